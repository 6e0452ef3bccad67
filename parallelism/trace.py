"""One type for what was measured and for what was predicted: `Event`, and the `Trace` made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from os import PathLike
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

__all__ = ["HOST", "KINDS", "Event", "RankTotals", "Trace"]

HOST = -1
"""The peer of a message between a device and the process that owns the cluster."""

KINDS = ("compute", "collective", "send", "recv", "wait", "h2d", "d2h", "memory")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that one rank did.

    ``start_seconds`` and ``duration_seconds`` are virtual time, filled in by `parallelism.timeline`;
    ``wall_*`` is what the clock on the wall said, counted from the start of the run.  The two are never mixed.
    """

    rank: int
    kind: str
    """One of `KINDS`."""
    name: str
    """The collective's name, the label of a compute block, the category of a memory event."""
    start_seconds: float = 0.0
    duration_seconds: float = 0.0
    wall_start_seconds: float = 0.0
    wall_duration_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of the device's thread (compute), or what ``seconds=`` declared."""
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    """Messages this rank sent."""
    flops: float = 0.0
    nbytes: float = 0.0
    """Memory traffic declared for a compute; bytes held (negative: freed) for a memory event."""
    axes: tuple[str, ...] | None = None
    group: tuple[int, ...] | None = None
    """The ranks that took part, in group order."""
    peer: int | None = None
    """The other rank of a send or a recv; `HOST` (-1) is the host."""
    algorithm: str | None = None
    stage: int | None = None
    microbatch: int | None = None
    phase: str | None = None
    """The pipeline action: F, B, I or W."""
    tag: int | None = None
    sequence: int | None = None
    """Which operation of its group (or message of its channel and tag) this is, from 0: what belongs together."""
    work: int | None = None
    """Number of the asynchronous operation that starts here; a ``wait`` event with the same number ends it."""
    parent: int | None = None
    """Number (``serial``) of the collective on this rank inside which this message was sent; such events are
    outside the totals."""
    serial: int = 0
    """Place in the record of this rank, from 0."""
    sources: tuple[tuple[int, int], ...] = ()
    """For a collective: (rank, bytes received from it)."""
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    location: str | None = None
    """``file:line`` of the user's code."""


class RankTotals(NamedTuple):
    """What one rank did in all, messages inside collectives left out."""

    compute_seconds: float = 0.0
    """Virtual time in compute events."""
    waiting_seconds: float = 0.0
    """Virtual time that collectives, messages and waits held the rank; asynchronous ones hold it in their wait."""
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0
    flops: float = 0.0


_HOST_KINDS = frozenset(("h2d", "d2h"))
_TRAFFIC_KINDS = frozenset(("collective", "send", "recv")) | _HOST_KINDS
_WAITING_KINDS = frozenset(("collective", "send", "recv", "wait"))


