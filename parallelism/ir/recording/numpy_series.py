"""Recording of NumPy's functions of series: differences, interpolation, convolutions, covariances, bins."""

from typing import Any

import numpy as np

from parallelism.arrays import vector_shape
from parallelism.dtypes import common_dtype, is_floating
from parallelism.ir.recording.numpy_calls import of_one_dtype
from parallelism.ir.recording.numpy_diagonals import places_along
from parallelism.ir.recording.numpy_shapes import as_list, axis_of, known_extent, part, stands_for
from parallelism.ir.tracing import apply, lift, refuse

# -- differences -------------------------------------------------------------------------------------------------------


@stands_for(np.ediff1d)
def _ediff1d(ary: Any, to_end: Any = None, to_begin: Any = None) -> Any:
    steps = np.diff(lift(ary).reshape(-1))
    around = [to_begin, steps, to_end]
    given = [lift(x, dtype=steps.dtype).reshape(-1) for x in around if x is not None]
    return np.concatenate(given) if len(given) > 1 else steps


@stands_for(np.gradient)
def _gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    x = lift(f)
    x = x if is_floating(x.dtype) else x.astype(np.float64)
    if edge_order != 1 or any(np.ndim(each) for each in varargs):
        refuse(
            "numpy.gradient with edge_order=2 or with coordinates",
            "give the distance of equal steps, and edge_order=1",
        )
    axes = range(x.ndim) if axis is None else as_list(axis)
    steps = list(varargs) * len(axes) if len(varargs) == 1 else list(varargs) or [1.0] * len(axes)
    found = tuple(_slopes(x, axis_of(a, x.ndim), h) for a, h in zip(axes, steps, strict=True))
    return found[0] if len(found) == 1 else found


def _slopes(x: Any, axis: int, step: Any) -> Any:
    """Half the difference of both neighbours; at the ends the difference to the one."""
    n = known_extent(x, axis, "numpy.gradient")
    if n < 2:
        raise ValueError(f"a gradient needs two elements, got {n} along axis {axis}")
    inner = (part(x, axis, 2, n) - part(x, axis, 0, n - 2)) / (2.0 * step)
    first = (part(x, axis, 1, 2) - part(x, axis, 0, 1)) / step
    last = (part(x, axis, n - 1, n) - part(x, axis, n - 2, n - 1)) / step
    return np.concatenate([first, inner, last], axis)


@stands_for(np.trapezoid)
def _trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    a = lift(y)
    axis = axis_of(axis, a.ndim)
    n = known_extent(a, axis, "numpy.trapezoid")
    sums = part(a, axis, 1, n) + part(a, axis, 0, n - 1)
    if x is None:
        return np.sum(sums * (dx / 2), axis=axis)
    at = lift(x)
    width: Any = np.diff(at, axis=axis if at.ndim > 1 else 0)
    wide = width.reshape(vector_shape(a.ndim, axis)) if at.ndim == 1 else width
    return np.sum(sums * wide / 2.0, axis=axis)


# -- bins and interpolation --------------------------------------------------------------------------------------------


@stands_for(np.searchsorted)
def _searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    """The number of elements that are less, or not greater."""
    if sorter is not None or side not in ("left", "right"):
        refuse("numpy.searchsorted with sorter=", "sort before")
    ordered, found = of_one_dtype("numpy.searchsorted", a, v)
    wide = found[..., None]
    return np.sum((ordered < wide) if side == "left" else (ordered <= wide), axis=-1)


@stands_for(np.digitize)
def _digitize(x: Any, bins: Any, right: bool = False) -> Any:
    if isinstance(bins, list | tuple | np.ndarray) and np.size(bins) > 1:
        edges = np.asarray(bins)
        if edges[0] > edges[-1]:
            flipped = _searchsorted(edges[::-1].copy(), x, "right" if right else "left")
            return len(edges) - flipped
    return _searchsorted(bins, x, "left" if right else "right")


@stands_for(np.interp)
def _interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
    if period is not None:
        refuse("numpy.interp with period=", "take numpy.mod of the places before")
    place, at, values = (lift(each).astype(np.float64) for each in (x, xp, fp))
    n = known_extent(at, 0, "numpy.interp")
    before = np.clip(_searchsorted(at, place, "right") - 1, 0, max(n - 2, 0))
    after = np.minimum(before + 1, n - 1)
    x0, x1 = np.take(at, before), np.take(at, after)
    y0, y1 = np.take(values, before), np.take(values, after)
    width = np.where(x1 == x0, 1.0, x1 - x0)
    slope = (y1 - y0) / width
    inside: Any = np.clip(place, at[0], at[n - 1])
    found = y0 + slope * (inside - x0)
    is_left = place < at[0]
    found = np.where(is_left, values[0] if left is None else left, found)
    is_right = place > at[n - 1]
    return np.where(is_right, values[n - 1] if right is None else right, found)


