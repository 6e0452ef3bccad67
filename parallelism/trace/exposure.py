"""Exposed communication: the time for which a rank is held by what is on its way, rather than by who has not sent it.

What holds a rank is a recv, a collective or the wait for one.  Of that time, what lies before the message was sent, or
before the last member came, is a bubble; the rest is communication that no compute covered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallelism.events import HOST

if TYPE_CHECKING:
    from parallelism.trace.trace import Trace


def exposed_seconds(trace: Trace) -> dict[int, float]:
    """Seconds of exposed communication of each of the trace's ranks."""
    exposed = dict.fromkeys(trace.ranks, 0.0)
    begun: dict[Any, float] = {}
    for event in trace:
        if event.parent is None and event.kind == "send":
            begun[event.rank, event.peer, event.tag, event.sequence] = event.start_seconds
        elif event.parent is None and event.kind == "collective":
            key = event.group, event.sequence
            begun[key] = max(begun.get(key, 0.0), event.start_seconds)
    under_way: dict[tuple[int, int], float] = {}
    for event in trace:
        if event.parent is not None or event.peer == HOST:
            continue
        begin: float | None = None
        if event.kind == "collective":
            begin = begun[event.group, event.sequence]
        elif event.kind == "recv":
            begin = begun.get((event.peer, event.rank, event.tag, event.sequence))
        elif event.kind == "wait" and event.work is not None:
            begin = under_way.get((event.rank, event.work))
        if begin is None:
            continue
        if event.kind != "wait" and event.work is not None:
            under_way[event.rank, event.work] = begin
        else:
            end = event.start_seconds + event.duration_seconds
            exposed[event.rank] += max(0.0, end - max(begin, event.start_seconds))
    return exposed
