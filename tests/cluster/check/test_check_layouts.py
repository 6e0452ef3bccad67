"""`check_sharded` and `check_resharding`: right functions pass, and each usual mistake is named."""

import numpy as np
import pytest

from vcluster import TensorSharding
from vcluster.check import check_resharding, check_sharded, sharded

INNER = "M, K_tp; K_tp, N -> M, N"
COLUMNS = "M, K; K, N_tp -> M, N_tp"
SMALL = [{"tp": 2}, {"tp": 3}]


def inner(device, a, b):
    return device.all_reduce(a @ b, "tp")


def test_a_right_product_passes_with_its_bytes():
    answer = check_sharded(inner, INNER, np.matmul, meshes=SMALL)
    assert answer, str(answer)
    assert answer.cases == 8
    rows = {row[0]: row[1:] for row in answer.figures}
    assert rows["yours"] == (str(2 * 2 * 3 * 9 * 8), "1 all_reduce")     # 2 (g-1)/g of 3x9 floats by rank
    assert check_sharded(lambda device, a, b: a @ b, COLUMNS, np.matmul, meshes=SMALL)


PRODUCTS = {
    "no reduce": (lambda device, a, b: a @ b, INNER, "a reduction is missing"),
    "reduced twice": (lambda device, a, b: device.all_reduce(inner(device, a, b), "tp"), INNER, "2 times too large"),
    "mean": (lambda device, a, b: device.all_reduce(a @ b, "tp", op="mean"), INNER, "a mean stands for a sum"),
    "reduce to one rank": (lambda device, a, b: device.reduce(a @ b, "tp"), INNER, "return None"),
    "not cut": (lambda device, a, b: device.all_gather(a @ b, "tp", dim=1), COLUMNS, "every rank returns the whole"),
    "shifted": (lambda device, a, b: device.shift(a @ b, "tp"), COLUMNS, "is exchanged|are exchanged|shifted"),
    "transposed": (lambda device, a, b: (a @ b).T, COLUMNS, "each output is transposed"),
    "shapes": (lambda device, a, b: b @ a, COLUMNS, ""),
    "one argument": (lambda device, a: a, INNER, r"called as mine\(device, shard0, shard1\)"),
    "narrower": (lambda device, a, b: (a @ b).astype(np.float16), COLUMNS,
                 "float16 comes out where it should be float64"),
    "no return": (lambda device, a, b: None, INNER, "returns None on every rank"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_usual_mistake_in_a_product_is_named(name):
    import re

    mine, layouts, words = PRODUCTS[name]
    answer = check_sharded(mine, layouts, np.matmul, meshes=SMALL)
    assert not answer
    assert answer.sentence.startswith("on Mesh(tp=2) with M=")
    assert re.search(words, answer.likely), str(answer)


def test_a_product_by_element_on_one_device_is_not_blamed_on_what_is_sent():
    answer = check_sharded(lambda device, a, b: a * b, COLUMNS, np.matmul)
    assert answer.sentence.startswith("on Mesh(tp=1) with M=") and answer.likely.endswith("the product of matrices is a @ b")


def test_a_function_that_does_not_end_is_waited_for_once(monkeypatch):
    def endless(device, a, b):
        while True:
            a = a + 1

    monkeypatch.setattr(sharded, "DEADLINE_SECONDS", 0.05)
    answer = check_sharded(endless, COLUMNS, np.matmul)
    assert answer.sentence == "on Mesh(tp=1) with M=1, K=1, N=1: the function does not come to an end"
    assert answer.likely.startswith("a loop that never ends") and answer.cases == 1


def test_terms_that_are_joined_in_place_of_added_up_are_named():
    for dim in (0, 1):
        answer = check_sharded(lambda device, a, b, dim=dim: device.all_gather(a @ b, "tp", dim=dim), INNER, np.matmul)
        assert answer.likely == (
            f"the terms of a sum over 'tp' are joined along dim {dim}, in place of added up: all_reduce adds them")


def to_columns(device, x):
    return device.all_to_all(x, "x", split_dim=1, concat_dim=0)


def by_gathering(device, x):
    whole = device.all_gather(x, "x")
    return np.array_split(whole, device.size, axis=1)[device.rank]


@pytest.mark.slow
def test_a_right_change_of_layout_passes_beside_the_cheapest_plan():
    answer = check_resharding(to_columns, "[x, None]", "[None, x]", cheapest=True)
    assert answer, str(answer)
    rows = {row[0]: row[1:] for row in answer.figures}
    assert rows["yours"][0] == rows["the cheapest known"][0] == str(4 * 8 * 8 * 3 // 4)
    dear = check_resharding(by_gathering, "[x, None]", "[None, x]", meshes=[{"x": 4}])
    assert dear
    assert "4 times the least known" in dear.sentence
    assert check_resharding(by_gathering, "[x, None]", "[None, x]", meshes=[{"x": 4}], cheapest=True).likely == \
        "more is sent than the ranks lack: they throw a part of it away"


def test_a_partial_source_is_summed():
    assert check_resharding(lambda device, x: device.reduce_scatter(x, "x"), "[None] partial=x", "[x]",
                            meshes=[{"x": 3}])


RESHARDINGS = {
    "nothing moves": (lambda device, x: x, "outputs are shards in layout [x, None]"),
    "not cut": (lambda device, x: device.all_gather(x, "x"), "every rank returns the whole array"),
    "the next block": (lambda device, x: np.array_split(device.all_gather(x, "x"), device.size, axis=1)[
        (device.rank + 1) % device.size], "exchanged"),
    "dims exchanged": (lambda device, x: device.all_to_all(x, "x", split_dim=0, concat_dim=1), ""),
    "reshard": (lambda device, x: device.reshard(x, TensorSharding("x", None), TensorSharding(None, "x")),
                "the exercise is to write"),
    "receives first": (lambda device, x: device.recv((device.rank + 1) % device.size), "every rank receives before"),
    "one rank only": (lambda device, x: to_columns(device, x) if device.rank else x, "the same calls"),
}


@pytest.mark.sampled(4)
@pytest.mark.slow_for("one rank only")
@pytest.mark.parametrize("name", RESHARDINGS)
def test_a_usual_mistake_in_a_change_of_layout_is_named(name):
    mine, words = RESHARDINGS[name]
    answer = check_resharding(mine, "[x, None]", "[None, x]", meshes=[{"x": 2}])
    assert not answer
    assert words in answer.likely, str(answer)


def test_layouts_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="the same number of dims"):
        check_resharding(to_columns, "[x]", "[None, x]")
