"""Losses and their gradients.

They divide by the rows of the *whole* batch, so losses and gradients of its parts add up to those of the whole.
"""

from collections.abc import Callable

import numpy as np

from parallelism.arrays import Array

Loss = Callable[[Array, Array, int], tuple[float, Array]]
"""``(predictions, targets, rows) -> (loss, gradient of the predictions)``, both divided by ``rows``."""


def mean_squared_error(predictions: Array, targets: Array, rows: int) -> tuple[float, Array]:
    """The mean over all elements of ``(predictions - targets) ** 2``, and its gradient.

    ``predictions`` and ``targets`` have the same shape, ``(n, outputs)``; they may be ``n`` of the ``rows`` of a batch.
    """
    difference = predictions - targets
    elements = rows * predictions.shape[1]
    return float(np.square(difference).sum()) / elements, difference * (2 / elements)


def softmax_cross_entropy(predictions: Array, targets: Array, rows: int) -> tuple[float, Array]:
    """The mean over the rows of ``-sum(targets * log(softmax(predictions)))``, and its gradient.

    ``predictions`` are logits, ``(n, classes)``; ``targets`` are classes, ``(n,)`` integers, or
    probabilities, ``(n, classes)``.  They may be ``n`` rows of a batch of ``rows``.
    """
    if targets.ndim == 1:
        targets = np.eye(predictions.shape[1], dtype=predictions.dtype)[targets]
    shifted = predictions - predictions.max(axis=1, keepdims=True)
    logarithms = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    loss = -float((targets * logarithms).sum())
    grad = np.exp(logarithms) * targets.sum(axis=1, keepdims=True) - targets
    return loss / rows, grad / rows


LOSSES: dict[str, Loss] = {
    "mean_squared_error": mean_squared_error,
    "softmax_cross_entropy": softmax_cross_entropy,
}
"""All losses by name."""
