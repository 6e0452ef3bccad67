"""The record that a device keeps of what it does, and how the host makes a `Trace` of everybody's.

A device appends one list to its record for each thing it did, in the order of the fields of `parallelism.trace.Event`
(``rank`` left out), or, for a collective that it has called before, what is the same each time and what is not; that
costs a microsecond.  What it computed between two calls is known by the CPU time of its
thread, which is the same however crowded the machine is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelism.timeline import replay
from parallelism.trace import Event, Trace

_FIELDS = tuple(field.name for field in fields(Event))[1:]
_INDEX = {name: i for i, name in enumerate(_FIELDS)}
_AXES, _GROUP, _ALGORITHM, _WORK, _LOCATION, _SEQUENCE, _SERIAL, _PARENT, _PEER, _TAG = map(
    _INDEX.__getitem__,
    ("axes", "group", "algorithm", "work", "location", "sequence", "serial", "parent", "peer", "tag"),
)
_SENT, _RECEIVED, _MESSAGES, _SOURCES, _WALL_START, _WALL_DURATION = map(
    _INDEX.__getitem__,
    ("bytes_sent", "bytes_received", "messages", "sources", "wall_start_seconds", "wall_duration_seconds"),
)
_DEFAULTS: list[Any] = [None, None] + [field.default for field in fields(Event)[3:]]
_SHORTEST_COMPUTE_NS = 2000
"""Less than this between two calls is not worth an event of its own: it is added to what follows."""

if TYPE_CHECKING:
    from vcluster.calls import Traffic

class Template(NamedTuple):
    """What is the same whenever a collective is repeated."""

    name: str
    axes: tuple[str, ...] | None
    group: tuple[int, ...]
    algorithm: str
    traffic: Traffic


class MessageTemplate(NamedTuple):
    """What is the same for all messages of one size in one channel."""

    kind: str
    peer: int
    tag: int
    nbytes: int


Record = list[Any]
"""Of each event its fields in a list; of what is repeated (template, location, start, duration) in nanoseconds."""


class Recorder:
    """Writes the record of one device during one run."""

    def __init__(self) -> None:
        self._clear()
        self.stopped = True
        self.note: Callable[[str, str], object] | None = None
        """Told what is called and at which line, lest the process die there."""
        self._noted: tuple[str, str] = "", ""
        self._wall_zero = self._wall_mark = self._cpu_mark = 0

    def _clear(self) -> None:
        self.record: Record = []
        self._label: tuple[str, dict[str, Any]] | None = None
        self._work = 0
        self._depth = 0

    def start(self) -> None:
        """Begin with an empty record; the clocks start here."""
        self._clear()
        self._noted = "", ""
        self.stopped = False
        self._wall_zero = time.perf_counter_ns()
        self._cpu_mark = time.thread_time_ns()
        self._wall_mark = self._wall_zero

    def stop(self) -> Record:
        self._flush_compute()
        self.stopped = True
        return self.record

    @property
    def busy(self) -> bool:
        """Whether a call of the library is under way."""
        return self._depth > 0

    def now(self) -> float:
        """Seconds since the start, by the wall clock."""
        return (time.perf_counter_ns() - self._wall_zero) * 1e-9

    def add(self, kind: str, name: str, **values: Any) -> list[Any]:
        """Append an event; the returned list may be filled in later by `fill`."""
        event = _DEFAULTS.copy()
        event[0] = kind
        event[1] = name
        for key, value in values.items():
            event[_INDEX[key]] = value
        if event[_LOCATION] is not None:
            self.begins(name, event[_LOCATION])
        if not self.stopped:
            event[_INDEX["serial"]] = len(self.record)
            self.record.append(event)
        return event

    def add_collective(
        self, name: str, axes: tuple[str, ...] | None, group: tuple[int, ...], algorithm: str, work: int | None,
        location: str,
    ) -> list[Any]:
        """The event of a collective that begins: `add`, without the dictionary."""
        event = _DEFAULTS.copy()
        event[0], event[1] = "collective", name
        event[_AXES], event[_GROUP], event[_ALGORITHM] = axes, group, algorithm
        event[_WORK], event[_LOCATION] = work, location
        event[_SERIAL] = len(self.record)
        self.record.append(event)
        self.begins(name, location)
        return event

    def begins(self, name: str, location: str) -> None:
        """Something is called at a line; said once while it is called again and again."""
        noted_name, noted_location = self._noted
        if self.note is not None and (location is not noted_location or name is not noted_name):
            self.note(name, location)
            self._noted = name, location

    @contextmanager
    def as_one(self, name: str, location: str) -> Iterator[list[Any]]:
        """The event of an operation made of others: what is called inside are its children."""
        event = self.add("collective", name, location=location)
        try:
            yield event
        finally:
            serial = event[_SERIAL]
            for i in range(serial + 1, len(self.record)):
                row = self.record[i] = _written_out(self.record[i], i)
                if row[_PARENT] is None:
                    row[_PARENT] = serial

    def moved_since(self, serial: int) -> list[tuple[Any, ...]]:
        """The fields of a `Traffic` of each collective inside `as_one` that was recorded from this number on."""
        return [
            (row[_SENT], row[_RECEIVED], row[_MESSAGES], row[_SOURCES])
            for row in self.record[serial:] if row[0] == "collective"
        ]

    def finish_collective(self, event: list[Any], traffic: Traffic, start_ns: int) -> None:
        """What it moved, and how long it took."""
        event[_SENT], event[_RECEIVED], event[_MESSAGES], event[_SOURCES] = traffic
        event[_WALL_START] = (start_ns - self._wall_zero) * 1e-9
        event[_WALL_DURATION] = (time.perf_counter_ns() - start_ns) * 1e-9

    def add_repeated(self, template: Template | MessageTemplate, location: str, start_ns: int) -> None:
        """The event of a collective or a message that ends now, and was like an earlier one."""
        self.begins(template[0], location)
        self.record.append((template, location, start_ns - self._wall_zero, time.perf_counter_ns() - start_ns))

    def serial(self, event: list[Any]) -> int:
        """The number of an event on this rank."""
        number: int = event[_INDEX["serial"]]
        return number

    def fill(self, event: list[Any], **values: Any) -> None:
        for key, value in values.items():
            event[_INDEX[key]] = value

    def next_work(self) -> int:
        self._work += 1
        return self._work

    def enter(self) -> int:
        """A call of the library begins: what was computed before it becomes an event.  Wall time in nanoseconds."""
        self._depth += 1
        now = time.perf_counter_ns()
        if self._depth == 1 and (now - self._wall_mark >= _SHORTEST_COMPUTE_NS or self._label is not None):
            self._flush_compute()
            now = time.perf_counter_ns()
        return now

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._cpu_mark = time.thread_time_ns()
            self._wall_mark = time.perf_counter_ns()

    def since(self, start_ns: int) -> dict[str, float]:
        """Wall times of an event that began at ``start_ns`` and ends now."""
        return {
            "wall_start_seconds": (start_ns - self._wall_zero) * 1e-9,
            "wall_duration_seconds": (time.perf_counter_ns() - start_ns) * 1e-9,
        }

    @contextmanager
    def compute(self, name: str, seconds: float | None, values: dict[str, Any]) -> Iterator[None]:
        """What is computed inside is one event of this name (more than one, if calls of the library interrupt it)."""
        self._flush_compute()
        before, self._label = self._label, (name, values)
        first = len(self.record)
        try:
            yield
        finally:
            self._flush_compute(always=not any(self._is_labelled(event) for event in self.record[first:]))
            self._label = before
            if seconds is not None:
                self._declare(first, name, seconds)

    def _is_labelled(self, event: list[Any]) -> bool:
        return self._label is not None and event[0] == "compute" and event[1] == self._label[0]

    def _declare(self, first: int, name: str, seconds: float) -> None:
        for event in self.record[first:]:
            if event[0] == "compute" and event[1] == name:
                self.fill(event, cpu_seconds=seconds)
                seconds = 0.0

    def _flush_compute(self, *, always: bool = False) -> None:
        if self._depth > 1 or self.stopped:
            return
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        spent = cpu - self._cpu_mark
        if spent < _SHORTEST_COMPUTE_NS and not always:
            return
        name, values = self._label or ("compute", {})
        self.add(
            "compute", name, cpu_seconds=spent * 1e-9,
            wall_start_seconds=(self._wall_mark - self._wall_zero) * 1e-9,
            wall_duration_seconds=(wall - self._wall_mark) * 1e-9, **values,
        )
        if self._label is not None:  # flops and bytes count once
            self._label = name, {k: v for k, v in values.items() if k not in ("flops", "nbytes")}
        self._cpu_mark, self._wall_mark = cpu, wall


def _written_out(row: Any, serial: int) -> list[Any]:
    """What is repeated, as a list of fields like the rest."""
    if type(row) is list:
        return row
    template, location, start_ns, duration_ns = row
    event = _DEFAULTS.copy()
    if type(template) is Template:
        event[0], event[1], event[_AXES], event[_GROUP], event[_ALGORITHM], told = "collective", *template
        event[_SENT], event[_RECEIVED], event[_MESSAGES], event[_SOURCES] = told
    else:
        kind, event[_PEER], event[_TAG], nbytes = template
        event[0] = event[1] = kind
        event[_SENT], event[_RECEIVED], event[_MESSAGES] = (nbytes, 0, 1) if kind == "send" else (0, nbytes, 0)
    event[_WALL_START], event[_WALL_DURATION] = start_ns * 1e-9, duration_ns * 1e-9
    event[_LOCATION], event[_SERIAL] = location, serial
    return event


def events_of(rank: int, record: Record) -> list[Event]:
    """The events of one rank's record."""
    events = []
    counts: Counter[Any] = Counter()
    for serial, row in enumerate(record):
        if type(row) is list:
            key = _counted_as(row)
            if key is not None:
                row[_SEQUENCE] = counts[key]
                counts[key] += 1
            events.append(Event(rank, *row))
            continue
        template, location, start_ns, duration_ns = row
        start, duration = start_ns * 1e-9, duration_ns * 1e-9
        if type(template) is Template:
            name, axes, group, algorithm, traffic = template
            events.append(Event(
                rank, "collective", name, 0.0, 0.0, start, duration, 0.0, traffic.bytes_sent, traffic.bytes_received,
                traffic.messages, axes=axes, group=group, algorithm=algorithm, sequence=counts[group],
                serial=serial, sources=traffic.sources, location=location,
            ))
            counts[group] += 1
        else:
            kind, peer, tag, nbytes = template
            sent, received = (nbytes, 0) if kind == "send" else (0, nbytes)
            events.append(Event(
                rank, kind, kind, 0.0, 0.0, start, duration, 0.0, sent, received, int(kind == "send"), peer=peer,
                tag=tag, sequence=counts[kind, peer, tag], serial=serial, location=location,
            ))
            counts[kind, peer, tag] += 1
    return events


def _counted_as(row: list[Any]) -> Any:
    """What an event is numbered among: the collectives of its group, the messages of its channel and tag."""
    if row[0] == "collective":
        return row[_GROUP]
    if row[0] in ("send", "recv") and row[_PARENT] is None:
        return row[0], row[_PEER], row[_TAG]
    return None


def make_trace(records: Sequence[Record], mesh_shape: dict[str, int]) -> Trace:
    """The trace of a run, from the record of each rank: replayed in virtual time."""
    events = replay([events_of(rank, record) for rank, record in enumerate(records)])
    return Trace(events, size=len(records), mesh_shape=mesh_shape)
