"""Ranks that run in threads and meet: for the recorder, what shared memory and channels are for the runtime.

A rank states its call and waits until the other members of its group have stated theirs.  If every rank waits or has
returned, and none has what it waits for, none ever will: that is a deadlock, found without a timeout.  Errors of
several ranks are those of the runtime (`parallelism.operation.errors`), with the same ranks, operation, lines and text.
"""

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from parallelism.events import HOST
from parallelism.operation import (
    ClusterError,
    Lane,
    Stuck,
    Undelivered,
    calling_line,
    deadlock_error,
    line_of,
    ranks_in_words,
    undelivered_error,
)
from parallelism.operation.errors import located
from parallelism.operation.user_lines import user_lines


class Cancelled(BaseException):
    """Another rank has failed, so this one ends too."""


class Meeting:
    """One operation of a group, with what each member states, by position."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.stated: list[Any] = [None] * len(ranks)
        self.missing = set(ranks)


class Channel(NamedTuple):
    """Messages of one source, target and tag."""

    source: int
    target: int
    tag: int


class Message(NamedTuple):
    """What was sent, and the line that sent it."""

    value: Any
    location: str | None


class _Wait(NamedTuple):
    ready: Callable[[], bool]
    text: Callable[[], str]
    """The operation, as a deadlock shows it."""
    lane: Lane
    waits_for: Callable[[], Sequence[int]]
    issued_at: str | None
    """The line that issued the operation, for one that the kernel itself never waits for."""


class Lockstep:
    """The ranks of one run, each a thread of its own while the run lasts."""

    def __init__(self, size: int) -> None:
        self._size, self._changed = size, threading.Condition()
        self._threads: dict[int, int] = {}
        self._waiting: dict[int, _Wait] = {}
        self._returned: set[int] = set()
        self._failures: dict[int, BaseException] = {}
        self._meetings: dict[Hashable, Meeting] = {}
        self._counts: Counter[tuple[int, Hashable]] = Counter()
        self._messages: dict[Channel, deque[Message]] = {}

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """The results of ``body(rank)`` by rank.

        Raises the error of the lowest rank among those that failed first, `DeadlockError` if no rank can continue, and
        `UndeliveredMessageError` if a message was not received.
        """
        results: list[Any] = [None] * self._size

        def one(rank: int) -> None:
            self._threads[rank] = threading.get_ident()
            try:
                results[rank] = body(rank)
            except Cancelled:
                pass
            except BaseException as error:      # raised again by the thread that called run
                with self._changed:
                    self._failures[rank] = error
            finally:
                with self._changed:
                    self._returned.add(rank)
                    self._find_deadlock()
                    self._changed.notify_all()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures:
            first = self._failures[min(self._failures)]
            if isinstance(first, ClusterError) and not first.locations:
                raise located(
                    first, {rank: line_of(error) or "?" for rank, error in sorted(self._failures.items())}) from None
            raise first
        if undelivered := [Undelivered(*channel, len(messages), messages[0].location)
                           for channel, messages in self._messages.items() if messages and channel.target != HOST]:
            raise undelivered_error(undelivered)
        return results

    def state(self, rank: int, group: Sequence[int], call: Any) -> Meeting:
        """The next operation of a group, in which ``rank`` makes this call."""
        with self._changed:
            ranks = tuple(group)
            self._counts[rank, ranks] += 1
            operation = ranks, self._counts[rank, ranks]
            meeting = self._meetings.setdefault(operation, Meeting(ranks))
            meeting.stated[ranks.index(rank)] = call
            meeting.missing.discard(rank)
            if not meeting.missing:
                del self._meetings[operation]
                self._changed.notify_all()
            return meeting

    def all_stated(
        self, rank: int, meeting: Meeting, text: Callable[[], str], issued_at: str | None = None
    ) -> list[Any]:
        """The calls of all members, by position, when the last one has called.  ``text`` describes this rank's."""
        ranks = meeting.ranks
        self._wait(rank, _Wait(
            lambda: not meeting.missing,
            lambda: text() + ("" if ranks == tuple(range(self._size)) else f" of group {list(ranks)}"),
            ("group", ranks),
            lambda: [member for member in ranks if member in meeting.missing], issued_at))
        return meeting.stated

    def put(self, channel: Channel, value: Any) -> None:
        """Sends a message, and does not wait."""
        with self._changed:
            self._messages.setdefault(channel, deque()).append(Message(value, calling_line()))
            self._changed.notify_all()

    def take(self, channel: Channel, issued_at: str | None = None) -> Message:
        """The oldest message of a channel, when there is one."""
        source, target, tag = channel
        self._wait(target, _Wait(
            lambda: bool(self._messages.get(channel)), lambda: f"recv(from {ranks_in_words([source])}, tag {tag})",
            ("recv", source, tag), lambda: [source], issued_at))
        with self._changed:
            return self._messages[channel].popleft()

    def _wait(self, rank: int, wait: _Wait) -> None:
        with self._changed:
            while not wait.ready():
                if self._failures:
                    raise Cancelled
                self._waiting[rank] = wait
                self._find_deadlock()
                if not self._failures:
                    self._changed.wait()
                del self._waiting[rank]

    def _find_deadlock(self) -> None:
        """Ends the run if no rank can continue."""
        waiting = self._waiting
        may_go_on = not waiting or len(waiting) + len(self._returned) < self._size
        if self._failures or may_go_on or any(wait.ready() for wait in waiting.values()):
            return
        frames = sys._current_frames()
        lines = {rank: [*user_lines(frames.get(self._threads[rank]))] for rank in waiting}
        stuck = [
            Stuck(rank, wait.text() + ("" if lines[rank] else ", never waited for,"),
                  lines[rank][0].place if lines[rank] else wait.issued_at or "?", wait.lane, tuple(wait.waits_for()))
            for rank, wait in sorted(waiting.items())
        ]
        self._failures[min(waiting)] = deadlock_error(
            stuck, self._returned, {rank: lines[rank][::-1] for rank in waiting})
        self._changed.notify_all()
