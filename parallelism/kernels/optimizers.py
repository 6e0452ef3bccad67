"""Optimizers: pure functions from parameters and gradients to new parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from parallelism.arrays import Array


class Optimizer(Protocol):
    """A frozen description of an optimizer with a pure ``update``.

    ``update(parameters, gradients, state) -> (parameters, state)``.  The first state is None; the caller keeps the
    state between updates.  Updates are elementwise, so parameters may be sharded in any way.
    """

    def update(
        self, parameters: Sequence[Array], gradients: Sequence[Array], state: Any
    ) -> tuple[list[Array], Any]: ...


@dataclass(frozen=True)
class SGD:
    """Gradient descent with heavy-ball momentum: ``v = momentum * v + g``, ``p = p - lr * v``; ``v`` starts at zero.

    >>> import numpy as np
    >>> from pipeline_parallelism import SGD
    >>> parameters, state = SGD(lr=0.5).update([np.array([1.0, 2.0])], [np.array([1.0, -1.0])], None)
    >>> parameters[0].tolist()
    [0.5, 2.5]

    The state is the list of ``v``, or None without momentum.
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
        velocities = zip(state or map(np.zeros_like, parameters), gradients, strict=True)
        state = [self.momentum * v + g for v, g in velocities] if self.momentum else None
        return [p - self.lr * v for p, v in zip(parameters, state or gradients, strict=True)], state


class AdamState(NamedTuple):
    """The state of `Adam`."""

    updates: int
    """The number of updates so far."""
    means: list[Array]
    """The running means of the gradients."""
    squares: list[Array]
    """The running means of the squared gradients."""


@dataclass(frozen=True)
class Adam:
    """Adam: Kingma and Ba, *Adam: A Method for Stochastic Optimization*, 2015, arXiv:1412.6980, algorithm 1.

    >>> import numpy as np
    >>> from pipeline_parallelism import Adam
    >>> parameters, state = Adam(lr=0.5).update([np.array([1.0, 2.0])], [np.array([1.0, -1.0])], None)
    >>> parameters[0].round(6).tolist()
    [0.5, 2.5]
    """

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
            state = AdamState(
                0, [np.zeros_like(p) for p in parameters], [np.zeros_like(p) for p in parameters]
            )
        a, b, t = self.beta1, self.beta2, state.updates + 1
        means = [a * m + (1 - a) * g for m, g in zip(state.means, gradients, strict=True)]
        squares = [b * v + (1 - b) * (g * g) for v, g in zip(state.squares, gradients, strict=True)]
        # In a program t is an array; its dtype must not widen that of the state.
        of_means, of_squares = (1 - np.power(beta, t) for beta in (a, b))

        def step(m: Array, v: Array) -> Array:
            mean = self.lr * (m / of_means.astype(m.dtype))
            found: Array = mean / (np.sqrt(v / of_squares.astype(v.dtype)) + self.epsilon)
            return found

        following = zip(parameters, means, squares, strict=True)
        return [self._moved(p, step(m, v)) for p, m, v in following], AdamState(t, means, squares)

    def _moved(self, parameter: Array, step: Array) -> Array:
        """The next value of a parameter.  One is made after the other, so that no list of steps is in memory."""
        return parameter - step


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, 2019,
    arXiv:1711.05101, algorithm 2, where the decay is multiplied by the learning rate, as in torch.
    """

    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {self.weight_decay!r}")

    def _moved(self, parameter: Array, step: Array) -> Array:
        return parameter - step - self.lr * self.weight_decay * parameter


def clipped(gradients: Sequence[Array], most: float) -> list[Array]:
    """The gradients, scaled together so that the norm of all of their elements is at most ``most``.

    They are multiplied by min(1, most / (norm + 1e-6)), as by ``torch.nn.utils.clip_grad_norm_``.  The norm is computed
    in the widest dtype of the gradients.
    """
    squares = [np.sum(np.square(g)) for g in gradients]
    factor = np.minimum(most / (np.sqrt(sum(squares[1:], squares[0])) + 1e-6), 1)
    return [g * factor.astype(g.dtype) for g in gradients]


def _check_rate(lr: float) -> None:
    if not 0 < lr < math.inf:
        raise ValueError(f"the learning rate lr must be above 0 and finite, got {lr!r}")


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")
