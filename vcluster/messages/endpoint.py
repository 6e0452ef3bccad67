"""One member of a cluster as the others see it: its memory, its signals, what it has under way, who it talks to.

A device has one, and so has the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vcluster.memory import (
    NAPS_SECONDS,
    NAPS_WITH_QUEUES_SECONDS,
    RUNNING,
    Arena,
    Heap,
    Layout,
    Operation,
    Peers,
    Signals,
    Status,
)
from vcluster.messages.blocks import HOLDER, TAKEN
from vcluster.messages.mailbox import Mailbox
from vcluster.messages.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class Endpoint:
    """What the channels and the collectives of one device, or of the host, stand on."""

    def __init__(
        self, arena: Arena, layout: Layout, number: int, *, capacity: int, spins: int = 200,
        queues: Mapping[int, tuple[Any, Any]] | None = None,
    ) -> None:
        """``queues``: for each peer (to it, from it), under the ``queue`` transport; None under shared memory."""
        self.arena = arena
        self.layout = layout
        self.number = number
        self.capacity = capacity
        naps = NAPS_SECONDS if queues is None else NAPS_WITH_QUEUES_SECONDS
        self.signals = Signals(arena, layout, number, spins=spins, naps_seconds=naps)
        self.heap = Heap(arena, layout.region(number), layout.region_nbytes, arena.words(layout.top_word(number)))
        self.peers = Peers(arena, layout, number, self.signals)
        self.tasks = Tasks(self.signals)
        self.queues = queues
        self.mailboxes: dict[int, Mailbox] = {}
        self._crowded = arena.words(layout.crowded_word(number))
        self.signals.before_sleep = self.take_in
        if number < layout.size:
            self.status = Status(arena, layout)
            self.signals.note_awaited, self.signals.tell_awaited = self._note_awaited, self._tell_awaited
            self.signals.after_sleep = self._after_sleep

    def mailbox(self, peer: int) -> Mailbox:
        """The two-way traffic with another endpoint."""
        found = self.mailboxes.get(peer)
        if found is None:
            found = self.mailboxes[peer] = Mailbox(self, peer)
        return found

    def _note_awaited(self) -> list[Operation]:
        return self.tasks.blocked_on()

    def _tell_awaited(self, operations: list[Operation]) -> None:
        self.status.set_blocked(self.number, operations, self.tasks.waits_at())

    def _after_sleep(self) -> None:
        self.status.set(self.number, RUNNING)

    def take_in(self) -> None:
        """Empty the rings that point here, so that nobody waits for room in them."""
        if self._crowded[0]:  # a ring is full, perhaps that of somebody whom nobody here has listened to yet
            self._crowded[0] = 0
            for peer in range(self.layout.endpoints):
                self.mailbox(peer)
        for mailbox in self.mailboxes.values():
            mailbox.take_in()

    def let_go(self) -> None:
        """At the end: close the channels, leave no thread of a queue and no cycle that keeps the mapping."""
        self.tasks.drop_all()
        for peer in range(self.layout.endpoints):
            self.mailbox(peer).close()
        self.mailboxes.clear()
        self.signals.before_sleep = self.signals.after_sleep = None
        self.signals.note_awaited = self.signals.tell_awaited = None
        for ways in (self.queues or {}).values():
            for way in ways:
                if hasattr(way, "join_thread"):  # of multiprocessing
                    way._ignore_epipe = True  # nobody reads any more what it still holds
                    way.close()
                    way.join_thread()
        self.queues = None

    def forget_traffic(self, gone: Collection[int] = ()) -> None:
        """Start from empty channels, after the control area was cleared; ``gone`` are endpoints that died."""
        self.tasks.drop_all()
        for mailbox in self.mailboxes.values():
            mailbox.forget()
        self.mailboxes.clear()

        def is_stray(offset: int) -> bool:
            header = self.arena.words(offset, HOLDER + 1)
            return not header[TAKEN] or header[HOLDER] in gone

        self.heap.reclaim(is_stray)
