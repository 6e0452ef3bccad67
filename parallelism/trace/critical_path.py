"""The critical path of a trace: the chain of events, from the last end back to the start, that made it so long.

It is walked backwards.  What held the device that ended last is on it; where that was a recv or a collective which
waited for another device, the path goes over to the device that was waited for, at the time it came.  Shorten
anything on the path and the makespan may shrink; shorten anything else and it does not.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from parallelism.trace.totals import outermost
from parallelism.trace.trace import Trace
from parallelism.trace.transfers import HOLDING, HOST_TRAFFIC, Moving, asynchronous, moving, rounded


class PathStep(NamedTuple):
    """A stretch of the path."""

    event: int
    """The place of the event in the trace."""
    start_seconds: float
    end_seconds: float


def critical_path(trace: Trace, moved: Moving | None = None) -> tuple[PathStep, ...]:
    """The steps, from the first to the last; what is between them is time in which the path's device did nothing.

    ``moved`` saves finding `moving` again.
    """
    columns = trace.columns
    starts = columns.numbers("start_seconds").astype(np.float64)
    ends = starts + columns.numbers("duration_seconds")
    at = np.flatnonzero(outermost(columns, HOLDING) & ~asynchronous(columns) & (ends > starts))
    if not len(at):
        return ()
    moved = moving(trace) if moved is None else moved
    ranks = columns.numbers("rank")
    moves = ~columns.isin("kind", {"compute", "send", *HOST_TRAFFIC})
    at = at[np.lexsort((starts[at], ranks[at]))]
    bounds = np.searchsorted(ranks[at], np.arange(trace.size + 1)).tolist()
    begin = starts[at].tolist()
    end = ends[at].tolist()
    since = rounded(moved.since[at], ends[at]).tolist()
    awaited = np.where(moves[at] & (moved.awaited[at] != at), ranks[moved.awaited[at]], -1).tolist()
    place, rank = at.tolist(), ranks[at].tolist()

    steps: list[PathStep] = []
    seen: set[int] = set()
    i = int(np.argmax(ends[at]))
    time = end[i]
    while True:
        seen.add(i)
        here, left = (rank[i], begin[i]) if awaited[i] < 0 else (awaited[i], min(since[i], time))
        if left < time:
            steps.append(PathStep(place[i], left, time))
        i = bisect_left(begin, left, bounds[here], bounds[here + 1]) - 1  # the last that started before
        if i < bounds[here] or i in seen:
            return tuple(reversed(steps))
        time = min(left, end[i])
