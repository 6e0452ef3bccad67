"""`check_kernel` and `assert_sharded_allclose`: right kernels pass, and each mistake is named."""

import re

import numpy as np
import pytest

from vcluster import (
    ClusterTimeoutError,
    Mesh,
    PerDevice,
    TensorSharding,
    VirtualCluster,
    assert_sharded_allclose,
    check_kernel,
)


def inner(device, a, b):
    return device.all_reduce(a @ b, "tp")


def without_reduce(device, a, b):
    return a @ b


PRODUCT = "M, K_tp; K_tp, N -> M, N"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kernel", "reference", "layouts", "cases"), [
    (inner, np.matmul, PRODUCT, 15),
    (without_reduce, np.matmul, "M, K_tp; K_tp, N -> M, N {U_tp}", 15),
    (lambda device, x: device.all_gather(x, ("dp", "tp"), dim=1), np.copy, "M, N_{dp,tp} -> M, N", 39),
    (lambda device, x: device.all_reduce(x.sum(), "tp"), np.sum, "N_tp -> ()", 11),
    (lambda device, x: 2 * x, lambda x: 2 * x, "N -> N", 3),
], ids=["all_reduce", "pending", "two axes", "scalar", "no axis"])
def test_a_right_kernel_passes_over_meshes_and_sizes(kernel, reference, layouts, cases):
    assert check_kernel(kernel, reference, layouts) == cases


def test_the_sizes_are_uneven_and_empty_and_1_too():
    seen = []

    def reference(x):
        seen.append(x.shape)
        return x

    layouts = "M_tp, N -> M_tp, N"
    check_kernel(lambda device, x: x, reference, layouts, meshes=[{"tp": 3}])
    assert seen == [(1, 1), (1, 2), (4, 8), (3, 6)]         # on 3 devices the first two leave two shards empty
    check_kernel(lambda device, x: x, reference, layouts, meshes=[Mesh(tp=2)], sizes=[{"M": 5, "N": 7}])
    assert seen[4:] == [(5, 7)]


def failing(kernel, reference, layouts, **options):
    with pytest.raises(AssertionError) as error:
        check_kernel(kernel, reference, layouts, **options)
    return str(error.value)


def test_a_missing_reduce_is_named_with_the_smallest_case():
    told = failing(without_reduce, np.matmul, PRODUCT, sizes=[{"M": 2, "K": 6, "N": 5}], seed=1)
    assert told.startswith("on Mesh(tp=2) with M=2, K=6, N=5, the outputs are not the shards of the array of shape (2, 5)")
    assert told.count("Mesh(tp=2)") == 1
    assert "probably: a reduction is missing: the sum of the outputs over 'tp' is what was expected" in told
    assert re.search(r"rank 1, which holds \[0:2, 0:5\]: \d+ of 10 differ, most at \[\d, \d\] of the whole: got", told)


def test_a_kernel_that_is_wrong_on_one_device_already_hears_so():
    told = failing(lambda device, x: x + 1, np.copy, "M_tp -> M_tp")
    assert told.startswith("on Mesh(tp=1) with M=1, ") and told.count("Mesh(") == 1
    assert told.endswith("probably: the arithmetic of the kernel: it differs on one device already, where nothing is "
                         "communicated")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kernel", "layouts", "cause"), [
    (lambda device, x: device.shift(x, "tp"), "N_tp -> N_tp", "has the shard of the rank that is 1 before it"),
    (lambda device, x: device.shift(x, "tp", by=-1), "N_tp -> N_tp", "the shard of the rank that is 1 after it"),
    (lambda device, x: device.all_gather(x, "tp"), "N_tp -> N_tp", "every rank returns the whole array"),
    (lambda device, x: x, "N, M_tp -> N, M", r"a gather is missing: .* along dim 1 over 'tp', .*'tp', dim=1\) joins"),
    (lambda device, x: x, "N_tp -> N", r"a gather is missing: .* all_gather\(y, 'tp', dim=0\) joins them"),
    (lambda device, x: device.all_reduce(x, "tp"), "N {U_tp} -> N", None),
    (lambda device, x: device.all_reduce(x, "tp"), "N, M_tp -> N, M_tp", None),
    (lambda device, x: device.all_reduce(x, "tp"), "N -> N", "4 times too large, the number of ranks along 'tp'"),
    (lambda device, x: device.all_reduce(x, "tp") / 16, "N -> N", "4 times too small, .* a mean stands for a sum"),
    (lambda device, x: device.reduce(x / 4, root=1), "N -> N", "ranks 0, 2 and 3 of 4 return None, as after a reduce"),
    (lambda device, x: None, "N -> N", "the kernel returns None on every rank: its return is missing"),
    (lambda device, x: x.T, "N, M -> N, M", "each output is transposed"),
    (lambda device, x: x + (device.rank == 3), "N -> N", "only rank 3 of 4 differ"),
], ids=["before", "after", "whole", "columns", "rows", "right", "other", "twice", "mean", "rooted", "none",
        "transposed", "last"])