@stands_for(np.bincount)
def _bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Counts of the numbers below ``minlength``.  NumPy returns more for larger ones: here they are an error."""
    if not minlength:
        refuse(
            "numpy.bincount without minlength=",
            "the shape of its result depends on the values; give the number of bins as minlength=",
        )
    given = lift(x)
    terms = np.ones_like(given, np.int64) if weights is None else lift(weights).astype(np.float64)
    places = apply("take", places_along(minlength), given, axis=0)
    none = np.zeros_like(given, terms.dtype, shape=(minlength,))
    return apply("scatter", none, places, terms, axis=0, op="sum")


# -- sums of products --------------------------------------------------------------------------------------------------


@stands_for(np.convolve)
def _convolve(a: Any, v: Any, mode: str = "full") -> Any:
    long, short = of_one_dtype("numpy.convolve", a, v)
    if known_extent(short, 0, "numpy.convolve") > known_extent(long, 0, "numpy.convolve"):
        long, short = short, long
    return _slid(long, np.flip(short), mode)


@stands_for(np.correlate)
def _correlate(a: Any, v: Any, mode: str = "valid") -> Any:
    long, short = of_one_dtype("numpy.correlate", a, v)
    if known_extent(short, 0, "numpy.correlate") > known_extent(long, 0, "numpy.correlate"):
        return np.flip(_slid(short, long, mode))
    return _slid(long, short, mode)


def _slid(long: Any, short: Any, mode: str) -> Any:
    """The products of ``short`` with each window of ``long``, beyond whose ends are zeros."""
    n = int(short.shape[0])
    if mode not in ("full", "same", "valid"):
        raise ValueError(f"the mode must be full, same or valid, got {mode!r}")
    before, after = {"full": (n - 1, n - 1), "same": (n // 2, n - 1 - n // 2), "valid": (0, 0)}[mode]
    padded = np.pad(long, (before, after)) if before or after else long
    return np.lib.stride_tricks.sliding_window_view(padded, n) @ short


@stands_for(np.polyval)
def _polyval(p: Any, x: Any) -> Any:
    coefficients, at = lift(p), lift(x)
    dtype = common_dtype(coefficients.dtype, at.dtype)
    found = np.zeros_like(at, dtype)
    for k in range(known_extent(coefficients, 0, "numpy.polyval")):
        found = found * at + coefficients[k]
    return found


# -- covariances -------------------------------------------------------------------------------------------------------


@stands_for(np.cov)
def _cov(
    m: Any, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: Any = None, **rest: Any
) -> Any:
    if any(x is not None for x in rest.values()):
        refuse("numpy.cov with weights or dtype=", "multiply the rows by the weights before")
    arrays = [m] if y is None else [m, y]
    rows = [_variables(each, rowvar) for each in arrays]
    x = np.concatenate(rows, axis=0) if len(rows) > 1 else rows[0]
    n = x.shape[1]
    away = x - np.mean(x, axis=1, keepdims=True)
    if ddof is None:
        ddof = 0 if bias else 1
    found = away @ away.T / (n - ddof)
    return found[0, 0] if found.shape == (1, 1) else found


def _variables(m: Any, rowvar: bool) -> Any:
    x = lift(m)
    x = x if is_floating(x.dtype) and x.dtype.itemsize == 8 else x.astype(np.float64)
    if x.ndim < 2:
        return x.reshape((1, -1))
    return x if rowvar or x.shape[0] == 1 else x.T


@stands_for(np.corrcoef)
def _corrcoef(x: Any, y: Any = None, rowvar: bool = True) -> Any:
    c = _cov(x, y, rowvar)
    if not c.ndim:
        return c / c
    sizes = np.sqrt(np.diagonal(c))
    return np.clip(c / sizes[:, None] / sizes[None, :], -1, 1)


# -- orders ------------------------------------------------------------------------------------------------------------


@stands_for(np.lexsort)
def _lexsort(keys: Any, axis: int = -1) -> Any:
    """By the last key, then by the ones before it: each sort keeps the order of the sorts before."""
    given = [lift(key) for key in keys]
    axis = axis_of(axis, given[0].ndim)
    order = np.argsort(given[0], axis=axis)
    for key in given[1:]:
        again = np.argsort(np.take_along_axis(key, order, axis), axis=axis)
        order = np.take_along_axis(order, again, axis)
    return order


@stands_for(np.partition)
def _partition(a: Any, kth: Any, axis: Any = -1, kind: str = "introselect") -> Any:
    """All elements in order, which is a partition by any of them."""
    return np.sort(a, axis=axis)


@stands_for(np.argpartition)
def _argpartition(a: Any, kth: Any, axis: Any = -1, kind: str = "introselect") -> Any:
    return np.argsort(a, axis=axis)
