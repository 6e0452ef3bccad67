"""The ops that call a method of the device: each alone, or several collectives in one call.

Several collectives of one kind over the same axes are one call on a buffer with their arrays, one after the other: of a
reduce_scatter the buffer has, for each device, its parts of all arrays.  Parts are padded to the size of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.execution.typed_arrays import ArrayMaker
from parallelism.ir import Op
from parallelism.layouts import step_of
from parallelism.mesh import Mesh, split_sizes
from parallelism.mesh.uneven import starts
from parallelism.operation import Device, Work
from parallelism.resharding import run_step
from parallelism.sharding import device_op


def _all_slice(device: Device, op: Op, x: Array) -> Any:
    places = starts(split_sizes(x.shape[op["dim"]], tuple(device.mesh.shape[axis] for axis in op["axes"])))
    mine = device.position(op["axes"])
    return x[(slice(None),) * op["dim"] + (slice(places[mine], places[mine + 1]),)]


def _group_collective(device: Device, op: Op, x: Array) -> Any:
    options: dict[str, Any] = {"groups": op["groups"]}
    match op["collective"]:
        case "all_gather":
            options["dim"] = op["dim"]
        case "all_reduce":
            options["op"] = device_op(op["op"], x.dtype)
        case "reduce_scatter":
            options.update(dim=op["dim"], op=device_op(op["op"], x.dtype))
        case "all_to_all":
            options.update(split_dim=op["dim"], concat_dim=op["concat_dim"])
    return getattr(device, op["collective"])(x, **options)


def _algorithm(op: Op) -> dict[str, str]:
    """The algorithm that a collective names, if it names one."""
    return {name: value for name, value in op.attributes if name == "algorithm"}


METHODS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda device, op, x, **how: device.all_reduce(
        x, op["axes"], op=device_op(op["op"], x.dtype), **how
    ),
    "all_gather": lambda device, op, x, **how: device.all_gather(
        x, op["axes"], dim=op["dim"], **_algorithm(op), **how
    ),
    "reduce_scatter": lambda device, op, x, **how: device.reduce_scatter(
        x, op["axes"], dim=op["dim"], op=device_op(op["op"], x.dtype), **_algorithm(op), **how
    ),
    "all_to_all": lambda device, op, x, **how: device.all_to_all(
        x, op["axes"], split_dim=op["split_dim"], concat_dim=op["concat_dim"], **_algorithm(op), **how
    ),
    "permute": lambda device, op, x, **how: device.permute(x, op["pairs"], op["axes"], **how),
    "all_slice": _all_slice,
    "group_collective": _group_collective,
    "relayout": lambda device, op, x: run_step(device, step_of(op, device.mesh), x),
}
"""The ops that are run by methods of the device, by their kinds: ``(device, op, x)`` gives the output.  A collective
takes ``async_op=True``, too."""


def one_call(ops: Sequence[Op], *, at_once: bool = False) -> Op:
    """The op that some collectives are together, on a flat array; one op that is not over ``at_once`` is itself."""
    first = ops[0]
    if len(ops) == 1 and not at_once:
        return first
    of_flat_array = {"dim": 0}
    attributes = tuple((name, of_flat_array.get(name, value)) for name, value in first.attributes)
    return replace(first, attributes=attributes)


@dataclass(frozen=True)
class StartedCall:
    """Collectives that were started as one call."""

    work: Work[Any] | None
    """None if they are over."""
    ops: Sequence[Op]
    sent: Array
    parts: Sequence[PaddedParts]
    """How each array is cut in a buffer; empty for one array, which is sent as it is."""
    received: Any = None
    """What the call gave, if it is over."""

    def wait(self) -> list[Array]:
        """Their results: contiguous arrays, which share no memory with the inputs."""
        found = np.asarray(self.received if self.work is None else self.work.wait())
        if self.parts:
            return _unpacked(self.ops, self.parts, found)
        if np.may_share_memory(found, self.sent) or not found.flags.c_contiguous:
            found = np.array(found, order="C")
        return [found]


def started(
    device: Device, call: Op, ops: Sequence[Op], inputs: Sequence[Array], *, at_once: bool = False
) -> StartedCall:
    """Starts collectives as one ``call`` (`one_call`); ``at_once``: returns when they are over."""
    parts = [PaddedParts.of(op, device.mesh) for op in ops] if len(ops) > 1 or at_once else []
    x = _packed(call.kind, parts, inputs) if parts else inputs[0]
    if at_once:
        return StartedCall(None, ops, x, parts, METHODS[call.kind](device, call, x))
    return StartedCall(METHODS[call.kind](device, call, x, async_op=True), ops, x, parts)


@dataclass(frozen=True)
class PaddedParts:
    """How an array of a collective is cut over the devices of a group, along one dim; an all_reduce cuts nothing."""

    shape: tuple[int, ...]
    """The shape of the whole array."""
    dim: int
    sizes: tuple[int, ...]
    """The extent of the dim in each part, in the order of the group."""

    @classmethod
    def of(cls, op: Op, mesh: Mesh) -> PaddedParts:
        """The parts of a collective: an all_gather puts them together, a reduce_scatter cuts them."""
        whole = op.outputs[0] if op.kind == "all_gather" else op.inputs[0]
        shape = tuple(map(int, whole.type.shape))
        if op.kind == "all_reduce":
            return cls(shape, 0, ())
        factors = tuple(mesh.shape[axis] for axis in op["axes"])
        return cls(shape, op["dim"], split_sizes(shape[op["dim"]], factors))

    @property
    def padded_size(self) -> int:
        """The elements of the largest part, as many as each has in the buffer; of an all_reduce those of the array."""
        return prod(self.part(max(self.sizes))) if self.sizes else prod(self.shape)

    def part(self, extent: int) -> tuple[int, ...]:
        """The shape of a part with this extent of the dim."""
        return (*self.shape[: self.dim], extent, *self.shape[self.dim + 1 :])

    def cut(self, x: Array) -> list[Array]:
        """The parts of the whole array."""
        places = starts(self.sizes)
        before = (slice(None),) * self.dim
        return [x[(*before, slice(start, end))] for start, end in pairwise(places)]


def buffer_size(call: Op, ops: Sequence[Op], mesh: Mesh) -> int:
    """The elements of the buffer that a device gives to a call of several collectives."""
    padded = sum(PaddedParts.of(op, mesh).padded_size for op in ops)
    return padded * int(call["group"]) if call.kind == "reduce_scatter" else padded


def _packed(kind: str, parts: Sequence[PaddedParts], inputs: Sequence[Array]) -> Array:
    """All arrays as one flat array.  For a reduce_scatter it has first the first device's parts of all arrays, then those
    of the second, and so on."""
    if kind == "all_reduce":
        return np.concatenate([x.ravel() for x in inputs])
    rows = len(parts[0].sizes) if kind == "reduce_scatter" else 1
    packed = np.zeros((rows, sum(each.padded_size for each in parts)), inputs[0].dtype)
    start = 0
    for each, x in zip(parts, inputs, strict=True):
        for row, part in enumerate(each.cut(x) if kind == "reduce_scatter" else [x]):
            packed[row, start : start + part.size] = part.ravel()
        start += each.padded_size
    return packed.ravel()


def _unpacked(ops: Sequence[Op], parts: Sequence[PaddedParts], flat: Array) -> list[Array]:
    rows = flat.reshape(len(parts[0].sizes) if ops[0].kind == "all_gather" else 1, -1)
    results, start = [], 0
    for op, each in zip(ops, parts, strict=True):
        if op.kind == "all_gather":
            gathered = [
                row[start : start + prod(each.part(extent))].reshape(each.part(extent))
                for row, extent in zip(rows, each.sizes, strict=True)
            ]
            results.append(np.concatenate(gathered, axis=each.dim))
        else:
            made = tuple(map(int, op.outputs[0].type.shape))
            results.append(np.array(rows[0, start : start + prod(made)].reshape(made), order="C"))
        start += each.padded_size
    return results


# -- results that are waited for later ---------------------------------------------------------------------------------


@dataclass
class UnderWay:
    """Collectives that were started as one call."""

    arrays: ArrayMaker
    work: Any
    ops: tuple[Op, ...]
    sent: tuple[tuple[str, int], ...] = ()
    """The memory, by category, that is freed when they are over."""
    found: Sequence[Array] | None = None

    def wait(self, into: Sequence[Array | None] = ()) -> Sequence[Array]:
        """Their outputs; waits for them once."""
        if self.found is None:
            self.found = self.arrays.wait(self.work, into)
        return self.found

    def freed(self) -> tuple[tuple[str, int], ...]:
        """The entries of `sent` at the first call; none later."""
        freed, self.sent = self.sent, ()
        return freed


@dataclass(frozen=True)
class Later:
    """An output of collectives that are under way."""

    call: UnderWay
    place: int
    """Its place among the outputs of the call."""

    def wait(self) -> Array:
        """The array."""
        return self.call.wait()[self.place]


def waited_for(x: Array | Later) -> Array:
    """The array, also if it is there later."""
    return x.wait() if isinstance(x, Later) else x
