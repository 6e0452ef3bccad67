"""Parameters of a model fitted to measurements: least squares on the relative error.

Levenberg and Marquardt's method (Marquardt, *An algorithm for least-squares estimation of nonlinear parameters*, 1963)
in the logarithms of the parameters, which so stay positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_STEP = 1e-6
_LONGEST = 1.5
"""Of a move in the logarithm of a parameter."""


def fitted(
    predict: Callable[[Floats], Sequence[float]], measured: Sequence[float], start: Sequence[float], rounds: int = 60
) -> Floats:
    """The parameters for which ``predict`` comes nearest to what was measured, from ``start`` on; all are positive.

    Nearest: the sum of ``(predicted / measured - 1)**2`` is least.
    """
    goal, at, damping = np.asarray(measured, np.float64), np.log(np.asarray(start, np.float64)), 1e-2

    def errors(place: Floats) -> Floats:
        return np.asarray(predict(np.exp(place)), np.float64) / goal - 1

    error = errors(at)
    for _ in range(rounds):
        slopes = np.stack([(errors(at + _STEP * way) - error) / _STEP for way in np.eye(len(at))], axis=1)
        square, downhill = slopes.T @ slopes, -(slopes.T @ error)
        move = np.linalg.solve(square + damping * np.diag(np.diag(square)) + 1e-12 * np.eye(len(at)), downhill)
        tried = at + np.clip(move, -_LONGEST, _LONGEST)
        new = errors(tried)
        if new @ new < error @ error:
            at, error, damping = tried, new, damping / 4
            if np.abs(move).max() < 1e-9:
                break
        else:
            damping *= 8
            if damping > 1e12:
                break
    return np.exp(at)
