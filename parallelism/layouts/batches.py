"""The inputs of a program on the host: checked, and the rows of a batch dealt to its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.ir import Function, TensorType
from parallelism.ir.extents import names_in, specialized
from parallelism.layouts.microbatches import batch_dim

Part = tuple[int, int]
"""The number of the first row, and how many rows."""


def checked(function: Function, inputs: Sequence[Any] | Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, int]]:
    """The inputs by name, and the numbers that their shapes give the symbols.

    ``ValueError`` or ``TypeError``, naming the input, for an array that is not of its type.
    """
    names = [value.name for value in function.inputs]
    if set(inputs) != set(names) if isinstance(inputs, Mapping) else len(inputs) != len(names):
        told = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else len(inputs)
        raise ValueError(f"@{function.name} takes {len(names)} inputs ({', '.join(names)}), got {told}")
    given = inputs if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))
    arrays = {name: np.asarray(given[name]) for name in names}
    numbers: dict[str, int] = {}
    for value in function.inputs:
        for extent, found in zip(value.type.shape, arrays[value.name].shape, strict=False):
            if str(extent) in names_in(extent):
                numbers.setdefault(str(extent), found)
    told = ", ".join(f"{name}={number}" for name, number in sorted(numbers.items()))
    for value in function.inputs:
        array, wanted = arrays[value.name], tuple(specialized(extent, numbers) for extent in value.type.shape)
        if array.dtype != value.type.dtype:
            raise TypeError(f"@{function.name}: input {value} was given an array of {array.dtype}")
        if array.shape != wanted:
            raise ValueError(f"@{function.name}: input {value} was given an array of shape {array.shape}"
                             + (f", with {told}" if told else ""))
    return arrays, numbers


def dealt(first: int, count: int, parts: int) -> tuple[Part, ...]:
    """So many rows in parts as even as can be, the longer ones first: as ``numpy.array_split`` deals them."""
    sizes = [count // parts + (i < count % parts) for i in range(parts)]
    return tuple((first + sum(sizes[:i]), size) for i, size in enumerate(sizes))


def rows_of(array: Array, type: TensorType, batch: str, first: int, count: int) -> Array:
    """Some rows of an array, along the dim of ``type`` that has them: a view."""
    dim = batch_dim(type, batch)
    if dim is None:
        raise ValueError(f"{type} has no rows: no extent has the symbol {batch}")
    start, length = (specialized(type.shape[dim], {batch: rows}) for rows in (first, count))
    return array[(slice(None),) * dim + (slice(start, start + length),)]
