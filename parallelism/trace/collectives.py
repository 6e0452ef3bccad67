"""The collectives of a trace as a table: their number, bytes, time and bus bandwidth.

Bus bandwidth is S / t times the factor of the kind (`parallelism.algorithms.kinds.bus_factor`).  With this factor it
can be compared with the speed of a link, for any number of ranks.  S, the bytes of the whole buffer, is in the events.
t is the time from the call of the last member to the end at the last member.
"""

from typing import NamedTuple

import numpy as np

from parallelism.algorithms import kind_of_event
from parallelism.events import Columns
from parallelism.events.columns import operations
from parallelism.timeline.matching import group_sizes
from parallelism.trace.trace import Trace
from parallelism.trace.transfers import Moving, moving, rounded


class CollectiveRow(NamedTuple):
    """All collectives of one name, algorithm, as run and as priced, and choice of axes."""

    name: str
    algorithm: str
    """The algorithm by which they were priced; if they were not, the one by which they ran."""
    axes: tuple[str, ...] | None
    operations: int
    """Counted once for each group that took part."""
    bytes_received: int
    """By all ranks together."""
    bytes_sent: int
    seconds: float
    """The sum of the times of all transfers, without the waiting for the last member."""
    bus_bytes_per_second: float | None
    """None if it is not defined, if they took no time, or if members are missing in the trace."""


def collectives(trace: Trace, moved: Moving | None = None) -> tuple[CollectiveRow, ...]:
    """The rows, in the order in which they first occur; ``moved`` saves finding `moving` again."""
    columns = trace.columns
    at = np.flatnonzero(columns.isin("kind", {"collective"}) & ~columns.present("parent"))
    if not len(at):
        return ()
    moved = moving(trace) if moved is None else moved
    events, since = columns.take(at), moved.since[at]
    _, firsts, place = np.unique(
        events.key("name", "algorithm", "priced_algorithm", "axes"), return_index=True, return_inverse=True
    )
    rows = []
    for i in np.argsort(firsts):
        alike = events.take(place == i)
        first = next(alike.take(slice(1)).events())
        seconds, bus_bytes = _times(alike, since[place == i], first.name)
        received, sent = (sum(alike.values(field)) for field in ("bytes_received", "bytes_sent"))
        rows.append(
            CollectiveRow(
                first.name,
                first.priced_algorithm or first.algorithm or "direct",
                first.axes,
                operations(alike),
                received,
                sent,
                seconds,
                bus_bytes / seconds if bus_bytes and seconds > 0 else None,
            )
        )
    return tuple(rows)


def _times(events: Columns, since: np.ndarray, name: str) -> tuple[float, float | None]:
    """The seconds of these collectives' transfers, and the bytes over the bus, if that is defined."""
    keys = events.key("group", "sequence") if events.present("sequence").all() else np.arange(len(events))
    _, place, came = np.unique(keys, return_inverse=True, return_counts=True)
    begins, ends = np.full(len(came), -np.inf), np.full(len(came), -np.inf)
    np.maximum.at(begins, place, since)
    np.maximum.at(ends, place, events.numbers("start_seconds") + events.numbers("duration_seconds"))
    seconds = float(np.maximum(ends - rounded(begins, ends), 0).sum())

    sizes = np.zeros(len(came), np.int64)
    sizes[place] = group_sizes(events)
    kind = kind_of_event(name)
    payloads = dict(zip(place.tolist(), events.values("payload_bytes"), strict=True))
    if (
        kind is None
        or kind.bus_factor is None
        or None in payloads.values()
        or not np.array_equal(sizes, came)
    ):
        return seconds, None
    return seconds, sum(kind.bus_factor(size) * payloads[each] for each, size in enumerate(sizes.tolist()))
