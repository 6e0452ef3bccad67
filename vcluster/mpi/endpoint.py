"""An endpoint whose peers are ranks of an MPI job.

The devices of one node map one arena, and meet and exchange messages there as on processes. Messages to the host and to
other nodes go by MPI: words that the sender would change in shared memory are changed by the receiver when the message
comes. For deadlocks an endpoint counts the messages to and from each peer by MPI: a message is under way if more were
sent than received.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from parallelism.operation import Lane
from vcluster.memory import (
    CANCELLED,
    DIRECTORY_BYTES,
    EMPTIED,
    GROUPS,
    PAGE,
    REACHED,
    Arena,
    Layout,
    Need,
    Signals,
    Status,
)
from vcluster.messages import Encoded, Endpoint, Mailbox, Wait
from vcluster.messages.blocks import HOLDER, TAKEN as BLOCK_TAKEN
from vcluster.messages.encoding import HEADER_BYTES, aligned
from vcluster.mpi.communicators import Communicators
from vcluster.mpi.mailbox import MpiMailbox, NodeMailbox
from vcluster.mpi.statuses import Counts, DeviceStatus
from vcluster.mpi.transport import (
    CANCEL,
    CLOSED,
    COMMUNICATOR,
    DATA,
    FIRST_NAP_SECONDS,
    LONGEST_NAP_SECONDS,
    POST,
    TAKEN,
    Address,
    Message,
    Transport,
    head_of,
    nap_seconds,
    retag,
)

SPIN_NS = 1_000_000
"""Nanoseconds for which a rank polls that has a core of its own, before it sleeps."""
POLLS = 32
"""Polls of such a rank between two calls of `give_way`."""

NOTHING = Encoded(b"", [], 0)


class MpiEndpoint(Endpoint):
    """The base of the channels and the collectives of one rank."""

    shares_memory = False

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        number: int,
        *,
        capacity: int,
        transport: Transport,
        cluster: int,
        ranks: Sequence[int],
        generation: int = 0,
        beside: Sequence[int] = (),
    ) -> None:
        """``ranks`` are the ranks of the job by endpoint. ``beside`` are the devices that map the arena."""
        self.transport = transport
        self.beside = frozenset(beside) | {number}
        self.shown: dict[int, memoryview] = {}
        """The words that this device shows in groups on its node, by `vcluster.mpi.statuses.place_of_word`."""
        self._near: dict[int, NodeMailbox] = {}
        """The mailboxes of devices on this node."""
        arena.cancel_place = layout.word(
            number, CANCELLED
        )  # a device may begin the next run while others end one
        self._cluster = cluster
        self._ranks = ranks
        self._ends = {rank: end for end, rank in enumerate(ranks)}
        self.communicators = Communicators(self, ranks)
        self.address = Address(cluster, generation)
        self.next_generation = generation
        """What the last command was sent in."""
        self.control: list[tuple[int, Message]] = []
        """Messages between a device and its host: the endpoint they come from, and themselves."""
        self.posts: dict[tuple[int, int, int], NDArray[np.uint8]] = {}
        """By group, number of the operation and endpoint: the calls that members have posted."""
        self._early: list[tuple[int, Message]] = []
        """Messages of a later generation: their sender has begun the next run already."""
        self.sent = [0] * layout.endpoints
        self.received = [0] * layout.endpoints
        """Messages to and from each endpoint in this generation."""
        self._lent: set[object] = set()
        """A token for each body that is being sent from where it lies."""
        self.hears = 0
        """Messages that have arrived."""
        super().__init__(arena, layout, number, capacity=capacity)
        transport.takers[cluster] = self._take

    def _new_signals(self, spins: int, naps_seconds: tuple[float, float]) -> Signals:
        return _PollingSignals(self, spins)

    def _new_status(self) -> Status:
        return DeviceStatus(self)

    def _new_mailbox(self, peer: int) -> Mailbox:
        if peer not in self.beside:
            return MpiMailbox(self, peer)
        return self._near.setdefault(peer, NodeMailbox(self, peer))  # another thread may have made it

    def send(
        self,
        peer: int,
        kind: int,
        encoded: Encoded = NOTHING,
        *,
        lane: int = 0,
        tag: int = 0,
        lend: bool = False,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Send a message to an endpoint, as `Transport.send`. `has_back` tells when nothing is lent any more."""
        if kind in _COUNTED:
            self.sent[peer] += 1
        if lend and then is None:
            token = object()
            self._lent.add(token)
            then = partial(self._lent.discard, token)
        self.transport.send(self._ranks[peer], kind, self.address, lane, tag, encoded, lend=lend, then=then)

    def has_back(self) -> bool:
        """Whether the arrays of all messages that were sent with ``lend`` may change again."""
        self.take_in()
        return not self._lent

    def new_post(self, lane: int, call: bytes, nbytes: int) -> tuple[bytearray, int]:
        """A block for the call of a collective with an array of so many bytes, and the place of the array in it."""
        size = HEADER_BYTES + aligned(len(call))
        block = bytearray(size + nbytes)
        block[HEADER_BYTES : HEADER_BYTES + len(call)] = call
        head_of(block, POST, self.address, lane, 0, nbytes, size)
        return block, size

    def post(self, peers: Sequence[int], block: bytearray, sequence: int) -> None:
        """Send the call of the operation with this number to the other members."""
        retag(block, sequence)
        for peer in peers:
            self.sent[peer] += 1
            self.transport.send_block(self._ranks[peer], block)

    def take_in(self) -> None:
        """Take in the messages that have arrived."""
        self.transport.poll()
        if self._crowded[0]:
            self._crowded[0] = 0
            for peer in self.beside:
                self.mailbox(peer)
        for mailbox in tuple(self._near.values()):
            mailbox.take_in()

    def maps(self, ranks: Iterable[int]) -> bool:
        """Whether all these devices lie on this node and map the same arena."""
        return self.beside.issuperset(ranks)

    def listed_as(self, key: int) -> int:
        """Each time that the directories are emptied, a group gets another number there.

        So what another device has not yet removed is never found.
        """
        return abs(hash((key, self.address.generation, self.groups_forgotten))) or 1

    def forget_groups(self) -> None:
        """Empty the directory of this device."""
        self.shown.clear()
        self.arena.clear(self.layout.directory(self.number), DIRECTORY_BYTES)
        self.arena.words(self.layout.word(self.number, GROUPS))[0] = 0

    def counts(self) -> Counts:
        """What this device has sent to each endpoint, the words that it shows, and the number of its groups."""
        shown = {place: word[0] for place, word in self.shown.items()}
        for mailbox in tuple(self._near.values()):
            shown |= mailbox.shown()
        return self.sent, shown, self.arena.words(self.layout.word(self.number, GROUPS))[0]

    def settle(self) -> Iterator[Wait]:
        """Wait until the arrays that were sent where they lie may change again. Their receivers take in all."""
        if not self.has_back():
            yield Wait(self.has_back, list)

    def need(self, peer: int, lane: Lane | None) -> Need:
        """The need that a peer does something in a lane: a message from it will have come then."""
        return Need(self.layout.rank(peer), lane, self.number, self.received[peer])

    def forget_traffic(self, gone: Collection[int] = ()) -> None:
        """Start from empty channels and groups. Messages of an earlier generation are dropped when they come."""
        is_host = self.number == self.layout.host
        generation = self.address.generation + 1 if is_host else self.next_generation
        self.address = Address(self._cluster, generation)
        self.signals.resume()
        self.tasks.drop_all()
        for mailbox in self._near.values():
            mailbox.forget()
        self._near.clear()
        self.mailboxes.clear()
        self.posts.clear()
        self.communicators.forget()
        self._lent = set()
        self.sent[:] = self.received[:] = [0] * len(self.sent)
        early, self._early = self._early, []
        for peer, message in early:
            self._sort(peer, message)
        self._empty_rings(generation)  # the last step: messages of the new generation may come meanwhile

    def _empty_rings(self, generation: int) -> None:
        """Empty the rings to the devices of this node, while none of them polls at one."""
        others = self.beside - {self.number}
        if not others:
            return
        self._meet(REACHED, generation)
        for peer in others:
            place = self.layout.ring(self.number, peer)
            self.arena.view[place : place + PAGE] = bytes(PAGE)
        self._crowded[0] = 0

        def is_stray(offset: int) -> bool:
            header = self.arena.words(offset, HOLDER + 1)
            return header[HOLDER] in others and not header[BLOCK_TAKEN]

        self.heap.reclaim(is_stray)
        self._meet(EMPTIED, generation)

    def _meet(self, which: int, generation: int) -> None:
        """Wait until all devices of this node have come so far with this reset. Each of them has got its command."""
        self.signals.fence()
        self.arena.words(self.layout.word(self.number, which))[0] = generation
        words = [self.arena.words(self.layout.word(each, which)) for each in self.beside]
        since = time.monotonic()
        while any(word[0] < generation for word in words):
            self.transport.poll()
            self.signals.check()
            time.sleep(nap_seconds(time.monotonic() - since))
        self.signals.fence()

    def let_go(self) -> None:
        """At the end: no message is for this endpoint any more."""
        self.transport.takers.pop(self._cluster, None)
        self.tasks.drop_all()
        self.mailboxes.clear()
        self._near.clear()
        self.communicators.forget()
        self.shown.clear()
        self._leave_signals()

    def _take(self, source: int, message: Message) -> None:
        self.hears += 1
        self._sort(self._ends[source], message)

    def _sort(self, peer: int, message: Message) -> None:
        kind, generation = message.kind, message.address.generation
        if kind == COMMUNICATOR and self.number != self.layout.host:
            self.communicators.make(message)
        elif kind not in _COUNTED and kind != CANCEL:
            self.control.append((peer, message))
        elif generation > self.address.generation:
            self._early.append((peer, message))
        elif generation == self.address.generation:
            if kind == CANCEL:
                self.arena.words(self.arena.cancel_place)[0] = 1
                return
            self.received[peer] += 1
            if kind == POST:
                self.posts[message.lane, message.tag, peer] = message.block
            else:
                mailbox = self.mailbox(peer)
                assert isinstance(mailbox, MpiMailbox)
                mailbox.arrive(message)


