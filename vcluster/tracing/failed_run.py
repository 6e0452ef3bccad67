"""The record of a run that failed: `FailedRun`, and the dumps that `vcluster.hangs` explains.

A device replies with its record when its run fails, too.  Of a call that never ended the record has a beginning, or
nothing where a call that was made before is repeated; what the device waited in is known from what it published.  Both
are put together when somebody asks, so that a run pays nothing for it.

A dump has the form of PyTorch's flight recorder (one entry for each call, with group, number, sizes and lines), and
these fields more: ``call``, the call as errors show it; ``waited``, whether the kernel waited for it; ``tag``; and of the
rank ``outcome`` and ``raised``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import permutations
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from parallelism.events import HOST
from parallelism.mesh import Mesh
from parallelism.operation import Lane
from parallelism.whole_files import written_whole
from vcluster.memory import BLOCKED, Operation, State
from vcluster.tracing.columns import Packed, columns_of

if TYPE_CHECKING:
    from parallelism.events import Event

VERSION = "2.10"
"""The version of PyTorch's dumps whose fields these have."""


class Line(Protocol):
    """A line of the user's code that was being executed."""

    @property
    def function(self) -> str: ...
    @property
    def place(self) -> str:
        """``file:line``."""


class Ended(NamedTuple):
    """How a rank ended."""

    outcome: str
    """``returned``, ``raised``, or ``stopped`` because of others."""
    raised: str = ""
    """The type of what it raised."""
    location: str = ""
    """The line that raised."""
    state: State | None = None
    """What it published when the run failed: what it waited in."""
    stack: Sequence[Line] = ()
    """Where its kernel was, outermost first."""


