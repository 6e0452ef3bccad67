"""Planted faults happen in the device that they name.

A device with faults is a `VirtualDevice` whose collectives and channels count operations and apply the faults. It
exists only in runs with faults, so other runs pay nothing.
"""

import os
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from parallelism.dtypes import is_numeric
from parallelism.mesh import Axes
from parallelism.operation import ReduceOp
from parallelism.operation.trees import leaves, rebuild
from vcluster.collectives import Collectives
from vcluster.device import VirtualDevice
from vcluster.faults.kinds import (
    RECV,
    SEND,
    Drop,
    Duplicate,
    Exit,
    Fault,
    Fill,
    FlipBit,
    Kill,
    Raise,
    Reorder,
)
from vcluster.messages import Encoded, Mailbox, Owner, Pending, VirtualChannel, Wait


def words_of(size: int, faults: int) -> int:
    """Number of 64-bit words for the counts: a 1, the operations of each rank, and whether each fault happened."""
    return 1 + size + faults


@dataclass(frozen=True)
class PlantedProgram:
    """A program with its faults. The counts are written to offset ``place`` in shared memory."""

    program: Callable[..., Any]
    faults: tuple[Fault | None, ...]
    """The faults. None in place of a fault that does not belong to this run."""
    seed: int
    place: int

    def __call__(self, device: VirtualDevice, /, *args: Any, **kwargs: Any) -> Any:
        plan = _Plan(device, self)
        sleeping = device.endpoint.signals
        before = sleeping.before_sleep

        def release_before_sleep() -> None:
            plan.release_soon()
            if before is not None:
                before()

        sleeping.before_sleep = release_before_sleep
        try:
            output = self.program(_PlantedDevice(device, plan), *args, **kwargs)
            plan.release()
        finally:
            sleeping.before_sleep = before
        return output


Faults = Sequence[tuple[int, Fault]]
"""The faults of one operation, each with its index among the planted faults."""
Steps = Generator[Wait, None, None]


class _Plan:
    """The faults of one device in one run."""

    def __init__(self, device: VirtualDevice, planted: PlantedProgram) -> None:
        self._device, self._seed = device, planted.seed
        self._mine = [(i, f) for i, f in enumerate(planted.faults) if f is not None and f.rank == device.rank]
        self._counts: Counter[str] = Counter()
        words = device.endpoint.arena.words(planted.place, words_of(device.size, len(planted.faults)))
        self._made = words[1 + device.rank : 2 + device.rank]
        self._happened = words[1 + device.size :]
        self._held: dict[tuple[int, int], Steps] = {}
        self.full: set[int] = set()

    def begin(self, name: str) -> Faults:
        """Count an operation that begins. Ends the process or raises if that was planted; returns the other faults."""
        self._made[0] += 1
        self._counts[name] += 1
        now = []
        for i, fault in self._mine:
            if (fault.among, fault.operation) not in ((None, self._made[0]), (name, self._counts[name])):
                continue
            fault.check_operation(name)
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

    def flipped(self, faults: Faults, name: str, x: Any) -> Any:
        """``x`` after the faults."""
        for i, fault in faults:
            if isinstance(fault, FlipBit):
                x = _with_flipped_bit(fault, name, x, np.random.default_rng((self._seed, i)))
        return x

    def hold(self, peer: int, tag: int, steps: Steps) -> None:
        """Hold back a message. ``steps`` send it."""
        self._held[peer, tag] = steps

    def take_held(self, peer: int, tag: int) -> Steps:
        """The steps that send the held-back message of this channel. Empty if there is none."""
        return self._held.pop((peer, tag), _nothing())

    def release(self) -> None:
        """Send all messages that are held back."""
        if self._held:
            self._device.recorder.enter()
            try:
                self._send_held(self._device.endpoint.tasks.run)
            finally:
                self._device.recorder.leave()

    def release_soon(self) -> None:
        """Issue all messages that are held back, from inside a call of the library."""
        self._send_held(self._device.endpoint.tasks.issue)

    def _send_held(self, send: Callable[[tuple[str, int, int], Steps, str], object]) -> None:
        held, self._held = self._held, {}
        for (peer, tag), steps in held.items():
            send((SEND, peer, tag), steps, "send of a message that was held back")


class _PlantedDevice(VirtualDevice):
    """The device that the kernel gets in a run with faults."""

    def __init__(self, device: VirtualDevice, plan: _Plan) -> None:
        self.__dict__.update(device.__dict__)
        self._plan = plan
        self._channels = {}
        self._owner = device.collectives
        self.collectives = cast(Collectives, _PlantedCollectives(device.collectives, plan))

    def channel(self, peer: int) -> VirtualChannel:
        if peer not in self._channels:
            super().channel(peer)  # raises if the rank does not exist
            self._channels[peer] = _PlantedChannel(self._owner, peer, self._plan)
        return self._channels[peer]


