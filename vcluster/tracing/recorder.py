"""A device records what it does in one flat list, because appending to it costs less than a microsecond.

An event has five entries: its description, its line in the user's code, its start and end in wall time (nanoseconds; 0
if not given), and its CPU seconds. The description is a `Template`, the same object for all events with one signature,
or, if more fields can differ, a `Row` with all fields of an event except the rank. `vcluster.tracing.columns` builds a
trace from the records of all devices.

The compute between two calls is measured by the CPU time of the device's thread, which does not depend on how crowded
the machine is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from vcluster.code import ClusterError
from vcluster.memory import forks
from vcluster.memory.threads import Threads, is_engaged
from vcluster.tracing import refusals
from vcluster.tracing.templates import DEFAULTS, INDEX, Row, Template, row_of

if TYPE_CHECKING:
    from parallelism.collectives import Traffic

(
    _AXES,
    _GROUP,
    _ALGORITHM,
    _WORK,
    _SERIAL,
    _PARENT,
    _DTYPE,
    _SENT,
    _RECEIVED,
    _MESSAGES,
    _SOURCES,
    _WALL_START,
    _WALL_DURATION,
    _PAYLOAD,
    _ROOT,
    _PAIRS,
) = map(
    INDEX.__getitem__,
    (
        "axes",
        "group",
        "algorithm",
        "work",
        "serial",
        "parent",
        "dtype",
        "bytes_sent",
        "bytes_received",
        "messages",
        "sources",
        "wall_start_seconds",
        "wall_duration_seconds",
        "payload_bytes",
        "root",
        "pairs",
    ),
)
_SHORTEST_COMPUTE_NS = 2000
"""Nanoseconds below which compute between two calls gets no event of its own. It is added to the next event."""
_OLDEST_CPU_MARK_NS = 25_000
"""Between calls that follow each other at once, the CPU time is read again after so many nanoseconds.  Reading it is a
system call, which takes a sixth of a small collective."""
_MOST_LABELS = 4096

ENTRIES = 5
"""Entries per event in a record: description, line, start and end in nanoseconds, CPU seconds."""

COMPUTE: Template = ("compute", "compute", {})


Labels = tuple[Template, Template]
"""The templates of a labelled block: for its first piece, and for the pieces after an interruption."""

Record = tuple[int, list[Any]]
"""The record of one device in one run: the wall time of its start in nanoseconds, and the entries."""


def _note_nowhere(name: str, location: str) -> None:
    """The note of a recorder whose calls nobody looks at."""


class _Block:
    """A context manager for `Recorder.compute`. A class is faster than a generator."""

    __slots__ = ("_before", "_first", "_labels", "_name", "_recorder", "_seconds")

    def __init__(self, recorder: Recorder, name: str, seconds: float | None, labels: Labels) -> None:
        self._recorder, self._name, self._seconds, self._labels = recorder, name, seconds, labels

    def __enter__(self) -> None:
        self._before, self._first = self._recorder._begin_block(self._labels)

    def __exit__(self, *_: object) -> None:
        self._recorder._end_block(self._name, self._seconds, self._before, self._first)


class Recorder:
    """Writes the record of one device during one run."""

    def __init__(self, threads: Threads | None = None) -> None:
        """``threads`` are those that use the endpoint whose calls are recorded."""
        self._threads = threads or Threads()
        self._threads.on_many, self._threads.depth = self._share, lambda: self._depth
        self._first = self._thread = self._threads.first
        """The thread whose compute is recorded; and the one that enters without a lock, 0 if none does."""
        self._shared = self._threads.many
        self._refusal = ""
        """Why no call can be made; empty if one can."""
        self._pid = os.getpid()
        forks.members.add(self)
        self._clear()
        self._labels: dict[Any, Labels] = {}
        self._uncounted_templates: list[tuple[Template, Callable[[], Traffic]]] = []
        """The templates of collectives whose traffic is not counted yet; they outlive a record."""
        self.stopped = True
        self.note: Callable[[str, str], object] = _note_nowhere
        """Called with each call's name and line, so that they are known if the process dies."""
        self._wall_zero = self._wall_mark = self._cpu_mark = self._cpu_read = 0

    def _clear(self) -> None:
        self._entries: list[Any] = []
        self._uncounted: list[tuple[Row, Callable[[], Traffic]]] = []
        """The events of collectives whose traffic is not counted yet."""
        self._label: Labels | None = None
        self._noted_name = self._noted_location = ""
        self._work = self._depth = 0
        self._follows = False
        """Whether the last call followed the one before it at once."""

    def start(self) -> None:
        """Begin an empty record. Its clocks start here."""
        self._clear()
        self._refusal = ""
        self._first, self._shared = get_ident(), self._threads.many
        self._thread = 0 if self._shared else self._first
        self.stopped = False
        self._wall_zero = self._wall_mark = self._cpu_read = perf_counter_ns()
        self._cpu_mark = thread_time_ns()

    def stop(self) -> Record:
        """End the record and return it."""
        self._flush_compute()
        self._count_traffic()
        self.stopped = True
        self._refuse(refusals.NO_RUN)
        entries, self._entries = self._entries, []
        return self._wall_zero, entries

    @property
    def busy(self) -> bool:
        """Whether a call of the library is in progress."""
        return self._depth > 0

    def now(self) -> float:
        """Wall seconds since the start of the record."""
        return (perf_counter_ns() - self._wall_zero) / 1e9

    def add(self, kind: str, name: str, location: str | None = None, **values: Any) -> Row:
        """Append an event. `fill` may complete the returned row later."""
        row = DEFAULTS.copy()
        row[0], row[1] = kind, name
        for key, value in values.items():
            row[INDEX[key]] = value
        if location is not None:
            self.begins(name, location)
        if not self.stopped:
            self._append(row, location)
        return row

    def _append(self, row: Row, location: str | None) -> None:
        row[_SERIAL] = len(self._entries) // ENTRIES
        self._entries.extend((row, location, 0, 0, 0.0))  # the row itself holds the times

    def add_collective(
        self,
        name: str,
        axes: tuple[str, ...] | None,
        group: tuple[int, ...],
        algorithm: str,
        work: int | None,
        location: str,
        dtype: str | None = None,
    ) -> Row:
        """Append the event of a collective that begins. Equivalent to `add`, without the dictionary."""
        row = DEFAULTS.copy()
        row[0], row[1] = "collective", name
        row[_AXES], row[_GROUP], row[_ALGORITHM], row[_WORK], row[_DTYPE] = (
            axes,
            group,
            algorithm,
            work,
            dtype,
        )
        self._append(row, location)
        self.begins(name, location)
        return row

    def begins(self, name: str, location: str) -> None:
        """Note that a call begins at a line. Consecutive repetitions of one call are noted once."""
        if name and (location is not self._noted_location or name is not self._noted_name):
            self._noted_name, self._noted_location = name, location
            self.note(name, location)

    @property
    def count(self) -> int:
        """The number of events so far."""
        return len(self._entries) // ENTRIES

    def forget(self, name: str, count: int) -> None:
        """Remove the collectives of this name after the first ``count`` events, with the events inside them."""
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
        """Add the event of an operation that is made of others. The calls inside become its children."""
        event = self.add("collective", name, location)
        try:
            yield event
        finally:
            self._count_traffic()
            for at in range((event[_SERIAL] + 1) * ENTRIES, len(self._entries), ENTRIES):
                row = self._entries[at] = row_of(self._entries[at])
                if row[_PARENT] is None:
                    row[_PARENT] = event[_SERIAL]

    def moved_since(self, count: int) -> list[tuple[Any, ...]]:
        """The fields of a `Traffic` of each collective recorded after so many events."""
        self._count_traffic()
        return [
            (row[_SENT], row[_RECEIVED], row[_MESSAGES], row[_SOURCES])
            for row in map(row_of, self._entries[count * ENTRIES :: ENTRIES])
            if row[0] == "collective"
        ]

    def finish_collective(self, row: Row, count_traffic: Callable[[], Traffic], start_ns: int) -> None:
        """The collective ends now.  What it moved is counted when the record is read, not between two calls."""
        if not self.stopped:
            self._uncounted.append((row, count_traffic))
        row[_WALL_START] = (start_ns - self._wall_zero) / 1e9
        row[_WALL_DURATION] = (perf_counter_ns() - start_ns) / 1e9

    def _count_traffic(self) -> None:
        for row, count_traffic in self._uncounted:
            row[_SENT], row[_RECEIVED], row[_MESSAGES], row[_SOURCES], call = count_traffic()
            if call is not None:
                row[_PAYLOAD], row[_ROOT], row[_PAIRS] = call.nbytes, call.root, call.pairs
        self._uncounted.clear()
        for (_, _, values), count_traffic in self._uncounted_templates:
            values.update(count_traffic().on_event())
        self._uncounted_templates.clear()

    def collective_template(
        self,
        name: str,
        axes: tuple[str, ...] | None,
        group: tuple[int, ...],
        algorithm: str,
        dtype: str | None,
        count_traffic: Callable[[], Traffic],
    ) -> Template:
        """The description that all repetitions of a collective share.  Its traffic is counted when a record is read."""
        template = "collective", name, {"axes": axes, "group": group, "algorithm": algorithm, "dtype": dtype}
        self._uncounted_templates.append((template, count_traffic))
        return template

    def add_repeated(self, template: Template, location: str | None, start_ns: int) -> None:
        """Append the event of a call that ends now and repeats an earlier one.  The caller has called `begins` before."""
        if not self.stopped:
            self._entries.extend((template, location, start_ns, perf_counter_ns(), 0.0))

    def add_untimed(self, kind: str, name: str, values: dict[str, Any], location: str | None = None) -> None:
        """Append an event whose times are among its ``values``, or not known.  The values may be completed later."""
        if not self.stopped:
            self._entries.extend(((kind, name, values), location, 0, 0, 0.0))

    def serial(self, row: Row) -> int:
        """The number of an event on this rank."""
        return int(row[_SERIAL])

    def fill(self, row: Row, **values: Any) -> None:
        """Set fields of an event that was added before."""
        for key, value in values.items():
            row[INDEX[key]] = value

    def next_work(self) -> int:
        self._work += 1
        return self._work

    def enter(self, name: str = "", location: str = "") -> int:
        """Note that a call of the library begins, and turn the compute before it into an event.

        ``name`` and ``location`` are those of the call, if it `begins` now.  Returns the wall time in nanoseconds.
        """
        if get_ident() != self._thread and not self._comes_in():
            self.begins(name, location)
            return perf_counter_ns()
        self._depth += 1
        try:
            now = perf_counter_ns()
            if self._depth == 1:
                self._follows = now - self._wall_mark < _SHORTEST_COMPUTE_NS and self._label is None
                if not self._follows:
                    self._flush_compute()
                    now = perf_counter_ns()
            if name and (location is not self._noted_location or name is not self._noted_name):  # `begins`
                self._noted_name, self._noted_location = name, location
                self.note(name, location)
        except RecursionError:
            self._depth -= 1
            raise
        return now

    def leave(
        self, kind: type[BaseException] | None = None, error: BaseException | None = None, _: object = None
    ) -> None:
        """Note that the call ends, with this exception if there was one."""
        if error is not None and (why := refusals.broken_off(error)):
            self._refuse(why)
        if self._shared and not self._goes_out():
            return
        self._depth -= 1
        if self._depth == 0:
            self._mark(perf_counter_ns())

    def leave_repeated(self, template: Template | None, location: str | None, start_ns: int) -> None:
        """`add_repeated` (if there is a template) and `leave` in one, with one look at the clock."""
        now = perf_counter_ns()
        if template is not None and not self.stopped:
            self._entries.extend((template, location, start_ns, now, 0.0))
        if self._shared and not self._goes_out():
            return
        self._depth -= 1
        if self._depth == 0:
            if self._follows and now - self._cpu_read < _OLDEST_CPU_MARK_NS:  # `_mark`, inlined
                self._wall_mark = now
            else:
                self._mark(now)

    def _mark(self, now: int) -> None:
        """The compute that the next call ends begins now.

        Where calls follow each other at once, the CPU time is not read after each: `_flush_compute` knows that the
        compute took no longer than the wall time, and this mark is at most `_OLDEST_CPU_MARK_NS` old.
        """
        if not self._follows or now - self._cpu_read >= _OLDEST_CPU_MARK_NS:
            self._cpu_mark = thread_time_ns()
            now = self._cpu_read = perf_counter_ns()
        self._wall_mark = now

    __enter__ = enter  # ``with recorder as start:`` around a call
    __exit__ = leave

    def _share(self) -> None:
        """Several threads make calls from now on."""
        self._thread, self._shared = 0, True

    def _comes_in(self) -> bool:
        """Let the calling thread in, one at a time. Whether it is the kernel's own."""
        if self._refusal:
            raise ClusterError(self._refusal)
        if self._first and get_ident() != self._first and is_engaged():
            raise ClusterError(refusals.ELSEWHERE)
        self._threads.__enter__()
        return get_ident() == self._first

    def _goes_out(self) -> bool:
        """Let the next thread in. Whether the calling thread is the kernel's own."""
        self._threads.__exit__()
        return get_ident() == self._first

    def forked(self, *, keep: bool) -> None:
        """In a forked copy of the process: refuse every call from now on."""
        self._refuse(refusals.forked(self._pid))

    def _refuse(self, why: str) -> None:
        """Refuse every call from now on, until the next record is started."""
        self._thread, self._refusal = -1, why

    def end_among_others(self, row: Row, name: str) -> None:
        """A call that was waited for ends. If other threads made calls meanwhile, it is one that was issued and later
        waited for: the record of a device has only one order.
        """
        if self._threads.many and row[_WORK] is None and not self.stopped:
            row[_WORK] = self.next_work()
            self.add("wait", name, None, work=row[_WORK], wall_start_seconds=self.now())

    def since(self, start_ns: int) -> dict[str, float]:
        """The wall times of an event that began at ``start_ns`` and ends now."""
        return {
            "wall_start_seconds": (start_ns - self._wall_zero) / 1e9,
            "wall_duration_seconds": (perf_counter_ns() - start_ns) / 1e9,
        }

    def compute(
        self, name: str, seconds: float | None, values: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Record the compute inside the context as one event of this name, or as several if calls interrupt it."""
        if seconds is not None:
            values["seconds"] = float(seconds)
        if get_ident() != self._first:
            return self._compute_elsewhere(name, values)
        return _Block(self, name, seconds, self._labels_of(name, values))

    @contextmanager
    def _compute_elsewhere(self, name: str, values: dict[str, Any]) -> Iterator[None]:
        """The work of another thread than the kernel's own, as one event."""
        cpu, wall = thread_time_ns(), perf_counter_ns()
        try:
            yield
        finally:
            spent = values.pop("seconds", (thread_time_ns() - cpu) / 1e9)
            self._entries.extend((("compute", name, values), None, wall, perf_counter_ns(), spent))

    def _begin_block(self, labels: Labels) -> tuple[Labels | None, int]:
        self._flush_compute()
        before, self._label = self._label, labels
        return before, len(self._entries)

    def _end_block(self, name: str, seconds: float | None, before: Labels | None, first: int) -> None:
        self._flush_compute(
            always=len(self._entries) == first or next(self._computed(first, name), None) is None
        )
        self._label = before
        if seconds is not None:
            for place in self._computed(first, name):
                self._entries[place + ENTRIES - 1] = seconds
                seconds = 0.0

    def begin_block(self) -> None:
        """Append the first event of a priced block in progress, so that later events follow it."""
        if self._label is not None and self._label[0] is not self._label[1]:
            self._flush_compute()

    def _computed(self, first: int, name: str) -> Iterator[int]:
        """Indices into the record of the compute events of this name, from index ``first`` on."""
        entries = self._entries
        for place in range(first, len(entries), ENTRIES):
            what = entries[place]
            if what[0] == "compute" and what[1] == name:
                yield place

    def _labels_of(self, name: str, values: dict[str, Any]) -> Labels:
        """The templates of a labelled block.

        Flops and bytes belong to the first piece, so that they count once.
        """
        key = name, *values.values()
        labels = self._labels.get(key)
        if labels is None:
            if len(self._labels) >= _MOST_LABELS:
                self._labels.clear()
            later = {k: v for k, v in values.items() if k not in ("flops", "nbytes")} | {"part": 1}
            if values.get("flops") or values.get("nbytes") or "seconds" in values:
                later["seconds"] = 0.0  # the first piece carries the price
            labels = self._labels[key] = ("compute", name, values), ("compute", name, later)
        return labels

    def _flush_compute(self, *, always: bool = False) -> None:
        if self._depth > 1 or self.stopped or get_ident() != self._first:
            return
        cpu, wall = thread_time_ns(), perf_counter_ns()
        spent = min(cpu - self._cpu_mark, wall - self._wall_mark)  # the mark may be older: see `_mark`
        begun = (
            self._label is None or self._label[0] is self._label[1]
        )  # a price stands where its block begins
        if spent < _SHORTEST_COMPUTE_NS and begun and not always:
            return
        what = COMPUTE
        if self._label is not None:
            what, later = self._label
            self._label = later, later
        self._entries.extend((what, None, self._wall_mark, wall, spent / 1e9))
        self._cpu_mark, self._wall_mark, self._cpu_read = cpu, wall, wall
