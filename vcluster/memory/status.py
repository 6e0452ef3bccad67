"""What a device is doing, written where the host can read it while the device sleeps.

A device is running, or finished with its kernel, or blocked; a blocked one tells what each operation under way needs:
from which peer, by which kind of operation there, and which word in shared memory will change when it has happened. The
host (`vcluster.runs.deadlock`) reads this only when it has heard nothing for a moment, so it is written only before a
sleep.

A word counts the changes: a reader that sees the same count before and after has read one state.

Beside it lies what the device called last, for when its process dies.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import NamedTuple

from parallelism.operation import Lane
from vcluster.memory.arena import LINE, PAGE, Arena
from vcluster.memory.layout import STATUS_BYTES, Layout

MOST_CALLS = 4096
"""Calls and their lines that are kept as they are written."""

RUNNING, BLOCKED, FINISHED = range(3)
_VERSION, _STATE, _LENGTH = range(3)

class Need(NamedTuple):
    """Something that an operation waits for."""

    peer: int
    """The rank that must act; -1 is the host."""
    lane: Lane | None
    """The lane of that rank whose operation would do it; None if any call there would."""
    place: int
    """Offset of a word that will have changed when it has happened."""
    value: int
    """What it is now."""


class Operation(NamedTuple):
    """An operation under way: the lane it is first in, what it is, and what it needs (None: not known)."""

    lane: Lane
    text: str
    needs: list[Need] | None


class State(NamedTuple):
    """What a device was doing when it was looked at."""

    version: int
    state: int
    operations: tuple[Operation, ...] = ()
    """If blocked: what is under way; the first is what the kernel itself waits for."""
    location: str = ""
    """The line of the kernel that waits."""


class LastSeen(NamedTuple):
    """What a device was doing when it was last seen: waiting in an operation, or computing after one."""

    operation: str | None = None
    """Its name; None if nothing was called."""
    location: str | None = None
    waiting_in: str | None = None
    """The operation in full, if it waited there."""

    def __str__(self) -> str:
        if self.waiting_in:
            return f" while it waited in {self.waiting_in} at {self.location}"
        return f"; the last it called was {self.operation} at {self.location}" if self.operation else ""


class Status:
    """Writes and reads the states."""

    def __init__(self, arena: Arena, layout: Layout) -> None:
        self._arena = arena
        self._words = [arena.words(layout.status(rank), 3) for rank in range(layout.size)]
        self._texts = [layout.status(rank) + LINE for rank in range(layout.size)]
        self._told: dict[tuple[str, str], bytes] = {}
        self._notes = [layout.status(rank) + STATUS_BYTES - PAGE for rank in range(layout.size)]

    def begin(self, rank: int) -> None:
        """Running, and nothing called yet; said by the host as it starts a run."""
        self._arena.view[self._notes[rank]] = 0
        self.set(rank, RUNNING)

    def set(self, rank: int, state: int) -> None:
        """Running or finished."""
        words = self._words[rank]
        words[_VERSION] += 1
        words[_STATE] = state

    def set_blocked(self, rank: int, operations: Sequence[Operation], location: str) -> None:
        """Blocked, on the first of ``operations``.  What is too long to tell counts as running."""
        plain = [(lane, text, None if needs is None else list(map(tuple, needs))) for lane, text, needs in operations]
        told = marshal.dumps((plain, location))
        words = self._words[rank]
        if len(told) > STATUS_BYTES - PAGE - LINE:
            return
        start = self._texts[rank]
        if words[_STATE] == BLOCKED and self._arena.view[start : start + words[_LENGTH]] == told:
            return  # as before
        words[_VERSION] += 1
        words[_STATE] = RUNNING
        self._arena.view[start : start + len(told)] = told
        words[_LENGTH] = len(told)
        words[_VERSION] += 1
        words[_STATE] = BLOCKED

    def version(self, rank: int) -> int:
        return int(self._words[rank][_VERSION])

    def read(self, rank: int) -> State:
        """One device's state; one that changes while it is read counts as running."""
        words = self._words[rank]
        version, state = words[_VERSION], words[_STATE]
        if state != BLOCKED:
            return State(version, state)
        start = self._texts[rank]
        told = bytes(self._arena.view[start : start + words[_LENGTH]])
        if words[_VERSION] != version:
            return State(version, RUNNING)
        operations, location = marshal.loads(told)
        under_way = tuple(
            Operation(lane, text, None if needs is None else [Need(*need) for need in needs])
            for lane, text, needs in operations
        )
        return State(version, BLOCKED, under_way, location)

    def note(self, rank: int, name: str, location: str) -> None:
        """What is called now, and at which line.  Below half a microsecond, since this is said at every call."""
        told = self._told.get((name, location))
        if told is None:
            if len(self._told) >= MOST_CALLS:  # code that is made anew in every run
                self._told.clear()
            told = self._told[name, location] = f"{name}\0{location}".encode()[: PAGE - 1] + b"\0"
        start = self._notes[rank]
        self._arena.view[start : start + len(told)] = told

    def last_seen(self, rank: int) -> LastSeen:
        """What a device, which may be dead, was doing."""
        state = self.read(rank)
        if state.state == BLOCKED:
            text = state.operations[0].text
            return LastSeen(text.partition("(")[0], state.location, text)
        start = self._notes[rank]
        name, _, rest = bytes(self._arena.view[start : start + PAGE]).partition(b"\0")
        location, _, _ = rest.partition(b"\0")
        return LastSeen(name.decode(errors="replace"), location.decode(errors="replace")) if name else LastSeen()

    def has_changed(self, need: Need) -> bool:
        """Whether what was needed may have happened since."""
        return bool(self._arena.words(need.place)[0] != need.value)
