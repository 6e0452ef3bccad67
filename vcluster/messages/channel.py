"""A first in, first out queue between two endpoints: between two devices, or between the host and a device.

    device.channel(3).send(x)          to and from rank 3
    device.channel(HOST).recv()        to and from the host, whose end is cluster.channel(rank)

`send` copies the value, and the other end receives the copy. Messages of one tag arrive in the order in which they were
sent. Messages of different tags do not wait for each other.

>>> from vcluster import HOST, VirtualCluster
>>> with VirtualCluster(2, backend="thread") as cluster:
...     cluster.channel(1).send("hello")
...     cluster.run(lambda device: device.channel(HOST).recv() if device.rank == 1 else None).outputs
[None, 'hello']
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from parallelism.arrays import Array
from parallelism.collectives import check_declared, check_shape, checked_tag
from parallelism.dtypes import as_dtype
from parallelism.events import HOST
from vcluster.code import call_site
from vcluster.code.call_sites import here
from vcluster.messages.blocks import REUSED_BYTES, Block, ReusedBlocks
from vcluster.messages.encoding import Encoded, encode_message
from vcluster.messages.endpoint import DONE, Owner, Pending, issue, pending
from vcluster.messages.envelopes import Described, Envelope, name_of
from vcluster.messages.tasks import Receive, Steps
from vcluster.tracing import Row, Template, dtype_name, message_template

MOST_SIGNATURES = 64
"""Maximal number of message signatures that one end remembers."""

Signature = tuple[int, np.dtype[Any], tuple[int, ...]]
"""Tag, dtype and shape of a message."""


class ChannelStatistics(NamedTuple):
    """Counts of one end of a channel so far.

    >>> from vcluster import VirtualCluster
    >>> with VirtualCluster(1, backend="thread") as cluster:
    ...     cluster.channel(0).send("hello")
    ...     cluster.channel(0).statistics().messages_sent
    ...     cluster.run(lambda device: device.channel(-1).recv()).outputs
    1
    ['hello']
    """

    messages_sent: int
    bytes_sent: int
    """Bytes of the arrays in the messages sent."""
    messages_received: int
    bytes_received: int
    messages_waiting: int
    """Number of messages that have arrived at this end and were not received."""
    capacity: int | None
    """Number of messages of one tag that the channel holds before a sender waits. None between host and device: there
    the sender never waits."""


class VirtualChannel:
    """One end of a channel. ``device.channel`` and ``cluster.channel`` return it.

    >>> from vcluster import VirtualCluster
    >>> def exchange(device):
    ...     channel = device.channel(1 - device.rank)
    ...     channel.send(10 * device.rank)
    ...     return channel.recv()
    >>> with VirtualCluster(2, backend="thread") as cluster:
    ...     cluster.run(exchange).outputs
    [10, 0]
    """

    repeats = True
    """Whether messages with the signature of an earlier one take the fast path."""

    def __init__(self, owner: Owner, peer: int) -> None:
        """``peer`` is a rank, or `HOST`."""
        self._owner = owner
        self._rank = owner.endpoint.layout.rank(owner.endpoint.number)
        self._peer = peer
        between_devices = HOST not in (peer, self._rank)  # the host and a device do not run at the same time
        self._capacity = owner.endpoint.capacity if between_devices else None
        self._mailbox = owner.endpoint.mailbox(owner.endpoint.layout.endpoint(peer))
        self._repeats = (
            self.repeats
            and bool(self._capacity)
            and owner.endpoint.maps((peer,))
            and owner.endpoint.queues is None
        )
        self._signatures: set[Signature] = set()
        self._outgoing: dict[Signature, tuple[Template, ReusedBlocks]] = {}
        """The template and the reusable blocks of each signature that was sent more than once."""

    def __repr__(self) -> str:
        return f"<VirtualChannel between {name_of(self._rank)} and {name_of(self._peer)}>"

    def send(self, x: Any, *, tag: int = 0) -> None:
        """Copy ``x`` into the channel. ``x`` is an array, a scalar, or tuples, lists and dicts of them.

        Returns when the copy lies in the channel. Waits while the channel holds ``channel_capacity`` messages of this
        tag (with capacity 0: until the message is taken). Between host and device it never waits, because neither
        receives while the other runs.

        **Communication**: one message with the bytes of the arrays.

        Raises ``TypeError`` for arrays that do not hold numbers, `ChannelClosedError` if either end is closed.
        """
        if type(x) is np.ndarray:
            prepared = self._outgoing.get((tag, x.dtype, x.shape))
            if prepared is not None and self._send_again(prepared, x, tag):
                return
        recorder = self._owner.recorder
        encoded = encode_message(x)
        with recorder as start:
            event = self._sent(x, encoded.nbytes, tag, None, here(1))
            steps = self._mailbox.sending(encoded, checked_tag(tag), capacity=self._capacity)
            self._owner.endpoint.tasks.run(
                ("send", self._peer, tag), steps, Described("send", self._peer, tag)
            )
            recorder.fill(event, **recorder.since(start))
            recorder.end_among_others(event, "send")
            self._note_signature(x, encoded, tag)

    def _send_again(self, prepared: tuple[Template, ReusedBlocks], x: Array, tag: int) -> bool:
        """Send an array on the fast path. False, and nothing is sent, if that is impossible now."""
        if self._owner.endpoint.tasks.lanes or type(tag) is not int:
            return False
        recorder, location = self._owner.recorder, call_site(2).location
        start = recorder.enter("send", location)
        try:
            template, blocks = prepared
            is_sent = self._mailbox.send_again(blocks, x, tag, self._capacity or 0)
        except BaseException as error:
            recorder.leave(type(error), error)
            raise
        recorder.leave_repeated(template if is_sent else None, location, start)
        return is_sent

    def _note_signature(self, x: Any, encoded: Encoded, tag: int) -> None:
        """Note that a message was sent, and prepare reusable blocks if its signature was sent before."""
        may_repeat = type(x) is np.ndarray and self._repeats and x.nbytes <= REUSED_BYTES
        if may_repeat and len(self._signatures) < MOST_SIGNATURES:
            key = tag, x.dtype, x.shape
            if key in self._signatures:
                template = message_template("send", self._peer, tag, x.nbytes, dtype_name(x.dtype))
                self._outgoing[key] = template, self._mailbox.reuse_blocks(encoded)
            self._signatures.add(key)

    def isend(self, x: Any, *, tag: int = 0) -> Pending:
        """`send` without waiting. ``x`` must not change before ``wait()`` of the returned work has returned."""
        recorder, lane = self._owner.recorder, ("send", self._peer, tag)
        with recorder as start:
            work, location = recorder.next_work(), here(1)
            is_plain = type(x) is np.ndarray and type(tag) is int
            if is_plain and self._repeats and self._owner.endpoint.tasks.is_free(lane):
                prepared = self._outgoing.get((tag, x.dtype, x.shape))
                if self._send_now(x, tag, prepared and prepared[1]):
                    values = {
                        "peer": self._peer,
                        "tag": tag,
                        "work": work,
                        "bytes_sent": x.nbytes,
                        "messages": 1,
                        "dtype": dtype_name(x.dtype),
                    }
                    recorder.begins("send", location)
                    recorder.add_repeated(("send", "send", values), location, start)
                    return pending(self._owner, DONE, work, "send")
            encoded = encode_message(x)
            self._sent(x, encoded.nbytes, tag, work, location)
            steps = self._mailbox.sending(encoded, checked_tag(tag), capacity=self._capacity)
            return issue(self._owner, lane, steps, Described("send", self._peer, tag), work, "send", location)

    def _send_now(self, x: Array, tag: int, blocks: ReusedBlocks | None) -> bool:
        """Send an array without waiting. False, and nothing is sent, if that is impossible now."""
        capacity = self._capacity or 0
        if blocks is not None and self._mailbox.send_again(blocks, x, tag, capacity):
            return True
        encoded = encode_message(x)
        if not self._mailbox.send_at_once(encoded, checked_tag(tag), capacity):
            return False
        self._note_signature(x, encoded, tag)
        return True

    def recv(self, *, tag: int = 0, out: Any = None) -> Any:
        """Take the oldest message with this tag, and wait until there is one.

        The result belongs to the caller. With ``out=``, an array of exactly its shape and dtype, the message is copied
        into ``out`` and ``out`` is returned.

        Raises `ChannelClosedError` if the channel is empty and either end is closed.
        """
        recorder, location = self._owner.recorder, call_site(1).location
        template: Template | None = None
        start = recorder.enter("recv", location)
        try:
            block = self._block_that_comes(tag)
            if block is not None:
                value, template = self._received_again(block, tag, out)
            else:
                event = self._event("recv", tag, None, location)
                steps = self._receiving(checked_tag(tag), out, event, start)
                value = self._owner.endpoint.tasks.run(
                    ("recv", self._peer, tag), steps, Described("recv", self._peer, tag)
                )
                recorder.end_among_others(event, "recv")
        except BaseException as error:
            recorder.leave(type(error), error)
            raise
        recorder.leave_repeated(template, location, start)
        return value

    def _block_that_comes(self, tag: int) -> Block | None:
        """The reusable block of the next message, if the fast path can take it. Waits until a message comes."""
        if not self._repeats or type(tag) is not int or self._owner.endpoint.tasks.lanes:
            return None
        block = self._mailbox.take_again(tag)
        if block is None and self._mailbox.is_empty:
            lane = "recv", self._peer, tag
            self._owner.endpoint.tasks.run(
                lane, self._mailbox.coming(tag), Described("recv", self._peer, tag)
            )
            block = self._mailbox.take_again(tag)
        return block

    def _received_again(self, block: Block, tag: int, out: Any) -> tuple[Any, Template]:
        """Copy a message that lies in a reusable block; the copy and the template of its event."""
        elements = block.elements
        try:
            if out is None:
                out = elements.copy()
            else:
                if (
                    type(out) is not np.ndarray
                    or out.shape != elements.shape
                    or out.dtype != elements.dtype
                    or not out.flags.c_contiguous
                ):
                    check_shape(f"recv from {name_of(self._peer)}", out, elements.shape, elements.dtype)
                np.copyto(out, elements)
        finally:
            self._mailbox.read(block)
        if block.template is None or block.template[2]["tag"] != tag:
            block.template = message_template("recv", self._peer, tag, block.nbytes)
        return out, block.template

    def irecv(
        self, *, tag: int = 0, shape: Sequence[int] | None = None, dtype: DTypeLike | None = None
    ) -> Pending:
        """`recv` without waiting; ``wait()`` of the returned work returns the message.

        If ``shape`` or ``dtype`` is given, the message must have it; otherwise ``wait()`` raises
        `CollectiveMismatchError`.
        """
        recorder = self._owner.recorder
        with recorder as start:
            work, location = recorder.next_work(), here(1)
            wanted = None if shape is None else tuple(shape), None if dtype is None else as_dtype(dtype)
            values: dict[str, Any] = {"peer": self._peer, "tag": checked_tag(tag), "work": work}

            def opened(envelope: Envelope) -> Any:
                values.update(bytes_received=envelope.nbytes, **recorder.since(start))
                value = envelope.open()
                if wanted != (None, None):
                    check_declared(self._rank, self._peer, value, *wanted)
                return value

            recorder.begins("recv", location)
            recorder.add_untimed("recv", "recv", values, location)
            lane = "recv", self._peer, tag
            receive = Receive(self._mailbox, lane, tag, opened, Described("recv", self._peer, tag), location)
            self._owner.endpoint.tasks.start(receive)
            return pending(self._owner, receive, work, "recv")

    def close(self) -> None:
        """Close the channel in both directions. Messages that have arrived can still be received at both ends."""
        self._mailbox.close()

    @property
    def closed(self) -> bool:
        """Whether either end was closed."""
        return self._mailbox.closed_here or self._mailbox.closed_there

    def statistics(self) -> ChannelStatistics:
        """Counts of this end since the cluster was started."""
        box = self._mailbox
        return ChannelStatistics(
            box.sent, box.bytes_sent, box.received, box.bytes_received, box.waiting, self._capacity
        )

    def _receiving(self, tag: int, out: Any, event: Row, start: int) -> Steps:
        envelope: Envelope = yield from self._mailbox.receiving(tag)
        self._owner.recorder.fill(event, bytes_received=envelope.nbytes, **self._owner.recorder.since(start))
        value = envelope.open()
        if out is None:
            return value
        if not isinstance(value, np.ndarray):
            raise TypeError(f"recv(out=) needs a message that is an array, got a {type(value).__name__}")
        check_shape(f"recv from {name_of(self._peer)}", out, value.shape, value.dtype)
        np.copyto(out, value)
        return out

    def _sent(self, x: Any, nbytes: int, tag: int, work: int | None, location: str) -> Row:
        dtype = dtype_name(x.dtype) if type(x) is np.ndarray else None
        return self._event("send", tag, work, location, bytes_sent=nbytes, messages=1, dtype=dtype)

    def _event(self, kind: str, tag: int, work: int | None, location: str, **values: Any) -> Row:
        return self._owner.recorder.add(
            kind, kind, peer=self._peer, tag=tag, work=work, location=location, **values
        )
