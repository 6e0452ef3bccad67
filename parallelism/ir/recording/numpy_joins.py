"""Recording of NumPy's functions that join, split, repeat and pad arrays."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from parallelism.arrays import vector_shape, with_extent
from parallelism.ir.core import Extent, is_negative, quotient
from parallelism.ir.recording.numpy_shapes import (
    axis_of,
    broadcast,
    expanded,
    known_extent,
    part,
    reshaped,
    stands_for,
)
from parallelism.ir.tracing import CALLS, Traced, apply, lift, refuse

# -- joining -----------------------------------------------------------------------------------------------------------


@stands_for(np.concatenate)
def _concatenate(arrays: Sequence[Any], axis: Any = 0) -> Any:
    parts = [lift(x) for x in arrays]
    if axis is None:
        parts, axis = [x.reshape(-1) for x in parts], 0
    return apply("concatenate", *parts, axis=axis_of(axis, parts[0].ndim))


def _of_ndim(x: Any, ndim: int) -> Any:
    x = lift(x)
    return reshaped(x, (*[1] * (ndim - x.ndim), *x.shape))


@stands_for(np.hstack)
def _hstack(tup: Sequence[Any]) -> Any:
    parts = [_of_ndim(x, 1) for x in tup]
    return _concatenate(parts, 0 if parts[0].ndim == 1 else 1)


def _as_columns(x: Any) -> Any:
    x = lift(x)
    return expanded(x, 1) if x.ndim == 1 else x


CALLS.update(
    {
        np.stack: lambda arrays, axis=0: _concatenate([expanded(lift(x), axis) for x in arrays], axis),
        np.vstack: lambda tup: _concatenate([_of_ndim(x, 2) for x in tup]),
        np.column_stack: lambda tup: _concatenate(list(map(_as_columns, tup)), 1),
        np.dstack: lambda tup: _concatenate(list(map(np.atleast_3d, map(lift, tup))), 2),
        np.append: lambda arr, values, axis=None: _concatenate([arr, values], axis),
    }
)


@stands_for(np.block)
def _block(arrays: Any) -> Any:
    depth = _depth(arrays)
    ndim = max(depth, *(x.ndim for x in _leaves(arrays)))
    return _joined_blocks(arrays, ndim, ndim - depth)


def _depth(arrays: Any) -> int:
    return 1 + _depth(arrays[0]) if isinstance(arrays, list) else 0


def _leaves(arrays: Any) -> list[Any]:
    if not isinstance(arrays, list):
        return [lift(arrays)]
    return [leaf for each in arrays for leaf in _leaves(each)]


def _joined_blocks(arrays: Any, ndim: int, axis: int) -> Any:
    """Nested lists: the innermost ones are joined along the last dim."""
    if not isinstance(arrays, list):
        return _of_ndim(arrays, ndim)
    return _concatenate([_joined_blocks(each, ndim, axis + 1) for each in arrays], axis)


@stands_for(np.insert)
def _insert(arr: Any, obj: Any, values: Any, axis: Any = None) -> Any:
    x = lift(arr).reshape(-1) if axis is None else lift(arr)
    axis = 0 if axis is None else axis_of(axis, x.ndim)
    if not isinstance(obj, int):
        refuse("numpy.insert at several places", "give one place, as an integer")
    place = obj + x.shape[axis] if obj < 0 else obj
    n = x.shape[axis]
    value: Any = lift(values).astype(x.dtype)
    value = np.moveaxis(value, 0, axis) if value.ndim == x.ndim and axis else value
    wide = value.shape[axis] if value.ndim == x.ndim else 1
    new = broadcast(value, with_extent(x.shape, axis, wide))
    return _concatenate([part(x, axis, 0, place), new, part(x, axis, place, n)], axis)


@stands_for(np.delete)
def _delete(arr: Any, obj: Any, axis: Any = None) -> Any:
    x = lift(arr).reshape(-1) if axis is None else lift(arr)
    axis = 0 if axis is None else axis_of(axis, x.ndim)
    kept = np.delete(np.arange(known_extent(x, axis, "numpy.delete")), obj)
    return apply("take", x, kept, axis=axis)


@stands_for(np.compress)
def _compress(condition: Any, a: Any, axis: Any = None) -> Any:
    if isinstance(condition, Traced):
        refuse("numpy.compress by recorded bools", "the shape of its result depends on the values")
    x = lift(a).reshape(-1) if axis is None else lift(a)
    return apply("take", x, np.flatnonzero(condition), axis=0 if axis is None else axis_of(axis, x.ndim))


# -- splitting ---------------------------------------------------------------------------------------------------------


def _pieces(x: Any, axis: int, sizes: Sequence[Extent]) -> list[Any]:
    pieces = apply("split", x, axis=axis, sizes=tuple(sizes))
    return list(pieces) if isinstance(pieces, tuple) else [pieces]


@stands_for(np.split, view=True)
def _split(x: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    axis, count = axis_of(axis, x.ndim), indices_or_sections
    if not isinstance(count, int):
        return _pieces(x, axis, [b - a for a, b in pairwise([0, *count, x.shape[axis]])])
    each = quotient((x.shape[axis],), (count,))
    if each is None:
        raise ValueError(f"a dim of {x.shape[axis]} cannot be split into {count} equal parts")
    return _pieces(x, axis, [each] * count)


@stands_for(np.array_split, view=True)
def _array_split(x: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    axis, count = axis_of(axis, x.ndim), indices_or_sections
    extent = x.shape[axis]
    if not isinstance(count, int) or not isinstance(extent, int):
        return _split(x, count, axis)
    return _pieces(x, axis, [extent // count + (i < extent % count) for i in range(count)])


stands_for(np.vsplit, view=True)(lambda x, sections: _split(x, sections, 0))
stands_for(np.dsplit, view=True)(lambda x, sections: _split(x, sections, 2))
stands_for(np.hsplit, view=True)(lambda x, sections: _split(x, sections, 0 if x.ndim == 1 else 1))
if hasattr(np, "unstack"):
    stands_for(np.unstack, view=True)(
        lambda x, axis=0: tuple(
            reshaped(piece, x.shape[:axis] + x.shape[axis_of(axis, x.ndim) + 1 :])
            for piece in _pieces(x, axis_of(axis, x.ndim), [1] * x.shape[axis])
        )
    )


# -- repeating ---------------------------------------------------------------------------------------------------------


@stands_for(np.repeat)
def _repeat(x: Any, repeats: Any, axis: Any = None) -> Any:
    if isinstance(repeats, Traced):
        refuse("numpy.repeat by recorded counts", "the shape of its result depends on the values")
    if not isinstance(repeats, int):
        x, axis = (reshaped(x, -1), 0) if axis is None else (x, axis_of(axis, x.ndim))
        return apply(
            "take", x, np.repeat(np.arange(known_extent(x, axis, "numpy.repeat")), repeats), axis=axis
        )
    x, axis = (reshaped(x, -1), 0) if axis is None else (x, axis_of(axis, x.ndim))
    shape = x.shape
    spread = broadcast(expanded(x, axis + 1), (*shape[: axis + 1], repeats, *shape[axis + 1 :]))
    return reshaped(spread, with_extent(shape, axis, shape[axis] * repeats))


@stands_for(np.tile)
def _tile(x: Any, reps: Any) -> Any:
    times = list(reps) if isinstance(reps, tuple | list) else [reps]
    x = _of_ndim(x, len(times))
    for axis, count in enumerate([1] * (x.ndim - len(times)) + times):
        if count != 1:
            x = _concatenate([x] * count, axis) if count else part(x, axis, 0, 0)
    return x


@stands_for(np.roll)
def _roll(x: Any, shift: Any, axis: Any = None) -> Any:
    if axis is None:
        return reshaped(_roll(reshaped(x, -1), shift, 0), x.shape)
    if isinstance(axis, tuple | list):
        shifts = shift if isinstance(shift, tuple | list) else [shift] * len(axis)
        for by, a in zip(shifts, axis, strict=True):
            x = _roll(x, by, a)
        return x
    axis = axis_of(axis, x.ndim)
    extent = x.shape[axis]
    if isinstance(extent, int):
        by = shift % extent if extent else 0
    else:
        by = shift
    place = -by if is_negative(by) else extent - by
    return x if by == 0 else _concatenate([part(x, axis, place, extent), part(x, axis, 0, place)], axis)


@stands_for(np.resize)
def _resize(a: Any, new_shape: Any) -> Any:
    flat = lift(a).reshape(-1)
    shape = new_shape if isinstance(new_shape, tuple | list) else (new_shape,)
    places = np.resize(np.arange(known_extent(flat, 0, "numpy.resize")), shape)
    return apply("take", flat, places, axis=0)


@stands_for(np.meshgrid)
def _meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Any:
    arrays = [lift(x).reshape(-1) for x in xi]
    count = len(arrays)
    order = [1, 0, *range(2, count)] if indexing == "xy" and count > 1 else list(range(count))
    shape = [arrays[order[d]].shape[0] for d in range(count)]
    found = []
    for number, x in enumerate(arrays):
        spread = x.reshape(vector_shape(count, order.index(number)))
        found.append(spread if sparse else broadcast(spread, tuple(shape)).copy())
    return tuple(found)


# -- padding -----------------------------------------------------------------------------------------------------------


def _edge(x: Any, axis: int, before: int, after: int) -> list[Any]:
    return [
        broadcast(part(x, axis, place, place + 1), with_extent(x.shape, axis, n))
        for place, n in ((0, before), (x.shape[axis] - 1, after))
    ]


def _wrap(x: Any, axis: int, before: int, after: int) -> list[Any]:
    return [part(x, axis, x.shape[axis] - before, x.shape[axis]), part(x, axis, 0, after)]


def _reflect(x: Any, axis: int, before: int, after: int) -> list[Any]:
    last = x.shape[axis] - 1
    return [
        apply("flip", part(x, axis, *ends), axis=axis) for ends in ((1, before + 1), (last - after, last))
    ]


def _symmetric(x: Any, axis: int, before: int, after: int) -> list[Any]:
    n = x.shape[axis]
    return [apply("flip", part(x, axis, *ends), axis=axis) for ends in ((0, before), (n - after, n))]


_AROUND = {"edge": _edge, "wrap": _wrap, "reflect": _reflect, "symmetric": _symmetric}


@stands_for(np.pad)
def _pad(x: Any, pad_width: Any, mode: str = "constant", *, constant_values: Any = 0) -> Any:
    if mode != "constant" and mode not in _AROUND:
        refuse(f"numpy.pad with mode {mode!r}", f"the modes are constant, {', '.join(_AROUND)}")
    if isinstance(constant_values, Traced):
        refuse("numpy.pad with recorded values", "the values must be numbers")
    widths = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2)).tolist()
    values = np.broadcast_to(np.asarray(constant_values), (x.ndim, 2)).tolist()
    for axis, (before, after) in ((axis, width) for axis, width in enumerate(widths) if any(width)):
        if mode != "constant":
            left, right = _AROUND[mode](x, axis, before, after)
            x = _concatenate([left, x, right], axis)
        elif not any(values[axis]):
            x = apply("place", x, axis=axis, begin=before, step=1, extent=x.shape[axis] + before + after)
        else:
            shapes = (with_extent(x.shape, axis, n) for n in (before, after))
            pairs = zip(values[axis], shapes, strict=True)
            left, right = (np.full_like(x, value, shape=shape) for value, shape in pairs)
            x = _concatenate([left, x, right], axis)
    return x
