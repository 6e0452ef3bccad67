"""Operators that work on each element alone.  Inputs are broadcast as in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallelism.ir.core import Linear, Operator, TensorType
from parallelism.ir.core.rules import elementwise as aligned
from parallelism.ir.core.table import register
from parallelism.ir.core.types import resolved
from parallelism.kernels import ACTIVATIONS

Derivative = Callable[..., Sequence[Any]]


def _ufunc(
    kernel: np.ufunc, derivative: Derivative | None = None, flops: int = 1, linear: Linear = (),
) -> None:
    """Register a NumPy ufunc under NumPy's name and with NumPy's dtypes."""
    register(Operator(
        kernel.__name__, lambda *types: aligned([type.shape for type in types]),
        lambda *types: resolved(kernel, *(type.dtype for type in types))[-1], kernel, derivative, flops,
        linear=linear,
    ))


def _function(name: str, kernel: Callable[..., Any], derivative: Derivative | None, flops: int) -> None:
    """Register a function of one floating-point array that keeps the dtype."""
    register(Operator(name, lambda x: aligned([x.shape]), lambda x: _floating(x), kernel, derivative, flops))


def _floating(x: TensorType) -> np.dtype[Any]:
    if x.dtype.kind != "f":
        raise TypeError(f"the input must be floating-point, got {x.dtype}")
    return x.dtype


def _where_dtype(condition: TensorType, a: TensorType, b: TensorType) -> np.dtype[Any]:
    if condition.dtype != bool:
        raise TypeError(f"the condition must be of bools (i1), got {condition.dtype}")
    return np.result_type(a.dtype, b.dtype)


_ufunc(np.add, lambda g, y, a, b: (g, g), linear="together")
_ufunc(np.subtract, lambda g, y, a, b: (g, -g), linear="together")
_ufunc(np.multiply, lambda g, y, a, b: (g * b, g * a), linear="each")
_ufunc(np.divide, lambda g, y, a, b: (g / b, -g * y / b), linear=(0,))
_ufunc(np.power, lambda g, y, a, b: (
    g * b * np.power(a, b - 1), g * y * np.log(np.where(a > 0, a, np.ones((), a.dtype)))
))
_ufunc(np.maximum, lambda g, y, a, b: (g * _share(a, b), g * _share(b, a)))
_ufunc(np.minimum, lambda g, y, a, b: (g * _share(b, a), g * _share(a, b)))
_ufunc(np.floor_divide, lambda g, y, a, b: (None, None))
_ufunc(np.remainder, lambda g, y, a, b: (g, -g * np.floor(a / b)))

_ufunc(np.negative, lambda g, y, x: (-g,), linear="together")
_ufunc(np.absolute, lambda g, y, x: (g * np.sign(x),))
_ufunc(np.square, lambda g, y, x: (g * x * 2,))
_ufunc(np.sqrt, lambda g, y, x: (g / (y * 2),))
_ufunc(np.reciprocal, lambda g, y, x: (-g * y * y,))
_ufunc(np.exp, lambda g, y, x: (g * y,))
_ufunc(np.expm1, lambda g, y, x: (g * (y + 1),))
_ufunc(np.log, lambda g, y, x: (g / x,))
_ufunc(np.log1p, lambda g, y, x: (g / (x + 1),))
_ufunc(np.sin, lambda g, y, x: (g * np.cos(x),))
_ufunc(np.cos, lambda g, y, x: (-g * np.sin(x),))
_ufunc(np.log2, lambda g, y, x: (g / (x * float(np.log(2))),))
_ufunc(np.log10, lambda g, y, x: (g / (x * float(np.log(10))),))
_ufunc(np.exp2, lambda g, y, x: (g * y * float(np.log(2)),))
_ufunc(np.cbrt, lambda g, y, x: (g / (3 * y * y),))
_ufunc(np.tan, lambda g, y, x: (g * (1 + y * y),))
_ufunc(np.arcsin, lambda g, y, x: (g / np.sqrt(1 - x * x),))
_ufunc(np.arccos, lambda g, y, x: (-g / np.sqrt(1 - x * x),))
_ufunc(np.arctan, lambda g, y, x: (g / (1 + x * x),))
_ufunc(np.sinh, lambda g, y, x: (g * np.cosh(x),))
_ufunc(np.cosh, lambda g, y, x: (g * np.sinh(x),))
_ufunc(np.tanh, lambda g, y, x: (g * (1 - y * y),))
_ufunc(np.hypot, lambda g, y, a, b: (g * a / y, g * b / y))
_ufunc(np.arctan2, lambda g, y, a, b: (g * b / (a * a + b * b), -g * a / (a * a + b * b)))
_ufunc(np.logaddexp, lambda g, y, a, b: (g * np.exp(a - y), g * np.exp(b - y)))
_ufunc(np.sign, lambda g, y, x: (None,))
_ufunc(np.floor, lambda g, y, x: (None,))
_ufunc(np.ceil, lambda g, y, x: (None,))
_ufunc(np.rint, lambda g, y, x: (None,))
_ufunc(np.trunc, lambda g, y, x: (None,))

for _compare in (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal, np.logical_and,
                 np.logical_or, np.logical_xor, np.logical_not, np.isfinite, np.isnan, np.bitwise_and, np.bitwise_or,
                 np.bitwise_xor, np.invert):
    _ufunc(_compare)

_function("relu", ACTIVATIONS["relu"].forward, lambda g, y, x: (g * (x > 0),), 1)
_function("gelu", ACTIVATIONS["gelu"].forward, lambda g, y, x: (g * _gelu_slope(x),), 8)
_function("sigmoid", lambda x: np.exp(-np.logaddexp(0, -x)), lambda g, y, x: (g * y * (1 - y),), 4)

register(Operator(
    "where", lambda *types: aligned([type.shape for type in types]),
    _where_dtype, np.where,
    lambda g, y, condition, a, b: (None, np.where(condition, g, _zero(g)), np.where(condition, _zero(g), g)), 1,
))
register(Operator(
    "convert", lambda x, dtype: aligned([x.shape]), lambda x, dtype: dtype, lambda x, dtype: x.astype(dtype),
    lambda g, y, x, dtype: (g,), attributes={"dtype": "a dtype"}, linear="together",
))


def _zero(g: Any) -> Any:
    return np.zeros((), g.dtype)


def _share(a: Any, b: Any) -> Any:
    """The share of the gradient of ``maximum(a, b)`` that goes to ``a``: 1, 0, or 0.5 if both are equal."""
    kind = (a + b).dtype
    return (a > b).astype(kind) + (a == b).astype(kind) * 0.5


def _gelu_slope(x: Any) -> Any:
    slope = float(np.sqrt(2 / np.pi))
    t = np.tanh(slope * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (slope * (1 + 3 * 0.044715 * x * x))
