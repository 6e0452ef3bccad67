"""Operators that need a whole dim at once: softmax, and the normalizations along the last dim."""

from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.core import Operator, Rule, TensorType, along_whole, letters, register, rule
from parallelism.kernels import layer_norm, rms_norm


def _dtype(x: TensorType, *others: TensorType, **_: Any) -> np.dtype[Any]:
    for type in (x, *others):
        if not is_floating(type.dtype) or type.dtype != x.dtype:
            raise TypeError(f"the inputs must be floating-point and of one dtype, got {x.dtype} and {type.dtype}")
    return x.dtype


def softmax(x: Any, axis: int) -> Any:
    """``exp(x)`` divided by its sum along ``axis``."""
    powers = np.exp(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis=axis, keepdims=True)


def log_softmax(x: Any, axis: int) -> Any:
    """The logarithm of the softmax of ``x`` along ``axis``."""
    shifted = x - x.max(axis=axis, keepdims=True, initial=-np.inf)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


def _normalization(*types: TensorType, epsilon: float) -> Rule:
    if not types[0].ndim:
        raise ValueError("the input must have at least one dim")
    names = letters(types[0].ndim - 1, "z")
    return rule(f"{names}z!{',z!' * (len(types) - 1)}->{names}z!", [type.shape for type in types])


def _row_sums(x: Any) -> Any:
    return np.sum(x, axis=-1, keepdims=True)


def _layer_norm_derivative(g: Any, y: Any, x: Any, weight: Any, bias: Any, epsilon: float) -> list[Any]:
    features = x.shape[-1]
    centred = x - _row_sums(x) / features
    scale = 1 / np.sqrt(_row_sums(centred * centred) / features + epsilon)
    hat, scaled = centred * scale, g * weight
    return [scale * (scaled - _row_sums(scaled) / features - hat * (_row_sums(scaled * hat) / features)), g * hat, g]


def _rms_norm_derivative(g: Any, y: Any, x: Any, weight: Any, epsilon: float) -> list[Any]:
    features = x.shape[-1]
    scale = 1 / np.sqrt(_row_sums(x * x) / features + epsilon)
    hat, scaled = x * scale, g * weight
    return [scale * (scaled - hat * (_row_sums(scaled * hat) / features)), g * hat]


register(Operator(
    "softmax", along_whole, _dtype, softmax,
    lambda g, y, x, axis: [y * (g - np.sum(g * y, axis=axis, keepdims=True))], 4, {"axis": "an integer"},
))
register(Operator(
    "log_softmax", along_whole, _dtype, log_softmax,
    lambda g, y, x, axis: [g - np.exp(y) * np.sum(g, axis=axis, keepdims=True)], 4, {"axis": "an integer"},
))
register(Operator(
    "layer_norm", lambda x, weight, bias, epsilon: _normalization(x, weight, bias, epsilon=epsilon), _dtype,
    layer_norm, _layer_norm_derivative, 8, {"epsilon": "a number"},
))
register(Operator(
    "rms_norm", lambda x, weight, epsilon: _normalization(x, weight, epsilon=epsilon), _dtype, rms_norm,
    _rms_norm_derivative, 5, {"epsilon": "a number"},
))
