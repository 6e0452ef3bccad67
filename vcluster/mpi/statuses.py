"""What devices wait for, as they tell it to the host: the base of the search for deadlocks.

A device that has waited for a moment sends what it needs, and how many messages it has sent to each peer and received
from it. A message is under way if its sender has sent more than its receiver has received. What a device said may be
out of date only because a message has come that its sender had not counted; then the sender had gone on first. So if
devices wait only for each other, and no message is under way between them, none has gone on since it spoke: the first
to do so would have needed a message of another.

Devices of one node meet, and exchange messages, in shared memory, which the host need not see. There the words that a
device writes for the others stand for messages. For a group they are the numbers of operations that the device has
posted and finished; for a peer, the numbers of messages that it has sent, taken in and received. They only grow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vcluster.memory import BLOCKED, FINISHED, GROUPS, RUNNING, LastSeen, Need, Operation, State, Status
from vcluster.memory.status import decode_blocked, encode_blocked
from vcluster.messages.encoding import decode, encode
from vcluster.mpi.transport import STATUS, Message

if TYPE_CHECKING:
    from vcluster.mpi.endpoint import MpiEndpoint

Counts = tuple[list[int], dict[int, int], int]
"""What a device has sent to each endpoint, the words that it shows (by `place_of_word`), and the number of its groups.
"""

PATIENCE_SECONDS = 0.02
"""Seconds of waiting after which a device tells the host."""


class DeviceStatus(Status):
    """The state of this device."""

    def __init__(self, endpoint: MpiEndpoint) -> None:
        super().__init__(endpoint.arena, endpoint.layout, endpoint.heap)
        self._endpoint = endpoint
        self._since: float | None = None
        self._told: bytes | None = None

    def set(self, rank: int, state: int) -> None:
        """Note that the device runs or has finished; the host learns of the end by the reply."""
        self._since = None
        if self._told is not None and state == RUNNING:
            self._tell(None)

    def set_blocked(self, rank: int, operations: Sequence[Operation], location: str, waits: int = 1) -> None:
        """Note that the device is blocked, and tell the host if it has been for a moment and this is new."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since < PATIENCE_SECONDS:
            return
        said = encode_blocked(operations, location, waits, self._endpoint.counts())
        if said != self._told:
            self._tell(said)

    def _tell(self, said: bytes | None) -> None:
        self._told = said
        self._endpoint.send(self._endpoint.layout.host, STATUS, encode(said or b"", "a state"))


class HostStatus(Status):
    """The states of all devices, as they told them."""

    def __init__(self, endpoint: MpiEndpoint) -> None:
        super().__init__(endpoint.arena, endpoint.layout)
        self._endpoint = endpoint
        size = endpoint.layout.size
        self._states = [State(0, RUNNING)] * size
        self._sent: list[list[int]] = [[0] * (size + 1)] * size
        """By rank: how many messages it had sent to each endpoint."""
        self._shown: list[dict[int, int]] = [{}] * size
        """By rank: the words that it showed the other members of groups on its node."""

    def take(self, rank: int, message: Message) -> None:
        """Note what a device says. What it said in an earlier generation does not count."""
        if message.address != self._endpoint.address:
            return
        said = decode(message.block)
        if not said:
            self.set(rank, RUNNING)
            return
        self._states[rank], (counts,) = decode_blocked(said, self.version(rank) + 1)
        self._count(rank, counts)

    def finish(self, rank: int, counts: Counts) -> None:
        """Note that a device has finished its kernel, and what it has sent and shown till then."""
        self._count(rank, counts)
        self.set(rank, FINISHED)

    def _count(self, rank: int, counts: Counts) -> None:
        self._sent[rank], self._shown[rank], groups = counts
        layout = self._endpoint.layout
        self._endpoint.arena.words(layout.word(rank, GROUPS))[0] = groups  # where the host looks for it

    def begin(self, rank: int) -> None:
        """Mark a device as running, with no call yet."""
        self.set(rank, RUNNING)

    def set(self, rank: int, state: int) -> None:
        """Mark a device as running or finished."""
        self._states[rank] = State(self.version(rank) + 1, state)

    def version(self, rank: int) -> int:
        """Counts what the device has said."""
        return self._states[rank].version

    def read(self, rank: int) -> State:
        """What the device said last."""
        return self._states[rank]

    def last_seen(self, rank: int) -> LastSeen:
        """What the device waited in, if it said so."""
        state = self._states[rank]
        return state.last_seen() if state.state == BLOCKED else LastSeen()

    def has_changed(self, need: Need) -> bool:
        """Whether a message of the peer is under way to the device that has this need, or its word has changed."""
        if need.place < 0:
            return self._shown[need.peer].get(need.place, 0) > need.value
        sent = self._endpoint.sent if need.peer < 0 else self._sent[need.peer]
        return sent[need.place] > need.value


SENT, TAKEN_IN, SHUT, RECEIVED = range(4)
"""What a device does for a peer on its node: it sends messages, takes them into its mailbox, closes the channel, and
receives messages from its mailbox."""


def place_of_word(key: int, word: int) -> int:
    """What stands in a `Need` for a word (0 or `LINE`) that the members of a group in shared memory show.

    Other places are numbers of endpoints, which are not negative, and those of `place_of_act`.
    """
    return -2 * key - bool(word)


def place_of_act(act: int, peer: int) -> int:
    """What stands in a `Need` for how often a device has done something for a peer."""
    return -(1 << 66) - 4 * peer - act
