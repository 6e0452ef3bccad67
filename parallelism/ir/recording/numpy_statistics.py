"""Recording of NumPy's functions of nan and infinity, of products so far, and of quantiles."""

from collections.abc import Callable
from math import floor
from typing import Any

import numpy as np

from parallelism.arrays import reduced_shape
from parallelism.dtypes import is_floating
from parallelism.ir.core import product
from parallelism.ir.recording.numpy_shapes import axes_of, axis_of, known_extent, part, stands_for
from parallelism.ir.tracing import ACCUMULATIONS, CALLS, lift, refuse

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


CALLS.update(
    {
        np.nanmax: _extreme(np.max, -np.inf),
        np.nanmin: _extreme(np.min, np.inf),
        np.nanargmax: lambda a, axis=None: np.argmax(_without_nan(lift(a), -np.inf), axis=axis),
        np.nanargmin: lambda a, axis=None: np.argmin(_without_nan(lift(a), np.inf), axis=axis),
    }
)


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
    away = np.where(
        np.isnan(x), lift(0, dtype=x.dtype), _without_nan(x, 0) - _nanmean(x, axis=axis, keepdims=True)
    )
    count = np.sum(~np.isnan(x), axis=axis, keepdims=keepdims)
    return np.sum(away * away, axis=axis, keepdims=keepdims) / (count - ddof).astype(x.dtype)


@stands_for(np.nanstd)
def _nanstd(a: Any, axis: Any = None, ddof: int = 0, keepdims: Any = False) -> Any:
    return np.sqrt(_nanvar(a, axis=axis, ddof=ddof, keepdims=keepdims))


# -- what stands so far ----------------------------------------------------------------------------------------------


def _so_far(function: np.ufunc, a: Any, axis: int) -> Any:
    """In as many steps as the number of elements has bits: each takes up what stands so far before."""
    x: Any = lift(a)
    axis = axis_of(axis, x.ndim)
    n, step = known_extent(x, axis, f"numpy.{function.__name__}.accumulate"), 1
    while step < n:
        later = function(part(x, axis, step, n), part(x, axis, 0, n - step))
        x = np.concatenate([part(x, axis, 0, step), later], axis)
        step *= 2
    return x


@stands_for(np.cumprod)
def _cumprod(a: Any, axis: Any = None, dtype: Any = None) -> Any:
    x: Any = lift(a)
    if axis is None:
        x, axis = x.reshape(-1), 0
    if dtype is not None or not is_floating(x.dtype):
        x = x.astype(np.prod(np.zeros(1, x.dtype), dtype=dtype).dtype)
    return _so_far(np.multiply, x, axis)


def _cumulative(function: Any, neutral: int) -> Callable[..., Any]:
    def recorded(x: Any, *, axis: Any = None, dtype: Any = None, include_initial: bool = False) -> Any:
        if axis is None and x.ndim > 1:
            raise ValueError("for an array of several dims the axis must be given")
        along = axis_of(0 if axis is None else axis, x.ndim)
        found = function(x, axis=along, dtype=dtype)
        if not include_initial:
            return found
        first = np.full_like(part(found, along, 0, 1), neutral)
        return np.concatenate([first, found], axis=along)

    return recorded


if hasattr(np, "cumulative_sum"):
    stands_for(np.cumulative_sum)(_cumulative(np.cumsum, 0))
    stands_for(np.cumulative_prod)(_cumulative(np.cumprod, 1))
stands_for(np.nancumsum)(
    lambda a, axis=None, dtype=None: np.cumsum(_without_nan(lift(a), 0), axis=axis, dtype=dtype)
)
stands_for(np.nancumprod)(
    lambda a, axis=None, dtype=None: np.cumprod(_without_nan(lift(a), 1), axis=axis, dtype=dtype)
)
ACCUMULATIONS.update(
    {
        np.add: np.cumsum,
        np.multiply: np.cumprod,
        np.maximum: lambda x, axis: _so_far(np.maximum, x, axis),
        np.minimum: lambda x, axis: _so_far(np.minimum, x, axis),
    }
)


# -- quantiles ---------------------------------------------------------------------------------------------------------


def _in_one_dim(x: Any, axis: Any) -> tuple[Any, tuple[int, ...]]:
    """The array with the dims of a reduction as its last one, and these dims."""
    axes = axes_of(axis, x.ndim)
    rest = [d for d in range(x.ndim) if d not in axes]
    moved = np.transpose(x, (*rest, *axes))
    return moved.reshape((*(x.shape[d] for d in rest), product(x.shape[d] for d in axes))), axes


