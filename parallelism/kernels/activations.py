"""Elementwise functions between layers, each with its backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Activation:
    """An elementwise function: ``forward(z)``, and ``backward(z, grad)`` for the gradient of ``z``."""

    name: str
    forward: Callable[[Array], Array]
    backward: Callable[[Array, Array], Array]


def _relu(z: Array) -> Array:
    return np.maximum(z, 0)


def _relu_backward(z: Array, grad: Array) -> Array:
    return grad * (z > 0)


def _tanh_backward(z: Array, grad: Array) -> Array:
    slope: Array = 1 - np.tanh(z) ** 2
    return grad * slope


_GELU_SLOPE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh(z: Array) -> Array:
    t: Array = np.tanh(_GELU_SLOPE * (z + _GELU_CUBE * z * z * z))
    return t


def _gelu(z: Array) -> Array:
    y: Array = 0.5 * z * (1 + _gelu_tanh(z))
    return y


def _gelu_backward(z: Array, grad: Array) -> Array:
    t = _gelu_tanh(z)
    slope: Array = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * _GELU_SLOPE * (1 + 3 * _GELU_CUBE * z * z)
    return grad * slope


def _identity(z: Array) -> Array:
    return z


def _identity_backward(z: Array, grad: Array) -> Array:
    return grad


IDENTITY = Activation("identity", _identity, _identity_backward)

ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation("relu", _relu, _relu_backward),
    "tanh": Activation("tanh", np.tanh, _tanh_backward),
    "gelu": Activation("gelu", _gelu, _gelu_backward),
    "identity": IDENTITY,
}
"""By name.  The slope of relu at 0 is 0.  Gelu is the tanh form of Hendrycks and Gimpel, *Gaussian Error Linear
Units*, 2016, arXiv:1606.08415, section 2; the exact one needs an error function, which NumPy does not have."""
