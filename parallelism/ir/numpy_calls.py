"""What NumPy's functions, ufuncs aside, become when they are recorded: mostly one operator each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from parallelism.ir.extents import Expression, Extent, product, quotient
from parallelism.ir.tracing import CALLS, Traced, apply, lift, refuse
from parallelism.ir.types import checked_dtype


def _is(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What is defined below stands for these functions of NumPy."""
    def keep(call: Callable[..., Any]) -> Callable[..., Any]:
        CALLS.update(dict.fromkeys(functions, call))
        return call

    return keep


def _axis(axis: Any, ndim: int) -> int:
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis!r} is none of {ndim} dims")
    return int(axis) % ndim


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    return tuple(sorted(_axis(a, ndim) for a in (axis if isinstance(axis, tuple | list) else (axis,))))


def _alike(*operands: Any) -> list[Traced]:
    """Operands of one dtype: that of the arrays, scalars of Python following them."""
    weak = [isinstance(x, int | float | Expression) for x in operands]
    dtype = np.result_type(*(
        (1 if isinstance(x, Expression) else x) if w else x.dtype if isinstance(x, Traced) else np.asarray(x)
        for x, w in zip(operands, weak, strict=True)
    ))
    return [lift(x, dtype=dtype if w else None).astype(dtype) for x, w in zip(operands, weak, strict=True)]


# -- reductions --------------------------------------------------------------------------------------------------------


def _reduction(kind: str) -> Callable[..., Any]:
    def call(x: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: Any = False) -> Any:
        if out is not None:
            refuse(f"numpy.{kind} into an array that is there already (out=)")
        x = x if dtype is None else x.astype(dtype)
        return apply(kind, x, axes=_axes(axis, x.ndim), keepdims=bool(keepdims))

    return call


for _kind, _functions in {
    "sum": (np.sum,), "prod": (np.prod,), "max": (np.max, np.amax), "min": (np.min, np.amin), "any": (np.any,),
    "all": (np.all,),
}.items():
    _is(*_functions)(_reduction(_kind))
for _function in (np.max, np.amax, np.min, np.amin, np.any, np.all):
    # these have no dtype, so what comes third is out
    CALLS[_function] = lambda x, axis=None, out=None, keepdims=False, call=CALLS[_function]: call(
        x, axis, None, out, keepdims)


@_is(np.mean)
def _mean(x: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: Any = False) -> Any:
    if x.dtype.kind in "biu" and dtype is None:
        dtype = np.float64
    axes = _axes(axis, x.ndim)
    total = CALLS[np.sum](x, axes, dtype, out, keepdims)
    return total / product(x.shape[d] for d in axes)


@_is(np.var)
def _var(x: Any, axis: Any = None, *, ddof: int = 0, keepdims: Any = False) -> Any:
    axes = _axes(axis, x.ndim)
    centred = x - _mean(x, axes, keepdims=True)
    return CALLS[np.sum](centred * centred, axes, None, None, keepdims) / (product(x.shape[d] for d in axes) - ddof)


@_is(np.std)
def _std(x: Any, axis: Any = None, *, ddof: int = 0, keepdims: Any = False) -> Any:
    return np.sqrt(_var(x, axis, ddof=ddof, keepdims=keepdims))


@_is(np.argmax)
def _argmax(x: Any, axis: Any = None) -> Any:
    return _extreme("argmax", x, axis)


@_is(np.argmin)
def _argmin(x: Any, axis: Any = None) -> Any:
    return _extreme("argmin", x, axis)


def _extreme(kind: str, x: Any, axis: Any) -> Any:
    return apply(kind, x.reshape(-1), axis=0) if axis is None else apply(kind, x, axis=_axis(axis, x.ndim))


@_is(np.cumsum)
def _cumsum(x: Any, axis: Any = None) -> Any:
    return apply("cumsum", x.reshape(-1), axis=0) if axis is None else apply("cumsum", x, axis=_axis(axis, x.ndim))


# -- products ----------------------------------------------------------------------------------------------------------


@_is(np.matmul)
def _matmul(a: Any, b: Any) -> Any:
    a, b = lift(a), lift(b)
    if a.ndim >= 2 and b.ndim >= 2:
        return apply("matmul", a, b)
    if not a.ndim or not b.ndim:
        refuse("numpy.matmul of a scalar")
    if b.ndim == 1:
        found = apply("matmul", a.reshape(1, -1) if a.ndim == 1 else a, b.reshape(-1, 1))
        return found.reshape(a.shape[:-1])
    return apply("matmul", a.reshape(1, -1), b).reshape((*b.shape[:-2], b.shape[-1]))


