"""What ``gather`` and ``scatter`` mean.

Both look up parts of an array, whose starts are in an array of indices.  A lookup along one dim is the operator
``take``; any other goes through the places of elements in the flat array.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.interop.folding import convert, elementwise as ew, emit, spread, whole
from parallelism.interop.moving_elements import (
    INDEX,
    broadcast_dims,
    clipped,
    iota,
    number,
    part,
    reshaped,
    taken,
    to_index,
    transposed,
    window_at,
)
from parallelism.interop.own_rows import added_along, gathered, is_own, put
from parallelism.interop.stablehlo.module import Node
from parallelism.interop.stablehlo.reading import Reader, meaning
from parallelism.interop.stablehlo.reductions import reducer
from parallelism.interop.stablehlo.shapes import fields, numbers


def _pairs(named: dict[str, Any], key: str, value: str) -> dict[int, int]:
    return dict(zip(named.get(key, ()), named.get(value, ()), strict=True))


def _columns(indices: Any, dim: int, count: int) -> list[Any]:
    """The indices of each dim that they start in: arrays of the batch dims, as int64."""
    if dim == indices.ndim:
        return [to_index(indices)] * min(count, 1)
    columns = []
    for i in range(count):
        column = part(indices, dim, i, i + 1)
        columns.append(to_index(reshaped(column, (*column.shape[:dim], *column.shape[dim + 1 :]))))
    return columns


@meaning("stablehlo.gather")
def _gather(reader: Reader, node: Node, x: list[Any]) -> Any:
    operand, indices = x
    named = fields(node.attributes["dimension_numbers"])
    sizes, shape = numbers(node, "slice_sizes"), node.type().shape
    offset, start_map = named.get("offset_dims", ()), named.get("start_index_map", ())
    batching = _pairs(named, "operand_batching_dims", "start_indices_batching_dims")
    dropped = {*named.get("collapsed_slice_dims", ()), *batching}
    vector = named.get("index_vector_dim", 0)
    columns = _columns(indices, vector, len(start_map))
    batch = [n for d, n in enumerate(indices.shape) if d != vector]
    batch_dims = [d for d in range(len(shape)) if d not in offset]
    shape = _own_shape(shape, batch, batch_dims, offset, [n for d, n in enumerate(sizes) if d not in dropped])
    if 0 in shape:
        return broadcast_dims(np.zeros((), operand.dtype), shape, ())
    moving = [d for d in range(operand.ndim) if sizes[d] != operand.shape[d]]
    if (
        not batching
        and len(start_map) >= 1
        and moving == [d for d in moving if d in start_map]
        and len(moving) <= 1
    ):
        axis = moving[0] if moving else start_map[0]
        if axis in dropped or sizes[axis] == 1:
            column = clipped(columns[start_map.index(axis)], 0, operand.shape[axis] - sizes[axis])
            picked = taken(operand, column, axis)  # the batch dims stand in place of the axis
            return _arranged(picked, operand.ndim, axis, len(batch), offset, batch_dims, dropped, shape)
    if not batching and prod(batch) == 1:
        starts = {d: reshaped(column, ()) for d, column in zip(start_map, columns, strict=True)}
        return reshaped(window_at(operand, starts, sizes), shape)
    if _is_in_each_row(operand, sizes, start_map, batching, vector) and [*offset] == [
        *range(len(batch), len(shape))
    ]:
        axis = start_map[0]
        column = clipped(columns[0], 0, operand.shape[axis] - 1)
        places = _places_in_rows(column, operand, axis)
        return reshaped(emit("take_along", whole(operand), whole(places), axis=axis), shape)
    if (along := _along_one_dim(operand, sizes, columns, start_map, batching, batch, vector)) is not None:
        return reshaped(along, shape)
    flat = None
    if not batching and dropped == {*start_map} and _looks_up_elements(operand, sizes, start_map):
        flat = gathered(operand, _inside(operand, columns))
    if flat is None:
        places = _places(operand.shape, sizes, columns, start_map, batching, batch, vector, clip=True)
        flat = emit("take", whole(reshaped(operand, (prod(operand.shape),))), whole(places), axis=0)
    windows = [sizes[d] for d in range(operand.ndim) if d not in dropped]
    arranged = reshaped(flat, (*batch, *windows))
    order = [0] * len(shape)
    for position, d in enumerate([*batch_dims, *offset]):
        order[d] = position
    return transposed(arranged, order)


def _inside(operand: Any, columns: Sequence[Any]) -> list[Any]:
    """The indices of the first dims, clipped to their extents; ranges are as they are."""
    return [
        column if is_own(column, extent) else clipped(column, 0, extent - 1)
        for column, extent in zip(columns, operand.shape, strict=False)
    ]


def _looks_up_elements(operand: Any, sizes: Sequence[Any], start_map: Sequence[int]) -> bool:
    """Whether indices are those of the first dims, in their order, and all of the others is meant."""
    depth = len(start_map)
    return (
        list(start_map) == [*range(depth)]
        and all(n == 1 for n in sizes[:depth])
        and list(sizes[depth:]) == list(operand.shape[depth:])
    )


def _is_in_each_row(
    operand: Any, sizes: Sequence[Any], dims: Sequence[int], batching: dict[int, int], vector: int
) -> bool:
    """Whether indices are those of one dim behind those of the batch, and all of the dims behind it is meant: a lookup in
    each row, as ``vmap`` of ``x[i]`` makes it."""
    if len(dims) != 1 or not batching:
        return False
    axis = dims[0]
    own = {d: n - (n > vector) for d, n in batching.items()}
    behind = all(sizes[d] == operand.shape[d] for d in range(axis + 1, operand.ndim))
    return own == {d: d for d in range(axis)} and sizes[axis] == 1 and behind


def _places_in_rows(column: Any, operand: Any, axis: int) -> Any:
    """The indices of a lookup in each row for each element of the dims behind ``axis``."""
    rows, behind = list(column.shape[:axis]), list(operand.shape[axis + 1 :])
    count = prod(column.shape[axis:])
    return spread(whole(reshaped(column, (*rows, count, *[1] * len(behind)))), (*rows, count, *behind))


def _along_one_dim(
    operand: Any,
    sizes: Sequence[Any],
    columns: Sequence[Any],
    start_map: Sequence[int],
    batching: dict[int, int],
    batch: Sequence[Any],
    vector: int,
) -> Any:
    """The elements along one dim at indices that belong to each place of the others, as of ``take_along_axis``.

    None if it is another gather, or if the dims are in another order.  JAX counts dims of extent 1 to the windows.
    """
    kept = [d for d in range(operand.ndim) if d in batching or d in start_map or operand.shape[d] != 1]
    operand = reshaped(operand, [operand.shape[d] for d in kept])
    start_map = [kept.index(d) for d in start_map]
    batching = {kept.index(d): own for d, own in batching.items()}
    if (
        len(start_map) != 1
        or any(n != 1 for n in sizes)
        or set(batching) | set(start_map) != {*range(operand.ndim)}
    ):
        return None
    axis = start_map[0]
    own = [batching[d] - (batching[d] > vector) for d in range(operand.ndim) if d != axis]
    rest = [d for d in range(len(batch)) if d not in own]
    if own != sorted(own) or (rest and rest != [*range(rest[0], rest[0] + len(rest))]):
        return None
    before = len([d for d in own if not rest or d < rest[0]])
    if rest and before != axis:
        return None
    column = clipped(columns[0], 0, operand.shape[axis] - 1)
    others = [batch[d] for d in own]
    places = reshaped(column, (*others[:axis], prod(batch[d] for d in rest), *others[axis:]))
    return emit("take_along", whole(operand), whole(places), axis=axis)


def _own_shape(
    shape: Sequence[Any],
    batch: Sequence[Any],
    batch_dims: Sequence[int],
    offset: Sequence[int],
    windows: Sequence[Any],
) -> tuple[Any, ...]:
    """The shape of the result of a gather: extents that its type leaves open are those of the indices."""
    own = list(shape)
    for d, n in [*zip(batch_dims, batch, strict=True), *zip(offset, windows, strict=True)]:
        own[d] = n
    return tuple(own)


def _arranged(
    picked: Any,
    ndim: int,
    axis: int,
    count: int,
    offset: Sequence[int],
    batch_dims: Sequence[int],
    dropped: set[int],
    shape: Sequence[Any],
) -> Any:
    """The result of a `take` with its batch dims and its other dims where the result has them."""
    before = [d for d in range(ndim) if d < axis]
    after = [d for d in range(ndim) if d > axis]
    names: list[Any] = [*before, *(("batch", i) for i in range(count)), *after]
    kept = [d for d in range(ndim) if d not in dropped]
    wanted: list[Any] = [None] * len(shape)
    for i, d in enumerate(batch_dims):
        wanted[d] = ("batch", i)
    for d, own in zip(offset, kept, strict=True):
        wanted[d] = own
    order = [
        names.index(name) for name in wanted if name in names
    ]  # the axis itself is left out where it has 1
    rest = [i for i in range(len(names)) if i not in order]  # collapsed dims, of extent 1
    return reshaped(transposed(picked, [*order, *rest]), shape)


def _places(
    whole_shape: Sequence[int],
    sizes: Sequence[int],
    columns: Sequence[Any],
    start_map: Sequence[int],
    batching: dict[int, int],
    batch: Sequence[int],
    vector: int,
    *,
    clip: bool,
) -> Any:
    """The places in the flat array of the elements of each part: shape (parts, elements of one)."""
    strides = [prod(whole_shape[d + 1 :]) for d in range(len(whole_shape))]
    parts, each = prod(batch), prod(sizes)
    start: Any = np.zeros((1,), INDEX)

    def moved(start: Any, along: Any, d: int) -> Any:
        """The first places of the parts, moved along a dim."""
        scaled = ew("multiply", reshaped(along, (parts,)), np.asarray(strides[d]))
        return scaled if start.shape == (1,) and parts != 1 else ew("add", start, scaled)

    for column, d in zip(columns, start_map, strict=True):
        first = clipped(column, 0, whole_shape[d] - sizes[d]) if clip else column
        start = moved(start, first, d)
    for d, own in batching.items():
        dim = own - (own > vector)
        start = moved(start, broadcast_dims(iota(batch[dim]), batch, (dim,)), d)
    inside: Any = np.zeros((1,) * len(sizes), INDEX)
    for d, size in enumerate(sizes):
        step = ew("multiply", iota(size, INDEX, len(sizes), d), np.asarray(strides[d]))
        inside = emit("add", inside, step)
    inside = reshaped(inside, (1, each))
    if start.shape == (1,) and parts != 1:
        start = broadcast_dims(np.zeros((), INDEX), (parts,), ())
    left = spread(whole(reshaped(start, (parts, 1))), (parts, each))
    return reshaped(ew("add", left, spread(inside, (parts, each))), (parts * each,))


@meaning("stablehlo.scatter")
def _scatter(reader: Reader, node: Node, x: list[Any]) -> Any:
    count = (len(x) - 1) // 2
    if count != 1:
        raise node.unsupported("a scatter into several arrays at once is not supported")
    operand, indices, updates = x
    named = fields(node.attributes["scatter_dimension_numbers"])
    window = named.get("update_window_dims", ())
    to_operand = named.get("scatter_dims_to_operand_dims", ())
    batching = _pairs(named, "input_batching_dims", "scatter_indices_batching_dims")
    inserted = {*named.get("inserted_window_dims", ()), *batching}
    vector = named.get("index_vector_dim", 0)
    op = _update(node, operand.dtype)
    columns = _columns(indices, vector, len(to_operand))
    batch_dims = [d for d in range(updates.ndim) if d not in window]
    batch = [updates.shape[d] for d in batch_dims]
    if 0 in updates.shape:
        return operand
    kept = [d for d in range(operand.ndim) if d not in inserted]
    sizes = [1] * operand.ndim
    for d, own in zip(window, kept, strict=True):
        sizes[own] = updates.shape[d]
    moved = transposed(updates, [*batch_dims, *window])
    inside = None
    for column, d in zip(columns, to_operand, strict=True):
        fits = ew(
            "logical_and",
            ew("greater_equal", column, np.asarray(0)),
            ew("less_equal", column, np.asarray(operand.shape[d] - sizes[d])),
        )
        inside = fits if inside is None else ew("logical_and", inside, fits)
    moving = [d for d in range(operand.ndim) if sizes[d] != operand.shape[d]]
    parts = prod(batch)
    if (
        not batching
        and len(moving) <= 1
        and len(to_operand) == 1
        and to_operand[0] in inserted
        and moving in ([], [to_operand[0]])
    ):
        axis = to_operand[0]
        place = ew("where", inside, columns[0], np.asarray(-1))
        rows = reshaped(moved, (parts, *(sizes[d] for d in kept)))
        rows = transposed(rows, [*range(1, axis + 1), 0, *range(axis + 1, rows.ndim)])
        return _put(operand, reshaped(place, (parts,)), rows, axis, op)
    if not batching and inserted == {*to_operand} and _looks_up_elements(operand, sizes, to_operand):
        found = put(operand, columns, moved, op, from_end=False)
        if found is not None:
            return found
    is_last = [*window] == [*range(len(batch), updates.ndim)]
    of_rows = is_last and _is_in_each_row(operand, sizes, to_operand, batching, vector)
    if of_rows and op == "sum" and is_floating(operand.dtype):
        return _added_in_rows(operand, columns[0], inside, moved, to_operand[0])
    places = _places(operand.shape, sizes, columns, to_operand, batching, batch, vector, clip=False)
    each = prod(sizes)
    if inside is not None:
        fits = spread(whole(reshaped(inside, (parts, 1))), (parts, each))
        places = ew("where", reshaped(whole(fits), (parts * each,)), places, np.asarray(-1))
    flat = reshaped(operand, (prod(operand.shape),))
    return reshaped(_put(flat, places, reshaped(moved, (parts * each,)), 0, op), operand.shape)


def _added_in_rows(operand: Any, column: Any, inside: Any, updates: Any, axis: int) -> Any:
    """The sum of an array and of updates in each row; those at places that are not ``inside`` count nothing."""
    places = _places_in_rows(clipped(column, 0, operand.shape[axis] - 1), operand, axis)
    own = reshaped(updates, places.shape)
    fits = _places_in_rows(inside, operand, axis)
    own = ew("where", fits, own, number(0, own))
    return added_along(operand, places, own, axis)


def _put(x: Any, places: Any, updates: Any, axis: int, op: str) -> Any:
    if x.dtype == bool:
        found = emit(
            "scatter",
            whole(convert(x, np.dtype(np.uint8))),
            whole(places),
            whole(convert(updates, np.dtype(np.uint8))),
            axis=axis,
            op=op,
        )
        return convert(found, np.dtype(bool))
    return emit("scatter", whole(x), whole(places), whole(updates), axis=axis, op=op)


def _update(node: Node, dtype: np.dtype[Any]) -> str:
    """How updates are combined with the array."""
    body = node.body
    if len(body.nodes) == 1 and body.nodes[0].operands == (body.arguments[1],):
        return "set"
    op = reducer(body, dtype)
    if op is None:
        raise node.unsupported("updates must be put in, or combined by add, multiply, maximum or minimum")
    return op
