"""The ops that call a method of the device: each alone, or several collectives in one call.

Several collectives of one kind over the same axes are one call if their arrays, one after the other in a buffer, can be
cut evenly: of a reduce_scatter the buffer has, for each device, its parts of all arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.execution.typed_arrays import ArrayMaker
from parallelism.ir import Op
from parallelism.layouts import step_of
from parallelism.mesh import split_sizes
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


METHODS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda device, op, x, **how: device.all_reduce(
        x, op["axes"], op=device_op(op["op"], x.dtype), **how
    ),
    "all_gather": lambda device, op, x, **how: device.all_gather(x, op["axes"], dim=op["dim"], **how),
    "reduce_scatter": lambda device, op, x, **how: device.reduce_scatter(
        x, op["axes"], dim=op["dim"], op=device_op(op["op"], x.dtype), **how
    ),
    "all_to_all": lambda device, op, x, **how: device.all_to_all(
        x, op["axes"], split_dim=op["split_dim"], concat_dim=op["concat_dim"], **how
    ),
    "permute": lambda device, op, x, **how: device.permute(x, op["pairs"], op["axes"], **how),
    "all_slice": _all_slice,
    "group_collective": _group_collective,
    "relayout": lambda device, op, x: run_step(device, step_of(op, device.mesh), x),
}
"""The ops that are run by methods of the device, by their kinds: ``(device, op, x)`` gives the output.  A collective
takes ``async_op=True``, too."""


def one_call(ops: Sequence[Op]) -> Op:
    """The op that some collectives are together, on a flat array; one op is itself."""
    first = ops[0]
    if len(ops) == 1:
        return first
    return replace(
        first, attributes=tuple((name, 0 if name == "dim" else value) for name, value in first.attributes)
    )


@dataclass(frozen=True)
class StartedCall:
    """Collectives that were started as one call."""

    work: Work[Any]
    ops: Sequence[Op]
    sent: Array

    def wait(self) -> list[Array]:
        """Their results: contiguous arrays, which share no memory with the inputs."""
        found = np.asarray(self.work.wait())
        if len(self.ops) > 1:
            return _unpacked(self.ops, found)
        if np.may_share_memory(found, self.sent) or not found.flags.c_contiguous:
            found = np.array(found, order="C")
        return [found]


def started(device: Device, call: Op, ops: Sequence[Op], inputs: Sequence[Array]) -> StartedCall:
    """Starts collectives as one ``call`` (`one_call`)."""
    x = inputs[0] if len(ops) == 1 else _packed(ops, inputs)
    return StartedCall(METHODS[call.kind](device, call, x, async_op=True), ops, x)


def _packed(ops: Sequence[Op], inputs: Sequence[Array]) -> Array:
    """The arrays in one flat array; of a reduce_scatter, for each device, one after the other, its parts of all."""
    if ops[0].kind != "reduce_scatter":
        return np.concatenate([x.ravel() for x in inputs])
    group = ops[0]["group"]
    return np.concatenate(
        [
            np.moveaxis(_cut(x, op["dim"], group), 1, 0).reshape(group, -1)
            for op, x in zip(ops, inputs, strict=True)
        ],
        axis=1,
    ).ravel()


def _unpacked(ops: Sequence[Op], flat: Array) -> list[Array]:
    gathers = ops[0].kind == "all_gather"
    rows = flat.reshape(ops[0]["group"] if gathers else 1, -1)
    results, start = [], 0
    for op in ops:
        own, made = (tuple(map(int, value.type.shape)) for value in (op.inputs[0], op.outputs[0]))
        end = start + prod(own if gathers else made)
        part, start = rows[:, start:end], end
        if gathers:  # the parts of the devices lie side by side along the dim
            part = np.moveaxis(part.reshape(len(rows), prod(own[: op["dim"]]), -1), 0, 1)
        results.append(np.array(part.reshape(made), order="C"))
    return results


def _cut(x: Array, dim: int, group: int) -> Array:
    """The array as (what is before the dim, the parts of the dim, the rest)."""
    return x.reshape(prod(x.shape[:dim]), group, -1)


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
        """`sent`, once."""
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
