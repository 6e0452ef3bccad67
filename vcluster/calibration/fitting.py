"""Parameters of a model are fitted to measurements by least squares on the relative error.

Published tables have rows that differ from the others in what their columns do not say.  So errors may count as squares
up to a size only, and in proportion beyond it: the "soft L1" loss (Triggs et al., *Bundle Adjustment*, 2000, section 3).

The method is that of Levenberg and Marquardt (Marquardt, *An algorithm for least-squares estimation of nonlinear
parameters*, 1963). It works on the logarithms of the parameters, which therefore stay positive.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from parallelism.arrays import Floats

_STEP = 1e-6
_LONGEST = 1.5
"""The largest change of the logarithm of a parameter in one step."""


def fitted(
    predict: Callable[[Floats], Sequence[float]],
    measured: Sequence[float],
    start: Sequence[float],
    rounds: int = 60,
    *,
    outliers: float = inf,
) -> Floats:
    """The positive parameters that minimise the sum of ``(predicted / measured - 1)**2``, searched from ``start`` on.

    Errors above ``outliers`` count in proportion, not as squares.
    """
    goal = np.asarray(measured, np.float64)
    at = np.log(np.asarray(start, np.float64))
    damping = 1e-2

    def errors(place: Floats) -> Floats:
        return np.asarray(predict(np.exp(place)), np.float64) / goal - 1

    def weights(error: Floats) -> Floats:
        found: Floats = 1 / np.sqrt(1 + (error / outliers) ** 2)
        return found

    def cost(error: Floats) -> float:
        return float((2 * error**2 / (1 + 1 / weights(error))).sum())  # of soft L1, without cancellation

    error = errors(at)
    for _ in range(rounds):
        slopes = np.stack([(errors(at + _STEP * way) - error) / _STEP for way in np.eye(len(at))], axis=1)
        weighted = slopes * weights(error)[:, None]
        square, downhill = weighted.T @ slopes, -(weighted.T @ error)
        move = np.linalg.solve(
            square + damping * np.diag(np.diag(square)) + 1e-12 * np.eye(len(at)), downhill
        )
        tried = at + np.clip(move, -_LONGEST, _LONGEST)
        new = errors(tried)
        better = cost(new) < cost(error)
        if better:
            at, error = tried, new
        damping *= 1 / 4 if better else 8
        if (better and np.abs(move).max() < 1e-9) or damping > 1e12:
            break
    return np.exp(at)
