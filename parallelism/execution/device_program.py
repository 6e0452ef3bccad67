"""The program of one device, made ready: what each op declares, what it holds in memory, how it is run.

It is run on a `Device` (`DeviceProgram.run`) and simulated (`parallelism.simulation.event_classes`) from one list of
steps, so that what is declared and held is the same.  A step holds what it makes, computes or communicates, and then
gives back what nobody reads any more:

    memory +     one event for each category of what it makes; a view makes nothing
    compute      named as the op, with its flops, bytes and dtype; none for what costs nothing
    collective   or a send or recv, in place of compute
    memory -     one for each category of what is freed

Flops count where there are floats; what is done with integers and bools counts by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism.ir import Function, Op, Value, freed_after
from parallelism.ir.passes.interpreter import run as run_kernel
from parallelism.layouts import step_of
from parallelism.mesh import split_sizes
from parallelism.mesh.uneven import starts
from parallelism.operation import Device
from parallelism.resharding import run_step
from parallelism.sharding import device_op

Array = NDArray[Any]
Held = tuple[tuple[str, int], ...]
"""Categories of memory, with bytes."""

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "send", "recv")
INPUTS, ACTIVATIONS, OUTPUTS = "inputs", "activations", "outputs"


class Price(NamedTuple):
    """What an op declares of itself."""

    flops: float
    nbytes: float
    dtype: str | None
    seconds: float | None = None
    """What it takes, where that is known: it counts in place of flops and bytes."""


class Step(NamedTuple):
    """One op at work."""

    op: Op
    price: Price | None
    """None of what costs nothing, and of what communicates."""
    made: Held
    freed: Held
    unread: tuple[str, ...]
    """Names of the values that nobody reads after it."""


@dataclass(frozen=True)
class DeviceProgram:
    """A function of local shapes, and the category that the memory of a value is counted in.

    ``categories`` names those of values; of the others inputs are ``inputs``, what is returned ``outputs``, and
    everything between ``activations``.  ``seconds`` says what an op takes, in place of its flops and bytes.
    ``ValueError`` for a function with symbols.
    """

    function: Function
    categories: Mapping[str, str]
    seconds: Callable[[Op], float] | None = None

    def __post_init__(self) -> None:
        if self.function.symbols:
            symbols = ", ".join(sorted(self.function.symbols))
            raise ValueError(f"@{self.function.name} has symbols, {symbols}; specialize it first")

    @cached_property
    def held(self) -> Held:
        """What the inputs take."""
        return self._held(self.function.inputs)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The ops in their order."""
        function = self.function
        outputs = {value.name for value in function.outputs}
        last: dict[str, int] = {value.name: -1 for value in function.inputs}
        for number, op in enumerate(function.ops):
            for value in (*op.inputs, *op.outputs):
                last[value.name] = number
        unread: list[list[str]] = [[] for _ in function.ops]
        for name, number in last.items():
            if name not in outputs and number >= 0:
                unread[number].append(name)
        made = (() if op.operator.view else op.outputs for op in function.ops)
        return tuple(
            Step(op, self._price(op), self._held(values), self._held(freed), tuple(names))
            for op, values, freed, names in zip(function.ops, made, freed_after(function), unread, strict=True)
        )

    def run(self, device: Device, arrays: Sequence[Array], **marks: Any) -> tuple[Array, ...]:
        """The outputs, of the inputs of this device; ``marks`` (stage, microbatch, phase) go to every event.

        **Communication**: what its collectives and messages say.
        """
        values = {value.name: array for value, array in zip(self.function.inputs, arrays, strict=True)}
        places = {name: mark for name, mark in marks.items() if name != "phase"}
        for op, price, made, freed, unread in self.steps:
            inputs = [values[value.name] for value in op.inputs]
            for category, nbytes in made:
                device.hold(category, nbytes, **places)
            if price is not None:
                flops, traffic, dtype, seconds = price
                with device.compute(op.kind, flops=flops, nbytes=traffic, dtype=dtype, seconds=seconds, **marks):
                    outputs = _run(device, op, inputs)
            else:
                outputs = _run(device, op, inputs)
            for value, array in zip(op.outputs, outputs, strict=True):
                values[value.name] = array
            del inputs, outputs
            for name in unread:
                del values[name]
            for category, nbytes in freed:
                device.hold(category, -nbytes, **places)
        return tuple(values[value.name] for value in self.function.outputs)

    def _price(self, op: Op) -> Price | None:
        if communicates(op) or op.operator.view:
            return None
        cut = op.kind in ("all_slice", "relayout")      # of what is cut only the part that is kept is read
        nbytes = 2.0 * float(op.outputs[0].type.nbytes) if cut else float(op.nbytes)
        floats = (value.type.dtype.name for value in (*op.outputs, *op.inputs) if value.type.dtype.kind == "f")
        dtype = next(floats, None)
        flops = float(op.flops) if dtype is not None else 0.0
        if not flops and not nbytes:
            return None
        return Price(flops, nbytes, dtype, None if self.seconds is None or cut else self.seconds(op))

    def _held(self, values: Sequence[Value]) -> Held:
        found: dict[str, int] = {}
        for value in values:
            nbytes = int(value.type.nbytes)
            if nbytes:
                category = self._category(value.name)
                found[category] = found.get(category, 0) + nbytes
        return tuple(found.items())

    def _category(self, name: str) -> str:
        found = self.categories.get(name)
        return self._others.get(name, ACTIVATIONS) if found is None else found

    @cached_property
    def _others(self) -> dict[str, str]:
        outputs = dict.fromkeys((value.name for value in self.function.outputs), OUTPUTS)
        return outputs | dict.fromkeys((value.name for value in self.function.inputs), INPUTS)


