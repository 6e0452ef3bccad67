"""Indices that are the numbers of the places that they stand in: ``x[arange(len(x)), chosen]`` picks one element of each row.

Frameworks write a lookup in each row so, and flatten it to places in the whole array.  Then each row would seem to depend on
all rows, and a program could not be split along its batch.  Here such indices are found, and the lookup stays in its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from parallelism.interop.arrays import INDEX, broadcast_dims, iota, reshaped, transposed
from parallelism.interop.folding import Spread, emit, known, spread, whole
from parallelism.ir.core import Extent, Op, Value
from parallelism.ir.tracing import Traced
from parallelism.ir.tracing.current import current

COMBINED = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}
"""The elementwise operators by which a scatter combines what is there with what comes."""


def place_of(x: Any) -> int | None:
    """The dim along which each element of an array of integers is its own index; None if none is known."""
    if isinstance(x, Spread):
        own = place_of(x.array)
        return own if own is not None and x.array.shape[own] == x.shape[own] else None
    if isinstance(x, Traced):
        return _place(x.value)
    for dim, extent in enumerate(x.shape):
        along = [extent if d == dim else 1 for d in range(x.ndim)]
        if extent > 1 and np.array_equal(x, np.broadcast_to(np.arange(extent).reshape(along), x.shape)):
            return dim
    return None


def _place(x: Value) -> int | None:
    """As `place_of`, for a value of the program that is being read."""
    op = _maker(x)
    if op is None:
        return None
    how = dict(op.attributes)
    if op.kind == "iota":
        return how["dim"] if how["starts"][how["dim"]] == 0 else None
    if op.kind == "constant":
        return place_of(np.reshape(how["value"], x.type.shape)) if isinstance(how["value"], tuple) else None
    if op.kind == "slice":
        return _place_in_a_part(op)
    if op.kind == "where":
        return _place_of_the_positive(op)
    if op.kind not in ("reshape", "broadcast_to", "transpose", "convert"):
        return None
    own = _place(op.inputs[0])
    if own is None or x.type.dtype.kind not in "iu":
        return None
    before, after = op.inputs[0].type.shape, x.type.shape
    if op.kind == "transpose":
        return list(how["permutation"]).index(own)
    if op.kind == "reshape":
        return _beside_unit_dims(own, before, after)
    own += len(after) - len(before)
    return own if before[own - len(after) + len(before)] == after[own] else None


def _maker(x: Value) -> Op | None:
    """The op that makes a value."""
    builder = current()
    assert builder is not None
    return next((op for op in reversed(builder.ops) if x in op.outputs), None)


def _place_in_a_part(op: Op) -> int | None:
    """Of a slice that is one of the arrays that were joined, that of this array."""
    how, joined = dict(op.attributes), _maker(op.inputs[0])
    if joined is None or joined.kind != "concatenate":
        return None
    axis, begin = how["axis"], 0
    if dict(joined.attributes)["axis"] != axis or how["step"] != 1:
        return None
    for each in joined.inputs:
        extent = each.type.shape[axis]
        if (how["begin"], how["end"]) == (begin, begin + extent):
            own = _place(each)
            return own if own != axis else None
        begin = begin + extent
    return None


def _place_of_the_positive(op: Op) -> int | None:
    """Of ``where(x < 0, x + n, x)``, which counts negative indices from the end, that of ``x``: no place is negative."""
    condition, _, x = op.inputs
    asked = _maker(condition)
    if asked is None or asked.kind != "less" or asked.inputs[0] != x:
        return None
    zero = _maker(asked.inputs[1])
    is_zero = zero is not None and zero.kind == "constant" and dict(zero.attributes)["value"] == 0
    return _place(x) if is_zero else None


def _beside_unit_dims(own: int, before: Sequence[Extent], after: Sequence[Extent]) -> int | None:
    """Where a dim is after a reshape that adds or removes dims of extent 1; None if it does more."""
    kept = [d for d, n in enumerate(before) if n != 1]
    found = [d for d, n in enumerate(after) if n != 1]
    if own not in kept or [before[d] for d in kept] != [after[d] for d in found]:
        return None
    return found[kept.index(own)]


def _own_places(data: Any, columns: Sequence[Any]) -> list[int | None] | None:
    """For each column of indices the dim whose places it has; None if that does not keep the dims in their order."""
    places = [place_of(column) for column in columns]
    for i, (place, column) in enumerate(zip(places, columns, strict=True)):
        if place is not None and column.shape[place] != data.shape[i]:
            places[i] = None
    found = [place for place in places if place is not None]
    in_order = found == sorted(set(found))
    return places if found and in_order and len(found) >= len(columns) - 1 else None


def gathered(data: Any, columns: Sequence[Any]) -> Any:
    """``data[columns[0], columns[1], ...]``, of which at most one column picks, and the others say where it stands.

    The columns have one shape, with which the result begins.  None if it is another lookup.
    """
    places = _own_places(data, columns)
    if places is None:
        return None
    shape, rest = list(columns[0].shape), list(data.shape[len(columns) :])
    behind = range(len(shape), len(shape) + len(rest))
    if None not in places:
        return broadcast_dims(data, [*shape, *rest], [*places, *behind])  # type: ignore[list-item]
    axis = places.index(None)
    order, free = _order(places, axis, len(shape))
    index = transposed(columns[axis], order)
    own = [index.shape[d] for d in range(len(shape))]
    after = own[axis + len(free) :]
    index = reshaped(index, [*own[:axis], prod(own[axis : axis + len(free)]), *after])
    if rest:
        index = reshaped(index, [*index.shape, *[1] * len(rest)])
        index = spread(whole(index), [*index.shape[: len(columns)], *rest])
    found = emit("take_along", whole(data), whole(index), axis=axis)
    found = reshaped(found, [*own, *rest])
    return transposed(found, [*(order.index(d) for d in range(len(shape))), *behind])


def put(data: Any, columns: Sequence[Any], updates: Any, op: str) -> Any:
    """``data`` with one update for each row, at the place that a column says, or in the whole row.

    ``updates`` begin with the shape of the columns; ``op`` is that of a `scatter`.  None if it is another scatter.
    """
    places = _own_places(data, columns)
    if places is None or (updates.dtype == bool and op != "set"):
        return None
    shape, rest = list(columns[0].shape), list(data.shape[len(columns) :])
    behind = range(len(shape), len(shape) + len(rest))
    axis = places.index(None) if None in places else None
    order, free = _order(places, axis, len(shape))
    if any(shape[d] != 1 for d in free) or (axis is None and free):
        return None
    moved = transposed(updates, [*order, *behind])
    moved = reshaped(moved, [*_without(moved.shape[: len(shape)], axis, len(free)), *rest])
    combined = moved if op == "set" else emit(COMBINED[op], whole(data), whole(moved))
    if axis is None:
        return combined
    index = transposed(columns[axis], order)
    index = reshaped(index, [*_without(index.shape, axis, len(free)), *[1] * len(rest)])
    return emit("where", at_index(index, data.shape[axis], axis), whole(combined), whole(data))


def at_index(index: Any, extent: Extent, axis: int) -> Any:
    """Where a dim is at an index, which has extent 1 along it; a negative one counts from the end."""
    if isinstance(index, Spread):
        index = index.array  # the comparison is broadcast where it is used
    zero = np.asarray(0, index.dtype)
    if (numbers := known(index)) is not None and isinstance(extent, int) and numbers.dtype != object:
        index = np.where(numbers < 0, numbers + extent, numbers)
    else:
        end = np.asarray(extent, index.dtype if isinstance(extent, int) else object)
        index = emit("where", emit("less", index, zero), emit("add", index, end), index)
    return emit("equal", index, whole(iota(extent, INDEX, index.ndim, axis)))


def _order(places: Sequence[int | None], axis: int | None, ndim: int) -> tuple[list[int], list[int]]:
    """The dims of a column in the order of the data, those of no place at ``axis`` or at the end; and these."""
    own = [place for place in places if place is not None]
    free = [d for d in range(ndim) if d not in own]
    at = len(own) if axis is None else axis
    return [*own[:at], *free, *own[at:]], free


def _without(shape: Sequence[Extent], axis: int | None, count: int) -> list[Extent]:
    """A shape with one dim of extent 1 in place of ``count`` dims from ``axis`` on."""
    return list(shape) if axis is None else [*shape[:axis], 1, *shape[axis + count :]]
