"""Ranks that run side by side in threads and meet: what an operation is that nobody carries out.

A rank says what it calls and waits until the others of its group have said theirs.  If all wait, and nobody has what he
waits for, nobody ever will: that is an error, not a wait without end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Cancelled(BaseException):
    """Another rank has failed: this one ends, too."""


class Meeting:
    """One operation of a group: what each member says, by position."""

    def __init__(self, size: int) -> None:
        self.said: list[Any] = [None] * size
        self.missing = size


class Lockstep:
    """The ranks of one run, each a thread of its own while the run lasts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._ended = 0
        self._failures: dict[int, BaseException] = {}
        self._meetings: dict[Hashable, Meeting] = {}
        self._counts: dict[tuple[int, Hashable], int] = {}
        self._messages: dict[Hashable, deque[Any]] = {}

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """``body(rank)`` of every rank, by rank; raises what the lowest rank of those that failed first raised."""
        results: list[Any] = [None] * self._size

        def one(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except Cancelled:
                pass
            except BaseException as error:          # told by the thread that asked for the run
                with self._changed:
                    self._failures[rank] = error
            finally:
                with self._changed:
                    self._ended += 1
                    self._look()
                    self._changed.notify_all()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[min(self._failures)]
        return results

    def say(self, rank: int, group: Sequence[int], what: Any) -> Meeting:
        """The next operation of a group, to which ``rank`` says ``what``."""
        with self._changed:
            ranks = tuple(group)
            number = self._counts.get((rank, ranks), 0)
            self._counts[rank, ranks] = number + 1
            meeting = self._meetings.setdefault((ranks, number), Meeting(len(ranks)))
            meeting.said[ranks.index(rank)] = what
            meeting.missing -= 1
            if not meeting.missing:
                del self._meetings[ranks, number]
                self._changed.notify_all()
            return meeting

    def all_said(self, rank: int, meeting: Meeting, what: str) -> list[Any]:
        """What everybody says, as soon as everybody has."""
        self._wait(rank, lambda: not meeting.missing, what)
        return meeting.said

    def put(self, channel: Hashable, message: Any) -> None:
        """Sends a message, and does not wait."""
        with self._changed:
            self._messages.setdefault(channel, deque()).append(message)
            self._changed.notify_all()

    def take(self, rank: int, channel: Hashable, what: str) -> Any:
        """The oldest message of a channel, as soon as there is one."""
        self._wait(rank, lambda: bool(self._messages.get(channel)), what)
        with self._changed:
            return self._messages[channel].popleft()

    def undelivered(self) -> list[Hashable]:
        """The channels in which messages lie."""
        return [channel for channel, messages in self._messages.items() if messages]

    def _wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        with self._changed:
            while not ready():
                if self._failures:
                    raise Cancelled
                self._waiting[rank] = ready, what
                self._look()
                if not self._failures:
                    self._changed.wait()
                del self._waiting[rank]

    def _look(self) -> None:
        """Ends the run if nobody can go on."""
        waiting = self._waiting
        if self._failures or not waiting or len(waiting) + self._ended < self._size:
            return
        if not any(ready() for ready, _ in waiting.values()):
            told = "; ".join(f"rank {rank} waits in {what}" for rank, (_, what) in sorted(waiting.items()))
            self._failures[min(waiting)] = RuntimeError(f"nobody can go on: {told}")
            self._changed.notify_all()
