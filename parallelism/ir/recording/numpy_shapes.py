"""Recording of NumPy's functions that reshape and reorder."""

from collections.abc import Callable
from typing import Any

import numpy as np

from parallelism.ir.core import Extent, quotient, rules
from parallelism.ir.tracing import CALLS, PASSING, VIEWS, apply, lift, refuse


def stands_for(*functions: Any, view: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: calls of these NumPy functions are recorded by the decorated function.

    ``view`` says that NumPy's result shares the memory of the first argument.
    """

    def keep(call: Callable[..., Any]) -> Callable[..., Any]:
        CALLS.update(dict.fromkeys(functions, call))
        if view:
            VIEWS.update(dict.fromkeys(functions, _first))
        return call

    return keep


def _first(*_: Any, **__: Any) -> int:
    return 0


def axis_of(axis: Any, ndim: int) -> int:
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis!r} is out of bounds for {ndim} dims")
    return int(axis) % ndim


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    return tuple(sorted(axis_of(a, ndim) for a in as_list(axis)))


def known_extent(x: Any, axis: int, name: str) -> int:
    """The number of elements along a dim, for a function that needs it."""
    n = x.shape[axis]
    if not isinstance(n, int):
        refuse(f"{name} along a dim of {n} elements", "give the symbols their numbers")
    return n


def as_list(axes: Any) -> list[Any]:
    """Axes or extents, or one of them, as a list."""
    return list(axes) if isinstance(axes, tuple | list) else [axes]


# -- shapes ------------------------------------------------------------------------------------------------------------


@stands_for(np.reshape, view=True)
def reshaped(x: Any, shape: Any, order: str = "C") -> Any:
    if order != "C":
        refuse(f"numpy.reshape in order {order!r}", "it is by rows: order='C'")
    extents = as_list(shape)
    unknown = [d for d, extent in enumerate(extents) if isinstance(extent, int) and extent == -1]
    if len(unknown) > 1:
        raise ValueError("at most one extent can be -1")
    for d in unknown:
        rest = quotient(x.shape, extents[:d] + extents[d + 1 :])
        if rest is None:
            raise ValueError(f"an array of shape {x.shape} cannot be reshaped to {tuple(extents)}")
        extents[d] = rest
    return x if tuple(extents) == x.shape else apply("reshape", x, shape=tuple(extents))


@stands_for(np.ravel, view=True)
def _ravel(x: Any, order: str = "C") -> Any:
    """The array in one dim, and by rows: of other arrays NumPy makes a copy, unlike ``reshape``."""
    flat = reshaped(x, -1, order)
    if flat is x and x._order is not None:
        flat = x.copy()
    flat._order = None
    return flat


@stands_for(np.transpose, np.permute_dims, view=True)
def transposed(x: Any, axes: Any = None) -> Any:
    order = tuple(reversed(range(x.ndim))) if axes is None else tuple(axis_of(a, x.ndim) for a in axes)
    return x if order == tuple(range(x.ndim)) else apply("transpose", x, permutation=order)


@stands_for(np.swapaxes, view=True)
def _swapaxes(x: Any, axis1: int, axis2: int) -> Any:
    order = list(range(x.ndim))
    a, b = axis_of(axis1, x.ndim), axis_of(axis2, x.ndim)
    order[a], order[b] = b, a
    return transposed(x, order)


@stands_for(np.moveaxis, view=True)
def _moveaxis(x: Any, source: Any, destination: Any) -> Any:
    sources = [axis_of(a, x.ndim) for a in np.atleast_1d(source).tolist()]
    destinations = [axis_of(a, x.ndim) for a in np.atleast_1d(destination).tolist()]
    pairs = sorted(zip(destinations, sources, strict=True))
    order = [d for d in range(x.ndim) if d not in sources]
    for to, axis in pairs:
        order.insert(to, axis)
    return transposed(x, order)


@stands_for(np.rollaxis, view=True)
def _rollaxis(x: Any, axis: int, start: int = 0) -> Any:
    axis = axis_of(axis, x.ndim)
    start = start + x.ndim if start < 0 else start
    return _moveaxis(x, axis, start - (axis < start))


@stands_for(np.expand_dims, view=True)
def expanded(x: Any, axis: Any) -> Any:
    shape = list(x.shape)
    for a in axes_of(axis, x.ndim + len(as_list(axis))):
        shape.insert(a, 1)
    return reshaped(x, shape)


@stands_for(np.squeeze, view=True)
def _squeeze(x: Any, axis: Any = None) -> Any:
    if axis is None and not all(isinstance(n, int) for n in x.shape):
        refuse(f"numpy.squeeze of an array of shape {x.shape}", "an extent with symbols may be 1; give axis=")
    axes = [d for d, n in enumerate(x.shape) if n == 1] if axis is None else axes_of(axis, x.ndim)
    if any(x.shape[d] != 1 for d in axes):
        raise ValueError(f"a dim to squeeze must have extent 1, got dims {list(axes)} of shape {x.shape}")
    return reshaped(x, [n for d, n in enumerate(x.shape) if d not in axes])


@stands_for(np.broadcast_to, view=True)
def broadcast(x: Any, shape: Any) -> Any:
    shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    return x if shape == x.shape else apply("broadcast_to", x, shape=shape)


@stands_for(np.flip, view=True)
def _flip(x: Any, axis: Any = None) -> Any:
    for a in axes_of(axis, x.ndim):
        x = apply("flip", x, axis=a)
    return x


@stands_for(np.rot90, view=True)
def _rot90(m: Any, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Any:
    for _ in range(k % 4):
        m = _flip(_swapaxes(m, *axes), axes[0])
    return m


@stands_for(np.broadcast_arrays)
def _broadcast_arrays(*arrays: Any) -> Any:
    parts = [lift(x) for x in arrays]
    shape: Any = rules.broadcast([x.shape for x in parts])
    return tuple(np.broadcast_to(x, shape) for x in parts)


PASSING.add(np.broadcast_arrays)


@stands_for(np.lib.stride_tricks.sliding_window_view, view=True)
def _windows(x: Any, window_shape: Any, axis: Any = None) -> Any:
    axes = range(x.ndim) if axis is None else as_list(axis)
    for size, a in zip(as_list(window_shape), [axis_of(a, x.ndim) for a in axes], strict=True):
        x = apply("windows", x, axis=a, size=size, step=1)
    return x


def part(x: Any, axis: int, begin: Extent, end: Extent, step: int = 1) -> Any:
    """The elements ``begin:end:step`` of one dim."""
    if (begin, end, step) == (0, x.shape[axis], 1):
        return x
    return apply("slice", x, axis=axis, begin=begin, end=end, step=step)


for _function, _call in {
    np.matrix_transpose: lambda x: _swapaxes(x, -1, -2),
    np.flipud: lambda m: _flip(m, 0),
    np.fliplr: lambda m: _flip(m, 1),
    np.atleast_1d: lambda x: reshaped(x, x.shape or (1,)),
    np.atleast_2d: lambda x: reshaped(x, (*[1] * (2 - x.ndim), *x.shape)),
    np.atleast_3d: lambda x: reshaped(
        x, [(1, 1, 1), (1, *x.shape, 1), (*x.shape, 1)][x.ndim] if x.ndim < 3 else x.shape
    ),
}.items():
    stands_for(_function, view=True)(_call)
