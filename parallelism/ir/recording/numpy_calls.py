"""Recording of NumPy's functions that compute.  Most become one operator."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from parallelism.dtypes import common_dtype, is_floating, limits_of
from parallelism.ir.core import Expression, checked_shape, product
from parallelism.ir.recording.numpy_shapes import axes_of, axis_of, part, stands_for
from parallelism.ir.tracing import CALLS, PASSING, Traced, apply, check_promotion, lift, meant_dtype, refuse


def _of_one_dtype(*operands: Any) -> list[Traced]:
    """The operands in their common dtype.  Python scalars are weak: they follow the arrays."""
    weak = [isinstance(x, int | float | Expression) and not isinstance(x, np.generic) for x in operands]
    dtype = common_dtype(*(
        (1 if isinstance(x, Expression) else x) if w else x.dtype if isinstance(x, Traced) else np.asarray(x).dtype
        for x, w in zip(operands, weak, strict=True)
    ))
    check_promotion("numpy.where", operands, dtype)
    return [lift(x, dtype=dtype if w else None).astype(dtype) for x, w in zip(operands, weak, strict=True)]


# -- reductions --------------------------------------------------------------------------------------------------------


_IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True}
"""The identity of each reduction; it replaces the elements that ``where=`` leaves out."""
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
}


def _reduced(
    kind: str, x: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: Any = False,
    initial: Any = None, where: Any = None,
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
    reduced = apply(kind, x, axes=axes_of(axis, x.ndim), keepdims=bool(keepdims))
    if dtype is not None:       # The operator sums small integers and bools as int64: the rest of that is the same.
        reduced = reduced.astype(dtype)
    return reduced if initial is None else _COMBINE[kind](reduced, lift(initial, dtype=reduced.dtype))


CALLS.update({np.sum: partial(_reduced, "sum"), np.prod: partial(_reduced, "prod")})
for _kind, _functions in {
    "max": (np.max, np.amax), "min": (np.min, np.amin), "any": (np.any,), "all": (np.all,),
}.items():
    # These functions have no dtype parameter: their third one is out.
    stands_for(*_functions)(lambda x, axis=None, out=None, keepdims=False, kind=_kind, **options: _reduced(
        kind, x, axis, None, out, keepdims, **options))


def _divided(total: Any, count: Any) -> Any:
    """A sum over the number of its terms, in the dtype of the sum; the number may be too large for 16 bits."""
    wide = total.astype(np.float32) if total.dtype == np.float16 else total
    return (wide / count).astype(total.dtype)


@stands_for(np.mean)
def _mean(x: Any, axis: Any = None, dtype: Any = None, out: None = None, keepdims: Any = False) -> Any:
    x = lift(x)
    own = np.dtype(np.float16) if x.dtype == np.float16 and dtype is None else None
    if own is not None:
        dtype = np.float32
    if x.dtype.kind in "biu" and dtype is None:
        dtype = np.float64
    axes = axes_of(axis, x.ndim)
    mean = _divided(_reduced("sum", x, axes, dtype, out, keepdims), product(x.shape[d] for d in axes))
    return mean if own is None else mean.astype(own)


@stands_for(np.var)
def _var(x: Any, axis: Any = None, dtype: Any = None, out: None = None, ddof: int = 0, keepdims: Any = False) -> Any:
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
        refuse("numpy.average with weights of another shape")
    return np.sum(x * weights, axis=axis, keepdims=keepdims) / np.sum(weights, axis=axis, keepdims=keepdims)


def _in_one_dim(kind: str, x: Any, axis: Any) -> Any:
    """An operator that works along one dim; with ``axis=None`` on the array as one dim."""
    return apply(kind, x.reshape(-1), axis=0) if axis is None else apply(kind, x, axis=axis_of(axis, x.ndim))


def _extreme(kind: str, x: Any, axis: Any = None, *, keepdims: Any = False) -> Any:
    index, reduced = _in_one_dim(kind, x, axis), axes_of(axis, x.ndim)
    return index.reshape([1 if d in reduced else n for d, n in enumerate(x.shape)]) if keepdims else index


@stands_for(np.std)
def _std(x: Any, axis: Any = None, dtype: Any = None, out: None = None, ddof: int = 0, keepdims: Any = False) -> Any:
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
    for _ in range(n):
        later, earlier = part(x, axis, 1, x.shape[axis]), part(x, axis, 0, x.shape[axis] - 1)
        x = later ^ earlier if x.dtype == bool else later - earlier
    return x


# -- elements ----------------------------------------------------------------------------------------------------------


@stands_for(np.where)
def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None or y is None:
        refuse("numpy.where with a condition only", "the shape of its result depends on the values")
    a, b = _of_one_dtype(x, y)
    return apply("where", lift(condition), a, b)


@stands_for(np.clip)
def _clip(x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    a_min, a_max = min if a_min is None else a_min, max if a_max is None else a_max
    x = x if a_min is None else np.maximum(x, a_min)
    return x if a_max is None else np.minimum(x, a_max)


@stands_for(np.round, np.around)
def _round(x: Any, decimals: int = 0) -> Any:
    if decimals == 0 or x.dtype.kind in "iu":
        if decimals < 0:
            refuse("numpy.round of integers to tens and more")
        return np.rint(x) if is_floating(x.dtype) else x
    scale = 10.0 ** abs(decimals)
    return np.rint(x * scale) / scale if decimals > 0 else np.rint(x / scale) * scale


@stands_for(np.nan_to_num)
def _nan_to_num(x: Any) -> Any:
    if not is_floating(x.dtype):
        return x
    limits = limits_of(x.dtype)
    return np.clip(np.where(np.isnan(x), 0, x), float(limits.min), float(limits.max))


@stands_for(np.full_like)
def _full_like(x: Any, fill_value: Any, dtype: Any = None, *, shape: Any = None) -> Any:
    dtype = x.dtype if dtype is None else meant_dtype(dtype)
    if isinstance(fill_value, Traced):
        return np.broadcast_to(fill_value.astype(dtype), x.shape if shape is None else shape).copy()
    return apply("constant", value=np.asarray(fill_value, dtype).item(), dtype=dtype,
                 shape=x.shape if shape is None else checked_shape(shape))


def _places(x: Any, axis: int) -> Any:
    return apply("iota", dim=axis + 2, shape=x.shape[-2:], starts=(0, 0), dtype=np.dtype(np.int64))


def _dtype_of(x: Any) -> Any:
    return x.dtype if isinstance(x, Traced) else meant_dtype(x) if isinstance(x, str) else x


PASSING.add(np.astype)
CALLS.update({
    # reductions
    np.ptp: lambda x, axis=None, *, keepdims=False: (
        np.max(x, axis=axis, keepdims=keepdims) - np.min(x, axis=axis, keepdims=keepdims)),
    np.count_nonzero: lambda x, axis=None, *, keepdims=False: np.sum(
        x if x.dtype == bool else x != 0, axis=axis, keepdims=keepdims),
    np.argmax: partial(_extreme, "argmax"),
    np.argmin: partial(_extreme, "argmin"),
    np.sort: lambda x, axis=-1, kind=None, *, stable=None: _in_one_dim("sort", x, axis),
    # Equal elements keep their order, which NumPy promises for kind="stable" only.
    np.argsort: lambda x, axis=-1, kind=None, *, stable=None: _in_one_dim("argsort", x, axis),
    # elements
    np.positive: lambda x: x,
    np.divmod: lambda a, b: (a // b, a % b),
    np.fabs: lambda x: np.absolute(x if is_floating(x.dtype) else x.astype(np.float64)),
    np.copy: lambda x: x.copy(),
    np.astype: lambda x, dtype, *, copy=True: x.astype(dtype, copy=copy),
    np.tril: lambda x, k=0: np.where(_places(x, -2) + k >= _places(x, -1), x, 0),
    np.triu: lambda x, k=0: np.where(_places(x, -2) + k <= _places(x, -1), x, 0),
    np.zeros_like: lambda x, dtype=None, *, shape=None: _full_like(x, 0, dtype, shape=shape),
    np.empty_like: lambda x, dtype=None, *, shape=None: _full_like(x, 0, dtype, shape=shape),
    np.ones_like: lambda x, dtype=None, *, shape=None: _full_like(x, 1, dtype, shape=shape),
    # types and shapes
    np.result_type: lambda *given: common_dtype(*map(_dtype_of, given)),
    np.can_cast: lambda from_, to, casting="safe": bool(np.can_cast(_dtype_of(from_), to, casting)),
    np.iscomplexobj: lambda x: False,
    np.isrealobj: lambda x: True,
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
    np.size: lambda x: x.size,
})
