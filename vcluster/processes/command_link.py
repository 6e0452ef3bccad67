"""The way of commands and replies between the host and a device's process: a note in shared memory, and a pipe.

A note is found by looking, which costs less than a microsecond; who has looked in vain for a moment says that it
sleeps and waits at the pipe, and who then leaves a note rings there, by an empty message.  One note lies there at a
time each way.  What is too long for it goes through the pipe itself, and a note says how many such messages come
before it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

from vcluster.memory import LINE, WIRE_BYTES, Arena, give_way

LOOKS = 240
"""How often the devices together look before they sleep: each of four for some 60 microseconds."""

NOTE_BYTES = WIRE_BYTES // 2 - LINE

_NUMBER, _NBYTES, _PIPED, _TAKEN, _SLEEPS = range(5)
"""The words of one side: of the note it left last, which number and how long it is and how many messages went through
the pipe before it; the number of the note it took last; whether it sleeps."""


class Wire:
    """One end."""

    def __init__(self, arena: Arena, place: int, connection: Any, *, host: bool, looks: int = 1) -> None:
        """``place`` is where the notes of both sides lie; all is zero there at first."""
        self.connection = connection
        self._looks = looks
        mine, theirs = (place, place + WIRE_BYTES // 2) if host else (place + WIRE_BYTES // 2, place)
        self._mine, self._theirs = arena.words(mine, 5), arena.words(theirs, 5)
        self._note = arena.view[mine + LINE : mine + LINE + NOTE_BYTES]
        self._their_note = arena.view[theirs + LINE : theirs + LINE + NOTE_BYTES]
        self._turnstile = threading.Lock()
        self._fd = connection.fileno()
        self._read = bytearray()
        """What came through the pipe and is not a whole message yet."""
        self._left: deque[bytes] = deque()
        """What was read and not received yet."""
        self._sent = 0
        """Messages through the pipe."""
        self._received = 0

    def send(self, data: bytes) -> None:
        """Leave a message (not an empty one).  ``OSError`` if the other side has gone."""
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
        if theirs[_SLEEPS]:  # since a moment ago
            self._write(b"")

    def look(self) -> bytes | None:
        """The next message, if it is a note that lies there."""
        number = self._theirs[_NUMBER]
        if number == self._mine[_TAKEN]:
            return None
        self._fence()
        if self._theirs[_PIPED] > self._received:
            return None  # what comes before it is in the pipe
        data = bytes(self._their_note[: self._theirs[_NBYTES]])
        self._fence()
        self._mine[_TAKEN] = number
        return data

    def read(self) -> list[bytes]:
        """What the pipe brings next, waiting for it, and a note that was left before: nothing if it brought only the
        bell, or part of a message.

        ``EOFError`` or ``OSError`` at its end.
        """
        more = os.read(self._fd, 1 << 16)
        if not more:
            raise EOFError
        self._read += more
        found: list[bytes] = []
        while len(self._read) >= 4 and len(self._read) >= (end := 4 + int.from_bytes(self._read[:4], "little")):
            if end > 4:
                note = self.look()  # one that lies there was left before
                found += [bytes(self._read[4:end])] if note is None else [note, bytes(self._read[4:end])]
                self._received += 1
            del self._read[:end]
        return found

    def receive(self) -> bytes:
        """The next message, waiting for it."""
        if self._left:
            return self._left.popleft()
        for _ in range(self._looks):
            data = self.look()
            if data is not None:
                return data
            give_way()
        self.fall_asleep()
        try:
            while True:
                data = self.look()
                if data is not None:
                    return data
                self._left.extend(self.read())
                if self._left:
                    return self._left.popleft()
        finally:
            self.awake()

    def fall_asleep(self) -> None:
        """From here on the other side rings; what came before is found by one more look."""
        self._mine[_SLEEPS] = 1
        self._fence()

    def awake(self) -> None:
        self._mine[_SLEEPS] = 0

    def _write(self, data: bytes) -> None:
        left = memoryview(len(data).to_bytes(4, "little") + data)
        while left:
            left = left[os.write(self._fd, left) :]

    def _fence(self) -> None:
        """See `vcluster.memory.signals.Signals.fence`."""
        self._turnstile.acquire(False)
        self._turnstile.release()
