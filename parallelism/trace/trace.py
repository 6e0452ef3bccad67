"""One type for what was measured and for what was predicted: the `Trace`, a sequence of `Event`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from parallelism.arrays import Ints
from parallelism.display.quantities import plural
from parallelism.events import HOST, KINDS, Columns, Event
from parallelism.events.columns import operations
from parallelism.spelling import explains_keywords, no_attribute, spelt_alike
from parallelism.timeline import Priced, UndeclaredComputeWarning
from parallelism.trace.totals import (
    HOST_KINDS,
    RankTotals,
    communication_matrix,
    outermost,
    peak_bytes,
    totals_by_rank,
)

if TYPE_CHECKING:
    from parallelism.hardware import Hardware
    from parallelism.timeline import Pricing
    from parallelism.trace.repricing import Simulation

_ELSEWHERE = {
    "exportchrometrace": "trace.to_chrome(path)",
    "tochrometrace": "trace.to_chrome(path)",
    "toperfetto": "trace.to_chrome(path)",
    "tojson": "trace.save(path)",
    "dump": "trace.save(path)",
    "keyaverages": "trace.summary()",
    "table": "trace.summary()",
    "totalbytes": "trace.bytes_received()",
    "nbytes": "trace.bytes_received()",
    "bytes": "trace.bytes_received()",
    "makespan": "trace.makespan_seconds",
    "duration": "trace.makespan_seconds",
    "seconds": "trace.makespan_seconds",
    "bubble": "trace.bubble_fraction",
    "peakmemory": "trace.peak_bytes(rank)",
    "maxmemoryallocated": "trace.peak_bytes(rank)",
    "commmatrix": "trace.communication_matrix()",
    "numranks": "trace.size",
    "worldsize": "trace.size",
}
"""Names elsewhere, without case and underscores, and what to write here."""

__all__ = ["HOST", "KINDS", "Event", "Priced", "RankTotals", "Trace", "UndeclaredComputeWarning"]


RECORDED_AS = {"shift": "permute", "isend": "send", "irecv": "recv", "sendrecv": "send"}
"""Calls of a device by the names under which they are recorded."""


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
    the trace covers (default: all).  ``ValueError`` for a rank outside ``size``, and for a mesh of another size.
    """

    size: int
    """The number of devices of the cluster."""
    mesh_shape: tuple[tuple[str, int], ...] | None
    """The axes of the mesh with their sizes, outermost first."""
    hardware: str | None
    ranks: tuple[int, ...]
    """The devices that this trace covers, idle ones included: all of them, or those it was filtered for."""
    host_traffic: bool
    """Whether totals are over the traffic with the host, as after ``filter(kind="h2d")``, and over nothing else."""
    priced: Priced
    """How its virtual time was computed."""
    simulation: Simulation | None
    """What a simulated trace was made by, and is made by again on other hardware; a file or a part of it has none."""
    columns: Columns
    """The events by columns; everything else here is computed from them."""

    def __init__(
        self,
        events: Iterable[Event] | Columns,
        size: int | None = None,
        *,
        mesh_shape: Mapping[str, int] | Iterable[tuple[str, int]] | None = None,
        hardware: str | None = None,
        ranks: Iterable[int] | None = None,
        host_traffic: bool = False,
        priced: Iterable[Any] = (),
        simulation: Simulation | None = None,
    ) -> None:
        values = self.__dict__
        if not isinstance(events, Columns):
            values["events"] = events = tuple(events)
            events = Columns.of(events)
        occurring = events.distinct("rank")
        size = max(occurring, default=-1) + 1 if size is None else size
        covered = tuple(sorted(occurring.union(range(size) if ranks is None else ranks)))
        if covered and (covered[0] < 0 or covered[-1] >= size):
            raise ValueError(
                f"the ranks of {size} devices are 0 to {size - 1}, "
                f"got an event of rank {covered[0] if covered[0] < 0 else covered[-1]}"
            )
        shape = None if mesh_shape is None else tuple(dict(mesh_shape).items())
        if shape is not None and prod(extent for _, extent in shape) != size:
            raise ValueError(
                f"a mesh of {dict(shape)} has {prod(extent for _, extent in shape)} devices, "
                f"the trace has {size}"
            )
        values.update(
            columns=events,
            size=size,
            mesh_shape=shape,
            hardware=hardware,
            ranks=covered,
            host_traffic=host_traffic,
            priced=Priced(*priced),
            simulation=simulation,
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Trace is immutable; {name!r} cannot be set")

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events, each an object of its own: those given, or created when this is first asked for."""
        return tuple(self.columns.events())

    def _of(self, columns: Columns, ranks: Iterable[int] | None = None, host_traffic: bool = False) -> Trace:
        """A trace of the same run with these of its events."""
        ranks = self.ranks if ranks is None else ranks
        return Trace(
            columns, **self._header() | {"ranks": ranks, "host_traffic": self.host_traffic or host_traffic}
        )

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, item: int) -> Event: ...
    @overload
    def __getitem__(self, item: slice) -> Trace: ...
    def __getitem__(self, item: int | slice) -> Event | Trace:
        if isinstance(item, slice):
            return self._of(self.columns.take(item))
        if "events" in self.__dict__:
            return self.events[item]
        place = range(len(self))[item]
        return next(self.columns.take(slice(place, place + 1)).events())

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events) if "events" in self.__dict__ else self.columns.events()

    def _header(self) -> dict[str, Any]:
        """All that makes a trace but its events: the arguments of `Trace`."""
        return {
            "size": self.size,
            "mesh_shape": self.mesh_shape,
            "hardware": self.hardware,
            "ranks": self.ranks,
            "host_traffic": self.host_traffic,
            "priced": self.priced,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return self is other or (self._header() == other._header() and self.columns == other.columns)

    def __hash__(self) -> int:
        return hash((len(self), *self._header().values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Trace, **self._header()), (self.columns,)

    @property
    def devices_in_words(self) -> str:
        """How many devices there are, and how many of them the trace has: ``"4 representatives of 512 devices"``."""
        devices, shown = plural(self.size, "device"), len(self.ranks)
        if shown == self.size:
            return devices
        return (
            f"{plural(shown, 'representative')} of {devices}"
            if self.priced.folded
            else f"{shown} of {devices}"
        )

    def __repr__(self) -> str:
        where = self.devices_in_words
        return f"<Trace of {len(self)} events on {where}, {self.makespan_seconds:.6g} s of virtual time>"

    if not TYPE_CHECKING:  # a type checker reports an unknown name itself

        def __getattr__(self, name):
            """Raise ``AttributeError`` for an unknown name, with the name that is meant."""
            no_attribute("trace", self, name, _ELSEWHERE)

    # What is in it

    @explains_keywords("trace.filter")
    def filter(
        self,
        *,
        kind: str | Collection[str] | None = None,
        name: str | Collection[str] | None = None,
        rank: int | Collection[int] | None = None,
        axes: str | tuple[str, ...] | None = None,
        stage: int | Collection[int] | None = None,
        microbatch: int | Collection[int] | None = None,
        phase: str | Collection[str] | None = None,
        peer: int | Collection[int] | None = None,
    ) -> Trace:
        """The events that fit everything given; a collection stands for any of its values.

        ``axes`` is one axis, or the exact tuple of axes.  Asking for ``h2d``, ``d2h`` or ``peer=HOST`` and nothing
        else of that sort makes the totals those of the traffic with the host.  ``ValueError`` for an unknown kind, for
        a rank that is not there, and for a name such as ``allreduce`` where there are operations ``all_reduce``.
        """
        given: dict[str, Any] = {
            "kind": kind,
            "name": name,
            "rank": rank,
            "stage": stage,
            "microbatch": microbatch,
            "phase": phase,
            "peer": peer,
        }
        wanted: dict[str, set[Any]] = {}
        for field, value in given.items():
            if value is not None:
                wanted[field] = {value} if isinstance(value, (str, int)) else set(value)
        kinds = wanted.get("kind", set())
        if unknown := kinds - set(KINDS):
            raise ValueError(
                f"no kind of event is called {sorted(unknown)[0]!r}; the kinds are {', '.join(KINDS)}"
            )
        for each in wanted.get("rank", ()):
            self._check_rank(each)
        for each in wanted.get("name", ()):
            self._check_name(each)
        if axes is not None:
            wanted["axes"] = {(axes,) if isinstance(axes, str) else tuple(axes)}
        columns = self.columns
        for field, values in wanted.items():
            columns = columns.take(columns.isin(field, values))
        host = (bool(kinds) and kinds <= HOST_KINDS) or wanted.get("peer") == {HOST}
        return self._of(
            columns, [rank for rank in self.ranks if rank in wanted.get("rank", self.ranks)], host
        )

    def count(self, name: str, rank: int | None = None) -> int:  # of a name, where a Sequence counts a value
        """How many operations of that name took place.

        A collective counts once for each group that took part, however many ranks that is; with ``rank``, those
        that rank joined.  Anything else (a compute block, a message's send or its recv) counts once per event.

        ``ValueError`` for a name such as ``allreduce`` where there are operations ``all_reduce``, and for a call that is
        recorded by another name, as a ``shift`` is by ``permute``.
        """
        columns = self.columns.only("name", "kind", "rank", "parent", "group", "sequence")
        wanted = columns.isin("name", {name}) & ~columns.present("parent") & ~columns.isin("kind", {"wait"})
        if not wanted.any():
            self._check_name(name)
        if rank is not None:
            self._check_rank(rank)
            wanted &= columns.isin("rank", {rank})
        return operations(columns.take(wanted))

    def _check_name(self, name: str) -> None:
        names = self.columns.distinct("name")
        meant = spelt_alike(name, names) or RECORDED_AS.get(name)
        if name not in names and meant in names:
            raise ValueError(f"a trace has no operation {name!r}; this one has {meant!r}")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"the ranks of {self.size} devices are 0 to {self.size - 1}, got rank={rank}")

    def by_rank(self) -> tuple[tuple[Event, ...], ...]:
        """The events of each rank, 0 to size-1, as `parallelism.timeline.replay` takes them."""
        lanes: list[list[Event]] = [[] for _ in range(self.size)]
        for event in self:
            lanes[event.rank].append(event)
        return tuple(map(tuple, lanes))

    # Totals

    @cached_property
    def totals(self) -> Mapping[int, RankTotals]:
        """The totals of each of `ranks`."""
        return totals_by_rank(self.columns, self.ranks, self.host_traffic)

    def _total(self, field: str, rank: int | None) -> Any:
        if rank is None:
            return sum(getattr(totals, field) for totals in self.totals.values())
        self._check_rank(rank)
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
        self._check_rank(rank)
        return self.peaks(category).get(rank, 0)

    def peaks(self, category: str | None = None) -> dict[int, int]:
        """`peak_bytes` of each rank that held anything."""
        return peak_bytes(self.columns, category)

    def communication_matrix(self) -> Ints:
        """Bytes from device to device, ``[source, destination]``, shape (size, size).

        The events of collectives have the sources of their bytes, messages are counted where they are received; so the
        sum is `bytes_received`.  ``ValueError`` for a trace of host traffic, which no device sends.
        """
        if self.host_traffic:
            raise ValueError(
                "a communication matrix is between devices; this trace was filtered for host traffic"
            )
        return communication_matrix(self.columns, self.size)

    # Time

    @cached_property
    def makespan_seconds(self) -> float:
        """Virtual time from the first start to the last end; a whole run starts at 0."""
        if not len(self):
            return 0.0
        starts = self.columns.numbers("start_seconds")
        return float((starts + self.columns.numbers("duration_seconds")).max() - starts.min())

    @property
    def bubble_fraction(self) -> float:
        """The part of the devices' time in which they do not compute: 1 - busy / (ranks x makespan)."""
        available = len(self.ranks) * self.makespan_seconds
        return (
            1 - sum(totals.compute_seconds for totals in self.totals.values()) / available
            if available
            else 0.0
        )

    @property
    def span_bubble_fraction(self) -> float:
        """The bubble by the ranks' own spans: (longest span - its busy time) / longest span.

        A rank's span runs from the start of its first compute to the end of its last.  This is how the papers
        on zero-bubble schedules count (Qi et al., Zero Bubble Pipeline Parallelism, section 5): a stage that
        starts late and ends late, and so could take up the next step meanwhile, is not charged for it.
        """
        computes = self.columns.take(outermost(self.columns, {"compute"}))
        starts, ranks = computes.numbers("start_seconds"), computes.numbers("rank")
        first = np.full(self.size, np.inf)
        last = np.full(self.size, -np.inf)
        np.minimum.at(first, ranks, starts)
        np.maximum.at(last, ranks, starts + computes.numbers("duration_seconds"))
        span, minus_busy = max(
            (
                (float(last[rank] - first[rank]), -self.totals[rank].compute_seconds)
                for rank in computes.distinct("rank")
            ),
            default=(0.0, 0.0),
        )
        return (span + minus_busy) / span if span else 0.0

    @property
    def compute(self) -> str:
        """``"measured"`` or ``"modelled"``: where the time of compute comes from."""
        return self.priced.compute

    @property
    def priced_dtype(self) -> str | None:
        """The dtype as which flops and bytes of all float arrays were priced; None: each as its own."""
        return self.priced.priced_dtype

    @property
    def link_sharing(self) -> bool:
        """Whether messages and collectives that overlap share their links, on a hardware that has some."""
        return self.priced.link_sharing

    @property
    def undeclared_seconds(self) -> float:
        """CPU seconds that cost nothing in a modelled trace, because neither flops, bytes nor seconds were declared."""
        return self.priced.undeclared_seconds

    def on(
        self,
        hardware: Hardware | str | PathLike[str],
        *,
        compute: str | None = None,
        priced_dtype: str | None = None,
        link_sharing: bool | None = None,
    ) -> Trace:
        """The same record priced elsewhere: what a run there would give.

        ``hardware`` is a `Hardware`, the name of a preset, a file, or ``"host"``: this machine as it was calibrated,
        or, if it was not, CPU seconds with free messages.  What is None is as in this trace.

        What `simulate` returned is simulated anew, folded if it was: the result equals a simulation there.  Else the
        events are priced; measured compute keeps its CPU seconds, and the ops stay those that were recorded.
        ``ValueError`` for a hardware with too few devices or no rate for a dtype, where CPU times are asked for that a
        modelled trace has left out, and for a part or a file of a trace whose events do not tell all their work.
        """
        from parallelism.hardware import Hardware
        from parallelism.timeline import Pricing

        if compute == "measured" != self.compute:
            raise ValueError(
                "compute='measured' wants CPU times, and a modelled trace has left out some of them"
            )
        to_host = isinstance(hardware, str) and hardware == "host"
        if to_host:
            hardware = Hardware.of_host(self.size) or hardware
        return self.priced_by(
            Pricing.of(
                hardware,
                self.compute if compute is None else compute,
                priced_dtype or (None if to_host else self.priced_dtype),
                self.link_sharing if link_sharing is None else link_sharing,
            )
        )

    def priced_by(self, pricing: Pricing) -> Trace:
        """`on`, with the prices of a `parallelism.timeline.pricing.Pricing`."""
        from parallelism.trace import repricing

        if self.simulation is not None:
            return self.simulation.on(pricing)
        events, priced = repricing.repriced_events(self, pricing)
        return Trace(events, **self._header() | {"hardware": pricing.name, "priced": priced})

    # Files and reports

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the whole trace as JSON; `load` gives an equal one.  ``ValueError`` for an event that is malformed."""
        from parallelism.trace import files as trace_files

        trace_files.save(path, self)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        """Reads what `save` wrote.

        ``ValueError`` that names the file, and the event and the field where it is one of them, for whatever is
        not such a trace; ``OSError`` if it cannot be read.  Nothing in the file is executed.
        """
        from parallelism.trace import files as trace_files

        columns, header = trace_files.load(path)
        try:
            return cls(columns, **header)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_chrome(self, path: str | PathLike[str]) -> None:
        """Writes JSON for Perfetto or ``chrome://tracing``: a process per device, virtual time in microseconds."""
        from parallelism.trace import chrome as trace_chrome

        trace_chrome.save_chrome(path, self)

    def summary(self) -> str:
        """Time, traffic and work by rank, and the collectives, as text of at most 80 columns."""
        from parallelism.trace import summary as trace_summary

        return trace_summary.as_text(self)

    def _repr_html_(self) -> str:
        from parallelism.trace import summary as trace_summary

        return trace_summary.as_html(self)
