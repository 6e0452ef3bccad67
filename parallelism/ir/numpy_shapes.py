"""What NumPy's functions that move elements become when they are recorded, ``x[...]`` among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from parallelism.ir.extents import Expression, Extent, quotient
from parallelism.ir.tracing import CALLS, Traced, apply, lift, refuse


def stands_for(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What is defined below stands for these functions of NumPy."""
    def keep(call: Callable[..., Any]) -> Callable[..., Any]:
        CALLS.update(dict.fromkeys(functions, call))
        return call

    return keep


def axis_of(axis: Any, ndim: int) -> int:
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis!r} is none of {ndim} dims")
    return int(axis) % ndim


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    return tuple(sorted(axis_of(a, ndim) for a in (axis if isinstance(axis, tuple | list) else (axis,))))


# -- shapes ------------------------------------------------------------------------------------------------------------


@stands_for(np.reshape)
def _reshape(x: Any, shape: Any) -> Any:
    extents = list(shape) if isinstance(shape, tuple | list) else [shape]
    unknown = [d for d, extent in enumerate(extents) if isinstance(extent, int) and extent == -1]
    if len(unknown) > 1:
        raise ValueError("one extent at most can be left open, as -1")
    for d in unknown:
        rest = quotient(x.shape, extents[:d] + extents[d + 1:])
        if rest is None:
            raise ValueError(f"an array of shape {x.shape} cannot be made {tuple(extents)}")
        extents[d] = rest
    return x if tuple(extents) == x.shape else apply("reshape", x, shape=tuple(extents))


@stands_for(np.ravel)
def _ravel(x: Any) -> Any:
    return _reshape(x, -1)


@stands_for(np.transpose, np.permute_dims)
def _transpose(x: Any, axes: Any = None) -> Any:
    order = tuple(reversed(range(x.ndim))) if axes is None else tuple(axis_of(a, x.ndim) for a in axes)
    return x if order == tuple(range(x.ndim)) else apply("transpose", x, permutation=order)


@stands_for(np.matrix_transpose)
def _matrix_transpose(x: Any) -> Any:
    return _swapaxes(x, -1, -2)


@stands_for(np.swapaxes)
def _swapaxes(x: Any, axis1: int, axis2: int) -> Any:
    order = list(range(x.ndim))
    a, b = axis_of(axis1, x.ndim), axis_of(axis2, x.ndim)
    order[a], order[b] = b, a
    return _transpose(x, order)


@stands_for(np.moveaxis)
def _moveaxis(x: Any, source: Any, destination: Any) -> Any:
    return _transpose(x, _moved(x.ndim, source, destination))


def _moved(ndim: int, source: Any, destination: Any) -> list[int]:
    sources, destinations = ([a] if isinstance(a, int) else list(a) for a in (source, destination))
    pairs = sorted(zip((axis_of(d, ndim) for d in destinations), (axis_of(s, ndim) for s in sources), strict=True))
    order = [d for d in range(ndim) if d not in {s for _, s in pairs}]
    for to, axis in pairs:
        order.insert(to, axis)
    return order


@stands_for(np.expand_dims)
def _expand_dims(x: Any, axis: Any) -> Any:
    axes = axes_of(axis, x.ndim + (len(axis) if isinstance(axis, tuple | list) else 1))
    shape = list(x.shape)
    for a in axes:
        shape.insert(a, 1)
    return _reshape(x, shape)


@stands_for(np.squeeze)
def _squeeze(x: Any, axis: Any = None) -> Any:
    axes = [d for d, n in enumerate(x.shape) if n == 1] if axis is None else axes_of(axis, x.ndim)
    if any(x.shape[d] != 1 for d in axes):
        raise ValueError(f"a dim to leave out has extent 1, in {x.shape}")
    return _reshape(x, [n for d, n in enumerate(x.shape) if d not in axes])


@stands_for(np.broadcast_to)
def _broadcast_to(x: Any, shape: Any) -> Any:
    shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    return x if shape == x.shape else apply("broadcast_to", x, shape=shape)


@stands_for(np.concatenate)
def _concatenate(arrays: Sequence[Any], axis: Any = 0) -> Any:
    parts = [lift(x) for x in arrays]
    if axis is None:
        parts, axis = [x.reshape(-1) for x in parts], 0
    return apply("concatenate", *parts, axis=axis_of(axis, parts[0].ndim))


@stands_for(np.stack)
def _stack(arrays: Sequence[Any], axis: int = 0) -> Any:
    parts = [_expand_dims(lift(x), axis) for x in arrays]
    return _concatenate(parts, axis)


