"""The arithmetic of a network in NumPy, forward and backward, written once: layers, losses, optimizers.

Every function is pure: it reads its arguments and returns new arrays of the same dtype.  A batch is an
array of shape ``(rows, features)``; it may have no rows.  Losses divide by the rows of the *whole* batch, so
the losses and the gradients of its parts add up to those of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


# ---------------------------------------------------------------------------------------------- dense layers


def dense(x: Array, weights: Array, bias: Array) -> Array:
    """``x @ weights + bias``: ``(rows, inputs), (inputs, outputs), (outputs,) -> (rows, outputs)``."""
    y: Array = x @ weights
    y += bias
    return y


def dense_backward_input(weights: Array, grad: Array) -> Array:
    """The gradient of a dense layer's input, ``grad @ weights.T``, from that of its output."""
    return grad @ weights.T


def dense_backward_weights(x: Array, grad: Array) -> tuple[Array, Array]:
    """The gradients of weights and bias, ``x.T @ grad`` and ``grad`` summed over its rows."""
    return x.T @ grad, grad.sum(axis=0)


def dense_forward_flops(rows: int, inputs: int, outputs: int) -> int:
    """Floating point operations of `dense`: two for each multiply-add of the product (the bias is not counted)."""
    return 2 * rows * inputs * outputs


def dense_backward_flops(rows: int, inputs: int, outputs: int, *, input_gradient: bool = True) -> int:
    """Those of the two products of the backward; of one of them without ``input_gradient`` (the first layer)."""
    return (4 if input_gradient else 2) * rows * inputs * outputs


# ----------------------------------------------------------------------------------------------- activations


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


# ---------------------------------------------------------------------------------------------------- losses

Loss = Callable[[Array, Array, int], tuple[float, Array]]
"""``(predictions, targets, rows) -> (loss, gradient of the predictions)``, both divided by ``rows``."""


def mean_squared_error(predictions: Array, targets: Array, rows: int) -> tuple[float, Array]:
    """The mean over all elements of ``(predictions - targets) ** 2``, and its gradient.

    ``predictions`` and ``targets`` have one shape, ``(n, outputs)``; they may be ``n`` of a batch of ``rows``.
    """
    difference = predictions - targets
    elements = rows * predictions.shape[1]
    return float(np.square(difference).sum()) / elements, difference * (2 / elements)


def softmax_cross_entropy(predictions: Array, targets: Array, rows: int) -> tuple[float, Array]:
    """The mean over the rows of ``-sum(targets * log(softmax(predictions)))``, and its gradient.

    ``predictions`` are logits, ``(n, classes)``; ``targets`` are classes, ``(n,)`` integers, or
    probabilities, ``(n, classes)``.  They may be ``n`` of a batch of ``rows``.
    """
    if targets.ndim == 1:
        targets = np.eye(predictions.shape[1], dtype=predictions.dtype)[targets]
    shifted = predictions - predictions.max(axis=1, keepdims=True)
    logarithms = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    grad = np.exp(logarithms) * targets.sum(axis=1, keepdims=True) - targets
    return -float((targets * logarithms).sum()) / rows, grad / rows


LOSSES: dict[str, Loss] = {
    "mean_squared_error": mean_squared_error,
    "softmax_cross_entropy": softmax_cross_entropy,
}
"""By name."""


# ------------------------------------------------------------------------------------------------ optimizers


class Optimizer(Protocol):
    """How parameters follow their gradients: a frozen description with a pure ``update``.

    ``update(parameters, gradients, state) -> (parameters, state)``; the state begins as None, and belongs to
    whoever keeps it.  Everything is elementwise, so parameters may be dealt out in any way.
    """

    def update(
        self, parameters: Sequence[Array], gradients: Sequence[Array], state: Any
    ) -> tuple[list[Array], Any]: ...


@dataclass(frozen=True)
class SGD:
    """Gradient descent: ``v = momentum * v + g``, ``p = p - lr * v``, with ``v`` zero at first (heavy ball).

    Its state is the list of the ``v``, or None without momentum.
    """

    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_fraction("momentum", self.momentum)

    def update(
        self, parameters: Sequence[Array], gradients: Sequence[Array], state: list[Array] | None
    ) -> tuple[list[Array], list[Array] | None]:
        """The next parameters, and the next state."""
        if self.momentum:
            state = state or [np.zeros_like(p) for p in parameters]
            state = [self.momentum * v + g for v, g in zip(state, gradients, strict=True)]
        else:
            state = None
        steps = state or gradients
        return [p - self.lr * v for p, v in zip(parameters, steps, strict=True)], state


class AdamState(NamedTuple):
    """How many updates there were, and the running means of the gradients and of their squares."""

    updates: int
    means: list[Array]
    squares: list[Array]


@dataclass(frozen=True)
class Adam:
    """Kingma and Ba, *Adam: A Method for Stochastic Optimization*, 2015, arXiv:1412.6980, algorithm 1."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_fraction("beta1", self.beta1)
        _check_fraction("beta2", self.beta2)
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, got {self.epsilon!r}")

    def update(
        self, parameters: Sequence[Array], gradients: Sequence[Array], state: AdamState | None
    ) -> tuple[list[Array], AdamState]:
        """The next parameters, and the next state."""
        if state is None:
            state = AdamState(0, [np.zeros_like(p) for p in parameters], [np.zeros_like(p) for p in parameters])
        a, b = self.beta1, self.beta2
        t = state.updates + 1
        means = [a * m + (1 - a) * g for m, g in zip(state.means, gradients, strict=True)]
        squares = [b * v + (1 - b) * (g * g) for v, g in zip(state.squares, gradients, strict=True)]
        updated = [
            p - self.lr * (m / (1 - a**t)) / (np.sqrt(v / (1 - b**t)) + self.epsilon)
            for p, m, v in zip(parameters, means, squares, strict=True)
        ]
        return updated, AdamState(t, means, squares)


def _check_rate(lr: float) -> None:
    if not 0 < lr < math.inf:
        raise ValueError(f"the learning rate lr must be above 0 and finite, got {lr!r}")


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
