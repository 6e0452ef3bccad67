"""Each device publishes its state in shared memory, where the host can read it while the device sleeps.

A device is running, blocked, or finished with its kernel; or it has left the kernel of a run that failed. A blocked device
lists what each pending operation needs: the peer that must act, the kind of operation the peer must perform, and the word
in shared memory that will change then.
The host (`vcluster.runs.deadlock`) reads this only after it has received nothing for a moment, so a device writes it
only before it sleeps, and after it has waited for a moment itself.

A version word counts the changes. A reader that sees the same version before and after has read one consistent state.

The device's last call is stored beside its state. It is reported when the process dies.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any, NamedTuple

from parallelism.operation import Lane
from vcluster.memory.arena import LINE, PAGE, Arena, Heap
from vcluster.memory.layout import STATUS_BYTES, Layout

MOST_CALLS = 4096
"""Maximal number of pairs of call and line whose encoded text is cached."""

RUNNING, BLOCKED, FINISHED, LEFT = range(4)
"""The states. A device that has left the kernel of a failed run only packs what it has recorded, which may take seconds."""
_VERSION, _STATE, _LENGTH, _PLACE = range(4)


class Need(NamedTuple):
    """One condition that an operation waits for."""

    peer: int
    """The rank that must act. -1 is the host."""
    lane: Lane | None
    """The lane of that rank whose operation would act. None if any call there would."""
    place: int
    """Offset of a word that will have changed when the condition holds."""
    value: int
    """The present value of that word."""


class Operation(NamedTuple):
    """A pending operation: the lane in which it is first, its text, and its needs (None if they are not known)."""

    lane: Lane
    text: str
    needs: list[Need] | None


class State(NamedTuple):
    """The state of a device at one version."""

    version: int
    state: int
    operations: tuple[Operation, ...] = ()
    """The pending operations of a blocked device. The first are those that threads of the kernel wait for."""
    location: str = ""
    """The line of the kernel that waits."""
    waits: int = 1
    """The number of operations, the first ones, that a thread of the kernel waits for."""

    def last_seen(self) -> LastSeen:
        """What a blocked device waits in."""
        text = self.operations[0].text
        return LastSeen(text.partition("(")[0], self.location, text)


def encode_blocked(operations: Sequence[Operation], location: str, waits: int, *more: Any) -> bytes:
    """What a blocked device tells of itself, and ``more``, which stands behind it."""
    plain = []
    for lane, text, needs in operations:  # marshal takes no named tuples
        plain.append((lane, text, None if needs is None else [tuple(need) for need in needs]))
    return marshal.dumps((plain, location, waits, *more))


def decode_blocked(encoded: bytes, version: int) -> tuple[State, list[Any]]:
    """The state that `encode_blocked` was given, at this version, and what stood behind it."""
    plain, location, waits, *more = marshal.loads(encoded)
    operations = []
    for lane, text, needs in plain:
        operations.append(Operation(lane, text, None if needs is None else [Need(*need) for need in needs]))
    return State(version, BLOCKED, tuple(operations), location, waits), more


class LastSeen(NamedTuple):
    """The last known activity of a device: waiting in an operation, or computing after one."""

    operation: str | None = None
    """The name of the operation. None if nothing was called."""
    location: str | None = None
    waiting_in: str | None = None
    """The full text of the operation, if the device waited in it."""

    def __str__(self) -> str:
        if self.waiting_in:
            return f" while it waited in {self.waiting_in} at {self.location}"
        return f"; its last call was {self.operation} at {self.location}" if self.operation else ""


def _as_text(noted: bytes) -> str:
    """What was noted. The name of a file need not be UTF-8, nor what the locale has: then it holds surrogates."""
    try:
        return noted.decode(errors="surrogatepass")
    except UnicodeDecodeError:  # it was cut
        return noted.decode(errors="replace")


class Status:
    """Writes and reads the states of all devices."""

    def __init__(self, arena: Arena, layout: Layout, heap: Heap | None = None) -> None:
        """``heap``: where the owner of a state puts a text that is too long for its place."""
        self._arena = arena
        self._heap = heap
        self._published = b""
        self._elsewhere: int | None = None
        self._words = [arena.words(layout.status(rank), 4) for rank in range(layout.size)]
        self._texts = [layout.status(rank) + LINE for rank in range(layout.size)]
        self._encoded: dict[tuple[str, str], bytes] = {}
        self._notes = [layout.status(rank) + STATUS_BYTES - PAGE for rank in range(layout.size)]

    def begin(self, rank: int) -> None:
        """Mark a device as running, with no call yet. The host calls this when it starts a run."""
        self._arena.view[self._notes[rank]] = 0
        self.set(rank, RUNNING)

    def set(self, rank: int, state: int) -> None:
        """Mark a device as running, as finished, or as gone from a kernel that failed."""
        words = self._words[rank]
        words[_VERSION] += 1
        words[_STATE] = state

    def set_blocked(self, rank: int, operations: Sequence[Operation], location: str, waits: int = 1) -> None:
        """Mark a device as blocked on the first ``waits`` of ``operations``."""
        encoded = encode_blocked(operations, location, waits)
        words = self._words[rank]
        if words[_STATE] == BLOCKED and encoded == self._published:
            return  # nothing has changed
        words[_VERSION] += 1
        words[_STATE] = RUNNING
        start = self._place_for(len(encoded), self._texts[rank])
        self._arena.view[start : start + len(encoded)] = encoded
        self._published = encoded
        words[_LENGTH], words[_PLACE] = len(encoded), start
        words[_VERSION] += 1
        words[_STATE] = BLOCKED

    def _place_for(self, nbytes: int, usual: int) -> int:
        """Where a text goes. One that is longer than a few pages lies in the heap, until the next one is published."""
        if self._elsewhere is not None and self._heap is not None:
            self._heap.free(self._elsewhere)
            self._elsewhere = None
        if nbytes <= STATUS_BYTES - PAGE - LINE or self._heap is None:
            return usual
        self._elsewhere = self._heap.allocate(nbytes)
        return self._elsewhere

    def version(self, rank: int) -> int:
        return int(self._words[rank][_VERSION])

    def read(self, rank: int) -> State:
        """The state of a device. A state that changes while it is read counts as running."""
        words = self._words[rank]
        version, state = words[_VERSION], words[_STATE]
        if state != BLOCKED:
            return State(version, state)
        start = words[_PLACE]
        encoded = bytes(self._arena.view[start : start + words[_LENGTH]])
        if words[_VERSION] != version:
            return State(version, RUNNING)
        return decode_blocked(encoded, version)[0]

    def note(self, rank: int, name: str, location: str) -> None:
        """Store the present call and its line. This runs at every call and takes less than half a microsecond."""
        encoded = self._encoded.get((name, location))
        if encoded is None:
            if len(self._encoded) >= MOST_CALLS:  # a program may create new code in every run
                self._encoded.clear()
            noted = f"{name}\0{location}".encode(errors="surrogatepass")
            encoded = self._encoded[name, location] = noted[: PAGE - 1] + b"\0"
        start = self._notes[rank]
        self._arena.view[start : start + len(encoded)] = encoded

    def last_seen(self, rank: int) -> LastSeen:
        """The last activity of a device, which may be dead."""
        state = self.read(rank)
        if state.state == BLOCKED:
            return state.last_seen()
        start = self._notes[rank]
        name, location, *_ = map(_as_text, bytes(self._arena.view[start : start + PAGE]).split(b"\0"))
        return LastSeen(name, location) if name else LastSeen()

    def has_changed(self, need: Need) -> bool:
        """Whether the word of ``need`` has changed, so that the condition may hold now."""
        return bool(self._arena.words(need.place)[0] != need.value)
