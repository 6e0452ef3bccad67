"""When the data of an operation moved, and who let it wait until then.

A collective lasts, for each of its members, from when that member comes to it.  Nothing moves before the last one has
come; so its time has two parts, which mean different things: waiting for others, and moving data.  The same goes for a
recv, before and after the send of its message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.events import HOST, Columns
from parallelism.events.columns import codes, combined

if TYPE_CHECKING:
    from parallelism.trace.trace import Trace

HOST_TRAFFIC = ("h2d", "d2h")
HOLDING = ("compute", "collective", "send", "recv", "wait", *HOST_TRAFFIC)
"""The kinds of event that take time on a device; what is left is memory."""


_ROUNDING = 2.0**-48
"""Of a time: some sixteen of the smallest steps of a float."""


class Moving(NamedTuple):
    """For each event of a trace, by its place there."""

    since: npt.NDArray[np.float64]
    """When its data began to move: the last member of a collective had come, the message of a recv was sent, which
    may be before the recv."""
    awaited: npt.NDArray[np.int64]
    """The place of the event that had to come first: the last member's, the send; its own where it waited for nobody.
    Of a wait, that of its operation."""


def moving(trace: Trace) -> Moving:
    """When each event's data moved.  An event whose partners are not in the trace waited for nobody."""
    columns = trace.columns
    start = columns.numbers("start_seconds").astype(np.float64)
    awaited = np.arange(len(columns))
    outermost = ~columns.present("parent")

    at = np.flatnonzero(outermost & columns.isin("kind", {"collective"}) & columns.present("group"))
    if len(at):
        members = columns.only("group", "sequence").take(at)
        _, place = np.unique(members.key("group", "sequence"), return_inverse=True)
        order = np.lexsort((start[at], place))
        last_of = np.zeros(place.max() + 1, np.int64)
        last_of[place[order]] = at[order]       # the last assignment stays: of the latest start
        awaited[at] = last_of[place]

    between = columns.present("peer") & ~columns.isin("peer", {HOST})
    at = np.flatnonzero(outermost & between & columns.isin("kind", {"send", "recv"}))
    if len(at):
        keys, sends = _messages(columns.only("kind", "rank", "peer", "tag", "sequence").take(at))
        known, first = np.unique(keys[sends], return_index=True)
        receives = at[~sends]
        if len(known):
            found = np.minimum(np.searchsorted(known, keys[~sends]), len(known) - 1)
            matched = known[found] == keys[~sends]
            awaited[receives[matched]] = at[sends][first[found[matched]]]

    operation = np.arange(len(columns))
    waits = columns.isin("kind", {"wait"})
    at = np.flatnonzero(outermost & columns.present("work"))
    if len(at):
        works = columns.only("rank", "work").take(at).key("rank", "work")
        issues = ~waits[at]
        known, first = np.unique(works[issues], return_index=True)
        if len(known):
            found = np.minimum(np.searchsorted(known, works[~issues]), len(known) - 1)
            matched = known[found] == works[~issues]
            operation[at[~issues][matched]] = at[issues][first[found[matched]]]
    awaited = awaited[operation]
    return Moving(start[awaited], awaited)


def rounded(since: npt.NDArray[np.float64], end: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The same times, but the end itself where no more lies between than adding up floats may leave."""
    return np.where(end - since <= _ROUNDING * np.abs(end), end, since)


def asynchronous(columns: Columns) -> npt.NDArray[np.bool_]:
    """Which events do not hold the clock of their rank, because a wait does that for them."""
    return columns.present("work") & ~columns.isin("kind", {"wait"})


def _messages(messages: Columns) -> tuple[npt.NDArray[np.int64], Any]:
    """The same number for a send and its recv, and which are sends."""
    sends = messages.isin("kind", {"send"})
    rank, peer = messages.numbers("rank"), messages.numbers("peer")
    return combined(codes(np.where(sends, rank, peer)), codes(np.where(sends, peer, rank)), messages.key("tag"),
                    messages.key("sequence")), sends
