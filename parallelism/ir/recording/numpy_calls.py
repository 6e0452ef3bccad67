"""Recording of NumPy's functions that compute.  Most become one operator."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.dtypes import common_dtype, is_floating
from parallelism.ir.core import Expression, checked_shape, resolved
from parallelism.ir.recording.numpy_shapes import stands_for
from parallelism.ir.tracing import CALLS, PASSING, Traced, apply, check_promotion, lift, meant_dtype, refuse


def of_one_dtype(function: str, *operands: Any) -> list[Traced]:
    """The operands in their common dtype.  Python scalars are weak: they follow the arrays."""
    dtype = common_dtype(*map(_promoting, operands))
    check_promotion(function, operands, dtype)
    lifted = []
    for x in operands:
        lifted.append(lift(x, dtype=dtype if _is_weak(x) else None).astype(dtype))
    return lifted


def _is_weak(x: Any) -> bool:
    return isinstance(x, int | float | Expression) and not isinstance(x, np.generic)


def _promoting(x: Any) -> Any:
    """What an operand brings into a common dtype: its dtype, or a Python scalar."""
    if _is_weak(x):
        return 1 if isinstance(x, Expression) else x
    return x.dtype if isinstance(x, Traced) else np.asarray(x).dtype


# -- elements ----------------------------------------------------------------------------------------------------------


@stands_for(np.where)
def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None or y is None:
        refuse("numpy.where with a condition only", "the shape of its result depends on the values")
    a, b = of_one_dtype("numpy.where", x, y)
    return apply("where", lift(condition), a, b)


@stands_for(np.select)
def _select(condlist: Sequence[Any], choicelist: Sequence[Any], default: Any = 0) -> Any:
    *choices, default = of_one_dtype("numpy.select", *choicelist, default)
    for condition, choice in zip(reversed(condlist), reversed(choices), strict=True):
        default = np.where(lift(condition), choice, default)
    return default


@stands_for(np.clip)
def _clip(x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    a_min, a_max = min if a_min is None else a_min, max if a_max is None else a_max
    if a_min is not None and a_max is not None:
        x, a_min, a_max = of_one_dtype("numpy.clip", x, a_min, a_max)
    x = x if a_min is None else np.maximum(x, a_min)
    return x if a_max is None else np.minimum(x, a_max)


@stands_for(np.round, np.around)
def _round(x: Any, decimals: int = 0) -> Any:
    if x.dtype == bool:
        if decimals:
            refuse("numpy.round of bools to decimals")
        return x.astype(np.float16)  # as in NumPy
    if decimals == 0 or x.dtype.kind in "iu":
        if decimals < 0:
            refuse("numpy.round of integers to tens and more")
        return np.rint(x) if is_floating(x.dtype) else x
    scale = 10.0 ** abs(decimals)
    return np.rint(x * scale) / scale if decimals > 0 else np.rint(x / scale) * scale


@stands_for(np.full_like)
def _full_like(x: Any, fill_value: Any, dtype: Any = None, *, shape: Any = None) -> Any:
    dtype = x.dtype if dtype is None else meant_dtype(dtype)
    if isinstance(fill_value, Traced) or fill_value != fill_value:  # a recorded number, or nan
        return np.broadcast_to(lift(fill_value).astype(dtype), x.shape if shape is None else shape).copy()
    return apply(
        "constant",
        value=np.asarray(fill_value, dtype).item(),
        dtype=dtype,
        shape=x.shape if shape is None else checked_shape(shape),
    )


def _places(x: Any, axis: int) -> Any:
    return apply("iota", dim=axis + 2, shape=x.shape[-2:], starts=(0, 0), dtype=np.dtype(np.int64))


def _dtype_of(x: Any) -> Any:
    if isinstance(x, Traced | np.ndarray):
        return x.dtype
    return meant_dtype(x) if isinstance(x, str) else x


PASSING.add(np.astype)
CALLS.update(
    {
        # elements
        np.positive: lambda x: x,
        np.divmod: lambda a, b: (a // b, a % b),
        np.fabs: lambda x: np.absolute(x.astype(resolved(np.fabs, x.dtype)[-1])),
        np.copy: lambda x: x.copy(),
        np.astype: lambda x, dtype, *, copy=True: x.astype(dtype, copy=copy),
        np.tril: lambda x, k=0: np.where(_places(x, -2) + k >= _places(x, -1), x, np.zeros((), x.dtype)),
        np.triu: lambda x, k=0: np.where(_places(x, -2) + k <= _places(x, -1), x, np.zeros((), x.dtype)),
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
    }
)
