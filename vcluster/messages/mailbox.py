"""The messages between two endpoints, as one of them handles them. Messages of one tag are first in, first out.

A message is a block in the heap of its sender. The sender puts the block's offset into a ring that both endpoints map.
The receiver takes it out and sorts it by tag. One word of the block's header tells that the message was taken, so that
the sender may send another; a second tells that the memory was released, so that the sender may reuse it. A large
message is not copied: the received array lies in the block.

Under the ``queue`` transport, the message goes through a ``multiprocessing.Queue`` instead, and only the header lies in
shared memory.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from parallelism.arrays import Array
from parallelism.operation import Lane
from vcluster.code import ChannelClosedError, ClusterError
from vcluster.memory import CROWDED, EPOCH, PAGE, STORES_IN_ORDER, Need
from vcluster.messages.blocks import (
    BLOCK_NBYTES,
    LANE,
    NBYTES,
    NUMBER,
    RELEASED,
    TAG,
    TAKEN,
    Block,
    ReusedBlocks,
    adopt,
    lend_block,
)
from vcluster.messages.encoding import HEADER_BYTES, Encoded, decode_alone
from vcluster.messages.envelopes import Envelope, name_of
from vcluster.messages.tasks import Steps, Wait

if TYPE_CHECKING:
    from vcluster.memory import Loan
    from vcluster.messages.endpoint import Endpoint

_HEAD, _TAIL, _CLOSED, _FIRST_SLOT = 0, 8, 16, 24
HEAD, TAIL, RING_CLOSED = 8 * _HEAD, 8 * _TAIL, 8 * _CLOSED
"""Words of a ring's page, and their offsets. The sender's and the receiver's words lie on different cache lines."""
SLOTS = PAGE // 8 - _FIRST_SLOT

KNOWN_BLOCKS = 1024
"""Maximal number of a peer's reusable blocks whose description the receiver caches."""


