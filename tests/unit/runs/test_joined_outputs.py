"""`Run.unshard` joins one array of each rank, or a tuple, list or dict of arrays; what cannot be joined is told."""

import numpy as np
import pytest

from parallelism import Mesh, TensorSharding
from parallelism.dtypes import as_dtype
from vcluster import ReplicasDifferWarning
from vcluster.runs.joining import joined

MESH, ROWS, WHOLE = Mesh(tp=3), TensorSharding("tp", None), TensorSharding()
X = np.arange(20.0).reshape(5, 4)
SHARDS = ROWS.shard(X, MESH)


def test_several_outputs_are_joined_in_their_form():
    outputs = [(shard, {"sum": np.float64(190), "turned": [shard.T]}) for shard in SHARDS]
    rows, rest = joined(outputs, (ROWS, {"sum": WHOLE, "turned": ["[None, tp]"]}), MESH)
    np.testing.assert_array_equal(rows, X)
    np.testing.assert_array_equal(rest["turned"][0], X.T)
    assert rest["sum"] == 190 and list(rest) == ["sum", "turned"]


def test_a_dict_of_layouts_may_leave_outputs_out():
    assert joined([{"x": shard, "rank": rank} for rank, shard in enumerate(SHARDS)], {"x": ROWS}, MESH)["x"].shape == (5, 4)


def test_a_list_of_numbers_is_an_array():
    assert joined([[0, 1], [2], [3]], "[tp]", MESH).tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(joined([list(shard) for shard in SHARDS], ROWS, MESH), X)


@pytest.mark.parametrize(("outputs", "layout", "told"), [
    ([None] * 3, ROWS, "the output is None on every rank, and there is nothing to join: the kernel's return is missing"),
    ([X, None, None], ROWS, "the output is None on ranks 1 and 2, as after a reduce or a gather to one rank"),
    ([(X, X[0])] * 3, ROWS, r"the output of rank 0 is a tuple of 2, not one array: give .* each, as \(layout, layout\)"),
    ([{"x": X}] * 3, ROWS, r"the output of rank 0 is a dict with 'x', not one array: give .* each, as \{'w': layout\}"),
    ([(X, X)] * 3, (ROWS,), "the layouts are for a tuple or list of 1; the output of rank 0 is a tuple of 2"),
    ([(X, {"a": X})] * 3, (ROWS, {"b": ROWS}), r"a dict with 'b'; the output\[1\] of rank 0 is a dict with 'a'"),
    ([X] * 3, (ROWS, ROWS), r"the output of rank 0 is an array of shape \(5, 4\)"),
    ([(1, None)] * 3, (WHOLE, WHOLE), r"the output\[1\] is None on every rank"),
], ids=range(8))
def test_what_cannot_be_joined_is_told(outputs, layout, told):
    with pytest.raises(ValueError, match=told):
        joined(outputs, layout, MESH)


@pytest.mark.parametrize("layout", [3, None, Mesh(tp=3)])
def test_what_is_no_layout_is_told(layout):
    with pytest.raises(TypeError, match="unshard takes a TensorSharding, its text such as"):
        joined(SHARDS, layout, MESH)


GRID = Mesh(dp=3, tp=2)


def test_replicas_that_differ_are_told_with_their_ranks_at_the_line_of_the_caller():
    outputs = [X[rank % 2 :: 2] for rank in range(6)]
    outputs[3] = outputs[3] + 1
    outputs[5] = outputs[5] * 2
    with pytest.warns(ReplicasDifferWarning) as caught:
        whole = joined([{"x": each} for each in outputs], {"x": "[tp, None]"}, GRID)["x"]
    assert [str(each.message) for each in caught] == [
        "by the layout [tp, None] ranks 1, 3 and 5 hold the same, and the output['x'] of ranks 3 and 5 is not that of rank "
        "1, which is taken; is a reduction missing?"]
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(whole, np.concatenate([outputs[0], outputs[1]]))


def test_of_many_shards_the_first_is_told_and_the_others_are_counted():
    with pytest.warns(ReplicasDifferWarning, match=r"of ranks 2 and 4 is not that of rank 0, .* missing\? Replicas of 1 "
                                                   "other shard differ, too"):
        joined([np.full(2, rank) for rank in range(6)], "[tp]", GRID)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("apart", [
    [1.0, 1.0 + 1e-12, 1.0], [np.float32(8), np.float32(8.001), np.float32(8)], [np.nan, np.nan, np.nan],
    [np.inf, np.inf, np.inf], [1j, 1j + 1e-12, 1j], ["a", "a", "a"], [np.array([], np.float32)] * 3,
    [np.array(each, as_dtype("bfloat16")) for each in (1, 1.02, 1)],
], ids=range(8))
def test_numbers_that_are_rounded_in_another_order_are_alike(apart):
    joined(apart, TensorSharding.replicated(np.ndim(apart[0])), MESH)


@pytest.mark.parametrize("apart", [
    [1.0, 1.001, 1.0], [0.0, 1e-30, 0.0], [np.nan, 1.0, np.nan], [np.inf, 1.0, np.inf], [3, 4, 3], [True, False, True],
    ["a", "b", "a"], [1j, 1 + 1j, 1j], [np.array(each, as_dtype("bfloat16")) for each in (1, 2, 1)],
], ids=range(9))
def test_other_differences_are_told(apart):
    with pytest.warns(ReplicasDifferWarning, match="rank 1 is not that of rank 0"):
        joined(apart, WHOLE, MESH)


@pytest.mark.filterwarnings("error")
def test_terms_of_a_sum_may_differ():
    assert joined([1, 2, 3], "[] partial=tp", MESH) == 6
