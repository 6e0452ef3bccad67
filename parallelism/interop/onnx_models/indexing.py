"""What operators mean that pick elements by index, and that put them in."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from parallelism.arrays import vector_shape, with_extent
from parallelism.dtypes import is_floating
from parallelism.interop.folding import (
    MOST_FOLDED,
    Spread,
    convert,
    emit,
    known,
    plainest,
    spread,
    unspread,
    whole,
)
from parallelism.interop.moving_elements import INDEX, concatenated, iota, part, reshaped, taken
from parallelism.interop.onnx_models.elementwise import ew
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning, with_optional
from parallelism.interop.onnx_models.shapes import axis_of
from parallelism.interop.own_rows import added_along, gathered, in_turn, put, put_in_turn


def from_zero(indices: Any, extent: Any) -> Any:
    """Indices from 0 on: a negative one counts from the end."""
    wide = convert(indices, INDEX)
    if (
        (found := known(wide)) is not None
        and isinstance(extent, int)
        and found.dtype != object
        and found.size <= MOST_FOLDED
    ):
        return np.where(found < 0, found + extent, found)
    return wide  # the operators of the IR count negative ones from the end, too


@meaning("Gather")
def _gather(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    axis = axis_of(node, len(x[0].shape))
    if x[0].dtype == object:
        return plainest(np.take(x[0], reader.numbers(node, x[1], "the indices").astype(int), axis))
    if axis == 0 and (found := reader.chosen_rows.looked_up(x[0], [x[1]])) is not None:
        return found
    return taken(x[0], from_zero(x[1], x[0].shape[axis]), axis)


@meaning("GatherElements")
def _gather_elements(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """Where the other dims are cut, the array is cut first."""
    axis = axis_of(node, len(x[0].shape))
    table = x[0]
    for d, n in enumerate(x[1].shape):
        if d != axis and n != table.shape[d]:
            table = part(table, d, 0, n)
    if (rows := _of_whole_rows(x[1], axis)) is not None:
        return taken(table, from_zero(rows, table.shape[axis]), axis)
    return emit("take_along", whole(table), whole(from_zero(x[1], table.shape[axis])), axis=axis)


def _of_whole_rows(indices: Any, axis: int) -> Any:
    """One index for all elements that are along the other dims, of which there are some; None if they differ."""
    own = unspread(indices)
    if own is indices or any(n != 1 for d, n in enumerate(own.shape) if d != axis):
        return None
    return reshaped(own, (own.shape[axis],)) if own.shape[axis] == indices.shape[axis] else None


def flat_places(indices: Any, shape: Any, batch: int = 0) -> Any:
    """The places in a flat array of the elements whose indices are along the last dim, after ``batch`` shared dims."""
    depth = indices.shape[-1]
    total: Any = None
    for i, column in enumerate(_columns(indices)):
        column = ew(
            "where",
            ew("less", column, np.asarray(0)),
            ew("add", column, np.asarray(shape[batch + i])),
            column,
        )
        term = ew("multiply", column, np.asarray(prod(shape[batch + i + 1 : batch + depth])))
        total = term if total is None else ew("add", total, term)
    for d in range(batch):
        step = prod(shape[d + 1 : batch + depth])
        along = iota(shape[d], INDEX, len(indices.shape) - 1, d)
        total = ew("add", total, ew("multiply", along, np.asarray(step)))
    return total


def _columns(indices: Any) -> list[Any]:
    """The indices along each dim, which stand along the last dim."""
    last = len(indices.shape) - 1
    return [reshaped(part(indices, last, i, i + 1), indices.shape[:-1]) for i in range(indices.shape[-1])]


@meaning("GatherND")
def _gather_nd(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    data = x[0]
    indices = convert(x[1], INDEX)
    batch = node.get("batch_dims", 0)
    if not batch and (found := reader.chosen_rows.looked_up(data, _columns(indices))) is not None:
        return found
    if isinstance(data, Spread) and not batch:
        data, indices = _without_copies(data, indices)
    depth = indices.shape[-1]
    if not batch and (found := gathered(data, _columns(indices))) is not None:
        return found
    rest = tuple(data.shape[batch + depth :])
    places = flat_places(indices, data.shape, batch)
    table = reshaped(data, (prod(data.shape[: batch + depth]), *rest))
    return emit("take", whole(table), whole(places), axis=0)


def _without_copies(data: Spread, indices: Any) -> tuple[Any, Any]:
    """The data and their indices without the dims along which all is the same, as positions along a batch.

    A place in these is no matter.  With it each row would seem to depend on all rows.
    """
    depth, last = indices.shape[-1], len(indices.shape) - 1
    different = [d for d in range(depth) if data.array.shape[d] != 1]
    indexed = different or [depth - 1]
    dims = [*indexed, *range(depth, data.ndim)]
    own_shape = [data.array.shape[d] for d in dims]
    shape = [data.shape[d] for d in dims]
    columns = [part(indices, last, d, d + 1) for d in indexed]
    return spread(reshaped(data.array, own_shape), shape), concatenated(columns, last)


_REDUCTIONS = {"none": "set", "add": "sum", "mul": "prod", "max": "max", "min": "min"}


def _put(x: Any, places: Any, updates: Any, op: str) -> Any:
    if x.dtype == bool:
        byte = np.dtype(np.uint8)
        return convert(_put(convert(x, byte), places, convert(updates, byte), op), np.dtype(bool))
    return emit("scatter", whole(x), whole(places), whole(updates), axis=0, op=op)


@meaning("ScatterND")
def _scatter_nd(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    data = x[0]
    indices = convert(x[1], INDEX)
    updates = x[2]
    depth = indices.shape[-1]
    rest = tuple(data.shape[depth:])
    op = _REDUCTIONS[node.get("reduction", "none")]
    columns = _columns(indices)
    if (found := reader.chosen_rows.put(data, columns, updates, op)) is not None:
        return found
    if (found := put(data, columns, updates, op)) is not None:
        return found
    places = flat_places(indices, data.shape)
    count = prod(places.shape)
    table = reshaped(data, (prod(data.shape[:depth]), *rest))
    return reshaped(
        _put(
            table,
            reshaped(places, (count,)),
            reshaped(updates, (count, *rest)),
            op,
        ),
        data.shape,
    )


@meaning("ScatterElements", "Scatter")
def _scatter_elements(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    data = x[0]
    indices = convert(x[1], INDEX)
    updates = x[2]
    ndim = len(data.shape)
    axis, shape = axis_of(node, ndim), tuple(data.shape)
    op = _REDUCTIONS[node.get("reduction", "none")]
    if axis == 0 and (found := _put_in_chosen_rows(reader, data, indices, updates, op)) is not None:
        return found
    others_are_whole = all(indices.shape[d] == shape[d] for d in range(ndim) if d != axis)
    if others_are_whole and in_turn(indices.shape[axis], op) and (op == "set" or data.dtype != bool):
        return put_in_turn(data, indices, updates, axis, op)
    indices = _from_start(indices, shape[axis])
    if others_are_whole and op == "sum" and is_floating(data.dtype):
        if (rows := _of_whole_rows(indices, axis)) is not None:
            extent = data.shape[axis]
            sums = emit("take_gradient", whole(updates), whole(rows), axis=axis, extent=extent)
            return ew("add", data, sums)
        return added_along(data, indices, updates, axis)
    total: Any = ew("multiply", indices, np.asarray(prod(shape[axis + 1 :])))
    for d in range(ndim):
        if d != axis:
            along = iota(indices.shape[d], INDEX, ndim, d)
            total = ew("add", total, ew("multiply", along, np.asarray(prod(shape[d + 1 :]))))
    count = prod(indices.shape)
    flat = _put(
        reshaped(data, (prod(shape),)),
        reshaped(total, (count,)),
        reshaped(updates, (count,)),
        op,
    )
    return reshaped(flat, shape)


def _put_in_chosen_rows(reader: Reader, data: Any, indices: Any, updates: Any, op: str) -> Any:
    """Whole rows that are put in at one index each, if a mask chose them; else None."""
    rows = unspread(indices)
    if rows.shape[1:] != (1,) * (rows.ndim - 1) or tuple(indices.shape) != tuple(updates.shape):
        return None
    return reader.chosen_rows.put(data, [reshaped(rows, rows.shape[:1])], updates, op)


@meaning("OneHot")
def _one_hot(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    depth = int(reader.ints(node, x[1], "depth")[0])
    classes = _from_start(convert(x[0], INDEX), depth)
    ndim = len(classes.shape)
    axis = node.get("axis", -1) % (ndim + 1)
    column = reshaped(classes, (*classes.shape[:axis], 1, *classes.shape[axis:]))
    is_hot = ew("equal", column, iota(depth, INDEX, ndim + 1, axis))
    off, on = (part(x[2], 0, i, i + 1) for i in (0, 1))
    return ew("where", is_hot, reshaped(on, ()), reshaped(off, ()))


def _from_start(indices: Any, extent: Any) -> Any:
    """Indices from 0 on, where a negative one counts from the end of a dim."""
    is_negative = ew("less", indices, np.asarray(0))
    return ew("where", is_negative, ew("add", indices, np.asarray(extent)), indices)


@meaning("ReverseSequence")
def _reverse_sequence(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a, lengths = x
    ndim = len(a.shape)
    batch, time = node.get("batch_axis", 1), node.get("time_axis", 0)
    lengths = reshaped(lengths, vector_shape(ndim, batch, a.shape[batch]))
    place = iota(a.shape[time], INDEX, ndim, time)
    last = ew("subtract", lengths, np.asarray(1))
    from_end = ew("subtract", last, place)
    turned = ew("where", ew("less", place, lengths), from_end, place)
    return emit("take_along", whole(a), whole(_wide(turned, a.shape)), axis=time)


def _wide(x: Any, shape: Any) -> Any:
    array = unspread(x)
    return spread(array, tuple(shape))


@meaning("TensorScatter")
def _tensor_scatter(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """A cache of keys with the new ones put in from a place on, which may differ over the batch."""
    cache, update, begins = with_optional(x, 3)
    ndim = len(cache.shape)
    axis = node.get("axis", -2) % ndim
    n, size = cache.shape[axis], update.shape[axis]
    first: Any = np.zeros((1,) * ndim, np.int64)
    if begins is not None:
        first = reshaped(convert(begins, INDEX), vector_shape(ndim, 0, cache.shape[0]))
    place = ew("subtract", iota(n, INDEX, ndim, axis), first)
    if node.get("mode", "linear") == "circular":
        place = ew("remainder", place, np.asarray(n))
    inside = ew("logical_and", ew("greater_equal", place, np.asarray(0)), ew("less", place, np.asarray(size)))
    where = ew("minimum", ew("maximum", place, np.asarray(0)), np.asarray(size - 1))
    where = _wide(where, with_extent(update.shape, axis, n))
    moved = emit("take_along", whole(update), whole(where), axis=axis)
    return ew("where", inside, moved, cache)