@_is(np.dot)
def _dot(a: Any, b: Any) -> Any:
    a, b = lift(a), lift(b)
    if not a.ndim or not b.ndim:
        return a * b
    if b.ndim > 2:
        refuse("numpy.dot with more than two dims on the right", "say it with einsum")
    return _matmul(a, b)


@_is(np.outer)
def _outer(a: Any, b: Any) -> Any:
    return apply("einsum", lift(a).reshape(-1), lift(b).reshape(-1), equation="i,j->ij")


@_is(np.einsum)
def _einsum(equation: Any, *operands: Any, optimize: Any = False) -> Any:
    if not isinstance(equation, str):
        refuse("numpy.einsum without an equation in letters")
    arrays = [lift(x) for x in operands]
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(arrays):
        raise ValueError(f"{equation} takes {len(terms)} operands, got {len(arrays)}")
    spare = iter(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in equation)
    hidden = [array.ndim - len(term.replace("...", "")) for term, array in zip(terms, arrays, strict=True)]
    dots = [next(spare) for _ in range(max((n for n, t in zip(hidden, terms, strict=True) if "..." in t), default=0))]
    terms = [term.replace("...", "".join(dots[len(dots) - n:])) for n, term in zip(hidden, terms, strict=True)]
    if arrow:
        right = right.replace("...", "".join(dots))
    else:
        joined = "".join(terms)
        right = "".join(dots) + "".join(sorted({c for c in joined if joined.count(c) == 1} - set(dots)))
    return apply("einsum", *arrays, equation=f"{','.join(terms)}->{right}")


# -- shapes ------------------------------------------------------------------------------------------------------------


@_is(np.reshape)
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


@_is(np.ravel)
def _ravel(x: Any) -> Any:
    return _reshape(x, -1)


@_is(np.transpose, np.permute_dims)
def _transpose(x: Any, axes: Any = None) -> Any:
    order = tuple(reversed(range(x.ndim))) if axes is None else tuple(_axis(a, x.ndim) for a in axes)
    return x if order == tuple(range(x.ndim)) else apply("transpose", x, permutation=order)


@_is(np.matrix_transpose)
def _matrix_transpose(x: Any) -> Any:
    return _swapaxes(x, -1, -2)


@_is(np.swapaxes)
def _swapaxes(x: Any, axis1: int, axis2: int) -> Any:
    order = list(range(x.ndim))
    a, b = _axis(axis1, x.ndim), _axis(axis2, x.ndim)
    order[a], order[b] = b, a
    return _transpose(x, order)


@_is(np.moveaxis)
def _moveaxis(x: Any, source: Any, destination: Any) -> Any:
    return _transpose(x, _moved(x.ndim, source, destination))


def _moved(ndim: int, source: Any, destination: Any) -> list[int]:
    sources, destinations = ([a] if isinstance(a, int) else list(a) for a in (source, destination))
    pairs = sorted(zip((_axis(d, ndim) for d in destinations), (_axis(s, ndim) for s in sources), strict=True))
    order = [d for d in range(ndim) if d not in {s for _, s in pairs}]
    for to, axis in pairs:
        order.insert(to, axis)
    return order


@_is(np.expand_dims)
def _expand_dims(x: Any, axis: Any) -> Any:
    axes = _axes(axis, x.ndim + (len(axis) if isinstance(axis, tuple | list) else 1))
    shape = list(x.shape)
    for a in axes:
        shape.insert(a, 1)
    return _reshape(x, shape)


@_is(np.squeeze)
def _squeeze(x: Any, axis: Any = None) -> Any:
    axes = [d for d, n in enumerate(x.shape) if n == 1] if axis is None else _axes(axis, x.ndim)
    if any(x.shape[d] != 1 for d in axes):
        raise ValueError(f"a dim to leave out has extent 1, in {x.shape}")
    return _reshape(x, [n for d, n in enumerate(x.shape) if d not in axes])


@_is(np.broadcast_to)
def _broadcast_to(x: Any, shape: Any) -> Any:
    shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    return x if shape == x.shape else apply("broadcast_to", x, shape=shape)


@_is(np.concatenate)
def _concatenate(arrays: Sequence[Any], axis: Any = 0) -> Any:
    parts = [lift(x) for x in arrays]
    if axis is None:
        parts, axis = [x.reshape(-1) for x in parts], 0
    return apply("concatenate", *parts, axis=_axis(axis, parts[0].ndim))


