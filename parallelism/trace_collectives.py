"""The collectives of a trace as a table: how many, how many bytes, how long, and at what bus bandwidth.

Bus bandwidth is that of NVIDIA's nccl-tests (doc/PERFORMANCE.md): S / t times a factor by which, whatever the number of
ranks g, it can be held against the speed of a link: 2(g-1)/g for all_reduce, (g-1)/g for all_gather, reduce_scatter,
all_to_all, scatter and gather, 1 for broadcast and reduce.  S, the whole buffer, is found from the bytes received and
the closed form of the algorithm; t is from when the last member has come until the last is through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from parallelism.columns import Columns, Table, operations
from parallelism.kinds import KINDS, NAMED_OTHERWISE, bus_factor
from parallelism.trace_moving import Moving, moving, rounded

if TYPE_CHECKING:
    from parallelism.trace import Trace


class CollectiveRow(NamedTuple):
    """All collectives of one name, algorithm, as run and as priced, and choice of axes."""

    name: str
    algorithm: str
    """By which they were priced, where they were; else by which they were run."""
    axes: tuple[str, ...] | None
    operations: int
    """Counted once for each group that took part."""
    bytes_received: int
    """By all ranks together."""
    bytes_sent: int
    seconds: float
    """The transfers of all of them, one after the other; waiting for the last to come is not in it."""
    bus_bytes_per_second: float | None
    """None where it is not defined, where they took no time, and where members are missing in the trace."""


def collectives(trace: Trace, moved: Moving | None = None) -> tuple[CollectiveRow, ...]:
    """The rows, in the order in which they first occur; ``moved`` saves finding `moving` again."""
    columns = trace.columns
    at = np.flatnonzero(columns.isin("kind", {"collective"}) & ~columns.present("parent"))
    if not len(at):
        return ()
    moved = moving(trace) if moved is None else moved
    events, since = columns.take(at), moved.since[at]
    key = events.key("name", "algorithm", "priced_algorithm", "axes")
    _, firsts, place = np.unique(key, return_index=True, return_inverse=True)
    rows = []
    for i in np.argsort(firsts):
        alike = events.take(place == i)
        first = next(alike.take(slice(1)).events())
        run = first.algorithm or "direct"
        seconds, bus_bytes = _times(alike, since[place == i], first.name, run)
        received, sent = (sum(alike.values(field)) for field in ("bytes_received", "bytes_sent"))
        rows.append(CollectiveRow(
            first.name, first.priced_algorithm or run, first.axes, operations(alike), received, sent, seconds,
            bus_bytes / seconds if bus_bytes and seconds > 0 else None))
    return tuple(rows)


def received_parts(name: str, algorithm: str, size: int) -> float | None:
    """What all ranks together receive in a collective of `bus_factor`, in parts of S; None for an unknown way.

    The same as `parallelism.closed_forms` sums up to, which stands above traces.
    """
    others = size - 1
    match name, algorithm:
        case ("scatter" | "gather"), _:
            return others / size if algorithm in ("direct", "naive") else None     # a tree passes shards on
        case ("all_reduce" | "reduce_scatter"), "naive":
            return size * others
        case "all_reduce", "recursive_doubling":
            return size * others.bit_length()
        case "all_reduce", _:
            return 2 * others
        case "all_to_all", "ring":
            return size * others / 2
        case "all_to_all", "bruck":
            return None
        case ("all_gather" | "reduce_scatter" | "all_to_all" | "broadcast" | "reduce"), _:
            return others
    return None


def _times(events: Columns, since: np.ndarray, name: str, algorithm: str) -> tuple[float, float | None]:
    """The seconds of these collectives' transfers, and the bytes over the bus, if that is defined."""
    keys = events.key("group", "sequence") if events.present("sequence").all() else np.arange(len(events))
    _, place, came = np.unique(keys, return_inverse=True, return_counts=True)
    begins, ends = np.full(len(came), -np.inf), np.full(len(came), -np.inf)
    np.maximum.at(begins, place, since)
    np.maximum.at(ends, place, events.numbers("start_seconds") + events.numbers("duration_seconds"))
    seconds = float(np.maximum(ends - rounded(begins, ends), 0).sum())

    groups = events["group"]
    assert isinstance(groups, Table)
    sizes = np.zeros(len(came), np.int64)
    sizes[place] = np.array([0 if ranks is None else len(ranks) for ranks in groups.values], np.int64)[groups.index]
    received = np.bincount(place, events.numbers("bytes_received").astype(np.float64), len(came))
    if not np.array_equal(sizes, came):
        return seconds, None
    return seconds, _bus_bytes(name, algorithm, zip(sizes.tolist(), received.tolist(), strict=True))


def _bus_bytes(name: str, algorithm: str, operations: Iterator[tuple[int, float]]) -> float | None:
    total = 0.0
    for size, received in operations:
        factor, parts = bus_factor(name, size), received_parts(name, algorithm, size)
        if factor is None or parts is None:
            return None
        total += factor * received / parts if parts else 0
    return total
