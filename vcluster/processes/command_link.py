"""The connection for commands and replies between the host and a device's process: notes in shared memory, and a pipe.

A receiver polls for a note, which takes less than a microsecond. After polling in vain for a moment, it publishes that
it sleeps and waits at the pipe; the sender of the next message then writes to the pipe. Each direction has room for
one note. A message that does not fit goes through the pipe, and the next note tells how many such messages precede it.
"""

import os
import pickle
import threading
from collections import deque
from typing import Any

from vcluster.code import OperationCancelled
from vcluster.memory import LINE, WIRE_BYTES, Arena, give_way
from vcluster.processes.output import print_in_fork

POLLS = 240
"""Number of polls of all devices together before they sleep. With four devices, each polls for about 60 microseconds.
"""

NOTE_BYTES = WIRE_BYTES // 2 - LINE

_NUMBER, _NBYTES, _PIPED, _TAKEN, _SLEEPS = range(5)
"""The words of one side. Of its last note: its number, its size in bytes, and the number of messages that went through
the pipe before it. Then the number of the note that this side took last, and whether this side sleeps."""


class Wire:
    """One end of the connection. The pipe is closed with it."""

    def __init__(self, arena: Arena, place: int, fd: int, *, host: bool, polls: int = 1) -> None:
        """``place`` is the offset of both sides' notes. It must be zero at first. ``fd`` is this end of the pipe."""
        self.fd = fd
        self._polls = polls
        mine, theirs = (place, place + WIRE_BYTES // 2) if host else (place + WIRE_BYTES // 2, place)
        self._mine, self._theirs = arena.words(mine, 5), arena.words(theirs, 5)
        self._note = arena.view[mine + LINE : mine + LINE + NOTE_BYTES]
        self._their_note = arena.view[theirs + LINE : theirs + LINE + NOTE_BYTES]
        self._turnstile = threading.Lock()
        self._read = bytearray()
        """Bytes from the pipe that do not form a whole message yet."""
        self._left: deque[bytes] = deque()
        """Messages that were read and not received yet."""
        self._sent = self._received = 0
        """Numbers of messages through the pipe."""

    def close(self) -> None:
        """Close this end of the pipe. A second call has no effect."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close

    def send(self, data: bytes) -> None:
        """Send a message, which must not be empty. ``OSError`` if the other side is gone."""
        mine, theirs = self._mine, self._theirs
        if len(data) > NOTE_BYTES or theirs[_SLEEPS] or theirs[_TAKEN] != mine[_NUMBER]:
            self._sent += 1
            self._write(data)
            return
        self._note[: len(data)] = data
        mine[_NBYTES], mine[_PIPED] = len(data), self._sent
        self._fence()
        mine[_NUMBER] += 1
        self._fence()
        if theirs[_SLEEPS]:  # it fell asleep just now
            self._write(b"")

    def take_note(self) -> bytes | None:
        """The next message if it is a note. None if there is none."""
        number = self._theirs[_NUMBER]
        if number == self._mine[_TAKEN]:
            return None
        self._fence()
        if self._theirs[_PIPED] > self._received:
            return None  # messages in the pipe precede it
        data = bytes(self._their_note[: self._theirs[_NBYTES]])
        self._fence()
        self._mine[_TAKEN] = number
        return data

    def read(self) -> list[bytes]:
        """Block until the pipe brings data, and return its messages, each after the note that precedes it.

        The list is empty if the pipe brought only a wake-up or part of a message. ``EOFError`` or ``OSError`` when the
        connection has ended.
        """
        more = os.read(self.fd, 1 << 16)
        if not more:
            raise EOFError
        self._read += more
        messages: list[bytes] = []
        while len(self._read) >= 4 and len(self._read) >= (
            end := 4 + int.from_bytes(self._read[:4], "little")
        ):
            if end > 4:
                note = self.take_note()  # a note that is there was left before
                messages += [bytes(self._read[4:end])] if note is None else [note, bytes(self._read[4:end])]
                self._received += 1
            del self._read[:end]
        return messages

    def receive(self) -> bytes:
        """Block until there is a message, and return it."""
        if self._left:
            return self._left.popleft()
        for _ in range(self._polls):
            data = self.take_note()
            if data is not None:
                return data
            give_way()
        self.fall_asleep()
        try:
            while True:
                data = self.take_note()
                if data is not None:
                    return data
                self._left.extend(self.read())
                if self._left:
                    return self._left.popleft()
        finally:
            self.awake()

    def fall_asleep(self) -> None:
        """Ask the other side for wake-ups through the pipe. Poll once more afterwards, for a message sent before."""
        self._mine[_SLEEPS] = 1
        self._fence()

    def awake(self) -> None:
        self._mine[_SLEEPS] = 0

    def _write(self, data: bytes) -> None:
        left = memoryview(len(data).to_bytes(4, "little") + data)
        while left:
            left = left[os.write(self.fd, left) :]

    def _fence(self) -> None:
        """See `vcluster.memory.signals.Signals.fence`."""
        self._turnstile.acquire(False)
        self._turnstile.release()


class WireLink:
    """The connection as a device uses it, whose run the host may interrupt."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire: Wire | None = wire
        self._rank = rank
        self._lock = threading.Lock()
        self._speaking = False
        self._interrupted = False

    def forked(self, *, keep: bool) -> None:
        """In a forked copy of the device: close the pipe, so that its end is the end of the device."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def send(self, message: Any) -> None:
        wire = self._wire
        if wire is None:
            print_in_fork(self._rank, message)
            return
        data = self._packed(message)
        mine = threading.current_thread() is threading.main_thread()
        if mine:
            self._speaking = True
        try:
            with self._lock:  # a kernel's own threads may print
                wire.send(data)
        finally:
            if mine:
                self._speaking = False
                self.settle()

    def interrupt(self) -> None:
        """Raise `OperationCancelled` in the main thread, after a message that is being sent."""
        if self._speaking:
            self._interrupted = True
        else:
            raise OperationCancelled("another device failed")

    def settle(self) -> None:
        if self._interrupted:
            self._interrupted = False
            raise OperationCancelled("another device failed")

    def receive(self) -> Any:
        assert self._wire is not None
        return self._unpacked(self._wire.receive())

    def _packed(self, message: Any) -> Any:
        return pickle.dumps(message, 5)

    def _unpacked(self, data: Any) -> Any:
        return pickle.loads(data)
