"""Recording of NumPy's functions of nan and infinity, of products so far, and of quantiles."""

from collections.abc import Callable
from math import floor
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.core import product
from parallelism.ir.recording.numpy_shapes import axes_of, axis_of, part
from parallelism.ir.tracing import CALLS, lift, refuse


def stands_for(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the function says how these functions of NumPy are recorded."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        CALLS.update(dict.fromkeys(functions, function))
        return function

    return register


def _extent(x: Any, axis: int, name: str) -> int:
    n = x.shape[axis]
    return (
        n
        if isinstance(n, int)
        else refuse(f"{name} along a dim of {n} elements", "give the symbols their numbers")
    )


# -- infinity and nan --------------------------------------------------------------------------------------------------


@stands_for(np.isinf)
def _isinf(x: Any) -> Any:
    return np.abs(lift(x)) == np.inf if is_floating(lift(x).dtype) else lift(x) != lift(x)


@stands_for(np.isposinf)
def _isposinf(x: Any) -> Any:
    return lift(x) == np.inf


@stands_for(np.isneginf)
def _isneginf(x: Any) -> Any:
    return lift(x) == -np.inf


def _without_nan(x: Any, value: Any) -> Any:
    return np.where(np.isnan(x), lift(value, dtype=x.dtype), x) if is_floating(x.dtype) else x


@stands_for(np.nansum)
def _nansum(a: Any, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Any:
    return np.sum(_without_nan(lift(a), 0), axis=axis, dtype=dtype, keepdims=keepdims)


@stands_for(np.nanprod)
def _nanprod(a: Any, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Any:
    return np.prod(_without_nan(lift(a), 1), axis=axis, dtype=dtype, keepdims=keepdims)


def _extreme(function: Any, worst: float) -> Callable[..., Any]:
    def recorded(a: Any, axis: Any = None, keepdims: Any = False) -> Any:
        x = lift(a)
        if not is_floating(x.dtype):
            return function(x, axis=axis, keepdims=keepdims)
        found = function(_without_nan(x, worst), axis=axis, keepdims=keepdims)
        none = np.all(np.isnan(x), axis=axis, keepdims=keepdims)
        return np.where(none, np.sum(x, axis=axis, keepdims=keepdims), found)  # a sum of nans is nan

    return recorded


CALLS.update({np.nanmax: _extreme(np.max, -np.inf), np.nanmin: _extreme(np.min, np.inf)})


@stands_for(np.nanmean)
def _nanmean(a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    x = lift(a)
    if not is_floating(x.dtype):
        return np.mean(x, axis=axis, keepdims=keepdims)
    count = np.sum(~np.isnan(x), axis=axis, keepdims=keepdims)
    return _nansum(x, axis=axis, keepdims=keepdims) / count.astype(x.dtype)


@stands_for(np.nanvar)
def _nanvar(a: Any, axis: Any = None, ddof: int = 0, keepdims: Any = False) -> Any:
    x = lift(a)
    if not is_floating(x.dtype):
        return np.var(x, axis=axis, ddof=ddof, keepdims=keepdims)
    away = x - _nanmean(x, axis=axis, keepdims=True)
    count = np.sum(~np.isnan(x), axis=axis, keepdims=keepdims)
    return _nansum(away * away, axis=axis, keepdims=keepdims) / (count - ddof).astype(x.dtype)


@stands_for(np.nanstd)
def _nanstd(a: Any, axis: Any = None, ddof: int = 0, keepdims: Any = False) -> Any:
    return np.sqrt(_nanvar(a, axis=axis, ddof=ddof, keepdims=keepdims))


# -- products so far, quantiles ----------------------------------------------------------------------------------------


@stands_for(np.cumprod)
def _cumprod(a: Any, axis: Any = None, dtype: Any = None) -> Any:
    """In as many steps as the number of elements has bits: each multiplies by what stands so far before."""
    x: Any = lift(a)
    if axis is None:
        x, axis = x.reshape(-1), 0
    if dtype is not None or not is_floating(x.dtype):
        x = x.astype(np.prod(np.zeros(1, x.dtype), dtype=dtype).dtype)
    axis = axis_of(axis, x.ndim)
    n, step = _extent(x, axis, "numpy.cumprod"), 1
    while step < n:
        x = np.concatenate(
            [part(x, axis, 0, step), part(x, axis, step, n) * part(x, axis, 0, n - step)], axis
        )
        step *= 2
    return x


def _in_one_dim(x: Any, axis: Any) -> tuple[Any, tuple[int, ...]]:
    """The array with the dims of a reduction as its last one, and these dims."""
    axes = axes_of(axis, x.ndim)
    rest = [d for d in range(x.ndim) if d not in axes]
    moved = np.transpose(x, (*rest, *axes))
    return moved.reshape((*(x.shape[d] for d in rest), product(x.shape[d] for d in axes))), axes


@stands_for(np.quantile)
def _quantile(a: Any, q: Any, axis: Any = None, *, keepdims: bool = False, method: str = "linear") -> Any:
    """Between two elements in order, linearly.  An array with a nan has a nan."""
    x = lift(a)
    if not isinstance(q, int | float) or method != "linear":
        refuse("numpy.quantile of several quantiles, or with method=", "call it for each, linearly")
    if keepdims and not x.ndim:
        refuse(
            "numpy.quantile or median of a number with keepdims=", "leave it out: there are no dims to keep"
        )
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile must be from 0 to 1, got {q}")
    x = x if is_floating(x.dtype) else x.astype(np.float64)
    flat, axes = _in_one_dim(x, axis)
    n = _extent(flat, flat.ndim - 1, "numpy.quantile")
    ordered, place = np.sort(flat, axis=-1), q * (n - 1)
    low = min(floor(place), n - 1)
    below, above = ordered[..., low], ordered[..., min(low + 1, n - 1)]
    found = below if place == low else below + (above - below) * lift(place - low, dtype=x.dtype)
    nans = np.isnan(flat)
    found = np.where(np.any(nans, axis=-1), np.sum(flat, axis=-1), found)
    kept = tuple(1 if d in axes else m for d, m in enumerate(x.shape))
    return found.reshape(kept) if keepdims else found


@stands_for(np.percentile)
def _percentile(a: Any, q: Any, axis: Any = None, **options: Any) -> Any:
    return _quantile(a, q / 100 if isinstance(q, int | float) else q, axis, **options)


@stands_for(np.median)
def _median(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    return _quantile(a, 0.5, axis, keepdims=keepdims)


@stands_for(np.heaviside)
def _heaviside(x: Any, at_zero: Any) -> Any:
    a = lift(x)
    zero = lift(0, dtype=a.dtype)
    steps = np.where(a > zero, lift(1, dtype=a.dtype), zero)
    return np.where(a == zero, lift(at_zero, dtype=a.dtype), np.where(np.isnan(a), a, steps))


@stands_for(np.trapezoid)
def _trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    a = lift(y)
    if x is not None:
        refuse("numpy.trapezoid with x=", "give the distance of equal steps as dx=")
    axis = axis_of(axis, a.ndim)
    n = _extent(a, axis, "numpy.trapezoid")
    return np.sum((part(a, axis, 1, n) + part(a, axis, 0, n - 1)) * (dx / 2), axis=axis)
