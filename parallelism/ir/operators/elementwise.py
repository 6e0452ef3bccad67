"""Operators that work on each element alone.  Inputs are broadcast as in NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallelism.dtypes import common_dtype, integer_limits, is_floating, is_integer
from parallelism.ir.core import Linear, Operator, TensorType, elementwise as aligned, register, resolved
from parallelism.ir.operators.activations import one_shape

Derivative = Callable[..., Sequence[Any]]


def _ufunc(kernel: np.ufunc, derivative: Derivative | None, linear: Linear) -> None:
    """Register a NumPy ufunc under NumPy's name and with NumPy's dtypes."""
    register(
        Operator(
            kernel.__name__,
            lambda *types: aligned([type.shape for type in types]),
            lambda *types: resolved(kernel, *(type.dtype for type in types))[-1],
            kernel,
            derivative,
            1,
            linear=linear,
        )
    )


def _where_dtype(condition: TensorType, a: TensorType, b: TensorType) -> np.dtype[Any]:
    if condition.dtype != bool:
        raise TypeError(f"the condition must be of bools (i1), got {condition.dtype}")
    return common_dtype(a.dtype, b.dtype)


_LINEAR: dict[np.ufunc, Linear] = {
    np.add: "together",
    np.subtract: "together",
    np.multiply: "each",
    np.divide: (0,),
    np.negative: "together",
}
_DERIVATIVES: dict[np.ufunc, Derivative | None] = {
    np.add: lambda g, y, a, b: (g, g),
    np.subtract: lambda g, y, a, b: (g, -g),
    np.multiply: lambda g, y, a, b: (g * b, g * a),
    np.divide: lambda g, y, a, b: (g / b, -g * y / b),
    np.power: lambda g, y, a, b: (
        g * b * np.power(a, b - 1),
        g * y * np.log(np.where(a > 0, a, np.ones((), a.dtype))),
    ),
    np.maximum: lambda g, y, a, b: (g * _share(a, b), g * _share(b, a)),
    np.minimum: lambda g, y, a, b: (g * _share(b, a), g * _share(a, b)),
    np.floor_divide: lambda g, y, a, b: (None, None),
    np.remainder: lambda g, y, a, b: (g, -g * np.floor(a / b)),
    np.fmod: lambda g, y, a, b: (g, -g * np.trunc(a / b)),
    np.negative: lambda g, y, x: (-g,),
    np.absolute: lambda g, y, x: (g * np.sign(x),),
    np.square: lambda g, y, x: (g * x * 2,),
    np.sqrt: lambda g, y, x: (g / (y * 2),),
    np.reciprocal: lambda g, y, x: (-g * y * y,),
    np.exp: lambda g, y, x: (g * y,),
    np.expm1: lambda g, y, x: (g * (y + 1),),
    np.log: lambda g, y, x: (g / x,),
    np.log1p: lambda g, y, x: (g / (x + 1),),
    np.sin: lambda g, y, x: (g * np.cos(x),),
    np.cos: lambda g, y, x: (-g * np.sin(x),),
    np.log2: lambda g, y, x: (g / (x * float(np.log(2))),),
    np.log10: lambda g, y, x: (g / (x * float(np.log(10))),),
    np.exp2: lambda g, y, x: (g * y * float(np.log(2)),),
    np.cbrt: lambda g, y, x: (g / (3 * y * y),),
    np.tan: lambda g, y, x: (g * (1 + y * y),),
    np.arcsin: lambda g, y, x: (g / np.sqrt(1 - x * x),),
    np.arccos: lambda g, y, x: (-g / np.sqrt(1 - x * x),),
    np.arctan: lambda g, y, x: (g / (1 + x * x),),
    np.sinh: lambda g, y, x: (g * np.cosh(x),),
    np.cosh: lambda g, y, x: (g * np.sinh(x),),
    np.tanh: lambda g, y, x: (g * (1 - y * y),),
    np.arcsinh: lambda g, y, x: (g / np.sqrt(x * x + 1),),
    np.arccosh: lambda g, y, x: (g / np.sqrt(x * x - 1),),
    np.arctanh: lambda g, y, x: (g / (1 - x * x),),
    np.hypot: lambda g, y, a, b: (g * a / y, g * b / y),
    np.arctan2: lambda g, y, a, b: (g * b / (a * a + b * b), -g * a / (a * a + b * b)),
    np.logaddexp: lambda g, y, a, b: (g * np.exp(a - y), g * np.exp(b - y)),
    **dict.fromkeys((np.sign, np.floor, np.ceil, np.rint, np.trunc), lambda g, y, x: (None,)),
    **dict.fromkeys(
        (
            np.equal,
            np.not_equal,
            np.less,
            np.less_equal,
            np.greater,
            np.greater_equal,
            np.logical_and,
            np.logical_or,
            np.logical_xor,
            np.logical_not,
            np.isfinite,
            np.isnan,
            np.bitwise_and,
            np.bitwise_or,
            np.bitwise_xor,
            np.invert,
            np.left_shift,
            np.right_shift,
        ),
        None,
    ),
}
"""The ufuncs that are operators, each with its derivative; None if it has none."""

for _kernel, _derivative in _DERIVATIVES.items():
    _ufunc(_kernel, _derivative, _LINEAR.get(_kernel, ()))

register(
    Operator(
        "where",
        lambda *types: aligned([type.shape for type in types]),
        _where_dtype,
        np.where,
        lambda g, y, condition, a, b: (
            None,
            np.where(condition, g, _zero(g)),
            np.where(condition, _zero(g), g),
        ),
        1,
    )
)
register(
    Operator(
        "convert",
        lambda x, dtype: aligned([x.shape]),
        lambda x, dtype: dtype,
        lambda x, dtype: x.astype(dtype),
        lambda g, y, x, dtype: (g,),
        attributes={"dtype": "a dtype"},
        linear="together",
    )
)


def _wide(x: TensorType, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if x.dtype != dtype and not (
        x.dtype.itemsize < dtype.itemsize and is_floating(x.dtype) and is_floating(dtype)
    ):
        raise TypeError(f"{x.dtype} is widened to a floating-point dtype of more bits, not to {dtype}")
    return dtype


register(
    Operator(  # as `convert`, but a pending sum passes through it, and is thus computed in the wider dtype
        "widen",
        lambda x, dtype: aligned([x.shape]),
        _wide,
        lambda x, dtype: x.astype(dtype),
        lambda g, y, x, dtype: (g,),
        attributes={"dtype": "a dtype"},
        linear="together",
    )
)


def _integers(x: TensorType, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if not is_floating(x.dtype) or not is_integer(dtype):
        raise TypeError(f"it makes integers of floats; got {x.dtype} to {dtype}")
    return dtype


def _saturated(x: Any, dtype: np.dtype[Any]) -> Any:
    least, most = integer_limits(dtype)
    with np.errstate(over="ignore"):  # in float16, 2**16 and more are infinite, and all floats less
        below, above = x <= x.dtype.type(least), x >= x.dtype.type(most + 1)  # powers of two are exact
    y = np.where(below | above | np.isnan(x), np.zeros((), x.dtype), x).astype(dtype)
    return np.where(below, np.array(least, dtype), np.where(above, np.array(most, dtype), y))


register(
    Operator(  # as `convert`, which leaves it to the machine what becomes of a float outside the range
        "saturate",
        lambda x, dtype: aligned([x.shape]),
        _integers,
        _saturated,
        attributes={"dtype": "a dtype"},
    )
)


# -- sums in the memory of a buffer ------------------------------------------------------------------------------------


def _dtype_of_buffer(buffer: TensorType, x: TensorType, **_: Any) -> np.dtype[Any]:
    if not np.can_cast(x.dtype, buffer.dtype, "same_kind"):
        raise TypeError(f"a buffer of {buffer.dtype} cannot take up terms of {x.dtype}")
    return buffer.dtype


def _accumulate(buffer: Any, x: Any, out: Any = None, op: str = "sum") -> Any:
    """The sum of both, or the larger ones, in the memory of the buffer, which no later op may read.

    The dtype is that of the buffer, so float32 can take up terms of 16 bits.
    """
    if op == "max":
        return np.maximum(buffer, x, out=out)
    return np.add(buffer, x, out=out, dtype=buffer.dtype, casting="same_kind")


register(
    Operator(
        "accumulate",
        lambda buffer, x, **_: one_shape(buffer, x),
        _dtype_of_buffer,
        _accumulate,
        lambda g, y, buffer, x: (g, g),
        1,
        optional={"op": "a string"},
        linear="together",
        reuses=True,
    )
)


def _zero(g: Any) -> Any:
    return np.zeros((), g.dtype)


def _share(a: Any, b: Any) -> Any:
    """The share of the gradient of ``maximum(a, b)`` that goes to ``a``: 1, 0, or 0.5 if both are equal."""
    kind = (a + b).dtype
    return (a > b).astype(kind) + (a == b).astype(kind) * 0.5
