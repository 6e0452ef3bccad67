"""The times and the memory of plans by simulating each: slow, and by definition right."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import numpy.typing as npt

from parallelism.planning.plan import Task
from parallelism.planning.space import Choices


def simulated_bounds(
    task: Task, possible: Choices, told: Callable[[str, int, int], None], start: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], int, float]:
    """The seconds of every plan without shared links, its peak of memory, how many were timed, the seconds before."""
    setup = perf_counter() - start
    seconds, peaks = np.zeros(len(possible)), np.zeros(len(possible), np.int64)
    for row in range(len(possible)):
        told("timed", row, len(possible))
        trace = task.simulate(possible.settings(row), link_sharing=False)
        seconds[row], peaks[row] = trace.makespan_seconds, max(trace.peaks().values())
    return seconds, peaks, len(possible), setup