@stands_for(np.split)
def _split(x: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    axis, places = axis_of(axis, x.ndim), indices_or_sections
    extent = x.shape[axis]
    if isinstance(places, int):
        each = quotient((extent,), (places,))
        if each is None:
            raise ValueError(f"a dim of {extent} is not {places} equal parts")
        sizes: list[Extent] = [each] * places
    else:
        bounds = [0, *places, extent]
        sizes = [b - a for a, b in pairwise(bounds)]
    found = apply("split", x, axis=axis, sizes=tuple(sizes))
    return list(found) if isinstance(found, tuple) else [found]


@stands_for(np.flip)
def _flip(x: Any, axis: Any = None) -> Any:
    for a in axes_of(axis, x.ndim):
        x = apply("flip", x, axis=a)
    return x


@stands_for(np.roll)
def _roll(x: Any, shift: int, axis: int) -> Any:
    axis = axis_of(axis, x.ndim)
    extent = x.shape[axis]
    by = shift % extent if isinstance(extent, int) else shift
    if isinstance(by, int) and by <= 0:
        return x if by == 0 else _concatenate([_part(x, axis, -by, extent), _part(x, axis, 0, -by)], axis)
    return _concatenate([_part(x, axis, extent - by, extent), _part(x, axis, 0, extent - by)], axis)


@stands_for(np.pad)
def _pad(x: Any, pad_width: Any, mode: str = "constant", *, constant_values: Any = 0) -> Any:
    if mode != "constant" or constant_values != 0:
        refuse("numpy.pad with anything but zeros")
    widths = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2)).tolist()
    for axis, (before, after) in enumerate(widths):
        if before or after:
            x = apply("place", x, axis=axis, begin=before, step=1, extent=x.shape[axis] + before + after)
    return x


@stands_for(np.lib.stride_tricks.sliding_window_view)
def _windows(x: Any, window_shape: Any, axis: Any = None) -> Any:
    sizes = list(window_shape) if isinstance(window_shape, tuple | list) else [window_shape]
    axes = list(range(x.ndim)) if axis is None else list(axis) if isinstance(axis, tuple | list) else [axis]
    for size, a in zip(sizes, [axis_of(a, x.ndim) for a in axes], strict=True):
        x = apply("windows", x, axis=a, size=size, step=1)
    return x


# -- x[...] ------------------------------------------------------------------------------------------------------------


def _part(x: Any, axis: int, begin: Extent, end: Extent, step: int = 1) -> Any:
    if (begin, end, step) == (0, x.shape[axis], 1):
        return x
    return apply("slice", x, axis=axis, begin=begin, end=end, step=step)


@stands_for("getitem")
def _getitem(x: Any, key: Any) -> Any:
    keys = list(key) if isinstance(key, tuple) else [key]
    used = sum(1 for k in keys if k is not None and k is not Ellipsis)
    if used > x.ndim:
        raise IndexError(f"{used} indices for an array of {x.ndim} dims")
    dots = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[dots:dots + 1] = [slice(None)] * (x.ndim - used)
    arrays = [k for k in keys if isinstance(k, Traced | np.ndarray | list)]
    if len(arrays) > 1:
        refuse("indexing by several arrays at once", "say it with take_along_axis")
    shape: list[Extent] = []
    axis = 0
    taken: tuple[int, Any] | None = None
    for k in keys:
        if k is None:
            shape.append(1)
            continue
        extent = x.shape[axis]
        if isinstance(k, slice):
            x = _sliced(x, axis, k)
            shape.append(x.shape[axis])
        elif isinstance(k, Traced | np.ndarray | list):
            taken = axis, k
            shape.extend(lift(k).shape)
        elif isinstance(k, int | np.integer | Expression) and not isinstance(k, bool):
            place = k if isinstance(k, Expression) else int(k) if k >= 0 else extent + int(k)
            if isinstance(place, int) and isinstance(extent, int) and not 0 <= place < extent:
                # what ends a `for` over an array must be Python's own error
                raise IndexError(f"index {k} is out of bounds for a dim of {extent}")
            x = _part(x, axis, place, place + 1)
        else:
            refuse(f"indexing by {k!r}")
        axis += 1
    if taken is not None:
        indices = lift(taken[1])
        if indices.dtype.kind not in "iu":
            refuse("indexing by bools", "the shape of the result depends on the numbers; say it with where")
        x = apply("take", x, indices, axis=taken[0])
    return _reshape(x, shape)


def _sliced(x: Any, axis: int, key: slice) -> Any:
    extent, step = x.shape[axis], 1 if key.step is None else key.step
    if step == -1 and key.start is None and key.stop is None:
        return apply("flip", x, axis=axis)
    if not isinstance(step, int) or step < 1:
        refuse(f"a slice with step {step}")
    if isinstance(extent, int) and not isinstance(key.start, Expression) and not isinstance(key.stop, Expression):
        begin, end, step = key.indices(extent)
        return _part(x, axis, begin, max(begin, end), step)
    begin, end = (
        at_all if k is None else extent + k if isinstance(k, int) and k < 0 else k
        for k, at_all in ((key.start, 0), (key.stop, extent))
    )
    return _part(x, axis, begin, end, step)
