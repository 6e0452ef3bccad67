"""Planted failures: what each of them is, and what it does in the device where it lies.

A device with faults is a `VirtualDevice` whose collectives and channels count operations and do what was planted; it
exists only in the runs that have faults, so nobody else pays for them.  See `vcluster.faults` for how they are planted.
"""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from vcluster.channel import VirtualChannel
from vcluster.collectives import Collectives
from vcluster.device import VirtualDevice
from vcluster.mailbox import Mailbox
from vcluster.payload import Encoded
from vcluster.pending import Owner, Pending
from vcluster.tasks import Wait
from vcluster.values import NUMERIC_KINDS, leaves, rebuild

SEND, RECV = "send", "recv"
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


@dataclass(frozen=True, kw_only=True)
class Drop(Fault):
    """The message is lost on the way; its sender takes it for sent."""


@dataclass(frozen=True, kw_only=True)
class Duplicate(Fault):
    """The message arrives twice."""


@dataclass(frozen=True, kw_only=True)
class Reorder(Fault):
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
_OF_MESSAGES = (Drop, Duplicate, Reorder)


@dataclass(frozen=True)
class PlantedProgram:
    """A program with the faults that lie in its way; what it counts goes to ``place`` in shared memory."""

    program: Callable[..., Any]
    faults: tuple[Fault | None, ...]
    """None where it is not for this run."""
    seed: int
    place: int

    def __call__(self, device: VirtualDevice, *args: Any, **kwargs: Any) -> Any:
        plan = _Plan(device, self)
        sleeping = device.endpoint.signals
        before = sleeping.before_sleep
        sleeping.before_sleep = partial(_one_after_the_other, plan.release, before)
        try:
            output = self.program(_PlantedDevice(device, plan), *args, **kwargs)
            plan.release()
        finally:
            sleeping.before_sleep = before
        return output


class _Plan:
    """What happens on one device in one run."""

    def __init__(self, device: VirtualDevice, planted: PlantedProgram) -> None:
        self._seed = planted.seed
        self._mine = [(i, f) for i, f in enumerate(planted.faults) if f is not None and f.rank == device.rank]
        self._counts: dict[str, int] = {}
        words = device.endpoint.arena.words(planted.place, 1 + device.size + len(planted.faults))
        self._made = words[1 + device.rank : 2 + device.rank]
        self._happened = words[1 + device.size :]
        self._held: dict[tuple[int, int], Callable[[], None]] = {}
        self.full: set[int] = set()

    def begin(self, name: str) -> list[tuple[int, Fault]]:
        """An operation begins: ends the process or raises if that was planted; gives the other faults of it."""
        self._made[0] += 1
        count = self._counts[name] = self._counts.get(name, 0) + 1
        now = []
        for i, fault in self._mine:
            if fault.operation != (self._made[0] if fault.among is None else count) or fault.among not in (None, name):
                continue
            if isinstance(fault, _OF_MESSAGES) and name != SEND:
                raise ValueError(f"{fault!r} is for a message that is sent; that operation is {name}")
            self._happened[i] = 1
            if isinstance(fault, Kill):
                os.kill(os.getpid(), fault.signal)
            elif isinstance(fault, Exit):
                os._exit(fault.code)
            elif isinstance(fault, Raise):
                raise fault.exception
            elif isinstance(fault, Fill):
                self.full.add(fault.peer)
            else:
                now.append((i, fault))
        return now

    def flipped(self, faults: Sequence[tuple[int, Fault]], name: str, x: Any) -> Any:
        """``x`` as it is after the faults."""
        for i, fault in faults:
            if isinstance(fault, FlipBit):
                if name in (*_OBJECTS, RECV):
                    what = "what arrives is not" if name == RECV else "pickled objects are not"
                    raise ValueError(f"{fault!r} is for a message that is sent or an array; that operation is {name}, "
                                     f"and {what}")
                x = _with_flipped_bit(fault, name, x, np.random.default_rng((self._seed, i)))
        return x

    def hold(self, peer: int, tag: int, deliver: Callable[[], None]) -> None:
        """Keep a message back."""
        self.release()
        self._held[peer, tag] = deliver

    def take_held(self, peer: int, tag: int) -> Callable[[], None] | None:
        """The message that is kept back in this channel."""
        return self._held.pop((peer, tag), None)

    def release(self) -> None:
        """Send on what is kept back."""
        while self._held:
            self._held.pop(next(iter(self._held)))()


class _PlantedDevice(VirtualDevice):
    """The device as the kernel sees it in a run with faults."""

    def __init__(self, device: VirtualDevice, plan: _Plan) -> None:
        self.__dict__.update(device.__dict__)
        self._plan = plan
        self._channels = {}
        self._owner = device.collectives
        self.collectives = cast(Collectives, _PlantedCollectives(device.collectives, plan))

    def channel(self, peer: int) -> VirtualChannel:
        found = self._channels.get(peer)
        if found is None:
            super().channel(peer)  # refuses a rank that is none
            found = self._channels[peer] = _PlantedChannel(self._owner, peer, self._plan)
        return found