_BETWEEN: dict[str, Callable[[Any, Any, Any], Any]] = {
    "linear": lambda below, above, share: below + (above - below) * share,
    "lower": lambda below, above, share: below,
    "higher": lambda below, above, share: np.where(share > 0, above, below),
    "midpoint": lambda below, above, share: np.where(share > 0, below + (above - below) / 2, below),
}
"""The methods of a quantile: what lies between two elements in order, at a share of their distance."""


def _quantiles(a: Any, q: Any, axis: Any, keepdims: bool, method: str, *, ignores_nan: bool) -> Any:
    """One quantile, or several along a new first dim."""
    if method not in _BETWEEN:
        refuse(f"numpy.quantile by the method {method!r}", f"the methods are {', '.join(_BETWEEN)}")
    if not isinstance(q, int | float | list | tuple | np.ndarray | np.number):
        refuse("numpy.quantile of recorded quantiles", "they must be numbers")
    each = np.asarray(q, np.float64)
    if each.ndim:
        flat = [_quantiles(a, float(k), axis, keepdims, method, ignores_nan=ignores_nan) for k in each.flat]
        return np.stack(flat).reshape((*each.shape, *flat[0].shape))
    x = lift(a)
    if keepdims and not x.ndim:
        refuse(
            "numpy.quantile or median of a number with keepdims=", "leave it out: there are no dims to keep"
        )
    if not 0 <= each <= 1:
        raise ValueError(f"a quantile must be from 0 to 1, got {q}")
    x = x if is_floating(x.dtype) or method in ("lower", "higher") else x.astype(np.float64)
    flat, axes = _in_one_dim(x, axis)
    find = _quantile_of_numbers if ignores_nan and is_floating(x.dtype) else _quantile_of_all
    found = find(np.sort(flat, axis=-1), flat, float(each), _BETWEEN[method])
    return found.reshape(reduced_shape(x.shape, axes, keepdims=True)) if keepdims else found


def _quantile_of_all(ordered: Any, flat: Any, q: float, between: Callable[[Any, Any, Any], Any]) -> Any:
    """Along the last dim.  An array with a nan has a nan."""
    n = known_extent(flat, flat.ndim - 1, "numpy.quantile")
    place = q * (n - 1)
    low = min(floor(place), n - 1)
    below = ordered[..., low]
    above = ordered[..., min(low + 1, n - 1)]
    share = place - low
    found = (
        below
        if not share
        else between(below, above, lift(share, dtype=np.float64).astype(_share_dtype(flat)))
    )
    if not is_floating(flat.dtype):
        return found
    return np.where(np.any(np.isnan(flat), axis=-1), np.sum(flat, axis=-1), found)


def _quantile_of_numbers(ordered: Any, flat: Any, q: float, between: Callable[[Any, Any, Any], Any]) -> Any:
    """Along the last dim, without its nans, which are last in order."""
    count = np.sum(~np.isnan(flat), axis=-1, keepdims=True)
    place = q * (count - 1).astype(np.float64)
    low = np.maximum(np.floor(place), 0).astype(np.int64)
    high = np.maximum(np.minimum(low + 1, count - 1), 0)
    below = np.take_along_axis(ordered, low, axis=-1)
    above = np.take_along_axis(ordered, high, axis=-1)
    share = (place - low.astype(np.float64)).astype(flat.dtype)
    found = between(below, above, share)
    return found.reshape(flat.shape[:-1])


def _share_dtype(x: Any) -> Any:
    return x.dtype if is_floating(x.dtype) else np.float64


def _ways(ignores_nan: bool) -> tuple[Callable[..., Any], ...]:
    """Quantile, percentile and median, with or without nans."""

    def quantile(a: Any, q: Any, axis: Any = None, *, keepdims: bool = False, method: str = "linear") -> Any:
        return _quantiles(a, q, axis, keepdims, method, ignores_nan=ignores_nan)

    def percentile(a: Any, q: Any, axis: Any = None, **options: Any) -> Any:
        return quantile(a, np.divide(q, 100), axis, **options)

    def median(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
        return quantile(a, 0.5, axis, keepdims=keepdims)

    return quantile, percentile, median


for _functions, _ignoring in (
    ((np.quantile, np.percentile, np.median), False),
    ((np.nanquantile, np.nanpercentile, np.nanmedian), True),
):
    for _function, _way in zip(_functions, _ways(_ignoring), strict=True):
        stands_for(_function)(_way)


@stands_for(np.heaviside)
def _heaviside(x: Any, at_zero: Any) -> Any:
    a = lift(x)
    zero = lift(0, dtype=a.dtype)
    steps = np.where(a > zero, lift(1, dtype=a.dtype), zero)
    return np.where(a == zero, lift(at_zero, dtype=a.dtype), np.where(np.isnan(a), a, steps))
