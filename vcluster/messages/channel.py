"""A first in, first out queue between two endpoints: device and device, or host and device.

    device.channel(3).send(x)          to and from rank 3
    device.channel(HOST).recv()        to and from the host, whose end is cluster.channel(rank)

What is sent is copied; the copy is what the other end gets.  Messages of one tag arrive in the order in which they were
sent; different tags do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from parallelism.collectives import check_declared, check_shape, checked_tag
from parallelism.events import HOST
from vcluster.code import call_site
from vcluster.code.call_sites import here
from vcluster.messages.block_cache import REUSED_BYTES, Block, ReusedBlocks
from vcluster.messages.encoding import Encoded, encode_message
from vcluster.messages.mailbox import Envelope
from vcluster.messages.tasks import Wait
from vcluster.messages.work import Owner, Pending, issue
from vcluster.tracing import Row, Template, dtype_name, message_template

MOST_LOOKS = 64
"""Of messages that one end remembers to have sent."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """What one end of a channel has seen so far."""

    messages_sent: int
    bytes_sent: int
    """Bytes of the arrays in those messages."""
    messages_received: int
    bytes_received: int
    messages_waiting: int
    """Messages that have arrived here and were not received."""
    capacity: int | None
    """Messages of one tag that may lie there before a sender waits; None: it never does (host and device)."""


class VirtualChannel:
    """One end of a channel."""

    repeats = True
    """Whether messages that look like earlier ones go a shorter way."""

    def __init__(self, owner: Owner, peer: int) -> None:
        """``peer`` is a rank, or `HOST`.  Made by ``device.channel`` and ``cluster.channel``."""
        self._owner = owner
        self._rank = owner.endpoint.layout.rank(owner.endpoint.number)
        self._peer = peer
        between_devices = HOST not in (peer, self._rank)  # host and device do not run at the same time
        self._capacity = owner.endpoint.capacity if between_devices else None
        self._mailbox = owner.endpoint.mailbox(owner.endpoint.layout.endpoint(peer))
        self._repeats = self.repeats and bool(self._capacity) and owner.endpoint.queues is None
        self._looks: set[tuple[int, np.dtype[Any], tuple[int, ...]]] = set()
        self._outgoing: dict[tuple[int, np.dtype[Any], tuple[int, ...]], tuple[Template, ReusedBlocks]] = {}
        """For each (tag, dtype, shape) that was sent more than once."""

    def __repr__(self) -> str:
        return f"<VirtualChannel between {_name(self._rank)} and {_name(self._peer)}>"

    def send(self, x: Any, *, tag: int = 0) -> None:
        """Copy ``x`` (an array, a scalar, or tuples, lists and dicts of them) and put it into the channel.

        Returns when the copy lies there; waits only while ``channel_capacity`` messages of this tag do (0: until the
        message is taken).  Between host and device it does not wait: neither receives while the other runs.
        **Communication**: one message, the bytes of the arrays.
        Raises ``TypeError`` for arrays that hold no numbers, `ChannelClosedError` if either end is closed.
        """
        if type(x) is np.ndarray:
            known = self._outgoing.get((tag, x.dtype, x.shape))
            if known is not None and self._send_again(known, x, tag):
                return
        recorder = self._owner.recorder
        encoded = encode_message(x)
        start = recorder.enter()
        try:
            event = self._sent(x, encoded.nbytes, tag, None)
            steps = self._mailbox.sending(encoded, checked_tag(tag), capacity=self._capacity)
            self._owner.endpoint.tasks.run(("send", self._peer, tag), steps, self._text_of("send", tag))
            recorder.fill(event, **recorder.since(start))
            self._note_look(x, encoded, tag)
        finally:
            recorder.leave()

    def _send_again(self, known: tuple[Template, ReusedBlocks], x: NDArray[Any], tag: int) -> bool:
        """Send an array that looks like an earlier one; False, and nothing done, if it cannot go the short way now."""
        if self._owner.endpoint.tasks.lanes or type(tag) is not int:
            return False
        recorder = self._owner.recorder
        start = recorder.enter()
        try:
            template, blocks = known
            if not self._mailbox.send_again(blocks, x, tag, self._capacity or 0):
                return False
            location = call_site(2).location
            recorder.begins("send", location)
            recorder.add_repeated(template, location, start)
            return True
        finally:
            recorder.leave()

    def _note_look(self, x: Any, encoded: Encoded, tag: int) -> None:
        """A message was sent; have blocks ready if it is the second of its look."""
        if type(x) is np.ndarray and self._repeats and x.nbytes <= REUSED_BYTES and len(self._looks) < MOST_LOOKS:
            key = tag, x.dtype, x.shape
            if key in self._looks:
                template = message_template("send", self._peer, tag, x.nbytes, dtype_name(x.dtype))
                self._outgoing[key] = template, self._mailbox.reuse_blocks(encoded)
            self._looks.add(key)

    def isend(self, x: Any, *, tag: int = 0) -> Pending:
        """`send` that does not wait.  ``x`` must not change before the returned work is waited for."""
        recorder = self._owner.recorder
        encoded = encode_message(x)
        recorder.enter()
        try:
            work = recorder.next_work()
            self._sent(x, encoded.nbytes, tag, work)
            steps = self._mailbox.sending(encoded, checked_tag(tag), capacity=self._capacity)
            return self._issue(("send", self._peer, tag), steps, work, "send")
        finally:
            recorder.leave()

    def recv(self, *, tag: int = 0, out: Any = None) -> Any:
        """Take the oldest message with this tag, waiting until there is one.

        The result is the caller's own.  With ``out=``, an array of exactly its shape and dtype, it is copied there.
        Raises `ChannelClosedError` if the channel is empty and either end is closed.
        """
        recorder = self._owner.recorder
        start = recorder.enter()
        try:
            if self._repeats and type(tag) is int and not self._owner.endpoint.tasks.lanes:
                block = self._mailbox.take_again(tag)
                if block is None and self._mailbox.is_empty:
                    lane = "recv", self._peer, tag
                    self._owner.endpoint.tasks.run(lane, self._mailbox.coming(tag), self._text_of("recv", tag))
                    block = self._mailbox.take_again(tag)
                if block is not None:
                    return self._received_again(block, tag, out, start)
            event = self._receives(tag, None)
            steps = self._receiving(checked_tag(tag), out, None, None, event, start)
            return self._owner.endpoint.tasks.run(("recv", self._peer, tag), steps, self._text_of("recv", tag))
        finally:
            recorder.leave()

    def _received_again(self, block: Block, tag: int, out: Any, start: int) -> Any:
        """The copy of a message that lies in a known block."""
        elements = block.elements
        try:
            if out is None:
                out = elements.copy()
            else:
                if type(out) is not np.ndarray or out.shape != elements.shape or out.dtype != elements.dtype:
                    check_shape(f"recv from {_name(self._peer)}", out, elements.shape, elements.dtype)
                np.copyto(out, elements)
        finally:
            self._mailbox.read(block)
        if block.template is None or block.template[2]["tag"] != tag:
            block.template = message_template("recv", self._peer, tag, block.nbytes)
        location = call_site(2).location
        self._owner.recorder.begins("recv", location)
        self._owner.recorder.add_repeated(block.template, location, start)
        return out

    def irecv(self, *, tag: int = 0, shape: Sequence[int] | None = None, dtype: DTypeLike | None = None) -> Pending:
        """`recv` that does not wait; the returned work does.  ``shape`` and ``dtype`` must be the message's."""
        recorder = self._owner.recorder
        start = recorder.enter()
        try:
            work = recorder.next_work()
            event = self._receives(tag, work)
            wanted = None if dtype is None else np.dtype(dtype)
            extents = None if shape is None else tuple(shape)
            steps = self._receiving(checked_tag(tag), None, extents, wanted, event, start)
            return self._issue(("recv", self._peer, tag), steps, work, "recv")
        finally:
            recorder.leave()

    def close(self) -> None:
        """No more messages either way.  What has arrived can still be received, by both ends."""
        self._mailbox.close()

    @property
    def closed(self) -> bool:
        """Whether either end was closed."""
        return self._mailbox.closed_here or self._mailbox.closed_there

    def statistics(self) -> ChannelStatistics:
        """Counts of this end, since the cluster was started."""
        box = self._mailbox
        return ChannelStatistics(
            box.sent, box.bytes_sent, box.received, box.bytes_received, box.waiting, self._capacity
        )

    def _issue(self, lane: tuple[str, int, int], steps: Generator[Wait, None, Any], work: int, name: str) -> Pending:
        return issue(self._owner, lane, steps, self._text_of(name, lane[2]), work, name)

    def _text_of(self, name: str, tag: int) -> str:
        way = "to" if name == "send" else "from"
        return f"{name}({way} {_name(self._peer)}, tag {tag})"

    def _receiving(
        self, tag: int, out: Any, shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None, event: Row, start:
        int
    ) -> Generator[Wait, None, Any]:
        envelope: Envelope = yield from self._mailbox.receiving(tag)
        self._owner.recorder.fill(event, bytes_received=envelope.nbytes, **self._owner.recorder.since(start))
        value = envelope.open()
        if shape is not None or dtype is not None:
            check_declared(self._rank, self._peer, value, shape, dtype)
        if out is None:
            return value
        if not isinstance(value, np.ndarray):
            raise TypeError(f"recv(out=) got a message that is a {type(value).__name__}, not an array")
        check_shape(f"recv from {_name(self._peer)}", out, value.shape, value.dtype)
        np.copyto(out, value)
        return out

    def _sent(self, x: Any, nbytes: int, tag: int, work: int | None) -> Row:
        dtype = dtype_name(x.dtype) if type(x) is np.ndarray else None
        return self._event("send", tag, work, bytes_sent=nbytes, messages=1, dtype=dtype)

    def _receives(self, tag: int, work: int | None) -> Row:
        return self._event("recv", tag, work)

    def _event(self, kind: str, tag: int, work: int | None, **values: Any) -> Row:
        return self._owner.recorder.add(kind, kind, peer=self._peer, tag=tag, work=work, location=here(2), **values)


def _name(rank: int) -> str:
    return "the host" if rank < 0 else f"rank {rank}"
