"""The faults: frozen descriptions of single failures."""

import signal as signals
from dataclasses import dataclass

import numpy as np

SEND, RECV = "send", "recv"
"""The names under which messages are counted, for all ways to send and receive."""
_OBJECTS = ("all_gather_object", "broadcast_object")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A failure on ``rank`` at its ``operation``.

    Operations are the collectives and messages that the kernel calls. Each rank counts them from 1 in each run. A
    sendrecv counts as two, and waiting for pending work does not count. With ``among="send"``, ``"recv"`` or the name
    of a collective, only those operations count (isend counts as send, irecv as recv). If ``rank`` or ``operation`` is
    a range, the seed chooses from it. ``run`` is the run inside the ``with`` block, counted from 1, in which the fault
    happens; None means every run.
    """

    rank: int | range
    operation: int | range
    run: int | None = 1
    among: str | None = None

    def check(self, size: int) -> None:
        """``ValueError`` or ``TypeError`` if the fault cannot happen on ``size`` devices."""
        self._whole("rank", 0, size - 1)
        self._whole("operation", 1)
        if self.run is not None:
            self._whole("run", 1)

    def check_operation(self, name: str) -> None:
        """``ValueError`` if the fault cannot happen in an operation of this name."""

    def _whole(self, name: str, least: int, most: int | None = None) -> None:
        value = getattr(self, name)
        for one in (value[0], value[-1]) if isinstance(value, range) and len(value) else (value,):
            if isinstance(one, bool) or not isinstance(one, int | np.integer):
                raise TypeError(f"{name} of {self!r} must be an integer")
            if one < least or (most is not None and one > most):
                span = f"{least} or more" if most is None else f"{least} to {most}"
                raise ValueError(f"{name} of {self!r} must be {span}, got {one}")


@dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    """The process gets a signal, by default SIGKILL, when the operation begins."""

    signal: int = getattr(signals, "SIGKILL", 9)

    def check(self, size: int) -> None:
        super().check(size)
        signals.Signals(self.signal)


@dataclass(frozen=True, kw_only=True)
class Exit(Fault):
    """The process ends by ``os._exit(code)`` when the operation begins."""

    code: int = 1


@dataclass(frozen=True, kw_only=True)
class Raise(Fault):
    """The operation raises ``exception`` instead of running."""

    exception: BaseException | type[BaseException]


@dataclass(frozen=True, kw_only=True)
class FlipBit(Fault):
    """One bit flips in the payload of a message, or in this rank's input of a collective.

    Bits are numbered from the lowest bit of the first element. A bool has one bit. None lets the seed choose. The
    kernel's own array does not change.
    """

    bit: int | None = None

    def check(self, size: int) -> None:
        super().check(size)
        if self.bit is not None:
            self._whole("bit", 0)

    def check_operation(self, name: str) -> None:
        if name == RECV or name in _OBJECTS:
            raise ValueError(
                f"{self!r} needs a sent message or a collective of arrays; this operation is {name}"
            )


@dataclass(frozen=True, kw_only=True)
class _OfMessage(Fault):
    def check_operation(self, name: str) -> None:
        if name != SEND:
            raise ValueError(f"{self!r} needs a sent message; this operation is {name}")


@dataclass(frozen=True, kw_only=True)
class Drop(_OfMessage):
    """The message is lost. For its sender, it counts as sent."""


@dataclass(frozen=True, kw_only=True)
class Duplicate(_OfMessage):
    """The message arrives twice."""


@dataclass(frozen=True, kw_only=True)
class Reorder(_OfMessage):
    """The message arrives after the next one of its channel and tag.

    It is held back until then, but at most until its sender receives, joins a collective, waits or ends. So it is late
    and not lost.
    """


@dataclass(frozen=True, kw_only=True)
class Fill(Fault):
    """From this operation on, the channel to ``peer`` is full: a send waits until its message is taken.

    A program that relies on room in its channels then deadlocks, as with ``channel_capacity=0``.
    """

    peer: int

    def check(self, size: int) -> None:
        super().check(size)
        self._whole("peer", -1, size - 1)


ENDING = (Kill, Exit)
"""Faults that end a process. On the thread backend, a device has no process of its own."""
