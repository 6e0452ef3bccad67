"""Messages between the ranks of an MPI job. This module alone imports mpi4py.

A message is a block (`vcluster.messages.encoding`) whose first line is its head. A small one is one message of MPI. Of
a large one, the head and the description go first, and the body follows from where it lies, without a copy. Messages
from one rank arrive in the order in which they were sent.

Nothing here waits. Whoever waits polls, and so takes in every message that has arrived: no send waits for a matching
receive, and no failure leaves a message behind that somebody would have to cancel.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vcluster.messages import Encoded
from vcluster.messages.encoding import HEADER_BYTES, aligned

START, COMMAND, REPLY, STATUS, CANCEL, DATA, POST, TAKEN, CLOSED, LEAVE, COMMUNICATOR, MEMORY = range(12)
"""The kinds of messages. For a rank: serve a device, leave the job. Between a device and its host: a command, a reply,
what a device waits for, the run is cancelled, of a communicator that it is asked for, or made, and the memory of its
node. Between endpoints: of a channel or an algorithm, a member's call of a collective, a message was taken, a channel
was closed."""

SMALL_BYTES = 1 << 14
"""Blocks up to this size are copied into one message of MPI."""

FIRST_NAP_SECONDS, LONGEST_NAP_SECONDS = 5e-5, 4e-3
"""The first and the longest sleep of a rank that waits. It polls between them: no other rank can wake it."""
_WAITED_OVER_NAP = 8

_HEAD = struct.Struct("<8q")
_TAG, _TAG_PLACE = struct.Struct("<q"), 32
_HEADS, _BODIES = 1, 2
"""Tags of MPI."""


class Address(NamedTuple):
    """Which cluster a message belongs to, and how often the traffic of that was reset before."""

    cluster: int
    generation: int


class Message(NamedTuple):
    """A message that has arrived."""

    kind: int
    address: Address
    lane: int
    tag: int
    nbytes: int
    """Bytes of its arrays."""
    block: NDArray[np.uint8]


class _Incoming(NamedTuple):
    message: Message
    request: Any
    """The receive of its body; None if it has none."""


def nap_seconds(waited_seconds: float) -> float:
    """How long a rank sleeps that has waited so long: a small part of it, so that it is late by no more than that."""
    return min(max(FIRST_NAP_SECONDS, waited_seconds / _WAITED_OVER_NAP), LONGEST_NAP_SECONDS)


def load_mpi() -> Any:
    """The module ``mpi4py.MPI``, which initializes MPI."""
    from mpi4py import MPI

    return MPI


class Transport:
    """Sends and receives the messages of this rank."""

    def __init__(self, mpi: Any) -> None:
        """``mpi`` is the module. All ranks of the job call this together."""
        self.mpi = mpi
        self.world = mpi.COMM_WORLD
        self._comm = self.world.Dup()
        self._interrupts = self.world.Dup()
        """A communicator for interrupts alone: a thread of a device receives them while its kernel computes."""
        self.rank, self.size = int(self._comm.rank), int(self._comm.size)
        self.takers: dict[int, Callable[[int, Message], None]] = {}
        """What is called with the source and each message of a cluster, by the number of the cluster."""
        self._sending: deque[tuple[Any, Any, Callable[[], object] | None]] = deque()
        """Requests that are not finished, the memory that they use, and what is called after them."""
        self._incoming: dict[int, deque[_Incoming]] = {}
        """By source, messages that have begun to arrive."""
        self._status = mpi.Status()
        self._turn = threading.Lock()
        self._pid = os.getpid()
        self.collectives = 0
        """Collectives of MPI that are under way."""
        self._left: list[Any] = []
        """Requests that nobody waits for any more, and the memory that they use."""

    def send(
        self,
        target: int,
        kind: int,
        address: Address,
        lane: int,
        tag: int,
        encoded: Encoded,
        *,
        lend: bool = False,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Start to send a value. ``lend``: its arrays do not change before ``then`` is called."""
        size = HEADER_BYTES + aligned(len(encoded.description))
        body: Any = b""
        if encoded.block_nbytes <= SMALL_BYTES:
            head = encoded.alone()
        else:
            head = bytearray(size)
            head[HEADER_BYTES : HEADER_BYTES + len(encoded.description)] = encoded.description
            is_lent = lend and len(encoded.buffers) == 1
            body = _flat(encoded.buffers[0]) if is_lent else memoryview(encoded.alone())[size:]
        _HEAD.pack_into(head, 0, kind, *address, lane, tag, encoded.nbytes, size, len(body))
        self.send_block(target, head)
        if len(body):  # otherwise the receiver expects nothing more
            request = self._comm.Isend([body, len(body), self.mpi.BYTE], target, _BODIES)
            self._sending.append((request, (body, encoded), then))
        elif then is not None:
            then()

    def send_block(self, target: int, block: bytearray) -> None:
        """Send a whole block, which begins with its head."""
        if os.getpid() != self._pid:
            raise RuntimeError("a forked copy of a rank takes no part in its job")
        request = self._comm.Isend([block, len(block), self.mpi.BYTE], target, _HEADS)
        if not request.Test():
            self._sending.append((request, block, None))

    def has_sent(self, block: bytearray) -> bool:
        """Whether a block that was sent may change again."""
        if self._sending:
            self.poll()
        return not self._sending or all(memory is not block for _, memory, _ in self._sending)

    def poll(self, *, one: bool = False) -> None:
        """Take in what has arrived, or ``one`` message of it, and let what is being sent go on."""
        if not self._turn.acquire(blocking=False):  # another thread of the host is doing this
            return
        try:
            while self._take_in_one() and not one:
                pass
            if self._incoming:
                self._deliver()
            if self._sending:
                self._finish_sending()
        finally:
            self._turn.release()

    def interrupt(self, target: int, address: Address) -> None:
        """Interrupt the kernel of a rank that serves a device of this cluster, in a run of this generation."""
        note = np.array(address, np.int64)
        self._sending.append((self._interrupts.Isend(note, target), note, None))

    def interrupted(self) -> Address | None:
        """For the thread of a device: the address of the latest interrupt that has arrived."""
        latest = None
        note = np.zeros(2, np.int64)
        while self._interrupts.Iprobe():
            self._interrupts.Recv(note)
            latest = Address(*note.tolist())
        return latest

    def beside(self, most: int | None = None) -> Any:
        """A communicator of the ranks on this node, or of ``most`` neighbours on it. All ranks call this together."""
        beside = self.world.Split_type(self.mpi.COMM_TYPE_SHARED)
        if most is None:
            return beside
        part = beside.Split(beside.rank // most)
        beside.Free()
        return part

    def communicator(self, ranks: Sequence[int]) -> Any:
        """A communicator of these ranks, in this order. All of them call this together."""
        world = self.world.Get_group()
        group = world.Incl(ranks)
        try:
            return self.world.Create_group(group)
        finally:
            group.Free()
            world.Free()

    def leave(self, request: Any, memory: object) -> None:
        """Leave a request to MPI, which may use the memory until the job ends."""
        self._left.append((request, memory))

    def gather(self, value: Any) -> Any:
        """What all ranks say, by rank, on rank 0. All call this together."""
        return self.world.gather(value)

    def abort(self) -> None:
        """End all ranks at once."""
        self.world.Abort(1)

    def _take_in_one(self) -> bool:
        status = self._status
        found = self._comm.Improbe(self.mpi.ANY_SOURCE, _HEADS, status)
        if found is None:
            return False
        source = status.source
        block = np.empty(status.Get_count(self.mpi.BYTE), np.uint8)
        found.Recv([block, block.size, self.mpi.BYTE])
        kind, cluster, generation, lane, tag, nbytes, size, body = _HEAD.unpack_from(block.data)
        request = None
        if body:
            head, block = block, np.empty(size + body, np.uint8)
            block[:size] = head
            request = self._comm.Irecv([block[size:], body, self.mpi.BYTE], source, _BODIES)
        message = Message(kind, Address(cluster, generation), lane, tag, nbytes, block)
        if request is None and source not in self._incoming:
            self._hand_over(source, message)
        else:
            self._incoming.setdefault(source, deque()).append(_Incoming(message, request))
        return True

    def _deliver(self) -> None:
        """Hand over what has arrived whole, in the order of each source."""
        for source, incoming in list(self._incoming.items()):
            while incoming and (incoming[0].request is None or incoming[0].request.Test()):
                self._hand_over(source, incoming.popleft().message)
            if not incoming:
                del self._incoming[source]

    def _hand_over(self, source: int, message: Message) -> None:
        taker = self.takers.get(message.address.cluster)
        if taker is not None:  # otherwise it belongs to a cluster that was closed
            taker(source, message)

    def _finish_sending(self) -> None:
        for _ in range(len(self._sending)):
            entry = self._sending.popleft()
            if not entry[0].Test():
                self._sending.append(entry)
            elif entry[2] is not None:
                entry[2]()

    def rest_seconds(self, waited_seconds: float) -> float:
        """How long a rank sleeps that has waited so long: only for a moment if large arrays are on the way.

        MPI moves them while somebody polls.
        """
        is_moving = self._sending or self._incoming or self.collectives
        return FIRST_NAP_SECONDS if is_moving else nap_seconds(waited_seconds)

    @property
    def is_sending(self) -> bool:
        """Whether something that was sent is still in the memory of this rank."""
        return bool(self._sending)


def head_of(
    block: bytearray, kind: int, address: Address, lane: int, tag: int, nbytes: int, size: int
) -> None:
    """Write the head of a block that is sent whole. ``size`` is that of the head and the description."""
    _HEAD.pack_into(block, 0, kind, *address, lane, tag, nbytes, size, 0)


def retag(block: bytearray, tag: int) -> None:
    """Write another tag into the head of a block."""
    _TAG.pack_into(block, _TAG_PLACE, tag)


def _flat(buffer: Any) -> memoryview:
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8).data
    return memoryview(buffer).cast("B")