class Mailbox:
    """The messages to and from one peer."""

    def __init__(self, endpoint: Endpoint, peer: int) -> None:
        self._endpoint = endpoint
        self._peer = peer
        layout, arena = endpoint.layout, endpoint.arena
        self._out_place, self._in_place = (
            layout.ring(endpoint.number, peer),
            layout.ring(peer, endpoint.number),
        )
        self._out, self._in = arena.words(self._out_place, PAGE // 8), arena.words(self._in_place, PAGE // 8)
        self._held = arena.words(layout.held_word(endpoint.number, peer))
        self._queues = endpoint.queues[peer] if endpoint.queues is not None else None
        self._arrived: dict[tuple[int, int], deque[Envelope]] = {}
        self._untaken: dict[tuple[int, int], deque[tuple[memoryview, Loan]]] = {}
        self._epoch = arena.words(EPOCH)
        self._peers = (peer,)
        self._known: dict[int, Block] = {}
        """The reusable blocks of the peer, by their offset."""
        self._reused: list[ReusedBlocks] = []
        self._taking_in = threading.Lock()
        self.sent = self.received = self.bytes_sent = self.bytes_received = 0

    # -- out ----------------------------------------------------------------------------------------------------------

    def sending(self, encoded: Encoded, tag: int, *, lane: int = 0, capacity: int | None = None) -> Steps:
        """Send a message.  It first waits while ``capacity`` or more messages of its tag are not taken.

        With a capacity of 0 it sends, and then waits until the message is taken.  None: there is no limit.
        """
        key = (lane, tag)
        self._check_open(lane)
        if capacity and len(self._untaken.get(key, ())) >= capacity and not self._has_room(key, capacity):
            yield Wait(
                lambda: self._has_room(key, capacity) or self.closed_there, lambda: self._needs_room(key)
            )
            self._check_open(lane)
        sent = yield from self._put(encoded, lane, tag)
        if capacity is not None:
            self._untaken.setdefault(key, deque()).append(sent)
            if capacity == 0:
                yield Wait(lambda: self._has_room(key, 1) or self.closed_there, lambda: self._needs_room(key))

    def send_at_once(self, encoded: Encoded, tag: int, capacity: int) -> bool:
        """Send a message as `sending` does, if that need not wait. False, and nothing is sent, if it would."""
        out, untaken = self._out, self._untaken.setdefault((0, tag), deque())
        if (
            out[_HEAD] - out[_TAIL] >= SLOTS
            or self._is_closed(0)
            or self._queues
            or (len(untaken) >= capacity and not self._has_room((0, tag), capacity))
        ):
            return False
        offset, header, loan = self._lend(encoded, 0, tag)
        encoded.write(self._endpoint.arena.view[offset : offset + header[BLOCK_NBYTES]])
        self._announce(offset)
        untaken.append((header, loan))
        self._count_sent(encoded.nbytes)
        return True

    def _lend(self, encoded: Encoded, lane: int, tag: int) -> tuple[int, memoryview, Loan]:
        """A block for a message: its offset, its header, which is written, and the loan."""
        nbytes = encoded.block_nbytes
        offset, header, loan = lend_block(
            self._endpoint, HEADER_BYTES if self._queues else nbytes, self._peer
        )
        header[LANE], header[TAG] = lane, tag
        header[BLOCK_NBYTES], header[NBYTES] = nbytes, encoded.nbytes
        return offset, header, loan

    def _announce(self, offset: int) -> None:
        """Put a block into the ring, which has room."""
        out, signals = self._out, self._endpoint.signals
        head = out[_HEAD]
        out[_FIRST_SLOT + head % SLOTS] = offset
        if not STORES_IN_ORDER:
            signals.fence()
        out[_HEAD] = head + 1
        signals.wake(self._peers)

    def _count_sent(self, nbytes: int) -> None:
        self.sent += 1
        self.bytes_sent += nbytes

    def _put(self, encoded: Encoded, lane: int, tag: int) -> Generator[Wait, None, tuple[memoryview, Loan]]:
        endpoint = self._endpoint
        offset, header, loan = self._lend(encoded, lane, tag)
        if self._queues:
            self._queues[0].put((self._epoch[0], offset, header.tolist(), encoded.alone()))
            self._out[_HEAD] += 1
            endpoint.signals.wake(self._peers)
        else:
            encoded.write(endpoint.arena.view[offset : offset + header[BLOCK_NBYTES]])
            out = self._out
            if out[_HEAD] - out[_TAIL] >= SLOTS:
                if endpoint.number == endpoint.layout.host:
                    raise ClusterError(
                        f"{SLOTS} messages from the host to rank {self._peer} are not received yet, and no more fit; "
                        f"run a program that receives them"
                    )
                endpoint.arena.words(endpoint.layout.word(self._peer, CROWDED))[0] = 1
                endpoint.signals.wake((self._peer,))
                tail = self._out_place + TAIL
                yield Wait(lambda: out[_HEAD] - out[_TAIL] < SLOTS, lambda: [self._need(None, tail)])
            self._announce(offset)
        if lane == 0:  # messages of other lanes belong to collectives
            self._count_sent(encoded.nbytes)
        return header, loan

    def _has_room(self, key: tuple[int, int], capacity: int) -> bool:
        untaken = self._untaken.get(key)
        while untaken:
            header, loan = untaken[0]
            if not loan.ended and not header[TAKEN]:
                break
            untaken.popleft()
        return not untaken or len(untaken) < capacity

    def send_again(self, blocks: ReusedBlocks, x: Array, tag: int, capacity: int) -> bool:
        """Send an array whose signature was sent before. False, and nothing is sent, if there is no room now."""
        untaken = self._untaken.get((0, tag))
        if untaken is None:
            untaken = self._untaken[0, tag] = deque()
        if len(untaken) >= capacity and not self._has_room((0, tag), capacity):
            return False
        out = self._out
        if out[_HEAD] - out[_TAIL] >= SLOTS or out[_CLOSED] or self._in[_CLOSED]:
            return False
        if (taken := blocks.take(tag)) is None:
            return False
        block, loan = taken
        block.elements[...] = x
        self._announce(block.offset)
        untaken.append((block.header, loan))
        self.sent += 1
        self.bytes_sent += block.nbytes
        return True

    # -- in -----------------------------------------------------------------------------------------------------------

    def receiving(self, tag: int, *, lane: int = 0) -> Generator[Wait, None, Envelope]:
        """Wait for the oldest message with this tag and take it."""
        key = (lane, tag)
        while not self.may_take(key):
            yield Wait(lambda: self.may_take(key), lambda: self.needs_message(key))
        return self.take(key)

    def may_take(self, key: tuple[int, int]) -> bool:
        """Whether `take` need not wait, because a message has arrived or none can come any more."""
        ring = self._in
        if key not in self._arrived and self._queues is None and ring[_HEAD] == ring[_TAIL]:
            return key[0] == 0 and bool(ring[_CLOSED] or self._out[_CLOSED])
        return self.has_message(key) or self._nothing_more_comes(key[0])

    def take(self, key: tuple[int, int]) -> Envelope:
        """Take the oldest message that has arrived; `ChannelClosedError` if there is none."""
        if not self.has_message(key):  # the last one may have come just before the close
            self._check_open(key[0])
        arrived = self._arrived[key]
        envelope = arrived.popleft()
        if not arrived:
            del self._arrived[key]
        envelope.taken()
        if key[0] == 0:
            self.received += 1
            self.bytes_received += envelope.nbytes
        return envelope

    def take_again(self, tag: int) -> Block | None:
        """Take the next message, if it comes soon, has this tag and lies in a cached reusable block. Otherwise None.

        The caller copies the message and then calls `read`.
        """
        if self._arrived:
            return None
        ring, signals = self._in, self._endpoint.signals
        tail = ring[_TAIL]
        for _ in signals.turns():
            if ring[_HEAD] != tail:
                break
        else:
            return None
        if not STORES_IN_ORDER:
            signals.fence()
        block = self._known.get(ring[_FIRST_SLOT + tail % SLOTS])
        if block is None or block.header[NUMBER] != block.number or block.header[TAG] != tag:
            return None
        ring[_TAIL] = tail + 1
        return block

    def coming(self, tag: int) -> Steps:
        """Wait until any message comes, for a caller whose `take_again` found none and who will call it again."""
        ring = self._in
        tail = ring[_TAIL]
        yield Wait(
            lambda: ring[_HEAD] != tail or bool(self._arrived) or self._nothing_more_comes(0),
            lambda: self.needs_message((0, tag)),
        )

    def read(self, block: Block) -> None:
        """Note that the message of `take_again` was copied."""
        block.header[TAKEN] = block.header[RELEASED] = 1
        self._endpoint.signals.wake(self._peers)
        self.received += 1
        self.bytes_received += block.nbytes

    def has_message(self, key: tuple[int, int]) -> bool:
        if key not in self._arrived:
            self.take_in()
        return key in self._arrived

    def take_in(self) -> None:
        """Sort the messages that have arrived by tag."""
        if self._queues:
            self._take_in_from_queue()
            return
        if not self._taking_in.acquire(blocking=False):  # another thread of the host is doing this
            return
        try:
            self._take_in_from_ring()
        finally:
            self._taking_in.release()

    def _take_in_from_ring(self) -> None:
        ring = self._in
        tail, head = ring[_TAIL], ring[_HEAD]
        if tail == head:
            return
        self._endpoint.signals.fence()
        while tail < head:
            self._sort(self._in_shared_memory(ring[_FIRST_SLOT + tail % SLOTS]))
            tail += 1
        ring[_TAIL] = tail
        self._endpoint.signals.wake((self._peer,))

    def _take_in_from_queue(self) -> None:
        assert self._queues is not None
        while True:
            try:
                epoch, offset, header, block = self._queues[1].get_nowait()
            except (queue.Empty, ValueError):  # the queue is empty, or was closed with the cluster
                return
            if epoch != self._epoch[0]:  # the message belongs to a run that failed
                continue
            self._in[_TAIL] += 1
            words = self._endpoint.arena.words(offset, 8)

            def taken(words: memoryview = words) -> None:
                words[TAKEN] = words[RELEASED] = 1
                self._endpoint.signals.wake((self._peer,))

            self._sort(
                Envelope(header[LANE], header[TAG], header[NBYTES], partial(decode_alone, block), taken)
            )

    def _sort(self, envelope: Envelope) -> None:
        self._arrived.setdefault((envelope.lane, envelope.tag), deque()).append(envelope)

    def _in_shared_memory(self, offset: int) -> Envelope:
        header, block = self._endpoint.arena.words(offset, 8), None
        if header[NUMBER]:
            block = self._known.get(offset)
            if block is None or block.number != header[NUMBER]:
                if len(self._known) >= KNOWN_BLOCKS:
                    self._known.clear()
                block = self._known[offset] = Block(self._endpoint, offset)

        def taken() -> None:
            header[TAKEN] = 1
            self._endpoint.signals.wake(self._peers)

        opened = partial(self.adopt, offset) if block is None else block.copied
        return Envelope(header[LANE], header[TAG], header[NBYTES], opened, taken)

    def nbytes_at(self, offset: int) -> int:
        """The size in bytes of the arrays in a block."""
        return int(self._endpoint.arena.words(offset, HEADER_BYTES // 8)[NBYTES])

    def adopt(self, offset: int) -> Any:
        """The content of a block of the peer. The block is released when the last array in it is gone."""
        return adopt(self._endpoint.arena, offset, self._held)

    def reuse_blocks(self, like: Encoded) -> ReusedBlocks:
        """Reusable blocks for messages with the signature of this one."""
        self._reused.append(ReusedBlocks(self._endpoint, self._peer, like))
        return self._reused[-1]

    def forget(self) -> None:
        """Free the reusable blocks. Messages in them are not read any more."""
        for blocks in self._reused:
            blocks.give_back()
        self._reused.clear()

    # -- about --------------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether every message that has arrived was received."""
        return not self._arrived and self._in[_HEAD] == self._in[_TAIL]

    @property
    def waiting(self) -> int:
        """Number of messages that have arrived and were not received."""
        self.take_in()
        return sum(len(arrived) for (lane, _), arrived in self._arrived.items() if lane == 0)

    def needs_message(self, key: tuple[int, int]) -> list[Need]:
        lane, tag = key
        sends: Lane = (
            ("send", self._endpoint.layout.rank(self._endpoint.number), tag) if lane == 0 else ("group", lane)
        )
        taken_in = (
            -1 if key in self._arrived else self._in[_TAIL]
        )  # it has arrived, but this endpoint did not notice
        return [
            self._need(sends, self._in_place + HEAD, taken_in),
            self._need(sends, self._in_place + RING_CLOSED),
        ]

    def _needs_room(self, key: tuple[int, int]) -> list[Need]:
        takes: Lane = ("recv", self._endpoint.layout.rank(self._endpoint.number), key[1])
        return [
            self._need(takes, self._untaken[key][0][1].offset + 8 * TAKEN, 0),
            self._need(takes, self._in_place + RING_CLOSED),
        ]

    def _need(self, lane: Lane | None, place: int, value: int | None = None) -> Need:
        """The need that the peer changes a word from ``value``, or from its present value."""
        now = self._endpoint.arena.words(place)[0] if value is None else value
        return Need(self._endpoint.layout.rank(self._peer), lane, place, now)

    def _nothing_more_comes(self, lane: int) -> bool:
        """Whether the channel is closed and everything sent before has arrived."""
        if not self._is_closed(lane):
            return False
        self._endpoint.signals.fence()
        return self._in[_HEAD] == self._in[_TAIL]  # a queue may deliver after the close

    def _is_closed(self, lane: int) -> bool:
        return lane == 0 and (self.closed_here or self.closed_there)  # collectives' messages are not affected

    def _check_open(self, lane: int) -> None:
        if self._is_closed(lane):
            here, there = (
                name_of(self._endpoint.layout.rank(end)) for end in (self._endpoint.number, self._peer)
            )
            by = here if self.closed_here else there
            raise ChannelClosedError(f"the channel between {here} and {there} was closed by {by}")

    def close(self, *, drop: bool = False) -> None:
        """Close the channel in both directions. Messages that have arrived can still be received, or are dropped."""
        self._out[_CLOSED] = 1
        if drop:  # with the memory in which they lie
            self._in[_TAIL] = self._in[_HEAD]
            self._arrived.clear()
        self._endpoint.signals.wake((self._peer,))

    @property
    def closed_here(self) -> bool:
        return bool(self._out[_CLOSED])

    @property
    def closed_there(self) -> bool:
        return bool(self._in[_CLOSED])
