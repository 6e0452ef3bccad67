"""Activations: elementwise functions between layers, each with its backward."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels.error_function import erf


@dataclass(frozen=True)
class Activation:
    """An elementwise function ``forward(z)``; ``backward(z, grad)`` returns the gradient of ``z``."""

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
    t: Array = z * (_GELU_SLOPE * _GELU_CUBE)
    t *= z
    t += _GELU_SLOPE
    t *= z
    return np.tanh(t, out=t if isinstance(t, np.ndarray) else None)  # for a scalar NumPy returns a number


def _gelu(z: Array) -> Array:
    y = _gelu_tanh(z)
    y += 1
    y *= z
    y *= 0.5
    return y


def _gelu_backward(z: Array, grad: Array) -> Array:
    """``grad * (1 + t + z (1 - t^2) (1 + 3 cube z^2) slope) / 2``, computed in two temporary arrays."""
    t = _gelu_tanh(z)
    inner = z * (3 * _GELU_CUBE * _GELU_SLOPE)
    inner *= z
    inner += _GELU_SLOPE
    inner *= z
    t += 1
    inner *= t
    inner *= 2 - t  # (1 - t^2) = (1 + t) (2 - (1 + t))
    t += inner
    t *= 0.5
    t *= grad
    return t


def _sigmoid(z: Array) -> Array:
    y: Array = np.exp(-np.logaddexp(0, -z))
    return y


def _silu(z: Array) -> Array:
    return z * _sigmoid(z)


def _silu_backward(z: Array, grad: Array) -> Array:
    share = _sigmoid(z)
    slope: Array = share * (1 + z * (1 - share))
    return grad * slope


def _relu2(z: Array) -> Array:
    positive = np.maximum(z, 0)
    return positive * positive


def _relu2_backward(z: Array, grad: Array) -> Array:
    return 2 * np.maximum(z, 0) * grad


def _gelu_exact(z: Array) -> Array:
    return z * _normal_below(z)


def _gelu_exact_backward(z: Array, grad: Array) -> Array:
    density: Array = np.exp(-0.5 * z * z) * z.dtype.type(1 / math.sqrt(2 * math.pi))
    density *= z
    density += _normal_below(z)
    density *= grad
    return density


def _normal_below(z: Array) -> Array:
    """The share of a normal distribution below ``z``."""
    share: Array = (erf(z * z.dtype.type(1 / math.sqrt(2))) + 1) * z.dtype.type(0.5)
    return share


def swiglu(gate: Array, z: Array) -> Array:
    """``silu(gate) * z``: a gated activation.  Shazeer, *GLU Variants Improve Transformer*, 2020, arXiv:2002.05202."""
    return _silu(gate) * z


def swiglu_backward(gate: Array, z: Array, grad: Array) -> tuple[Array, Array]:
    """The gradients of ``gate`` and ``z``, given that of `swiglu`."""
    return _silu_backward(gate, grad * z), grad * _silu(gate)


def gated(name: str, gate: Array, z: Array) -> Array:
    """The activation of this name of ``gate``, times ``z`` (Shazeer, 2020, arXiv:2002.05202)."""
    return _activation(name).forward(gate) * z


def gated_backward(name: str, gate: Array, z: Array, grad: Array) -> tuple[Array, Array]:
    """The gradients of ``gate`` and ``z``, given that of `gated`."""
    return _activation(name).backward(gate, grad * z), grad * _activation(name).forward(gate)


def _activation(name: str) -> Activation:
    return ACTIVATIONS.get(name) or FURTHER_ACTIVATIONS[name]


CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0
"""Those of gpt-oss (``swiglu_alpha`` and ``swiglu_limit`` of its config.json)."""


def clamped_swiglu(gate: Array, z: Array) -> Array:
    """``(z + 1) * gate * sigmoid(slope * gate)``, of a gate of at most the limit, and z between minus it and it.

    It is the activation of the experts of gpt-oss (2025, arXiv:2508.10925, section 2.2).
    """
    gate = np.minimum(gate, CLAMPED_LIMIT)
    share = _sigmoid(CLAMPED_SLOPE * gate)
    return (np.clip(z, -CLAMPED_LIMIT, CLAMPED_LIMIT) + 1) * gate * share


def clamped_swiglu_backward(gate: Array, z: Array, grad: Array) -> tuple[Array, Array]:
    """The gradients of ``gate`` and ``z``, given that of `clamped_swiglu`; 0 beyond the limits."""
    low = np.minimum(gate, CLAMPED_LIMIT)
    kept = np.clip(z, -CLAMPED_LIMIT, CLAMPED_LIMIT)
    share = _sigmoid(CLAMPED_SLOPE * low)
    slope = share * (1 + CLAMPED_SLOPE * low * (1 - share))
    of_gate: Array = grad * (kept + 1) * slope * (gate < CLAMPED_LIMIT)
    of_z: Array = grad * low * share * (np.abs(z) < CLAMPED_LIMIT)
    return of_gate, of_z


def _identity(z: Array) -> Array:
    return z


def _identity_backward(z: Array, grad: Array) -> Array:
    return grad


IDENTITY = Activation("identity", _identity, _identity_backward)

ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation("relu", _relu, _relu_backward),
    "tanh": Activation("tanh", np.tanh, _tanh_backward),
    "gelu": Activation("gelu", _gelu, _gelu_backward),
    "silu": Activation("silu", _silu, _silu_backward),
    "identity": IDENTITY,
}
"""All activations by name.  The slope of relu at 0 is 0.  Gelu is the tanh form of Hendrycks and Gimpel, *Gaussian
Error Linear Units*, 2016, arXiv:1606.08415, section 2."""

FURTHER_ACTIVATIONS: dict[str, Activation] = {
    "relu2": Activation("relu2", _relu2, _relu2_backward),
    "gelu_exact": Activation("gelu_exact", _gelu_exact, _gelu_exact_backward),
}
"""Those of Transformers only.  Relu2 is the square of relu (So et al., *Primer*, 2021, arXiv:2109.08668, section 2);
``gelu_exact`` has the error function."""
