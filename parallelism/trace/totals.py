"""Sums over the events of a trace: time and traffic by rank, bytes from device to device, memory that is held."""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Bools, Ints
from parallelism.events import HOST, Columns
from parallelism.events.columns import sums

HOST_KINDS = frozenset(("h2d", "d2h"))
_TRAFFIC_KINDS = frozenset(("collective", "send", "recv")) | HOST_KINDS
_WAITING_KINDS = frozenset(("collective", "send", "recv", "wait"))
_MOST_BYTES = 1e300
"""Bound on held memory: the bytes of a forged trace may add up to more than a float holds."""


class RankTotals(NamedTuple):
    """Sums over all events of one rank, without the messages inside collectives."""

    compute_seconds: float = 0.0
    """Virtual time in compute events."""
    waiting_seconds: float = 0.0
    """Virtual time in which collectives, messages and waits block the rank; asynchronous ones do so in their wait."""
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    flops: float = 0.0


def outermost(columns: Columns, kinds: Collection[str]) -> Bools:
    """Which events are of these kinds, and inside no collective."""
    return columns.isin("kind", kinds) & ~columns.present("parent")


def counted(columns: Columns, host_traffic: bool) -> Columns:
    """The events whose bytes are in the totals: those between devices, or those with the host."""
    columns = columns.only(
        "kind", "rank", "peer", "parent", "bytes_sent", "bytes_received", "messages", "sources"
    )
    host = columns.isin("kind", HOST_KINDS) | columns.isin("peer", {HOST})
    return columns.take(outermost(columns, _TRAFFIC_KINDS) & (host == host_traffic))


def totals_by_rank(columns: Columns, ranks: tuple[int, ...], host_traffic: bool) -> dict[int, RankTotals]:
    """The totals of each of ``ranks``, in ascending order."""
    traffic = counted(columns, host_traffic)
    columns = columns.only("kind", "rank", "work", "parent", "duration_seconds", "flops")

    def by_rank(events: Columns, field: str) -> list[Any]:
        return sums(
            events.numbers(field), np.searchsorted(np.array(ranks), events.numbers("rank")), len(ranks)
        )

    blocking = ~columns.present("work") | columns.isin("kind", {"wait"})
    rows = zip(
        by_rank(columns.take(outermost(columns, {"compute"})), "duration_seconds"),
        by_rank(columns.take(outermost(columns, _WAITING_KINDS) & blocking), "duration_seconds"),
        *(by_rank(traffic, field) for field in ("bytes_sent", "bytes_received", "messages")),
        by_rank(columns.take(~columns.present("parent")), "flops"),
        strict=True,
    )
    return {rank: RankTotals(*row) for rank, row in zip(ranks, rows, strict=True)}


def peak_bytes(columns: Columns, category: str | None) -> dict[int, int]:
    """The most bytes that each rank held at any time, all together or of one category."""
    held: dict[int, float] = {}
    peaks: dict[int, int] = {}
    events = columns.take(columns.isin("kind", {"memory"}))
    if category is not None:
        events = events.take(events.isin("name", {category}))
    for rank, nbytes in zip(events.values("rank"), events.values("nbytes"), strict=True):
        held[rank] = now = min(max(held.get(rank, 0) + nbytes, -_MOST_BYTES), _MOST_BYTES)
        peaks[rank] = max(peaks.get(rank, 0), int(now))
    return peaks


def communication_matrix(columns: Columns, size: int) -> Ints:
    """Bytes from device to device, ``[source, destination]``, shape (size, size)."""
    matrix = np.zeros((size, size), np.int64)
    traffic = counted(columns, host_traffic=False)
    received = traffic.take(traffic.isin("kind", {"recv"}) & traffic.present("peer"))
    np.add.at(
        matrix, (received.numbers("peer"), received.numbers("rank")), received.numbers("bytes_received")
    )
    sources = traffic.take(~traffic.isin("sources", {()}))
    _, first, times = np.unique(sources.key("rank", "sources"), return_index=True, return_counts=True)
    different = sources.take(first)
    for rank, pairs, count in zip(
        different.values("rank"), different.values("sources"), times.tolist(), strict=True
    ):
        for source, nbytes in pairs:
            matrix[source, rank] += count * nbytes
    return matrix
