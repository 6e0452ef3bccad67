"""Recording of NumPy's reductions, and of its functions that find, sort or sum along one dim."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from parallelism.arrays import reduced_shape, vector_shape
from parallelism.dtypes import common_dtype, is_floating
from parallelism.ir.core import product
from parallelism.ir.recording.numpy_shapes import axes_of, axis_of, broadcast, part, stands_for
from parallelism.ir.tracing import CALLS, apply, lift, meant_dtype, refuse

_IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True}
"""The identity of each reduction; it replaces the elements that ``where=`` leaves out."""
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def _reduced(
    kind: str,
    x: Any,
    axis: Any = None,
    dtype: Any = None,
    out: None = None,
    keepdims: Any = False,
    initial: Any = None,
    where: Any = None,
) -> Any:
    if out is not None:
        refuse(f"numpy.{kind} into an existing array given by position", "pass it by keyword: out=")
    x = lift(x)
    dtype = None if dtype is None else meant_dtype(dtype)
    x = x if dtype is None else x.astype(dtype)
    if where is not None:
        if initial is None and kind not in _IDENTITY:
            refuse(f"numpy.{kind} with where= and without initial=")
        x = np.where(lift(where), x, lift(_IDENTITY.get(kind, initial), dtype=x.dtype))
    axes = axes_of(axis, x.ndim)
    if initial is not None and kind not in _IDENTITY and any(x.shape[a] == 0 for a in axes):
        shape = reduced_shape(x.shape, axes, keepdims=keepdims)
        return broadcast(lift(initial, dtype=x.dtype), shape).copy()
    reduced = apply(kind, x, axes=axes, keepdims=bool(keepdims))
    if dtype is not None:
        # The operator sums small integers and bools as int64; modulo a smaller dtype that is the same.
        reduced = reduced.astype(dtype)
    return reduced if initial is None else _COMBINE[kind](reduced, lift(initial, dtype=reduced.dtype))


CALLS.update({np.sum: partial(_reduced, "sum"), np.prod: partial(_reduced, "prod")})
for _kind, _functions in {
    "max": (np.max, np.amax),
    "min": (np.min, np.amin),
    "any": (np.any,),
    "all": (np.all,),
}.items():
    # These functions have no dtype parameter: their third one is out.
    stands_for(*_functions)(
        lambda x, axis=None, out=None, keepdims=False, kind=_kind, **options: _reduced(
            kind, x, axis, None, out, keepdims, **options
        )
    )


def _is_half(dtype: np.dtype[Any]) -> bool:
    return is_floating(dtype) and dtype.itemsize <= 2


def _divided(total: Any, count: Any) -> Any:
    """A sum over the number of its terms, in the dtype of the sum; the number may be too large for 16 bits."""
    wide = total.astype(np.float32) if _is_half(total.dtype) else total
    return (wide / count).astype(total.dtype)


@stands_for(np.mean)
def _mean(
    x: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: Any = False, *, where: Any = None
) -> Any:
    x = lift(x)
    if where is not None:
        counted: Any = np.broadcast_to(lift(where), x.shape)
        given = np.mean(np.zeros(1, x.dtype), dtype=dtype).dtype
        total = np.sum(x, axis=axis, dtype=given, keepdims=keepdims, where=counted)
        count: Any = np.sum(counted, axis=axis, keepdims=keepdims)
        return (total / count).astype(
            given
        )  # as NumPy, which divides in float64 where an integer is asked for
    own = x.dtype if dtype is None and _is_half(x.dtype) else None
    if own is not None:  # NumPy sums these in float32, too
        dtype = np.float32
    if x.dtype.kind in "biu" and dtype is None:
        dtype = np.float64
    axes = axes_of(axis, x.ndim)
    mean = _divided(_reduced("sum", x, axes, dtype, out, keepdims), product(x.shape[d] for d in axes))
    return mean if own is None else mean.astype(own)


@stands_for(np.var)
def _var(
    x: Any, axis: Any = None, dtype: Any = None, out: None = None, ddof: int = 0, keepdims: Any = False
) -> Any:
    x = lift(x)
    if x.dtype.kind in "biu" and dtype is None:
        dtype = np.float64
    axes = axes_of(axis, x.ndim)
    count = product(x.shape[d] for d in axes)
    centred = x - _divided(_reduced("sum", x, axes, dtype, None, True), count)
    return _divided(_reduced("sum", centred * centred, axes, dtype, out, keepdims), count - ddof)


@stands_for(np.average)
def _average(x: Any, axis: Any = None, weights: Any = None, *, keepdims: Any = False) -> Any:
    if weights is None:
        return _mean(x, axis, keepdims=keepdims)
    weights = lift(weights)
    if weights.shape != x.shape:
        if weights.ndim != 1 or not isinstance(axis, int):
            refuse(
                "numpy.average with weights of another shape", "give one weight for each element along axis="
            )
        along = axis_of(axis, x.ndim)
        weights = np.broadcast_to(weights.reshape(vector_shape(x.ndim, along)), x.shape)
    dtype = common_dtype(x.dtype, weights.dtype)
    if lift(x).dtype.kind in "biu":
        dtype = common_dtype(dtype, np.dtype(np.float64))
    total = np.sum(x.astype(dtype) * weights.astype(dtype), axis=axis, keepdims=keepdims)
    return total / np.sum(weights, axis=axis, dtype=dtype, keepdims=keepdims)


def _in_one_dim(kind: str, x: Any, axis: Any) -> Any:
    """An operator that works along one dim; with ``axis=None`` on the array as one dim."""
    return apply(kind, x.reshape(-1), axis=0) if axis is None else apply(kind, x, axis=axis_of(axis, x.ndim))


def _extreme(kind: str, x: Any, axis: Any = None, *, keepdims: Any = False) -> Any:
    index = _in_one_dim(kind, x, axis)
    if not keepdims:
        return index
    kept = list(x.shape)
    for d in axes_of(axis, x.ndim):
        kept[d] = 1
    return index.reshape(kept)


@stands_for(np.std)
def _std(
    x: Any, axis: Any = None, dtype: Any = None, out: None = None, ddof: int = 0, keepdims: Any = False
) -> Any:
    variance = _var(x, axis, dtype, out, ddof, keepdims)
    return np.sqrt(variance).astype(variance.dtype)


@stands_for(np.cumsum)
def _cumsum(x: Any, axis: Any = None, dtype: Any = None) -> Any:
    if dtype is None:
        return _in_one_dim("cumsum", x, axis)
    dtype = meant_dtype(dtype)
    return _in_one_dim("cumsum", x.astype(dtype), axis).astype(dtype)


@stands_for(np.diff)
def _diff(x: Any, n: int = 1, axis: int = -1) -> Any:
    axis = axis_of(axis, x.ndim)
    if not n:
        refuse("numpy.diff of order 0", "it returns the array itself")
    for _ in range(n):
        later = part(x, axis, 1, x.shape[axis])
        earlier = part(x, axis, 0, x.shape[axis] - 1)
        x = later ^ earlier if x.dtype == bool else later - earlier
    return x


CALLS.update(
    {
        np.ptp: lambda x, axis=None, *, keepdims=False: (
            np.max(x, axis=axis, keepdims=keepdims) - np.min(x, axis=axis, keepdims=keepdims)
        ),
        np.count_nonzero: lambda x, axis=None, *, keepdims=False: np.sum(
            x if x.dtype == bool else x != 0, axis=axis, keepdims=keepdims
        ),
        np.argmax: partial(_extreme, "argmax"),
        np.argmin: partial(_extreme, "argmin"),
        np.sort: lambda x, axis=-1, kind=None, *, stable=None: _in_one_dim("sort", x, axis),
        # Equal elements keep their order, which NumPy promises for kind="stable" only.
        np.argsort: lambda x, axis=-1, kind=None, *, stable=None: _in_one_dim("argsort", x, axis),
    }
)
