"""What can be planted: frozen descriptions of single failures."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass

import numpy as np

SEND, RECV = "send", "recv"
"""By these names messages are counted, however they were sent."""
_OBJECTS = ("all_gather_object", "broadcast_object")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong on ``rank`` at its ``operation``.

    Operations are the collectives and messages that the kernel calls, counted on each rank from 1 in each run (a
    sendrecv is two; waiting for a work is none).  With ``among="send"`` (which counts isend too; ``"recv"`` likewise)
    or a collective's name only those count.  A range in place of ``rank`` or ``operation`` lets the seed choose.
    ``run`` is the run of the ``with`` block in which it happens, from 1; None: in each.
    """

    rank: int | range
    operation: int | range
    run: int | None = 1
    among: str | None = None

    def check(self, size: int) -> None:
        """``ValueError`` or ``TypeError`` unless it can happen on ``size`` devices."""
        self._whole("rank", 0, size - 1)
        self._whole("operation", 1)
        if self.run is not None:
            self._whole("run", 1)

    def check_operation(self, name: str) -> None:
        """``ValueError`` unless it can happen in an operation of this name."""

    def _whole(self, name: str, least: int, most: int | None = None) -> None:
        value = getattr(self, name)
        values = (value[0], value[-1]) if isinstance(value, range) and len(value) else (value,)
        for one in values:
            if isinstance(one, bool) or not isinstance(one, int | np.integer):
                raise TypeError(f"{name} of {self!r} must be an integer")
            if one < least or (most is not None and one > most):
                span = f"{least} or more" if most is None else f"{least} to {most}"
                raise ValueError(f"{name} of {self!r} must be {span}, got {one}")


@dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    """The process gets a signal, SIGKILL if no other is given, as the operation begins."""

    signal: int = getattr(signals, "SIGKILL", 9)

    def check(self, size: int) -> None:
        super().check(size)
        signals.Signals(self.signal)


@dataclass(frozen=True, kw_only=True)
class Exit(Fault):
    """The process ends by ``os._exit(code)`` as the operation begins."""

    code: int = 1


@dataclass(frozen=True, kw_only=True)
class Raise(Fault):
    """The operation raises ``exception`` in place of what it does."""

    exception: BaseException | type[BaseException]


@dataclass(frozen=True, kw_only=True)
class FlipBit(Fault):
    """One bit is flipped in what a message carries, or in what this rank puts into a collective.

    Bits are counted from the lowest of the first element; a bool has one.  None: the seed chooses.  The kernel's own
    array is left as it is.
    """

    bit: int | None = None

    def check(self, size: int) -> None:
        super().check(size)
        if self.bit is not None:
            self._whole("bit", 0)

    def check_operation(self, name: str) -> None:
        if name == RECV or name in _OBJECTS:
            raise ValueError(f"{self!r} is for a message that is sent, or a collective of arrays; this is {name}")


@dataclass(frozen=True, kw_only=True)
class _OfMessage(Fault):
    def check_operation(self, name: str) -> None:
        if name != SEND:
            raise ValueError(f"{self!r} is for a message that is sent; this is {name}")


@dataclass(frozen=True, kw_only=True)
class Drop(_OfMessage):
    """The message is lost on the way; its sender takes it for sent."""


@dataclass(frozen=True, kw_only=True)
class Duplicate(_OfMessage):
    """The message arrives twice."""


@dataclass(frozen=True, kw_only=True)
class Reorder(_OfMessage):
    """The message arrives after the next one of its channel and tag.

    It is held back until then; at the latest until its sender receives, joins a collective, waits for something or
    ends, so that it is late but not lost.
    """


@dataclass(frozen=True, kw_only=True)
class Fill(Fault):
    """From the operation on, the channel to ``peer`` is full: a send there waits until its message is taken.

    A program that counts on room in its channels deadlocks then, as with ``channel_capacity=0``.
    """

    peer: int

    def check(self, size: int) -> None:
        super().check(size)
        self._whole("peer", -1, size - 1)


ENDING = (Kill, Exit)
"""They end a process, which a thread has not of its own."""