def test_a_mistake_that_explains_all_outputs_is_named(kernel, layouts, cause):
    options = {"meshes": [Mesh(tp=4)], "sizes": [{"N": 12, "M": 12}]}
    if layouts == "N {U_tp} -> N":
        assert check_kernel(kernel, np.copy, layouts, **options) == 1
    elif cause is None:
        assert "probably" not in failing(kernel, np.copy, layouts, **options)
    else:
        assert re.search(cause, failing(kernel, np.copy, layouts, **options))


def test_two_ranks_that_exchange_their_shards_are_told_without_a_direction():
    told = failing(lambda device, x: device.shift(x, "tp"), np.copy, "N_tp -> N_tp", meshes=[Mesh(tp=2)])
    assert "shards are exchanged along 'tp': each rank has that of the other" in told


def test_exchanged_axes_are_named():
    x, mesh = np.arange(16.0).reshape(4, 4), Mesh(dp=2, tp=2)
    with VirtualCluster(mesh, backend="thread") as cluster:
        run = cluster.run(lambda device, shard: shard, PerDevice(TensorSharding("tp", "dp").shard(x, mesh)))
    assert_sharded_allclose(run, "[tp, dp]", x)
    with pytest.raises(AssertionError, match=r"the outputs are shards in layout \[tp, dp\]: a wrong axis or dim"):
        assert_sharded_allclose(run, TensorSharding("dp", "tp"), x)
    with pytest.raises(AssertionError, match=r"rank 0, which holds \[0:2, 0:4\]: shape \(2, 2\), expected \(2, 4\)"):
        assert_sharded_allclose(run, "[dp, None]", x)


def test_tolerances_and_nan():
    with VirtualCluster(2, backend="thread") as cluster:
        run = cluster.run(lambda device: np.array([1.0, np.nan]) + 1e-9)
    assert_sharded_allclose(run, "[None]", [1.0, np.nan])
    told = r"1 of 2 differ, most at \[0\] of the whole: got 1.0\d*, expected 1.0, 1e-09 off"
    with pytest.raises(AssertionError, match=told):
        assert_sharded_allclose(run, "[None]", [1.0, np.nan], rtol=0)


def test_an_error_of_the_kernel_leaves_with_the_case():
    with pytest.raises(RuntimeError) as error:
        check_kernel(lambda device, x: x[5], np.sum, "N -> ()", meshes=[{"tp": 2}], sizes=[{"N": 3}])
    assert error.value.__notes__ == ["in check_kernel on Mesh(tp=2) with N=3"]


