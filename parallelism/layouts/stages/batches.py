"""Inputs of a program on the host: their checks, and the split of a batch into parts of rows."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.ir import Function, TensorType
from parallelism.ir.core import names_in
from parallelism.ir.core.extents import specialized
from parallelism.layouts.stages.microbatches import batch_dim

Part = tuple[int, int]
"""The number of the first row, and the number of rows."""


def checked(
    function: Function, inputs: Sequence[Any] | Mapping[str, Any]
) -> tuple[dict[str, Array], dict[str, int]]:
    """The inputs by name, and the values of the symbols, which follow from their shapes.

    ``ValueError`` or ``TypeError`` names an input whose array does not have its type.
    """
    names = [value.name for value in function.inputs]
    if set(inputs) != set(names) if isinstance(inputs, Mapping) else len(inputs) != len(names):
        actual = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else len(inputs)
        raise ValueError(f"@{function.name} takes {len(names)} inputs ({', '.join(names)}), got {actual}")
    given = inputs if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))
    arrays = {name: np.asarray(given[name]) for name in names}
    numbers: dict[str, int] = {}
    for value in function.inputs:
        for extent, actual_extent in zip(value.type.shape, arrays[value.name].shape, strict=False):
            if str(extent) in names_in(extent):
                numbers.setdefault(str(extent), actual_extent)
    symbols = ", ".join(f"{name}={number}" for name, number in sorted(numbers.items()))
    for value in function.inputs:
        array, wanted = arrays[value.name], tuple(specialized(extent, numbers) for extent in value.type.shape)
        if array.dtype != value.type.dtype:
            raise TypeError(f"@{function.name}: input {value} was given an array of {array.dtype}")
        if array.shape != wanted:
            raise ValueError(
                f"@{function.name}: input {value} was given an array of shape {array.shape}"
                + (f", with {symbols}" if symbols else "")
            )
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
