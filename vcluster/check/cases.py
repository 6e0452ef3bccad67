"""One call of a collective: the arrays that go in, those that should come out, and whether they came.

Element e of the array of rank r has the value (e + 1) * 512**r: a sum of such elements tells of what it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.algorithms import CollectiveKind

Array = npt.NDArray[Any]
BASE = 512
MOST_RANKS = 5
"""512**5 * 512 is below 2**53: float64 holds all sums exactly."""


@dataclass(frozen=True, eq=False)
class Case:
    """One call of a collective: by position, what goes in and what should come out (None: anything)."""

    kind: CollectiveKind
    root: int
    inputs: tuple[Array | None, ...]
    expected: tuple[Any, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.inputs)


def tagged(rank: int, shape: tuple[int, ...], dtype: npt.DTypeLike, start: int = 0) -> Array:
    """The array of a rank, whose elements have numbers from ``start`` on."""
    numbers = np.arange(start + 1, start + 1 + int(np.prod(shape)), dtype=np.int64).reshape(shape)
    tags: Array = (numbers * BASE**rank).astype(dtype)
    return tags


def agrees(output: Any, expected: Any) -> bool:
    """Whether a rank returned what it should."""
    if expected is None:
        return True
    if isinstance(expected, list):
        return (
            isinstance(output, list | tuple)
            and len(output) == len(expected)
            and all(map(agrees, output, expected))
        )
    if output is None or isinstance(output, list | tuple | dict):
        return False
    array = np.asarray(output)
    return (
        array.shape == expected.shape
        and array.dtype == expected.dtype
        and bool(np.array_equal(array, expected))
    )


def rounded(case: Case, outputs: Sequence[Any]) -> bool:
    """Whether all ranks return what they should, up to the precision of float32."""
    return all(
        expected is None
        or (
            not isinstance(expected, list)
            and same_values(np.asarray(output), expected, case.size, np.float32)
        )
        for output, expected in zip(outputs, case.expected, strict=True)
    )


def same_values(array: Array, expected: Array, size: int, precision: npt.DTypeLike) -> bool:
    """Whether two arrays hold the same values, up to the rounding of ``size`` sums where ``precision`` is a float."""
    if array.shape != expected.shape or array.dtype.kind not in "iuf":
        return False
    if np.dtype(precision).kind != "f":
        return bool(np.array_equal(array, expected))
    with np.errstate(over="ignore"):  # float16 has no such large values: they are infinite
        held = expected.astype(precision).astype(np.float64)
    return bool(np.allclose(array, held, rtol=size * float(np.finfo(precision).eps), atol=0))