class _Around:
    """All that it does not do itself, another object does."""

    def __init__(self, inner: Any, plan: _Plan) -> None:
        self._inner, self._plan = inner, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _PlantedCollectives(_Around):
    """The collectives of a device, with their operations counted."""

    def run(self, kind: str, x: Any, *args: Any, name: str | None = None, **options: Any) -> Any:
        called = name or kind
        faults = self._plan.begin(called)
        self._plan.release()
        return self._inner.run(kind, self._plan.flipped(faults, called, x), *args, name=name, **options)

    def repeated(
        self,
        kind: str,
        x: Any,
        axes: Axes,
        out: Any,
        dim: int = 0,
        root: int = 0,
        op: ReduceOp | None = None,
    ) -> Any:
        return self.run(kind, x, axes, out=out, dim=dim, root=root, op=op)


class _PlantedChannel(VirtualChannel):
    """A channel of a device, with its messages counted."""

    repeats = False

    def __init__(self, owner: Owner, peer: int, plan: _Plan) -> None:
        super().__init__(owner, peer)
        self._plan = plan
        self._planted = _PlantedMailbox(self._mailbox, peer, plan)
        self._mailbox = cast(Mailbox, self._planted)

    def send(self, x: Any, *, tag: int = 0) -> None:
        self._planted.faults = self._plan.begin(SEND)
        super().send(self._plan.flipped(self._planted.faults, SEND, x), tag=tag)

    def isend(self, x: Any, *, tag: int = 0) -> Pending:
        self._planted.faults = self._plan.begin(SEND)
        return super().isend(self._plan.flipped(self._planted.faults, SEND, x), tag=tag)

    def recv(self, *, tag: int = 0, out: Any = None) -> Any:
        self._plan.begin(RECV)
        self._plan.release()
        return super().recv(tag=tag, out=out)

    def irecv(self, *, tag: int = 0, shape: Any = None, dtype: Any = None) -> Pending:
        self._plan.begin(RECV)
        self._plan.release()
        return super().irecv(tag=tag, shape=shape, dtype=dtype)


class _PlantedMailbox(_Around):
    """The mailbox of a peer, with faults: messages are lost, duplicated or overtaken."""

    def __init__(self, inner: Mailbox, peer: int, plan: _Plan) -> None:
        super().__init__(inner, plan)
        self._peer = peer
        self.faults: Faults = ()
        """The faults of the next message."""

    def sending(self, encoded: Encoded, tag: int, *, capacity: int | None) -> Steps:
        """`Mailbox.sending` with the planted faults. The additional messages do not wait for room."""
        kinds = {type(fault) for _, fault in self.faults}
        self.faults = ()
        if Drop in kinds:
            return self._losing(encoded)
        held = self._plan.take_held(self._peer, tag)
        if Reorder in kinds:
            self._plan.hold(self._peer, tag, self._inner.sending(_copied(encoded), tag))
            return held
        return self._passing(
            encoded, tag, 0 if self._peer in self._plan.full else capacity, Duplicate in kinds, held
        )

    def _losing(self, encoded: Encoded) -> Steps:
        yield from _nothing()
        self._inner.sent += 1
        self._inner.bytes_sent += encoded.nbytes

    def _passing(self, encoded: Encoded, tag: int, capacity: int | None, twice: bool, held: Steps) -> Steps:
        yield from self._inner.sending(encoded, tag, capacity=capacity)
        if twice:
            yield from self._inner.sending(encoded, tag)
        yield from held


def _with_flipped_bit(fault: FlipBit, name: str, x: Any, rng: np.random.Generator) -> Any:
    parts = leaves(x)
    arrays = {i: np.array(part, order="C") for i, part in enumerate(parts) if part is not None}
    arrays = {i: array for i, array in arrays.items() if is_numeric(array.dtype)}
    bits = sum(_bits(array) * array.size for array in arrays.values())
    if not bits:
        raise ValueError(f"{fault!r} needs a value with bits; {name} has none here")
    bit = int(rng.integers(bits)) if fault.bit is None else fault.bit
    if bit >= bits:
        raise ValueError(f"{fault!r} needs a value of more than {fault.bit} bits; {name} has {bits} here")
    for i in arrays:
        array = arrays[i]
        if bit < _bits(array) * array.size:
            break
        bit -= _bits(array) * array.size
    element, bit = divmod(bit, _bits(array))
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and not np.little_endian):
        bit ^= 8 * (array.dtype.itemsize - 1)  # the lowest byte comes last
    array.reshape(-1).view(np.uint8)[element * array.itemsize + bit // 8] ^= 1 << bit % 8
    parts[i] = array if array.ndim else array[()]
    return rebuild(x, parts)


def _bits(array: np.ndarray) -> int:
    return 1 if array.dtype.kind == "b" else 8 * array.itemsize


def _copied(encoded: Encoded) -> Encoded:
    """A copy of the message, which does not change when its sender changes the arrays."""
    return Encoded(
        encoded.description, [memoryview(memoryview(b).tobytes()) for b in encoded.buffers], encoded.nbytes
    )


def _nothing() -> Steps:
    yield from ()
