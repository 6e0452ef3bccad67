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
from numpy.typing import DTypeLike

from parallelism.trace import HOST
from vcluster.errors import CollectiveMismatchError
from vcluster.mailbox import Envelope
from vcluster.payload import encode_message
from vcluster.pending import Owner, Pending
from vcluster.places import here
from vcluster.tasks import Wait
from vcluster.values import check_shape


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

    def __init__(self, owner: Owner, peer: int) -> None:
        """``peer`` is a rank, or `HOST`.  Made by ``device.channel`` and ``cluster.channel``."""
        self._owner = owner
        self._rank = owner.endpoint.layout.rank(owner.endpoint.number)
        self._peer = peer
        between_devices = HOST not in (peer, self._rank)  # host and device do not run at the same time
        self._capacity = owner.endpoint.capacity if between_devices else None
        self._mailbox = owner.endpoint.mailbox(owner.endpoint.layout.endpoint(peer))

    def __repr__(self) -> str:
        return f"<VirtualChannel between {_name(self._rank)} and {_name(self._peer)}>"

    def send(self, x: Any, *, tag: int = 0) -> None:
        """Copy ``x`` (an array, a scalar, or tuples, lists and dicts of them) and put it into the channel.

        Returns when the copy lies there; waits only while ``channel_capacity`` messages of this tag do (0: until the
        message is taken).  Between host and device it does not wait: neither receives while the other runs.
        **Communication**: one message, the bytes of the arrays.
        Raises ``TypeError`` for arrays that hold no numbers, `ChannelClosedError` if either end is closed.
        """
        recorder = self._owner.recorder
        encoded = encode_message(x)
        start = recorder.enter()
        try:
            event = self._sent(encoded.nbytes, tag, None)
            steps = self._mailbox.sending(encoded, _tag(tag), capacity=self._capacity)
            self._owner.endpoint.tasks.run(("send", self._peer, tag), steps, self._told_as("send", tag))
            recorder.fill(event, **recorder.since(start))
        finally:
            recorder.leave()

    def isend(self, x: Any, *, tag: int = 0) -> Pending:
        """`send` that does not wait.  ``x`` must not change before the returned work is waited for."""
        recorder = self._owner.recorder
        encoded = encode_message(x)
        recorder.enter()
        try:
            work = recorder.next_work()
            self._sent(encoded.nbytes, tag, work)
            steps = self._mailbox.sending(encoded, _tag(tag), capacity=self._capacity)
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
            event = self._receives(tag, None)
            steps = self._receiving(_tag(tag), out, None, None, event, start)
            return self._owner.endpoint.tasks.run(("recv", self._peer, tag), steps, self._told_as("recv", tag))
        finally:
            recorder.leave()

    def irecv(self, *, tag: int = 0, shape: Sequence[int] | None = None, dtype: DTypeLike | None = None) -> Pending:
        """`recv` that does not wait; the returned work does.  ``shape`` and ``dtype`` must be the message's."""
        recorder = self._owner.recorder
        start = recorder.enter()
        try:
            work = recorder.next_work()
            event = self._receives(tag, work)
            wanted = None if dtype is None else np.dtype(dtype)
            steps = self._receiving(_tag(tag), None, None if shape is None else tuple(shape), wanted, event, start)
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
        task = self._owner.endpoint.tasks.issue(lane, steps, self._told_as(name, lane[2]))
        pending = Pending(self._owner, task, work, name)
        self._owner.unwaited[work] = pending
        return pending

    def _told_as(self, name: str, tag: int) -> str:
        way = "to" if name == "send" else "from"
        return f"{name}({way} {_name(self._peer)}, tag {tag})"

    def _receiving(
        self, tag: int, out: Any, shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None, event: list[Any], start:
        int
    ) -> Generator[Wait, None, Any]:
        envelope: Envelope = yield from self._mailbox.receiving(tag)
        self._owner.recorder.fill(event, bytes_received=envelope.nbytes, **self._owner.recorder.since(start))
        value = envelope.open()
        if shape is not None or dtype is not None:
            self._check_declared(value, shape, dtype)
        if out is None:
            return value
        if not isinstance(value, np.ndarray):
            raise TypeError(f"recv(out=) got a message that is a {type(value).__name__}, not an array")
        check_shape(f"recv from {_name(self._peer)}", out, value.shape, value.dtype)
        np.copyto(out, value)
        return out

    def _check_declared(self, value: Any, shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None) -> None:
        array = np.asarray(value)
        wrong = []
        if shape is not None and array.shape != shape:
            wrong.append(f"shape {list(shape)} was declared, {list(array.shape)} came")
        if dtype is not None and array.dtype != dtype:
            wrong.append(f"dtype {dtype} was declared, {array.dtype} came")
        if wrong:
            raise CollectiveMismatchError(
                f"irecv of {_name(self._rank)} from {_name(self._peer)}: {'; '.join(wrong)}",
                ranks=(self._rank, self._peer), operation="irecv",
            )

    def _sent(self, nbytes: int, tag: int, work: int | None) -> list[Any]:
        return self._event("send", (self._rank, self._peer, tag), tag, work, bytes_sent=nbytes, messages=1)

    def _receives(self, tag: int, work: int | None) -> list[Any]:
        return self._event("recv", (self._peer, self._rank, tag, "in"), tag, work)

    def _event(self, kind: str, key: tuple[Any, ...], tag: int, work: int | None, **values: Any) -> list[Any]:
        recorder = self._owner.recorder
        return recorder.add(
            kind, kind, peer=self._peer, tag=tag, work=work, sequence=recorder.next_sequence(key), location=here(2),
            **values
        )


def _name(rank: int) -> str:
    return "the host" if rank < 0 else f"rank {rank}"


def _tag(tag: int) -> int:
    if isinstance(tag, bool) or not hasattr(tag, "__index__"):
        raise TypeError(f"a tag is an integer, got {tag!r}")
    number = tag.__index__()
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"a tag is a 64-bit integer, got {tag}")
    return number