@_is(np.stack)
def _stack(arrays: Sequence[Any], axis: int = 0) -> Any:
    parts = [_expand_dims(lift(x), axis) for x in arrays]
    return _concatenate(parts, axis)


@_is(np.split)
def _split(x: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    axis, places = _axis(axis, x.ndim), indices_or_sections
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


@_is(np.flip)
def _flip(x: Any, axis: Any = None) -> Any:
    for a in _axes(axis, x.ndim):
        x = apply("flip", x, axis=a)
    return x


@_is(np.roll)
def _roll(x: Any, shift: int, axis: int) -> Any:
    axis = _axis(axis, x.ndim)
    extent = x.shape[axis]
    by = shift % extent if isinstance(extent, int) else shift
    if isinstance(by, int) and by <= 0:
        return x if by == 0 else _concatenate([_part(x, axis, -by, extent), _part(x, axis, 0, -by)], axis)
    return _concatenate([_part(x, axis, extent - by, extent), _part(x, axis, 0, extent - by)], axis)


@_is(np.pad)
def _pad(x: Any, pad_width: Any, mode: str = "constant", *, constant_values: Any = 0) -> Any:
    if mode != "constant" or constant_values != 0:
        refuse("numpy.pad with anything but zeros")
    widths = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2)).tolist()
    for axis, (before, after) in enumerate(widths):
        if before or after:
            x = apply("place", x, axis=axis, begin=before, step=1, extent=x.shape[axis] + before + after)
    return x


@_is(np.lib.stride_tricks.sliding_window_view)
def _windows(x: Any, window_shape: Any, axis: Any = None) -> Any:
    sizes = list(window_shape) if isinstance(window_shape, tuple | list) else [window_shape]
    axes = list(range(x.ndim)) if axis is None else list(axis) if isinstance(axis, tuple | list) else [axis]
    for size, a in zip(sizes, [_axis(a, x.ndim) for a in axes], strict=True):
        x = apply("windows", x, axis=a, size=size, step=1)
    return x


# -- elements ----------------------------------------------------------------------------------------------------------


@_is(np.where)
def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None or y is None:
        refuse("numpy.where with a condition only", "the shape of its result depends on the numbers")
    a, b = _alike(x, y)
    return apply("where", lift(condition), a, b)


@_is(np.clip)
def _clip(x: Any, a_min: Any = None, a_max: Any = None) -> Any:
    x = x if a_min is None else np.maximum(x, a_min)
    return x if a_max is None else np.minimum(x, a_max)


@_is(np.positive)
def _positive(x: Any) -> Any:
    return x


@_is(np.astype)
def _astype(x: Any, dtype: Any, *, copy: bool = True) -> Any:
    return x.astype(dtype)


@_is(np.take)
def _take(x: Any, indices: Any, axis: Any = None) -> Any:
    x = lift(x)
    return apply("take", x.reshape(-1), indices, axis=0) if axis is None else apply(
        "take", x, indices, axis=_axis(axis, x.ndim))


@_is(np.take_along_axis)
def _take_along_axis(x: Any, indices: Any, axis: int = -1) -> Any:
    x = lift(x)
    return apply("take_along", x, indices, axis=_axis(axis, x.ndim))


def _like(value: int) -> Callable[..., Any]:
    return lambda x, dtype=None: apply(
        "constant", value=value, shape=x.shape, dtype=checked_dtype(x.dtype if dtype is None else dtype))


_is(np.zeros_like)(_like(0))
_is(np.ones_like)(_like(1))
_is(np.shape)(lambda x: x.shape)
_is(np.ndim)(lambda x: x.ndim)
_is(np.size)(lambda x: x.size)


@_is(np.tril)
def _tril(x: Any, k: int = 0) -> Any:
    return np.where(_places(x, -2) + k >= _places(x, -1), x, 0)


@_is(np.triu)
def _triu(x: Any, k: int = 0) -> Any:
    return np.where(_places(x, -2) + k <= _places(x, -1), x, 0)


def _places(x: Any, axis: int) -> Any:
    shape = x.shape[-2:]
    return apply("iota", dim=axis + 2, shape=shape, starts=(0, 0), dtype=np.dtype(np.int64))


# -- x[...] ------------------------------------------------------------------------------------------------------------


def _part(x: Any, axis: int, begin: Extent, end: Extent, step: int = 1) -> Any:
    if (begin, end, step) == (0, x.shape[axis], 1):
        return x
    return apply("slice", x, axis=axis, begin=begin, end=end, step=step)


@_is("getitem")
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
