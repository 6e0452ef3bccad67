"""`check_kernel` looks for the usual mistakes where all shards have one size, and says so if a kernel is right there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vcluster import check_kernel

LOCAL = "each rank returns the reference of its own shards: what the reference computes along a dim that is split over 'tp'"
EQUAL = "it is right where all ranks hold as much: the mean of the ranks' means is not the mean of the whole"
TERM = "argument 3, which all ranks of 'tp' hold, is added on each of them before the sum over 'tp'"


def layer_norm(x: Any) -> Any:
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)


def mean_of_means(device: Any, x: Any) -> Any:
    with np.errstate(all="ignore"):
        return device.all_reduce(x.sum(axis=0) / len(x), "tp", op="mean")


def bias_on_every_rank(device: Any, x: Any, w: Any, b: Any) -> Any:
    return device.all_reduce(x @ w + b, "tp")


def likely(kernel: Any, reference: Any, layouts: str, **options: Any) -> str:
    with pytest.raises(AssertionError) as failed:
        check_kernel(kernel, reference, layouts, **options)
    return str(failed.value).partition("probably: ")[2]


@pytest.mark.parametrize(("kernel", "reference", "layouts", "cause"), [
    (lambda device, x: layer_norm(x), layer_norm, "M, N_tp -> M, N_tp", LOCAL),     # was told a softmax to be rescaled
    (lambda device, x: np.cumsum(x), np.cumsum, "N_tp -> N_tp", LOCAL),             # was told a causal mask
    (mean_of_means, lambda x: x.mean(axis=0), "M_tp, N -> N", EQUAL),
    (bias_on_every_rank, lambda x, w, b: x @ w + b, "M, K_tp; K_tp, N; N -> M, N", TERM),
], ids=["norm", "running sum", "means", "bias"])
def test_the_mistake_is_named(kernel: Any, reference: Any, layouts: str, cause: str) -> None:
    sizes = [dict.fromkeys("MKN", 2)]
    meshes = [{"tp": 2}] if cause != EQUAL else [{"tp": 3}]
    told = likely(kernel, reference, layouts, sizes=sizes, meshes=meshes)
    assert cause in told and "\n" not in told


def test_a_missing_sum_is_still_called_that() -> None:
    told = likely(lambda device, x, w: x @ w, np.matmul, "M, K_tp; K_tp, N -> M, N", meshes=[{"tp": 2}])
    assert told == "a reduction is missing: the sum of the outputs over 'tp' is what was expected"


def test_as_many_rows_as_ranks_are_not_taken_for_the_ranks() -> None:
    told = likely(lambda device, x: device.all_reduce(x.sum(axis=0), "tp"), lambda x: x.mean(axis=0), "M_tp, N -> N")
    assert told.startswith("the arithmetic of the kernel")


def test_a_kernel_that_is_wrong_on_equal_shards_is_not_said_to_be_right_there() -> None:
    told = likely(lambda device, x: x + device.rank, np.copy, "M_tp -> M_tp", sizes=[{"M": 3}])
    assert told.startswith("only rank 1 of 2 differ")


def test_the_distance_of_what_is_no_number_is_not_told() -> None:
    with pytest.raises(AssertionError, match=r"of the whole: got nan, expected -?\d\.0$"):
        check_kernel(lambda device, x: x * np.nan, np.copy, "M -> M", sizes=[{"M": 1}])


def test_an_error_on_an_empty_shard_says_how_to_leave_it_out() -> None:
    def largest(device: Any, x: Any) -> Any:
        return device.all_reduce(x.max(axis=0), "tp", op="max")

    with pytest.raises(Exception, match="zero-size array") as raised:
        check_kernel(largest, lambda x: x.max(axis=0), "M_tp -> ()")
    assert raised.value.__notes__[0].endswith("(a shard of shape (0,)); sizes=[...] says which extents are checked")
    assert check_kernel(largest, lambda x: x.max(axis=0), "M_tp -> ()", sizes=[{"M": 5}]) == 4