def communicates(op: Op) -> bool:
    """Whether an op is a call of the device's."""
    return op.kind in CALLS or (op.kind == "relayout" and op["step"] != "slice")


def _run(device: Device, op: Op, inputs: list[Array]) -> tuple[Array, ...]:
    """The outputs: contiguous arrays that own their memory, but for views."""
    if op.kind in ("send", "recv"):
        if op.kind == "recv":
            return np.asarray(device.recv(op["source"], tag=op["tag"])),
        device.send(inputs[0], op["destination"], tag=op["tag"])
        return ()
    call = _ON_A_DEVICE.get(op.kind)
    if call is None:
        return run_kernel(op, inputs)
    array = np.asarray(call(device, op, inputs[0]))
    if np.may_share_memory(array, inputs[0]) or not array.flags.c_contiguous:
        array = np.array(array, order="C")
    return array,


# -- what is done to the part of a device ------------------------------------------------------------------------------


def _all_reduce(device: Device, op: Op, x: Array) -> Any:
    return device.all_reduce(x, op["axes"], op=device_op(op["op"], x.dtype))


def _all_gather(device: Device, op: Op, x: Array) -> Any:
    return device.all_gather(x, op["axes"], dim=op["dim"])


def _reduce_scatter(device: Device, op: Op, x: Array) -> Any:
    return device.reduce_scatter(x, op["axes"], dim=op["dim"], op=device_op(op["op"], x.dtype))


def _all_to_all(device: Device, op: Op, x: Array) -> Any:
    return device.all_to_all(x, op["axes"], split_dim=op["split_dim"], concat_dim=op["concat_dim"])


def _permute(device: Device, op: Op, x: Array) -> Any:
    return device.permute(x, op["pairs"], op["axes"])


def _all_slice(device: Device, op: Op, x: Array) -> Any:
    extents = device.mesh.shape
    places = starts(split_sizes(x.shape[op["dim"]], tuple(extents[axis] for axis in op["axes"])))
    mine = device.position(op["axes"])
    return x[(slice(None),) * op["dim"] + (slice(places[mine], places[mine + 1]),)]


def _relayout(device: Device, op: Op, x: Array) -> Array:
    return run_step(device, step_of(op, device.mesh), x)


_ON_A_DEVICE: dict[str, Callable[[Device, Op, Array], Any]] = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all, "permute": _permute, "all_slice": _all_slice, "relayout": _relayout,
}