_COUNTED = frozenset({DATA, POST, TAKEN, CLOSED})


class _PollingSignals(Signals):
    """Waiting for messages, which wake nobody: every condition polls, and a sleeper sleeps longer and longer.

    Devices of the same node wake each other.
    """

    def __init__(self, endpoint: MpiEndpoint, spins: int) -> None:
        naps = FIRST_NAP_SECONDS, LONGEST_NAP_SECONDS
        super().__init__(endpoint.arena, endpoint.layout, endpoint.number, spins=spins, naps_seconds=naps)
        if endpoint.layout.size <= endpoint.layout.cores:
            self.spins, self.spin_ns, self.polls = SPIN_NS, SPIN_NS, POLLS
        self._endpoint = endpoint
        self._heard = 0
        self._since = 0.0
        """When the present wait began to sleep."""
        self._sleep_until_roused, self._sleep = self._sleep, self._nap

    def turns(self) -> Iterator[None]:
        """Iterate over polls as `Signals` does, and let large arrays that this rank sends go on meanwhile."""
        transport = self._endpoint.transport
        for turn in super().turns():
            if transport.is_sending:
                transport.poll()
            yield turn

    def wake(self, endpoints: Iterable[int]) -> None:
        """Wake those that sleep. A rank that never waits comes here, too: large arrays that it sends go on."""
        if self._endpoint.transport.is_sending:
            self._endpoint.transport.poll()
        super().wake(endpoints)

    def rouse(self, endpoints: Iterable[int]) -> None:
        """`wake` without the fence."""
        if self._endpoint.transport.is_sending:
            self._endpoint.transport.poll()
        super().rouse(endpoints)

    def cancel(self) -> None:
        """Cancel the run here; the host tells all devices."""
        super().cancel()
        endpoint = self._endpoint
        if endpoint.number == endpoint.layout.host:
            for rank in range(endpoint.layout.size):
                endpoint.send(rank, CANCEL)

    def _nap(self, address: int, seen: int, longest_ns: int) -> None:
        if self._endpoint.hears != self._heard:  # more may follow soon
            self._heard, longest_ns = self._endpoint.hears, self._first_nap_ns
            self._word[0] += 1
            seen = seen + 1 & 0xFFFFFFFF
        now = time.monotonic()
        if longest_ns == self._first_nap_ns:
            self._since = now
        self._sleep_until_roused(
            address, seen, int(1e9 * self._endpoint.transport.rest_seconds(now - self._since))
        )
