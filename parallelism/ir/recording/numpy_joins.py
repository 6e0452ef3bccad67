"""Recording of NumPy's functions that join, split, repeat and pad arrays."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from parallelism.ir.core import Extent, is_negative, quotient
from parallelism.ir.recording.numpy_shapes import axis_of, broadcast, expanded, part, reshaped, stands_for
from parallelism.ir.tracing import CALLS, apply, lift, refuse

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
        np.append: lambda arr, values, axis=None: _concatenate([arr, values], axis),
    }
)


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
    if not isinstance(repeats, int):
        refuse("numpy.repeat with a different count for each element")
    x, axis = (reshaped(x, -1), 0) if axis is None else (x, axis_of(axis, x.ndim))
    shape = x.shape
    spread = broadcast(expanded(x, axis + 1), (*shape[: axis + 1], repeats, *shape[axis + 1 :]))
    return reshaped(spread, (*shape[:axis], shape[axis] * repeats, *shape[axis + 1 :]))


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
    by = shift % extent if isinstance(extent, int) and extent else shift
    place = -by if is_negative(by) else extent - by
    return x if by == 0 else _concatenate([part(x, axis, place, extent), part(x, axis, 0, place)], axis)


# -- padding -----------------------------------------------------------------------------------------------------------


def _edge(x: Any, axis: int, before: int, after: int) -> list[Any]:
    return [
        broadcast(part(x, axis, place, place + 1), (*x.shape[:axis], n, *x.shape[axis + 1 :]))
        for place, n in ((0, before), (x.shape[axis] - 1, after))
    ]


def _wrap(x: Any, axis: int, before: int, after: int) -> list[Any]:
    return [part(x, axis, x.shape[axis] - before, x.shape[axis]), part(x, axis, 0, after)]


def _reflect(x: Any, axis: int, before: int, after: int) -> list[Any]:
    last = x.shape[axis] - 1
    return [
        apply("flip", part(x, axis, *ends), axis=axis) for ends in ((1, before + 1), (last - after, last))
    ]


_AROUND = {"edge": _edge, "wrap": _wrap, "reflect": _reflect}


@stands_for(np.pad)
def _pad(x: Any, pad_width: Any, mode: str = "constant", *, constant_values: Any = 0) -> Any:
    if (mode != "constant" and mode not in _AROUND) or not isinstance(constant_values, int | float):
        refuse(
            f"numpy.pad with mode {mode!r} and these values",
            "the modes are constant (one number), edge, wrap and reflect",
        )
    widths = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2)).tolist()
    for axis, (before, after) in ((axis, width) for axis, width in enumerate(widths) if any(width)):
        if mode != "constant":
            left, right = _AROUND[mode](x, axis, before, after)
            x = _concatenate([left, x, right], axis)
        elif constant_values == 0:
            x = apply("place", x, axis=axis, begin=before, step=1, extent=x.shape[axis] + before + after)
        else:
            shapes = ((*x.shape[:axis], n, *x.shape[axis + 1 :]) for n in (before, after))
            left, right = (np.full_like(x, constant_values, shape=shape) for shape in shapes)
            x = _concatenate([left, x, right], axis)
    return x
