"""Inputs of a program on the host: their checks, and the split of a batch into parts of rows."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from parallelism.arrays import Array
from parallelism.ir import Function, TensorType
from parallelism.ir.core.extents import specialized
from parallelism.ir.passes.given_arrays import (
    checked as check_types,
    named_arrays,
    numbers_in,
    without_number,
)
from parallelism.layouts.stages.microbatches import batch_dim

Part = tuple[int, int]
"""The number of the first row, and the number of rows."""


def checked(
    function: Function, inputs: Sequence[Any] | Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, int]]:
    """The inputs by name, and the numbers of the symbols in their types, which follow from their shapes.

    ``ValueError`` or ``TypeError`` names an input whose array does not have its type.
    """
    arrays = named_arrays(function, inputs)
    numbers = numbers_in(function, arrays)
    given = frozenset[str]().union(*(value.type.symbols for value in function.inputs))
    if missing := given - numbers.keys():
        raise without_number(function.name, missing)
    check_types(function, arrays, numbers)
    return arrays, numbers


def dealt(first: int, count: int, parts: int) -> tuple[Part, ...]:
    """``count`` rows from ``first`` on, split into ``parts`` as by ``numpy.array_split``: larger parts first."""
    sizes = [count // parts + (i < count % parts) for i in range(parts)]
    return tuple(zip(accumulate(sizes[:-1], initial=first), sizes, strict=True))


def rows_of(array: Array, type: TensorType, batch: str, first: int, count: int) -> Array:
    """A view of ``count`` rows of an array from ``first`` on, along the batch dim of ``type``."""
    dim = batch_dim(type, batch)
    if dim is None:
        raise ValueError(f"{type} has no rows, because no extent has the symbol {batch}")
    start, length = (specialized(type.shape[dim], {batch: rows}) for rows in (first, count))
    return array[(slice(None),) * dim + (slice(start, start + length),)]