class _PlantedCollectives:
    """The collectives of a device, counted."""

    def __init__(self, inner: Collectives, plan: _Plan) -> None:
        self._inner = inner
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, kind: str, x: Any, *args: Any, name: str | None = None, **options: Any) -> Any:
        called = name or kind
        faults = self._plan.begin(called)
        self._plan.release()
        return self._inner.run(kind, self._plan.flipped(faults, called, x), *args, name=name, **options)


class _PlantedChannel(VirtualChannel):
    """A channel of a device, its messages counted."""

    def __init__(self, owner: Owner, peer: int, plan: _Plan) -> None:
        super().__init__(owner, peer)
        self._plan = plan
        self._planted = _PlantedMailbox(self._mailbox, owner, peer, plan)
        self._mailbox = cast(Mailbox, self._planted)

    def send(self, x: Any, *, tag: int = 0) -> None:
        self._planted.faults = self._plan.begin(SEND)
        super().send(self._plan.flipped(self._planted.faults, SEND, x), tag=tag)

    def isend(self, x: Any, *, tag: int = 0) -> Pending:
        self._planted.faults = self._plan.begin(SEND)
        return super().isend(self._plan.flipped(self._planted.faults, SEND, x), tag=tag)

    def recv(self, *, tag: int = 0, out: Any = None) -> Any:
        self._receives()
        return super().recv(tag=tag, out=out)

    def irecv(self, *, tag: int = 0, shape: Any = None, dtype: Any = None) -> Pending:
        self._receives()
        return super().irecv(tag=tag, shape=shape, dtype=dtype)

    def _receives(self) -> None:
        self._plan.flipped(self._plan.begin(RECV), RECV, None)
        self._plan.release()


class _PlantedMailbox:
    """The way of messages to a peer, on which they are lost, doubled and overtaken."""

    def __init__(self, inner: Mailbox, owner: Owner, peer: int, plan: _Plan) -> None:
        self._inner = inner
        self._owner = owner
        self._peer = peer
        self._plan = plan
        self.faults: list[tuple[int, Fault]] = []
        """Of the message that is sent next."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sending(self, encoded: Encoded, tag: int, *, capacity: int | None) -> Generator[Wait]:
        """`Mailbox.sending`, with what was planted.  What is added to the traffic waits for no room."""
        kinds = {type(fault) for _, fault in self.faults}
        self.faults = []
        if Drop in kinds:
            return self._losing(encoded)
        held = self._plan.take_held(self._peer, tag)
        if Reorder in kinds:
            self._plan.hold(self._peer, tag, partial(self._deliver, _copied(encoded), tag))
            return self._releasing(held)
        return self._passing(encoded, tag, 0 if self._peer in self._plan.full else capacity, Duplicate in kinds, held)

    def _losing(self, encoded: Encoded) -> Generator[Wait]:
        self._inner.sent += 1
        self._inner.bytes_sent += encoded.nbytes
        return
        yield

    def _releasing(self, held: Callable[[], None] | None) -> Generator[Wait]:
        if held is not None:
            held()
        return
        yield

    def _passing(
        self, encoded: Encoded, tag: int, capacity: int | None, twice: bool, held: Callable[[], None] | None
    ) -> Generator[Wait]:
        yield from self._inner.sending(encoded, tag, capacity=capacity)
        if twice:
            yield from self._inner.sending(encoded, tag)
        if held is not None:
            held()

    def _deliver(self, encoded: Encoded, tag: int) -> None:
        steps = self._inner.sending(encoded, tag)
        self._owner.endpoint.tasks.issue(("late", self._peer, tag), steps, f"send(to rank {self._peer}, tag {tag})")


def _with_flipped_bit(fault: FlipBit, name: str, x: Any, rng: np.random.Generator) -> Any:
    parts = leaves(x)
    arrays = {i: np.array(part, order="C") for i, part in enumerate(parts) if part is not None}
    arrays = {i: array for i, array in arrays.items() if array.dtype.kind in NUMERIC_KINDS}
    bits = sum(_bits(array) * array.size for array in arrays.values())
    if not bits:
        raise ValueError(f"{fault!r} needs a value with bits; {name} has none here")
    bit = int(rng.integers(bits)) if fault.bit is None else fault.bit
    if bit >= bits:
        raise ValueError(f"{fault!r} needs a value of more than {fault.bit} bits; {name} has {bits} here")
    for i, array in arrays.items():
        if bit < _bits(array) * array.size:
            element, bit = divmod(bit, _bits(array))
            if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and not np.little_endian):
                bit ^= 8 * (array.dtype.itemsize - 1)  # the lowest byte is the last
            array.reshape(-1).view(np.uint8)[element * array.itemsize + bit // 8] ^= 1 << bit % 8
            return rebuild(x, [array if j == i and array.ndim else array[()] if j == i else part
                               for j, part in enumerate(parts)])
        bit -= _bits(array) * array.size
    raise AssertionError("a bit lies in one of the arrays")


def _bits(array: np.ndarray) -> int:
    return 1 if array.dtype.kind == "b" else 8 * array.itemsize


def _copied(encoded: Encoded) -> Encoded:
    """The message as it is now, whatever its sender does to the arrays."""
    return Encoded(encoded.description, [np.frombuffer(bytearray(b), np.uint8) for b in encoded.buffers], encoded.nbytes)


def _one_after_the_other(first: Callable[[], object], second: Callable[[], object] | None) -> None:
    first()
    if second is not None:
        second()
