"""Indices that are the numbers of the places that they stand in: ``x[arange(len(x)), chosen]`` picks one element of each row.

Frameworks write a lookup in each row so, and flatten it to places in the whole array.  Then each row would seem to depend on
all rows, and a program could not be split along its batch.  Here such indices are found, and the lookup stays in its row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from parallelism.arrays import vector_shape
from parallelism.interop.folding import Spread, emit, known, spread, whole
from parallelism.interop.moving_elements import broadcast_dims, iota, part, reshaped, transposed
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
        places = np.arange(extent).reshape(vector_shape(x.ndim, dim))
        if extent > 1 and np.array_equal(x, np.broadcast_to(places, x.shape)):
            return dim
    return None


def _place(x: Value) -> int | None:
    """As `place_of`, for a value of the program that is being read."""
    op = _maker(x)
    rule = None if op is None else _PLACES.get(op.kind)
    return None if op is None or rule is None else rule(op)


def _maker(x: Value) -> Op | None:
    """The op that makes a value of the program that is being read."""
    builder = current()
    assert builder is not None
    return builder.maker(x)


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
    return _place(x) if _is_constant(asked.inputs[1], 0) else None


_NEUTRAL = {"add": 0, "multiply": 1}


def _place_unchanged(op: Op) -> int | None:
    """Of ``0 + x`` and ``1 * x``, which JAX writes for a range, that of ``x``."""
    (out,) = op.outputs
    for x, other in (op.inputs, op.inputs[::-1]):
        if _is_constant(other, _NEUTRAL[op.kind]) and x.type == out.type:
            return _place(x)
    return None


def _is_constant(x: Value, number: int) -> bool:
    """Whether each element of a value is known to be this number."""
    op = _maker(x)
    return op is not None and op.kind == "constant" and dict(op.attributes)["value"] == number


def _place_in_a_range(op: Op) -> int | None:
    how = dict(op.attributes)
    dim: int = how["dim"]
    return dim if how["starts"][dim] == 0 else None


def _place_in_numbers(op: Op) -> int | None:
    value = dict(op.attributes)["value"]
    return place_of(np.reshape(value, op.outputs[0].type.shape)) if isinstance(value, tuple) else None


def _place_moved(op: Op) -> int | None:
    """Where the dim of the input is in an output with the same elements, or with more that are alike."""
    own, after = _place(op.inputs[0]), op.outputs[0].type
    before = op.inputs[0].type.shape
    if own is None or after.dtype.kind not in "iu":
        return None
    if op.kind == "transpose":
        return list(dict(op.attributes)["permutation"]).index(own)
    if op.kind == "reshape":
        return _beside_unit_dims(own, before, after.shape)
    moved = own + after.ndim - len(before)
    return moved if before[own] == after.shape[moved] else None


def _beside_unit_dims(own: int, before: Sequence[Extent], after: Sequence[Extent]) -> int | None:
    """Where a dim is after a reshape that adds or removes dims of extent 1; None if it does more."""
    kept = [d for d, n in enumerate(before) if n != 1]
    found = [d for d, n in enumerate(after) if n != 1]
    if own not in kept or [before[d] for d in kept] != [after[d] for d in found]:
        return None
    return found[kept.index(own)]


_PLACES: dict[str, Callable[[Op], int | None]] = {
    "iota": _place_in_a_range,
    "constant": _place_in_numbers,
    "slice": _place_in_a_part,
    "where": _place_of_the_positive,
    "add": _place_unchanged,
    "multiply": _place_unchanged,
    "convert": _place_moved,
    "reshape": _place_moved,
    "broadcast_to": _place_moved,
    "transpose": _place_moved,
}
"""For each kind of op the dim along which its output is its own index."""


def is_own(column: Any, extent: Extent) -> bool:
    """Whether each index of a column is its own place in a dim of this extent."""
    place = place_of(column)
    return place is not None and bool(column.shape[place] == extent)


def _own_places(data: Any, columns: Sequence[Any]) -> list[int | None] | None:
    """For each column of indices the dim whose places it has; None if that does not keep the dims in their order."""
    places = [place_of(column) if is_own(column, data.shape[i]) else None for i, column in enumerate(columns)]
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
    shape = list(columns[0].shape)
    rest = list(data.shape[len(columns) :])
    behind = range(len(shape), len(shape) + len(rest))
    own = [place for place in places if place is not None]
    if len(own) == len(places):
        return broadcast_dims(data, [*shape, *rest], [*own, *behind])
    axis = places.index(None)
    order, free = _order(places, axis, len(shape))
    index = transposed(columns[axis], order)
    extents = [index.shape[d] for d in range(len(shape))]
    after = extents[axis + len(free) :]
    index = reshaped(index, [*extents[:axis], prod(extents[axis : axis + len(free)]), *after])
    if rest:
        index = reshaped(index, [*index.shape, *[1] * len(rest)])
        index = spread(whole(index), [*index.shape[: len(columns)], *rest])
    found = emit("take_along", whole(data), whole(index), axis=axis)
    found = reshaped(found, [*extents, *rest])
    return transposed(found, [*(order.index(d) for d in range(len(shape))), *behind])


def put(data: Any, columns: Sequence[Any], updates: Any, op: str, *, from_end: bool = True) -> Any:
    """``data`` with a few updates in each row, at the places that one column says, or in the whole row.

    ``updates`` begin with the shape of the columns; ``op`` is that of a `scatter`.  Negative indices count ``from_end``, or
    pick nothing.  None if it is another scatter.
    """
    places = _own_places(data, columns)
    if places is None or (updates.dtype == bool and op != "set"):
        return None
    shape = list(columns[0].shape)
    rest = list(data.shape[len(columns) :])
    behind = range(len(shape), len(shape) + len(rest))
    axis = places.index(None) if None in places else None
    order, free = _order(places, axis, len(shape))
    moved = transposed(updates, [*order, *behind])
    if axis is None:
        return None if free else _combined(data, moved, op)
    turns = prod(shape[d] for d in free)
    if not in_turn(turns, op):
        return None
    index = transposed(columns[axis], order)
    own = [*index.shape[:axis], turns, *index.shape[axis + len(free) :]]
    index = reshaped(index, [*own, *[1] * len(rest)])
    moved = reshaped(moved, [*own, *rest])
    return put_in_turn(data, index, moved, axis, op, from_end=from_end)


MOST_TURNS = 16
"""The most elements of a row that are put in one after the other; more go through the flat array."""


def in_turn(turns: Extent, op: str) -> bool:
    """Whether so many updates of a row are put in one after the other.

    Several for a largest or a smallest are not: of three that are equal each has a third of the gradient, and in turn the
    first two would have a quarter.
    """
    return isinstance(turns, int) and turns <= (1 if op in ("max", "min") else MOST_TURNS)


def put_in_turn(data: Any, indices: Any, updates: Any, axis: int, op: str, *, from_end: bool = True) -> Any:
    """One update of each row after the other, along a dim, so that no row depends on others.

    The indices and the updates have as many dims as ``data``, and its extents but along ``axis``; indices may have 1.
    """
    for i in range(indices.shape[axis]):
        index = part(indices, axis, i, i + 1)
        if isinstance(index, Spread):
            index = index.array  # the comparison is broadcast where it is used
        if from_end:
            index = _from_start(index, data.shape[axis])
        at = emit("equal", index, whole(iota(data.shape[axis], index.dtype, data.ndim, axis)))
        combined = _combined(data, part(updates, axis, i, i + 1), op)
        data = emit("where", at, whole(combined), whole(data))
    return data


def added_along(data: Any, indices: Any, updates: Any, axis: int) -> Any:
    """The sum of ``data`` and of any number of updates in each row, at their places along a dim, from 0 on.

    The indices and the updates have as many dims as ``data``, and its extents but along ``axis``.
    """
    sums = emit("take_along_gradient", whole(updates), whole(indices), axis=axis, extent=data.shape[axis])
    return emit("add", whole(data), sums)


def _combined(data: Any, update: Any, op: str) -> Any:
    return update if op == "set" else emit(COMBINED[op], whole(data), whole(update))


def _from_start(index: Any, extent: Extent) -> Any:
    """Indices from 0 on, where a negative one counts from the end."""
    numbers = known(index)
    if numbers is not None and isinstance(extent, int) and numbers.dtype != object:
        return np.where(numbers < 0, numbers + extent, numbers)
    end = np.asarray(extent, index.dtype if isinstance(extent, int) else object)
    negative = emit("less", index, np.asarray(0, index.dtype))
    return emit("where", negative, emit("add", index, end), index)


def _order(places: Sequence[int | None], axis: int | None, ndim: int) -> tuple[list[int], list[int]]:
    """The dims of a column in the order of the data, those of no place at ``axis`` or at the end; and these."""
    own = [place for place in places if place is not None]
    free = [d for d in range(ndim) if d not in own]
    at = len(own) if axis is None else axis
    return [*own[:at], *free, *own[at:]], free
