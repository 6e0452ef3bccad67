"""One member of a cluster as the others see it: its memory, its signals, its pending operations, and its mailboxes.

Each device has an endpoint, and so has the host.  An asynchronous operation returns a work object, `Pending`, that its
owner keeps until it is waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from parallelism.operation import Lane, Unfinished
from parallelism.spelling import no_attribute
from vcluster.memory import (
    CROWDED,
    NAPS_SECONDS,
    NAPS_WITH_QUEUES_SECONDS,
    RUNNING,
    SPINS,
    Arena,
    Heap,
    Layout,
    Peers,
    Signals,
    Status,
)
from vcluster.messages.blocks import HOLDER, TAKEN
from vcluster.messages.mailbox import Mailbox
from vcluster.messages.tasks import DONE as DONE, Awaited, Receive, Steps, Task, Tasks
from vcluster.tracing import Recorder


class Endpoint:
    """The base of the channels and the collectives of one device, or of the host."""

    shares_memory = True
    """Whether all the others, the host too, map the same arena, and so can wake this endpoint."""

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        number: int,
        *,
        capacity: int,
        spins: int = SPINS,
        queues: Mapping[int, tuple[Any, Any]] | None = None,
    ) -> None:
        """``queues``: under the ``queue`` transport, for each peer the queue to it and the queue from it; else None."""
        self.arena = arena
        self.layout = layout
        self.number = number
        self.capacity = capacity
        naps = NAPS_SECONDS if queues is None else NAPS_WITH_QUEUES_SECONDS
        self.signals = self._new_signals(spins, naps)
        self.threads = self.signals.threads
        self.heap = Heap(
            arena, layout.region(number), layout.region_nbytes, arena.words(layout.top_word(number))
        )
        self.peers = Peers(arena, layout, number, self.signals)
        self.tasks = Tasks(self.signals)
        self.queues = queues
        self.mailboxes: dict[int, Mailbox] = {}
        self.groups_forgotten = 0
        """How often the directories of groups were emptied because one was filling up."""
        self._crowded = arena.words(layout.word(number, CROWDED))
        self.signals.before_sleep = self.take_in
        if number < layout.size:
            self.status = self._new_status()
            self.signals.note_awaited = self.tasks.blocked_on
            self.signals.publish_awaited = self._publish_awaited
            self.signals.after_sleep = partial(self.status.set, number, RUNNING)

    def mailbox(self, peer: int) -> Mailbox:
        """The traffic with another endpoint, in both directions."""
        mailbox = self.mailboxes.get(peer)
        if mailbox is None:
            mailbox = self.mailboxes.setdefault(peer, self._new_mailbox(peer))
        return mailbox

    # What a backend without shared memory replaces:

    def maps(self, ranks: Iterable[int]) -> bool:
        """Whether all these devices map the same arena."""
        return True

    def listed_as(self, key: int) -> int:
        """The number under which the directories of this moment list the group with this key."""
        return key

    def forget_groups(self) -> None:
        """Forget the groups of this device, whose slots are free. The host has emptied all directories."""

    def _new_signals(self, spins: int, naps_seconds: tuple[float, float]) -> Signals:
        return Signals(self.arena, self.layout, self.number, spins=spins, naps_seconds=naps_seconds)

    def _new_status(self) -> Status:
        return Status(self.arena, self.layout, self.heap)

    def _new_mailbox(self, peer: int) -> Mailbox:
        return Mailbox(self, peer)

    def _publish_awaited(self, awaited: Awaited) -> None:
        if awaited.operations:
            self.status.set_blocked(self.number, *awaited)

    def take_in(self) -> None:
        """Empty the rings that point to this endpoint, so that no sender waits for room in them."""
        if self._crowded[0]:  # a ring is full, possibly of a peer whose mailbox does not exist here yet
            self._crowded[0] = 0
            for peer in range(self.layout.endpoints):
                self.mailbox(peer)
        for mailbox in self.mailboxes.values():
            mailbox.take_in()

    def let_go(self) -> None:
        """At the end: close the channels and queues, and break all cycles that would keep the mapping alive."""
        self.tasks.drop_all()
        for peer in range(self.layout.endpoints):
            self.mailbox(peer).close(drop=True)
        self.mailboxes.clear()
        self._leave_signals()
        for ways in (self.queues or {}).values():
            for way in ways:
                if hasattr(way, "join_thread"):  # of multiprocessing
                    way._ignore_epipe = True  # its remaining content will not be read
                    way.close()
                    way.join_thread()
        self.queues = None

    def _leave_signals(self) -> None:
        self.signals.before_sleep = self.signals.after_sleep = None
        self.signals.note_awaited = self.signals.publish_awaited = None
        self.threads.leave_recorder()

    def forget_traffic(self, gone: Collection[int] = ()) -> None:
        """Start from empty channels, after the control area was cleared. ``gone`` are endpoints that died."""
        self.tasks.drop_all()
        for mailbox in self.mailboxes.values():
            mailbox.forget()
        self.mailboxes.clear()

        def is_stray(offset: int) -> bool:
            header = self.arena.words(offset, HOLDER + 1)
            return not header[TAKEN] or header[HOLDER] in gone

        self.heap.reclaim(is_stray)


class Owner(Protocol):
    """An object that starts operations: the collectives of a device, or the host."""

    endpoint: Endpoint
    recorder: Recorder
    unwaited: dict[int, Pending]


def issue(
    owner: Owner, lane: Lane, steps: Steps, text: object, work: int, name: str, location: str | None = None
) -> Pending:
    """Start an operation and return at once; ``str(text)`` describes it, ``work`` is its number."""
    return pending(owner, owner.endpoint.tasks.issue(lane, steps, text, location), work, name)


def pending(owner: Owner, task: Task | Receive, work: int, name: str) -> Pending:
    """The work object of an operation that was started."""
    found = owner.unwaited[work] = Pending(owner, task, work, name)
    return found


_ELSEWHERE = {
    "result": "wait(), which returns the result",
    "get": "wait(), which returns the result",
    "value": "wait(), which returns the result",
    "getfuture": "wait(), which returns the result",
    "blockuntilready": "wait(), which returns the result",
    "iscompleted": "done()",
    "isready": "done()",
    "test": "done()",
    "ready": "done()",
    "issuccess": "done()",
    **dict.fromkeys(
        ("shape", "dtype", "sum", "mean", "t", "ndim", "size", "astype", "reshape", "copy"),
        "wait(), which returns the array that has it",
    ),
}
"""Names of futures elsewhere, and of arrays, and what to write here."""


class Pending(Unfinished):
    """An operation that was issued. `wait` returns its result, and `done` tells whether it is finished."""

    def __init__(self, owner: Owner, task: Task | Receive, number: int, name: str) -> None:
        self._owner = owner
        self._task = task
        self._number = number
        self._name = name
        self._waited = False

    if not TYPE_CHECKING:  # a type checker reports an unknown name itself

        def __getattr__(self, name):
            """Raise ``AttributeError`` for an unknown name, with the name that is meant."""
            no_attribute("pending operation", self, name, _ELSEWHERE)

    def __repr__(self) -> str:
        return f"<{self._name}, {'done' if self._task.finished else 'pending'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"it is an asynchronous {self._name} and not its result: write .wait(), which returns that"
        )

    def done(self) -> bool:
        """Whether the result is available. Calling this lets pending operations advance."""
        if not self._task.finished:
            self._owner.endpoint.signals.check()
            with self._owner.endpoint.threads:
                self._owner.endpoint.tasks.advance()
        return self._task.finished

    def wait(self) -> Any:
        """Block until the operation is finished and return its result. May be called again."""
        if self._waited:
            return self._owner.endpoint.tasks.wait(self._task)
        self._waited = True
        self._owner.unwaited.pop(self._number, None)
        with self._owner.recorder as start:
            try:
                return self._owner.endpoint.tasks.wait(self._task)
            finally:
                self._owner.recorder.add_repeated(("wait", self._name, {"work": self._number}), None, start)
