"""Ranks that run in threads and meet: for the recorder, what shared memory and channels are for the runtime.

A rank states its call and waits until the other members of its group have stated theirs.  If every rank waits or has
returned, and none has what it waits for, none ever will: that is a deadlock, found without a timeout.  Errors of
several ranks are those of the runtime (`parallelism.operation.errors`), with the same ranks, operation, lines and text.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from parallelism.events import HOST
from parallelism.operation import (
    ClusterError,
    DeadlockError,
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
from parallelism.operation.thread_frames import frames_by_thread
from parallelism.operation.user_lines import user_lines

LONG_TURN_SECONDS = 0.1
"""A rank that goes on for so long does not keep the others from going on beside it."""


class Cancelled(BaseException):
    """Another rank has failed, so this one ends too."""


class Meeting:
    """One operation of a group, with what each member states, by position."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.stated: list[Any] = [None] * len(ranks)
        self.missing = set(ranks)
        self._computed: dict[str, Any] = {}
        self._computing = threading.Lock()

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """What is the same for all members: ``compute`` is called for the first that asks."""
        with self._computing:
            if name not in self._computed:
                self._computed[name] = compute()
            return self._computed[name]


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
    """The ranks of one run, each a thread of its own while the run lasts.

    The threads take turns: one goes on until it has to wait or has returned, then the next that can.  A thousand
    threads that were awake together would spend their time on taking Python's lock from each other.  A thread that
    keeps its turn for long may wait for another rank in a way that is not seen here, so others go on beside it.
    """

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._can_go_on = deque(range(size))
        """The ranks that have what they need, and have no turn yet."""
        self._running = 0
        self.turns = 0
        """How many turns were given: one to each rank, and one for each wait."""
        self._turns: dict[int, threading.Lock] = {}
        """The locks at which the ranks wait for a turn; released to give it."""
        self._threads: dict[int, threading.Thread] = {}
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
            try:
                results[rank] = body(rank)
            except Cancelled:
                pass
            except BaseException as error:  # raised again by the thread that called run
                with self._lock:
                    self._fail(rank, error)
            finally:
                with self._lock:
                    self._returned.add(rank)
                    self._end_turn()
                    if len(self._returned) == self._size:
                        self._ended.notify_all()

        for rank in range(self._size):
            self._turns[rank] = threading.Lock()
            self._turns[rank].acquire()
            self._threads[rank] = threading.Thread(target=one, args=(rank,), daemon=True)
        try:
            self._give_turns()
        except BaseException as error:  # an interrupt, or no more threads can be started
            self._end_all(error)
            raise
        for thread in self._threads.values():
            thread.join()
        self._raise_failures()
        return results

    def _give_turns(self) -> None:
        """Gives turns until all ranks have returned.  A rank that keeps its turn for long is not waited for."""
        with self._lock:
            self._give_turn()
            while len(self._returned) < self._size:
                turns = self.turns
                has_ended = self._ended.wait(LONG_TURN_SECONDS)
                if not has_ended and self.turns == turns and self._can_go_on:
                    self._give_turn()

    def _end_all(self, error: BaseException) -> None:
        """Lets all ranks that have begun fail with an error of the run."""
        with self._lock:
            self._can_go_on = deque(rank for rank in self._can_go_on if self._threads[rank].ident)
            self._fail(-1, error)
            while self._can_go_on:
                self._give_turn()

    def _raise_failures(self) -> None:
        """Raises the error of the lowest rank that failed, or of messages that nobody received."""
        if self._failures:
            first = self._failures[min(self._failures)]
            if isinstance(first, ClusterError) and not first.locations:
                lines = {rank: line_of(error) or "?" for rank, error in sorted(self._failures.items())}
                raise located(first, lines) from None
            raise first
        undelivered = []
        for channel, messages in self._messages.items():
            if messages and channel.target != HOST:
                undelivered.append(Undelivered(*channel, len(messages), messages[0].location))
        if undelivered:
            raise undelivered_error(undelivered)

    def state(self, rank: int, group: Sequence[int], call: Any) -> Meeting:
        """The next operation of a group, in which ``rank`` makes this call."""
        with self._lock:
            ranks = tuple(group)
            self._counts[rank, ranks] += 1
            operation = ranks, self._counts[rank, ranks]
            meeting = self._meetings.setdefault(operation, Meeting(ranks))
            meeting.stated[ranks.index(rank)] = call
            meeting.missing.discard(rank)
            if not meeting.missing:
                del self._meetings[operation]
                self._wake(ranks)
            return meeting

    def all_stated(
        self, rank: int, meeting: Meeting, text: Callable[[], str], issued_at: str | None = None
    ) -> list[Any]:
        """The calls of all members, by position, when the last one has called.  ``text`` describes this rank's."""
        ranks = meeting.ranks
        self._wait(
            rank,
            _Wait(
                lambda: not meeting.missing,
                lambda: text() + ("" if ranks == tuple(range(self._size)) else f" of group {list(ranks)}"),
                ("group", ranks),
                lambda: [member for member in ranks if member in meeting.missing],
                issued_at,
            ),
        )
        return meeting.stated

    def put(self, channel: Channel, value: Any) -> None:
        """Sends a message, and does not wait."""
        message = Message(value, calling_line())
        with self._lock:
            self._messages.setdefault(channel, deque()).append(message)
            self._wake([channel.target])

    def take(self, channel: Channel, issued_at: str | None = None) -> Message:
        """The oldest message of a channel, when there is one."""
        source, target, tag = channel
        self._wait(
            target,
            _Wait(
                lambda: bool(self._messages.get(channel)),
                lambda: f"recv(from {ranks_in_words([source])}, tag {tag})",
                ("recv", source, tag),
                lambda: [source],
                issued_at,
            ),
        )
        with self._lock:
            return self._messages[channel].popleft()

    # -- turns; the caller holds the lock ------------------------------------------------------------------------------

    def _give_turn(self) -> None:
        """Lets the next rank go on that can.  If none can and none runs, none ever will."""
        if not self._can_go_on and not self._running and self._waiting:
            self._fail(min(self._waiting), self._deadlock())
        if self._can_go_on:
            rank = self._can_go_on.popleft()
            self._running += 1
            self.turns += 1
            if self._threads[rank].ident is None:
                self._threads[rank].start()
            else:
                self._turns[rank].release()

    def _end_turn(self) -> None:
        self._running -= 1
        if not self._running:
            self._give_turn()

    def _wake(self, ranks: Iterable[int]) -> None:
        """Something came for these ranks: those that wait for just that can go on."""
        for rank in ranks:
            if rank in self._waiting and self._waiting[rank].ready():
                del self._waiting[rank]
                self._can_go_on.append(rank)

    def _fail(self, rank: int, error: BaseException) -> None:
        """The run fails: each rank that waits goes on, and ends."""
        self._failures[rank] = error
        self._can_go_on.extend(self._waiting)
        self._waiting.clear()

    def _wait(self, rank: int, wait: _Wait) -> None:
        """Returns when the rank has what it waits for.  The caller does not hold the lock."""
        with self._lock:
            if wait.ready():
                return
            if self._failures:
                raise Cancelled
            self._waiting[rank] = wait
            self._end_turn()
        self._turns[rank].acquire()
        with self._lock:
            if not wait.ready():
                raise Cancelled

    def _deadlock(self) -> DeadlockError:
        waiting = self._waiting
        frames = frames_by_thread()
        stacks = {}
        stuck = []
        for rank, wait in sorted(waiting.items()):
            lines = [*user_lines(frames.get(self._threads[rank].ident or 0))]
            text, location = wait.text(), wait.issued_at or "?"
            if lines:
                location = lines[0].place
            else:
                text += ", never waited for,"
            stuck.append(Stuck(rank, text, location, wait.lane, tuple(wait.waits_for())))
            stacks[rank] = lines[::-1]
        return deadlock_error(stuck, self._returned, stacks)
