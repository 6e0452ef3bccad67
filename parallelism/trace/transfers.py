"""When the data of an operation moved, and which event it waited for until then.

A collective lasts, for each of its members, from the moment at which that member calls it.  Data moves only after the
last member has called it.  So its time has two parts: waiting for others, and moving data.  The time of a recv has the
same two parts, before and after the send of its message.
"""

from typing import NamedTuple

import numpy as np

from parallelism.arrays import Bools, Floats, Ints
from parallelism.events import Columns
from parallelism.timeline import collectives_of, operations_of_waits, sends_of_recvs
from parallelism.trace.trace import Trace

HOST_TRAFFIC = ("h2d", "d2h")
HOLDING = ("compute", "collective", "send", "recv", "wait", *HOST_TRAFFIC)
"""The kinds of event that take time on a device: all but memory."""

_ROUNDING = 2.0**-48
"""Relative error of a time that is still rounding: some sixteen of the smallest steps of a float."""


class Moving(NamedTuple):
    """For each event of a trace, by its place there."""

    since: Floats
    """Seconds at which its data began to move: when the last member called the collective, or when the message of a
    recv was sent, which may be before the recv."""
    awaited: Ints
    """The place of the event that had to happen first: the last member's call, or the send.  Its own place if it
    waited for nothing; for a wait, what its operation waited for."""


def moving(trace: Trace) -> Moving:
    """When each event's data moved.  An event whose partners are not in the trace waited for nothing."""
    columns = trace.columns
    start = columns.numbers("start_seconds").astype(np.float64)
    awaited = np.arange(len(columns))

    at, key = collectives_of(columns)
    grouped = columns.present("group")[at]
    at, key = at[grouped], key[grouped]
    _, place = np.unique(key, return_inverse=True)
    order = np.lexsort((start[at], place))
    last_of = np.zeros(place.max(initial=-1) + 1, np.int64)
    last_of[place[order]] = at[order]  # the last assignment stays: of the latest start
    awaited[at] = last_of[place]

    recvs, sends = sends_of_recvs(columns)
    awaited[recvs] = sends

    waits, issues = operations_of_waits(columns)
    awaited[waits] = awaited[issues]
    return Moving(start[awaited], awaited)


def rounded(since: Floats, end: Floats) -> Floats:
    """The times ``since``, or ``end`` where the two differ by no more than the rounding of a sum of floats."""
    return np.where(end - since <= _ROUNDING * np.abs(end), end, since)


def asynchronous(columns: Columns) -> Bools:
    """Which events do not block their rank, because a later wait does."""
    return columns.present("work") & ~columns.isin("kind", {"wait"})
