"""Results that lost precision are told from results that lack an array."""

import numpy as np
import pytest

from parallelism.algorithms import kind_of
from vcluster.check.cases import Case, rounded, tagged
from vcluster.check.mistakes import finding_of


def all_reduce(size: int) -> Case:
    inputs = tuple(tagged(rank, (3,), "float64") for rank in range(size))
    return Case(kind_of("all_reduce"), 0, inputs, (sum(inputs),) * size)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_narrower_dtype_of_the_result_is_the_mistake(dtype: str) -> None:
    case = all_reduce(4)
    with np.errstate(over="ignore"):
        finding = finding_of(case, [case.expected[0].astype(dtype)] * 4, [3] * 4)
    assert finding.details[0] == f"rank 0 returns {dtype} and should return float64"
    assert finding.likely == f"the dtype changes: {dtype} comes out where float64 went in"


def test_sums_in_float32_are_told_from_sums_that_lack_rank_0() -> None:
    small, large = all_reduce(2), all_reduce(4)
    in_float32 = [large.expected[0].astype(np.float32).astype(np.float64)] * 4
    assert rounded(large, in_float32) and rounded(small, small.expected)
    assert not rounded(small, [small.expected[0] - small.inputs[0]] * 2)
    finding = finding_of(large, in_float32, [3] * 4, all_rounded=True)
    assert finding.details[0].endswith("should hold 134480385, holds 134480384")
    assert finding.likely == "values are rounded: on the way they are float32, which is less precise than float64"