@dataclass(frozen=True, init=False, repr=False)
class Trace(Sequence[Event]):
    """What happened, or what would: an immutable sequence of `Event`, in the order of record within each rank.

    >>> shift = [Event(rank, "collective", "shift", bytes_sent=8, bytes_received=8, group=(0, 1), sequence=0,
    ...                sources=((1 - rank, 8),)) for rank in (0, 1)]
    >>> trace = Trace([*shift, Event(0, "h2d", "arguments", bytes_received=100)])
    >>> trace.count("shift"), trace.bytes_received(), trace.filter(kind="h2d").bytes_received()
    (1, 16, 100)

    Totals of bytes and messages are **between devices**: collectives, and messages whose peer is a device.  What
    goes to and from the host is left out, unless the trace was filtered for it (`host_traffic`).  Messages
    inside a collective (``parent``) are in no total: the collective's own event counts them.

    ``size`` is the number of devices (default: enough for the ranks that occur), ``mesh_shape`` the size of each
    axis, outermost first, ``hardware`` the name of what the virtual time stands for, ``ranks`` the devices that
    the trace tells about (default: all).  ``ValueError`` for a rank outside ``size``, and for a mesh of another size.
    """

    events: tuple[Event, ...]
    size: int
    """The number of devices of the cluster."""
    mesh_shape: tuple[tuple[str, int], ...] | None
    """The axes of the mesh with their sizes, outermost first."""
    hardware: str | None
    ranks: tuple[int, ...]
    """The devices this trace tells about, idle ones included: all of them, or those it was filtered for."""
    host_traffic: bool
    """Whether totals are over the traffic with the host, as after ``filter(kind="h2d")``, and over nothing else."""

    def __init__(
        self, events: Iterable[Event], size: int | None = None, *,
        mesh_shape: Mapping[str, int] | Iterable[tuple[str, int]] | None = None, hardware: str | None = None,
        ranks: Iterable[int] | None = None, host_traffic: bool = False,
    ) -> None:
        events = tuple(events)
        occurring = {event.rank for event in events}
        size = max(occurring, default=-1) + 1 if size is None else size
        told = tuple(sorted(occurring.union(range(size) if ranks is None else ranks)))
        if told and (told[0] < 0 or told[-1] >= size):
            raise ValueError(f"the ranks of {size} devices are 0 to {size - 1}, "
                             f"got an event of rank {told[0] if told[0] < 0 else told[-1]}")
        shape = None if mesh_shape is None else tuple(dict(mesh_shape).items())
        if shape is not None and prod(extent for _, extent in shape) != size:
            raise ValueError(f"a mesh of {dict(shape)} has {prod(extent for _, extent in shape)} devices, "
                             f"the trace has {size}")
        for name, value in (("events", events), ("size", size), ("mesh_shape", shape), ("hardware", hardware),
                            ("ranks", told), ("host_traffic", host_traffic)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.events)

    @overload
    def __getitem__(self, item: int) -> Event: ...
    @overload
    def __getitem__(self, item: slice) -> Trace: ...
    def __getitem__(self, item: int | slice) -> Event | Trace:
        return replace(self, events=self.events[item]) if isinstance(item, slice) else self.events[item]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        return f"<Trace of {len(self)} events on {self.size} devices, {self.makespan_seconds:.6g} s of virtual time>"

    # What is in it

    def filter(
        self, *, kind: str | Collection[str] | None = None, name: str | Collection[str] | None = None,
        rank: int | Collection[int] | None = None, axes: str | tuple[str, ...] | None = None,
        stage: int | Collection[int] | None = None, microbatch: int | Collection[int] | None = None,
        phase: str | Collection[str] | None = None, peer: int | Collection[int] | None = None,
    ) -> Trace:
        """The events that fit everything given; a collection stands for any of its values.

        ``axes`` is one axis, or the exact tuple of axes.  Asking for ``h2d``, ``d2h`` or ``peer=HOST`` and nothing
        else of that sort makes the totals those of the traffic with the host.  ``ValueError`` for an unknown kind.
        """
        given: dict[str, Any] = {"kind": kind, "name": name, "rank": rank, "stage": stage, "microbatch": microbatch,
                                 "phase": phase, "peer": peer}
        wanted = {field: {value} if isinstance(value, (str, int)) else set(value)
                  for field, value in given.items() if value is not None}
        kinds = wanted.get("kind", set())
        if unknown := kinds - set(KINDS):
            raise ValueError(f"no kind of event is called {sorted(unknown)[0]!r}; the kinds are {', '.join(KINDS)}")
        if axes is not None:
            wanted["axes"] = {(axes,) if isinstance(axes, str) else tuple(axes)}
        events: Iterable[Event] = self.events
        for field, values in wanted.items():
            events = [event for event in events if getattr(event, field) in values]
        host = (bool(kinds) and kinds <= _HOST_KINDS) or wanted.get("peer") == {HOST}
        ranks = tuple(r for r in self.ranks if r in wanted.get("rank", self.ranks))
        return replace(self, events=tuple(events), ranks=ranks, host_traffic=self.host_traffic or host)

    def count(self, name: str, rank: int | None = None) -> int:     # of a name, where a Sequence counts a value
        """How many operations of that name took place.

        A collective counts once for each group that took part, however many ranks that is; with ``rank``, those
        that rank joined.  Anything else (a compute block, a message's send or its recv) counts once per event.
        """
        groups: set[tuple[tuple[int, ...] | None, int]] = set()
        others = 0
        for event in self.events:
            if event.name == name and event.parent is None and event.kind != "wait" and rank in (None, event.rank):
                if event.kind == "collective" and event.sequence is not None:
                    groups.add((event.group, event.sequence))
                else:
                    others += 1
        return len(groups) + others

    def by_rank(self) -> tuple[tuple[Event, ...], ...]:
        """The events of each rank, 0 to size-1, as `parallelism.timeline.replay` takes them."""
        lanes: list[list[Event]] = [[] for _ in range(self.size)]
        for event in self.events:
            lanes[event.rank].append(event)
        return tuple(map(tuple, lanes))

    # Totals

    def _is_counted(self, event: Event) -> bool:
        """Whether the bytes of this event are in the totals."""
        if event.parent is not None or event.kind not in _TRAFFIC_KINDS:
            return False
        return (event.kind in _HOST_KINDS or event.peer == HOST) == self.host_traffic

    @cached_property
    def totals(self) -> Mapping[int, RankTotals]:
        """The totals of each of `ranks`."""
        sums: dict[int, list[Any]] = {rank: list(RankTotals()) for rank in self.ranks}
        for event in self.events:
            if event.parent is not None:
                continue
            sum_ = sums[event.rank]
            if event.kind == "compute":
                sum_[0] += event.duration_seconds
            elif event.kind in _WAITING_KINDS and (event.work is None or event.kind == "wait"):
                sum_[1] += event.duration_seconds
            sum_[5] += event.flops
            if self._is_counted(event):
                sum_[2] += event.bytes_sent
                sum_[3] += event.bytes_received
                sum_[4] += event.messages
        return {rank: RankTotals(*sum_) for rank, sum_ in sums.items()}

    def _total(self, field: str, rank: int | None) -> Any:
        if rank is None:
            return sum(getattr(totals, field) for totals in self.totals.values())
        if not 0 <= rank < self.size:
            raise ValueError(f"the ranks of {self.size} devices are 0 to {self.size - 1}, got rank={rank}")
        return getattr(self.totals.get(rank, RankTotals()), field)

    def bytes_received(self, rank: int | None = None) -> int:
        """Bytes that came from other devices, to one rank or to all together."""
        return int(self._total("bytes_received", rank))

    def bytes_sent(self, rank: int | None = None) -> int:
        """Bytes that went to other devices, from one rank or from all together."""
        return int(self._total("bytes_sent", rank))

    def messages(self, rank: int | None = None) -> int:
        """Messages sent to other devices, by one rank or by all together."""
        return int(self._total("messages", rank))

    def flops(self, rank: int | None = None) -> float:
        """Floating-point operations declared by compute events, of one rank or of all together."""
        return float(self._total("flops", rank))

    def peak_bytes(self, rank: int, category: str | None = None) -> int:
        """The most bytes that the rank held at any time (``device.hold``), all together or of one category."""
        return self.peaks(category).get(rank, 0)

    def peaks(self, category: str | None = None) -> dict[int, int]:
        """`peak_bytes` of each rank that held anything."""
        held: dict[int, float] = {}
        peaks: dict[int, int] = {}
        for event in self.events:
            if event.kind == "memory" and category in (None, event.name):
                held[event.rank] = now = held.get(event.rank, 0) + event.nbytes
                peaks[event.rank] = max(peaks.get(event.rank, 0), int(now))
        return peaks

    def communication_matrix(self) -> npt.NDArray[np.int64]:
        """Bytes from device to device, ``[source, destination]``, shape (size, size).

        Collectives tell the sources of their bytes, messages are counted where they are received; so the sum
        is `bytes_received`.  ``ValueError`` for a trace of host traffic, which no device sends.
        """
        if self.host_traffic:
            raise ValueError("a communication matrix is between devices; this trace was filtered for host traffic")
        matrix = np.zeros((self.size, self.size), np.int64)
        for event in self.events:
            if self._is_counted(event):
                if event.kind == "recv" and event.peer is not None:
                    matrix[event.peer, event.rank] += event.bytes_received
                for source, nbytes in event.sources:
                    matrix[source, event.rank] += nbytes
        return matrix

    # Time

    @cached_property
    def makespan_seconds(self) -> float:
        """Virtual time from the first start to the last end; a whole run starts at 0."""
        if not self.events:
            return 0.0
        end = max(event.start_seconds + event.duration_seconds for event in self.events)
        return end - min(event.start_seconds for event in self.events)

    @property
    def bubble_fraction(self) -> float:
        """The part of the devices' time in which they do not compute: 1 - busy / (ranks x makespan)."""
        available = len(self.ranks) * self.makespan_seconds
        return 1 - sum(totals.compute_seconds for totals in self.totals.values()) / available if available else 0.0

    @property
    def span_bubble_fraction(self) -> float:
        """The bubble by the ranks' own spans: (longest span - its busy time) / longest span.

        A rank's span runs from the start of its first compute to the end of its last.  This is how the papers
        on zero-bubble schedules count (Qi et al., Zero Bubble Pipeline Parallelism, section 5): a stage that
        starts late and ends late, and so could take up the next step meanwhile, is not charged for it.
        """
        spans: dict[int, tuple[float, float]] = {}
        for event in self.events:
            if event.kind == "compute" and event.parent is None:
                first, last = spans.get(event.rank, (event.start_seconds, event.start_seconds))
                end = event.start_seconds + event.duration_seconds
                spans[event.rank] = min(first, event.start_seconds), max(last, end)
        span, minus_busy = max(((last - first, -self.totals[rank].compute_seconds)
                                for rank, (first, last) in spans.items()), default=(0.0, 0.0))
        return (span + minus_busy) / span if span else 0.0

    # Files and reports

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the whole trace as JSON; `load` gives an equal one.  ``ValueError`` for an event that is malformed."""
        from parallelism import trace_files

        trace_files.save(path, self, Event, KINDS)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        """Reads what `save` wrote.

        ``ValueError`` that names the file, and the event and the field where it is one of them, for whatever is
        not such a trace; ``OSError`` if it cannot be read.  Nothing in the file is executed.
        """
        from parallelism import trace_files

        events, header = trace_files.load(path, Event, KINDS)
        try:
            return cls(events, **header)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_chrome(self, path: str | PathLike[str]) -> None:
        """Writes JSON for Perfetto or ``chrome://tracing``: a process per device, virtual time in microseconds."""
        from parallelism import trace_chrome

        trace_chrome.save_chrome(path, self)

    def summary(self) -> str:
        """Time, traffic and work by rank, and the collectives, as text of at most 80 columns."""
        from parallelism import trace_summary

        return trace_summary.as_text(self)

    def _repr_html_(self) -> str:
        from parallelism import trace_summary

        return trace_summary.as_html(self)

