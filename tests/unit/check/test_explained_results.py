"""The mistakes that results explain, where no run is needed to see them."""

import numpy as np
import pytest

from parallelism.algorithms import kind_of
from vcluster.check.cases import Case, tagged
from vcluster.check.mistakes import finding_of


def case_of(kind: str, shape: tuple[int, ...], size: int, expected) -> Case:
    inputs = tuple(tagged(rank, shape, "float64") for rank in range(size))
    return Case(kind_of(kind), 0, inputs, (expected(inputs),) * size)


def test_a_broadcast_of_two_dims_that_leaves_all_arrays_as_they_are() -> None:
    case = case_of("broadcast", (4, 3), 3, lambda inputs: inputs[0])
    finding = finding_of(case, case.inputs, [0, 0, 0])
    assert finding.likely == "ranks 1 and 2 return their own array: that of the root never reaches them"


@pytest.mark.parametrize(("empty", "likely"), [
    ([2, 3], "on rank 0 the places of rank 1 are still empty: the steps end too early"),
    ([3], "some places are still empty, and others of the same piece are not: only a part of it arrives"),
    ([0, 1, 2, 3, 4, 5], "on rank 0 the places of ranks 0-2 are still empty: the steps end too early"),
])
def test_places_of_a_joined_result_that_are_empty(empty: list[int], likely: str) -> None:
    case = case_of("all_gather", (2,), 3, np.concatenate)
    output = case.expected[0].copy()
    output[empty] = 0
    assert finding_of(case, [output] * 3, [2, 2, 2]).likely == likely


def test_the_rank_that_is_named_lacks_an_array() -> None:
    case = case_of("all_reduce", (2,), 4, sum)
    inputs = case.inputs
    outputs = [case.expected[0], inputs[1] + inputs[2], inputs[2] + inputs[3] + inputs[0], case.expected[0]]
    assert finding_of(case, outputs, [3] * 4).likely == (
        "arrays are missing: rank 1 lacks those of ranks 0 and 3, the steps end too early")