class FailedRun:
    """What each rank did in a run that failed, as far as it came: ``error.trace``.

    >>> from vcluster import DeadlockError, VirtualCluster
    >>> with VirtualCluster(2, backend="thread") as cluster:
    ...     try:
    ...         cluster.run(lambda device: device.recv(1 - device.rank))
    ...     except DeadlockError as error:
    ...         record = error.trace
    >>> [(dump["rank"], dump["entries"][-1]["call"]) for dump in record.dumps]
    [(0, 'recv(from rank 1, tag 0)'), (1, 'recv(from rank 0, tag 0)')]

    `save` writes it, and ``python -m vcluster hang`` or `vcluster.hangs.explain` explains the file without the program.
    """

    def __init__(
        self,
        mesh: Mesh,
        records: Mapping[int, bytes | Packed],
        ended: Mapping[int, Ended],
        calls: Mapping[int, str],
    ) -> None:
        """``calls``: what each member of a group called, where they called different things."""
        self.mesh = mesh
        self._records, self._ended, self._calls = records, ended, calls

    @cached_property
    def events(self) -> list[Event]:
        """What every rank recorded, rank by rank. They have wall times, and no virtual times: the run has no end."""
        return list(columns_of(self._records).events()) if self._records else []

    @cached_property
    def dumps(self) -> list[dict[str, Any]]:
        """A dump of each rank, in the form of PyTorch's flight recorder. A rank whose process died has none."""
        groups = _Groups(self.mesh, self.events)
        mine: dict[int, list[Event]] = {rank: [] for rank in self._ended}
        for event in self.events:
            mine[event.rank].append(event)
        return [
            _Dump(rank, ended, groups).of(mine[rank], self._calls)
            for rank, ended in sorted(self._ended.items())
        ]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the dumps of all ranks into one file, as JSON, a line for each. ``OSError`` if it cannot be written."""
        with written_whole(path) as file:
            lines = ",\n".join(map(json.dumps, self.dumps))
            file.write(f'{{"version": {json.dumps(VERSION)}, "dumps": [\n{lines}\n]}}\n')

    def __repr__(self) -> str:
        return f"<record of a failed run on {self.mesh!r}>"


def open_call(events: Iterable[Event], group: tuple[int, ...]) -> Event | None:
    """Of what one rank recorded, the first call of a group that has not ended. One that repeats an earlier call may be
    missing: it is recorded when it ends.
    """
    for event in events:
        if event.kind == "collective" and event.group == group and not event.wall_duration_seconds:
            return event
    return None


class _Groups:
    """The groups of a run: of the mesh's axes, and others that were called."""

    def __init__(self, mesh: Mesh, events: Sequence[Event]) -> None:
        self.world = tuple(range(mesh.size))
        self._names = {self.world: "all ranks"}
        for count in range(1, len(mesh.axes) + 1):
            for axes in permutations(mesh.axes, count):
                for ranks in mesh.groups(axes):
                    self._names.setdefault(ranks, ", ".join(axes))
        for event in events:
            if event.group is not None:
                self._names.setdefault(event.group, "groups=")
        self._numbers = {ranks: number for number, ranks in enumerate(self._names)}

    def named(self, text: str) -> tuple[int, ...]:
        """The group that the text of a call names; without one it is that of all ranks."""
        found = re.search(r" of group \[([\d, ]+)\]", text)
        return self.world if found is None else self.known(tuple(map(int, found[1].split(","))))

    def known(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """A group, which has a number from now on."""
        self._names.setdefault(ranks, "groups=")
        self._numbers.setdefault(ranks, len(self._numbers))
        return ranks

    def fields(self, ranks: tuple[int, ...]) -> dict[str, Any]:
        """What an entry says of its group."""
        return {"pg_id": self._numbers[ranks], "process_group": [f"{list(ranks)}", self._names[ranks]]}

    def configuration(self, used: set[tuple[int, ...]]) -> dict[str, Any]:
        """What a dump says of the groups of its calls."""
        return {
            str(self._numbers[ranks]): {
                "name": f"{list(ranks)}",
                "desc": self._names[ranks],
                "ranks": f"{list(ranks)}",
            }
            for ranks in sorted(used, key=self._numbers.__getitem__)
        }


class _Dump:
    """Writes the dump of one rank."""

    def __init__(self, rank: int, ended: Ended, groups: _Groups) -> None:
        self._rank, self._ended, self._groups = rank, ended, groups
        self._entries: list[dict[str, Any]] = []
        self._lanes: list[Lane] = []
        """For each entry, the lane in which it is in order with others."""
        self._numbers: Counter[Lane] = Counter()
        self._used = {groups.world}

    def of(self, events: Sequence[Event], calls: Mapping[int, str]) -> dict[str, Any]:
        """The dump, from what the rank recorded and waited in; of a mismatch, from what the members called."""
        awaited = {event.work for event in events if event.kind == "wait"}
        pending = self._pending()
        different = open_call(events, tuple(calls)) if self._rank in calls else None
        for event in events:
            if event is different:
                self._add_mismatch(calls, event.location or "")
            elif event.parent is None and event.kind in ("collective", "send", "recv") and event.peer != HOST:
                is_over = event.wall_duration_seconds > 0 or (
                    event.work is not None and event.work in awaited
                )
                if event.kind == "send":
                    is_over = is_over or ("send", event.peer, event.tag) not in pending
                if (
                    is_over or event.work is not None
                ):  # a blocking call that is not over is added as it was published
                    self._add_event(event, is_over)
        if self._rank in calls:
            if different is None:
                self._add_mismatch(calls, self._line_of_end())
        elif self._is_blocked:
            state = self._ended.state
            assert state is not None
            for place, operation in enumerate(state.operations[: state.waits]):
                self._wait_in(operation, "" if place else state.location)
        return {
            "version": VERSION,
            "rank": self._rank,
            "outcome": self._ended.outcome,
            "raised": self._ended.raised,
            "pg_config": self._groups.configuration(self._used),
            "entries": self._entries,
        }

    @property
    def _is_blocked(self) -> bool:
        state = self._ended.state
        return self._ended.outcome == "stopped" and state is not None and state.state == BLOCKED

    def _pending(self) -> list[Lane]:
        state = self._ended.state
        return [] if state is None else [operation.lane for operation in state.operations]

    def _add_event(self, event: Event, is_over: bool) -> None:
        lane, text = self._lane_of(event)
        entry = self._add(lane, text, event.location or "", (), is_over=is_over, dtype=event.dtype)
        if event.wall_start_seconds:
            start = round(event.wall_start_seconds * 1e9)
            entry["time_created_ns"] = entry["time_discovered_started_ns"] = start
            if is_over:
                entry["time_discovered_completed_ns"] = start + round(event.wall_duration_seconds * 1e9)

    def _lane_of(self, event: Event) -> tuple[Lane, str]:
        """What an event is in order with, and its text.  A record has no arguments of a call, only what it moved."""
        if event.kind == "collective":
            known = [event.dtype or "", f"{event.payload_bytes:.0f} bytes" if event.payload_bytes else ""]
            return (
                "group",
                event.group or self._groups.world,
            ), f"{event.name}({', '.join(filter(None, known))})"
        way = "to" if event.kind == "send" else "from"
        return (event.kind, event.peer, event.tag), f"{event.kind}({way} rank {event.peer}, tag {event.tag})"

    def _wait_in(self, operation: Operation, location: str) -> None:
        """Note that the kernel waited in an operation: one that was issued before, or else a new one."""
        lane = operation.lane
        if lane[0] == "group":
            lane = "group", self._groups.named(operation.text)
        entry = next(
            (
                entry
                for entry, its in zip(self._entries, self._lanes, strict=True)
                if its == lane and entry["state"] != "completed"
            ),
            None,
        )
        if entry is None:
            entry = self._add(lane, operation.text, location, self._ended.stack, is_over=False)
        elif location:
            entry["frames"] = _frames(location, self._ended.stack)
        entry["waited"], entry["call"] = True, operation.text

    def _line_of_end(self) -> str:
        """Where the kernel raised or waited; of a call that was made before, the record has no beginning."""
        ended = self._ended
        stack = ended.stack[-1].place if ended.stack else ""
        return ended.location or stack or (ended.state.location if ended.state is not None else "")

    def _add_mismatch(self, calls: Mapping[int, str], location: str) -> None:
        """The call of this rank in a group whose members called different things."""
        self._add(("group", tuple(calls)), calls[self._rank], location, (), is_over=False)

    def _add(
        self,
        lane: Lane,
        text: str,
        location: str,
        stack: Sequence[Line],
        *,
        is_over: bool,
        dtype: str | None = None,
    ) -> dict[str, Any]:
        self._numbers[lane] += 1
        where: Any = lane[1]  # the group, or the peer
        is_message = lane[0] != "group"
        group = self._groups.world if is_message else self._groups.known(where)
        self._used.add(group)
        name = text.partition("(")[0]
        if is_message:  # the host stands behind the last rank
            arrow = "->" if lane[0] == "send" else "<-"
            name = f"{lane[0]} {self._rank}{arrow}{len(group) if where == HOST else where}"
        entry = {
            "record_id": len(self._entries),
            **self._groups.fields(group),
            "collective_seq_id": 0 if is_message else self._numbers[lane],
            "p2p_seq_id": self._numbers[lane] if is_message else 0,
            "is_p2p": is_message,
            "tag": lane[2] if is_message else 0,
            "profiling_name": f"vcluster:{name}",
            "call": text,
            "input_dtypes": [] if dtype is None else [dtype],
            "state": "completed" if is_over else "started",
            "frames": _frames(location, stack),
        }
        self._entries.append(entry)
        self._lanes.append(lane)
        return entry


def _frames(location: str, stack: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines of a call, innermost first."""
    lines = [(line.function, line.place) for line in reversed(stack)]
    if location and not (lines and lines[0][1] == location):
        lines.insert(0, ("", location))
    frames = []
    for function, place in lines:
        filename, _, number = place.rpartition(":")
        frames.append(
            {"name": function, "filename": filename, "line": int(number) if number.isdigit() else 0}
        )
    return frames
