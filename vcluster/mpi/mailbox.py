"""The messages to and from one peer: on another node by MPI, on the same node in shared memory.

Over MPI the sender counts what the receiver has not taken; the receiver tells it with a message for each.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from parallelism.events import HOST
from parallelism.operation import Lane
from vcluster.memory import Need
from vcluster.messages import Encoded, Mailbox, Steps
from vcluster.messages.blocks import TAKEN as BLOCK_TAKEN
from vcluster.messages.encoding import decode
from vcluster.messages.envelopes import Envelope
from vcluster.messages.mailbox import HEAD, RING_CLOSED, TAIL
from vcluster.mpi.statuses import RECEIVED, SENT, SHUT, TAKEN_IN, place_of_act
from vcluster.mpi.transport import CLOSED, DATA, TAKEN, Message

if TYPE_CHECKING:
    from vcluster.mpi.endpoint import MpiEndpoint


class NodeMailbox(Mailbox):
    """The messages to and from a device of the same node, in shared memory.

    The host, which may lie on another node, learns from each device what it has written there.
    """

    _endpoint: MpiEndpoint

    def __init__(self, endpoint: MpiEndpoint, peer: int) -> None:
        super().__init__(endpoint, peer)
        self._acts = {
            self._in_place + HEAD: SENT,
            self._in_place + RING_CLOSED: SHUT,
            self._out_place + TAIL: TAKEN_IN,
        }

    def shown(self) -> dict[int, int]:
        """How often this endpoint has done something for the peer, by `place_of_act`."""
        words = self._endpoint.arena.words
        acts = {
            SENT: self._out_place + HEAD,
            SHUT: self._out_place + RING_CLOSED,
            TAKEN_IN: self._in_place + TAIL,
        }
        return {place_of_act(act, self._peer): words(place)[0] for act, place in acts.items()} | {
            place_of_act(RECEIVED, self._peer): self.received
        }

    def _need(self, lane: Lane | None, place: int, value: int | None = None) -> Need:
        act = self._acts.get(place)
        if act is None:  # it is in the header of a block: whether the peer has received that
            act, value = RECEIVED, self.sent - self._unreceived()
        return super()._need(lane, place, value)._replace(place=place_of_act(act, self._endpoint.number))

    def _unreceived(self) -> int:
        """The number of messages that the peer has not received, as far as this endpoint sees."""
        return sum(
            not (loan.ended or header[BLOCK_TAKEN])
            for (lane, _), untaken in self._untaken.items()
            if lane == 0
            for header, loan in untaken
        )


class MpiMailbox(Mailbox):
    """The messages to and from an endpoint of another node, by MPI. The words of the rings are this rank's own."""

    _endpoint: MpiEndpoint

    def __init__(self, endpoint: MpiEndpoint, peer: int) -> None:
        super().__init__(endpoint, peer)
        layout = endpoint.layout
        self._held = endpoint.arena.words(
            layout.held_word(endpoint.number, endpoint.number)
        )  # blocks come here
        self._reports = HOST not in (layout.rank(peer), layout.rank(endpoint.number))
        """Whether the sender waits if too many of its messages are not taken."""
        self._has_closed = self._was_closed = False

    def arrive(self, message: Message) -> None:
        """Sort a message by what it is."""
        if message.kind == CLOSED:
            self._was_closed = True
        elif message.kind == TAKEN:
            untaken = self._untaken[0, message.tag]
            if untaken:
                untaken.popleft()
        else:
            self._sort(
                Envelope(
                    message.lane,
                    message.tag,
                    message.nbytes,
                    partial(decode, message.block),
                    partial(self._taken, message.lane, message.tag),
                )
            )

    def _taken(self, lane: int, tag: int) -> None:
        if lane == 0 and self._reports:
            self._endpoint.send(self._peer, TAKEN, tag=tag)

    def _put(self, encoded: Encoded, lane: int, tag: int) -> Steps:
        yield from ()
        self.take_in()  # not after it: the caller counts the message before it may be told that it was taken
        self._endpoint.send(self._peer, DATA, encoded, lane=lane, tag=tag, lend=lane != 0)
        if lane == 0:
            self._count_sent(encoded.nbytes)

    def _has_room(self, key: tuple[int, int], capacity: int) -> bool:
        self.take_in()
        return len(self._untaken.get(key, ())) < capacity

    def may_take(self, key: tuple[int, int]) -> bool:
        """Whether `take` need not wait, because a message has arrived or none can come any more."""
        return self.has_message(key) or self._nothing_more_comes(key[0])

    def take_in(self) -> None:
        """Take in the messages that have arrived by MPI, of all peers."""
        self._endpoint.transport.poll()

    @property
    def is_empty(self) -> bool:
        """Whether every message that has arrived was received."""
        return not self._arrived

    def needs_message(self, key: tuple[int, int]) -> list[Need]:
        """The need that the peer sends such a message."""
        lane, tag = key
        layout = self._endpoint.layout
        sends: Lane = ("send", layout.rank(self._endpoint.number), tag) if lane == 0 else ("group", lane)
        need = self._endpoint.need(self._peer, sends)
        return [need._replace(value=-1) if key in self._arrived else need]

    def _needs_room(self, key: tuple[int, int]) -> list[Need]:
        takes: Lane = ("recv", self._endpoint.layout.rank(self._endpoint.number), key[1])
        return [self._endpoint.need(self._peer, takes)]

    def _nothing_more_comes(self, lane: int) -> bool:
        return self._is_closed(lane)

    def close(self, *, drop: bool = False) -> None:
        """Close the channel in both directions. Messages that have arrived can still be received, or are dropped."""
        if drop:
            self._arrived.clear()
        if not self._has_closed:
            self._has_closed = True
            self._endpoint.send(self._peer, CLOSED)

    @property
    def closed_here(self) -> bool:
        return self._has_closed

    @property
    def closed_there(self) -> bool:
        return self._was_closed