@pytest.mark.parametrize(("layouts", "told"), [
    ("M, N", "layouts must be those of the arguments, '->' and that of the result"),
    ("M, 7 -> M", "a dim must be a name, and _axis if it is split, such as M or K_tp; got '7'"),
    ("M_tp, -> M", "a comma stands between two dims, and none follows the last of 'M_tp,' in 'M_tp, -> M'"),
    ("M, M -> M", "the dims of a tensor must have different names"),
    ("M, N -> M", "the layout of the result has 1 dim, and the reference returns shape"),
])
def test_layouts_that_cannot_be_are_refused(layouts, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        check_kernel(lambda device, x: x, np.copy, layouts)
    with pytest.raises(ValueError, match="N is missing"):
        check_kernel(lambda device, x: x, np.copy, "M, N -> M, N", sizes=[{"M": 2}])


def test_a_reference_whose_result_has_another_extent_than_its_name_is_refused():
    told = "dims of one name have one extent: M of the result must be 2, and the reference returns shape (1, 3)"
    with pytest.raises(ValueError, match=re.escape(told)):
        check_kernel(lambda device, x: x, lambda x: x[:-1], "M_tp, N -> M_tp, N", sizes=[{"M": 2, "N": 3}])
    assert check_kernel(lambda device, x: x[:-1], lambda x: x[:-1], "M, N -> L, N", sizes=[{"M": 2, "N": 3}]) == 1


def test_a_reference_without_a_return_is_told():
    told = r"^the reference returns None on Mesh\(tp=1\) with N=1: its return is missing$"
    with pytest.raises(ValueError, match=told):
        check_kernel(lambda device, x: x, lambda x: None, "N_tp -> N_tp")


def test_sizes_serve_every_mesh_and_to_check_nothing_is_an_error():
    meshes, sizes = ({"tp": size} for size in (1, 2, 3)), ({"N": extent} for extent in (1, 5))
    assert check_kernel(lambda device, x: x, np.copy, "N_tp -> N_tp", meshes=meshes, sizes=sizes) == 6
    for none in ({"meshes": []}, {"sizes": []}):
        with pytest.raises(ValueError, match="must have at least one entry: with none, nothing is checked"):
            check_kernel(lambda device, x: x, np.copy, "N_tp -> N_tp", **none)


def test_a_kernel_that_never_ends_is_ended_by_a_deadline():
    def endless(device, x):
        while True:
            x = x + 1

    with pytest.raises(ClusterTimeoutError, match=r"computing at .*test_check_kernel\.py") as error:
        check_kernel(endless, np.copy, "N_tp -> N_tp", deadline_seconds=0.05)
    assert error.value.__notes__ == ["in check_kernel on Mesh(tp=1) with N=1"]


def split_log_sum(device, scores):
    largest = device.all_reduce(scores.max(axis=1, initial=-np.inf), "tp", op="max")[:, None]
    powers = np.exp(scores - largest)
    total = device.all_reduce(powers.sum(axis=1), "tp")[:, None]
    return powers / total, (largest + np.log(total))[:, 0]


def log_sum(scores):
    powers = np.exp(scores)
    return powers / powers.sum(axis=1, keepdims=True), np.log(powers.sum(axis=1))


SEVERAL = "M, N_tp -> M, N_tp; M"


def test_a_kernel_may_have_several_results():
    sizes = [{"M": 3, "N": 5}, {"M": 2, "N": 1}]
    given = {"meshes": ({"tp": size} for size in (1, 2, 3)), "sizes": iter(sizes)}       # each is asked for once
    assert check_kernel(split_log_sum, log_sum, SEVERAL, rtol=1e-6, **given) == 6
    told = failing(lambda device, x: (split_log_sum(device, x)[0], x.sum(axis=1)), log_sum, SEVERAL, sizes=sizes, rtol=1e-6)
    assert told.startswith("result 2: on Mesh(tp=1) with M=3, N=5, the outputs are not the shards")


@pytest.mark.parametrize(("kernel", "reference", "came"), [
    (lambda device, x: x, log_sum, "ndarray"), (split_log_sum, lambda x: (x, x, x), "a tuple of 3"),
])
def test_as_many_results_are_returned_as_the_layouts_have(kernel, reference, came):
    with pytest.raises(Exception, match="a tuple of 2 must be returned; got") as error:
        check_kernel(kernel, reference, SEVERAL, sizes=[{"M": 1, "N": 1}])
    assert str(error.value).endswith(came)
