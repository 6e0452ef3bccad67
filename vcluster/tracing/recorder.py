"""The record that a device keeps of what it does: one list, because to add to it costs less than a microsecond.

Five entries stand for an event: what it was, where in the user's code, when it began and ended by the clock on the
wall (in nanoseconds; 0: it does not say), and the seconds that it computed.  What it was is a `Template`, the same
object for all events of one look, or, where more than that can differ, a `Row` of all fields of an event but the rank.
`vcluster.tracing.columns` makes a trace of the records of all devices.

What a device computed between two calls is known by the CPU time of its thread, which is the same however crowded the
machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.events import Event

if TYPE_CHECKING:
    from parallelism.collectives import Traffic

FIELDS = tuple(field.name for field in fields(Event))[1:]
_INDEX = {name: i for i, name in enumerate(FIELDS)}
_AXES, _GROUP, _ALGORITHM, _WORK, _SERIAL, _PARENT, _DTYPE = map(
    _INDEX.__getitem__, ("axes", "group", "algorithm", "work", "serial", "parent", "dtype")
)
_SENT, _RECEIVED, _MESSAGES, _SOURCES, _WALL_START, _WALL_DURATION = map(
    _INDEX.__getitem__,
    ("bytes_sent", "bytes_received", "messages", "sources", "wall_start_seconds", "wall_duration_seconds"),
)
_PAYLOAD, _ROOT, _PAIRS = map(_INDEX.__getitem__, ("payload_bytes", "root", "pairs"))
_DEFAULTS: list[Any] = [None, None] + [field.default for field in fields(Event)[3:]]

_SHORTEST_COMPUTE_NS = 2000
"""Less than this between two calls is not worth an event of its own: it is added to what follows."""
_MOST_LABELS = 4096

ENTRIES = 5
"""Of one event in a record: what, where, start and end in nanoseconds, seconds computed."""

Row = list[Any]
Template = tuple[str, str, dict[str, Any]]
"""Kind, name and fields of events that differ in place and time only."""
COMPUTE: Template = ("compute", "compute", {})


Record = tuple[int, list[Any]]
"""What one device did in one run: when that began, by the clock on the wall, and the entries."""


def row_of(what: Row | Template) -> Row:
    """All fields of an event, as far as they are known by what it was."""
    if type(what) is list:
        return what
    kind, name, values = what
    row = _DEFAULTS.copy()
    row[0], row[1] = kind, name
    for key, value in values.items():
        row[_INDEX[key]] = value
    return row


def collective_template(
    name: str, axes: tuple[str, ...] | None, group: tuple[int, ...], algorithm: str, traffic: Traffic,
    dtype: str | None = None,
) -> Template:
    """What is the same whenever a collective is repeated."""
    fields = {"axes": axes, "group": group, "algorithm": algorithm, "dtype": dtype}
    return "collective", name, {**fields, **traffic.on_event()}


def message_template(kind: str, peer: int, tag: int, nbytes: int, dtype: str | None = None) -> Template:
    """What is the same for all messages of one size in one channel."""
    counted = {"bytes_sent": nbytes, "messages": 1} if kind == "send" else {"bytes_received": nbytes}
    return kind, kind, {"peer": peer, "tag": tag, "dtype": dtype, **counted}


@lru_cache(maxsize=64)
def dtype_name(dtype: Any) -> str:
    """``dtype.name``, which NumPy makes up every time."""
    name: str = np.dtype(dtype).name
    return name


class _Block:
    """A context: quicker than a generator."""

    __slots__ = ("_before", "_first", "_labels", "_name", "_recorder", "_seconds")

    def __init__(
        self, recorder: Recorder, name: str, seconds: float | None, labels: tuple[Template, Template]
    ) -> None:
        self._recorder, self._name, self._seconds, self._labels = recorder, name, seconds, labels

    def __enter__(self) -> None:
        self._before, self._first = self._recorder._begin_block(self._labels)

    def __exit__(self, *_: object) -> None:
        self._recorder._end_block(self._name, self._seconds, self._before, self._first)


class Recorder:
    """Writes the record of one device during one run."""

    def __init__(self) -> None:
        self._clear()
        self._labels: dict[Any, tuple[Template, Template]] = {}
        self.stopped = True
        self.note: Callable[[str, str], object] | None = None
        """Told what is called and at which line, lest the process die there."""
        self._noted: tuple[str, str] = "", ""
        self._wall_zero = self._wall_mark = self._cpu_mark = 0

    def _clear(self) -> None:
        self._entries: list[Any] = []
        self._uncounted: list[tuple[Row, Callable[[], Traffic]]] = []
        """The events of collectives whose traffic is not counted yet."""
        self._label: tuple[Template, Template] | None = None
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
        """The record, complete."""
        self._flush_compute()
        self._count_traffic()
        self.stopped = True
        entries, self._entries = self._entries, []
        return self._wall_zero, entries

    @property
    def busy(self) -> bool:
        """Whether a call of the library is under way."""
        return self._depth > 0

    def now(self) -> float:
        """Seconds since the start, by the wall clock."""
        return (time.perf_counter_ns() - self._wall_zero) / 1e9

    def add(self, kind: str, name: str, location: str | None = None, **values: Any) -> Row:
        """Append an event; the returned row may be filled in later by `fill`."""
        row = _DEFAULTS.copy()
        row[0] = kind
        row[1] = name
        for key, value in values.items():
            row[_INDEX[key]] = value
        if location is not None:
            self.begins(name, location)
        if not self.stopped:
            self._append(row, location)
        return row

    def _append(self, row: Row, location: str | None) -> None:
        row[_SERIAL] = len(self._entries) // ENTRIES
        self._entries.extend((row, location, 0, 0, 0.0))    # its times are its own

    def add_collective(
        self, name: str, axes: tuple[str, ...] | None, group: tuple[int, ...], algorithm: str, work: int | None,
        location: str, dtype: str | None = None,
    ) -> Row:
        """The event of a collective that begins: `add`, without the dictionary."""
        row = _DEFAULTS.copy()
        row[0], row[1] = "collective", name
        row[_AXES], row[_GROUP], row[_ALGORITHM], row[_WORK], row[_DTYPE] = axes, group, algorithm, work, dtype
        self._append(row, location)
        self.begins(name, location)
        return row

    def begins(self, name: str, location: str) -> None:
        """Something is called at a line; said once while it is called again and again."""
        noted_name, noted_location = self._noted
        if self.note is not None and (location is not noted_location or name is not noted_name):
            self.note(name, location)
            self._noted = name, location

    @property
    def count(self) -> int:
        """How many events there are so far."""
        return len(self._entries) // ENTRIES

    def forget(self, name: str, count: int) -> None:
        """Leave out the collectives of this name after the first so many events, and what is inside them."""
        kept: list[Any] = []
        forgotten = set()
        for at in range(count * ENTRIES, len(self._entries), ENTRIES):
            row = row_of(self._entries[at])
            if row[:2] == ["collective", name] or row[_PARENT] in forgotten:
                forgotten.add(at // ENTRIES)
            else:
                kept += self._entries[at : at + ENTRIES]
        self._entries[count * ENTRIES :] = kept

    @contextmanager
    def as_one(self, name: str, location: str) -> Iterator[Row]:
        """The event of an operation made of others: what is called inside are its children."""
        event = self.add("collective", name, location)
        try:
            yield event
        finally:
            for at in range((event[_SERIAL] + 1) * ENTRIES, len(self._entries), ENTRIES):
                row = self._entries[at] = row_of(self._entries[at])
                if row[_PARENT] is None:
                    row[_PARENT] = event[_SERIAL]

    def moved_since(self, count: int) -> list[tuple[Any, ...]]:
        """The fields of a `Traffic` of each collective recorded after so many events."""
        self._count_traffic()
        rows = (row_of(what) for what in self._entries[count * ENTRIES :: ENTRIES])
        return [(row[_SENT], row[_RECEIVED], row[_MESSAGES], row[_SOURCES]) for row in rows if row[0] == "collective"]

    def finish_collective(self, row: Row, count_traffic: Callable[[], Traffic], start_ns: int) -> None:
        """The collective ends now.  What it moved is counted when the record is read, not between two calls."""
        if not self.stopped:
            self._uncounted.append((row, count_traffic))
        row[_WALL_START] = (start_ns - self._wall_zero) / 1e9
        row[_WALL_DURATION] = (time.perf_counter_ns() - start_ns) / 1e9

    def _count_traffic(self) -> None:
        for row, count_traffic in self._uncounted:
            row[_SENT], row[_RECEIVED], row[_MESSAGES], row[_SOURCES], call = count_traffic()
            if call is not None:
                row[_PAYLOAD], row[_ROOT], row[_PAIRS] = call.nbytes, call.root, call.pairs
        self._uncounted.clear()

    def add_repeated(self, template: Template, location: str, start_ns: int) -> None:
        """The event of a collective or a message that ends now, and was like an earlier one.

        The caller says that it `begins`.
        """
        if not self.stopped:
            self._entries.extend((template, location, start_ns, time.perf_counter_ns(), 0.0))

    def add_traffic(self, kind: str, name: str, peer: int, **counted: int) -> None:
        """The event of a transfer whose time nobody took."""
        self._entries.extend(((kind, name, {"peer": peer, **counted}), None, 0, 0, 0.0))

    def serial(self, row: Row) -> int:
        """The number of an event on this rank."""
        number: int = row[_SERIAL]
        return number

    def fill(self, row: Row, **values: Any) -> None:
        """Set fields of an event that was added."""
        for key, value in values.items():
            row[_INDEX[key]] = value

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
            "wall_start_seconds": (start_ns - self._wall_zero) / 1e9,
            "wall_duration_seconds": (time.perf_counter_ns() - start_ns) / 1e9,
        }

    def compute(self, name: str, seconds: float | None, values: dict[str, Any]) -> AbstractContextManager[None]:
        """What is computed inside is one event of this name (more than one, if calls of the library interrupt it)."""
        if seconds is not None:
            values["seconds"] = float(seconds)
        return _Block(self, name, seconds, self._labels_of(name, values))

    def _begin_block(self, labels: tuple[Template, Template]) -> tuple[tuple[Template, Template] | None, int]:
        self._flush_compute()
        before, self._label = self._label, labels
        return before, len(self._entries)

    def _end_block(
        self, name: str, seconds: float | None, before: tuple[Template, Template] | None, first: int
    ) -> None:
        self._flush_compute(
            always=len(self._entries) == first or next(self._computed(first, name), None) is None)
        self._label = before
        if seconds is not None:
            for place in self._computed(first, name):
                self._entries[place + ENTRIES - 1] = seconds
                seconds = 0.0

    def begin_block(self) -> None:
        """A block under way whose price has no event yet gets it here: what follows comes after it."""
        if self._label is not None and self._label[0] is not self._label[1]:
            self._flush_compute()

    def _computed(self, first: int, name: str) -> Iterator[int]:
        """Where the compute events of this name stand, from a place in the record on."""
        entries = self._entries
        for place in range(first, len(entries), ENTRIES):
            what = entries[place]
            if what[0] == "compute" and what[1] == name:
                yield place

    def _labels_of(self, name: str, values: dict[str, Any]) -> tuple[Template, Template]:
        """What is computed under a label, the first time and when it goes on: flops and bytes count once."""
        key = name, *values.values()
        found = self._labels.get(key)
        if found is None:
            if len(self._labels) >= _MOST_LABELS:
                self._labels.clear()
            later = {k: v for k, v in values.items() if k not in ("flops", "nbytes")} | {"part": 1}
            if values.get("flops") or values.get("nbytes") or "seconds" in values:
                later["seconds"] = 0.0      # its price is that of the first piece
            found = self._labels[key] = ("compute", name, values), ("compute", name, later)
        return found

    def _flush_compute(self, *, always: bool = False) -> None:
        if self._depth > 1 or self.stopped:
            return
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        spent = cpu - self._cpu_mark
        begun = self._label is None or self._label[0] is self._label[1]     # a price stands where its block begins
        if spent < _SHORTEST_COMPUTE_NS and begun and not always:
            return
        what = COMPUTE
        if self._label is not None:
            what, later = self._label
            self._label = later, later
        self._entries.extend((what, None, self._wall_mark, wall, spent / 1e9))
        self._cpu_mark, self._wall_mark = cpu, wall
