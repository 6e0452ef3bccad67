"""From a program of whole tensors, laid out, to the program of one device.

    localized = localize(propagate(annotate(loss, {"x": TensorSharding("dp", None)}), mesh), mesh)
    localized.program(rank=0)       # local shapes; what it says to other devices stands in it as ops
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism.ir.extents import Extent
from parallelism.ir.function import Function, Op, Value
from parallelism.ir.table import of_a_part
from parallelism.ir.types import TensorType
from parallelism.layouts.devices import Axes, Devices
from parallelism.layouts.moves import Move, moves
from parallelism.layouts.placed import placed
from parallelism.layouts.propagation import propagate
from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingStep
from parallelism.sharding import TensorSharding


class Class(NamedTuple):
    """Devices whose programs differ at most in where their parts begin."""

    rank: int
    """The lowest of them."""
    size: int
    """How many they are."""


@dataclass(frozen=True)
class Localized:
    """A program laid out on devices: of the whole, and of each of them."""

    function: Function
    """The whole: every value with its layout, every change of layout an op ``reshard``, so that each other op finds its
    inputs as it needs them."""
    devices: Devices

    @property
    def mesh(self) -> Mesh:
        """``ValueError`` if a number of devices is a symbol."""
        return self.devices.mesh

    @property
    def inputs(self) -> tuple[TensorSharding, ...]:
        """How each input is dealt out."""
        return tuple(map(layout_of, self.function.inputs))

    @property
    def outputs(self) -> tuple[TensorSharding, ...]:
        """How each output lies."""
        return tuple(map(layout_of, self.function.outputs))

    @cached_property
    def classes(self) -> tuple[Class, ...]:
        """The devices by what they do, ordered by their lowest ranks.

        Those of one class have programs with the same ops, shapes, and bytes received; only ``starts`` may differ.
        ``ValueError`` if a number of devices is a symbol.
        """
        first, counts = np.unique(self._classes, return_index=True, return_counts=True)[1:]
        return tuple(Class(int(rank), int(count)) for rank, count in zip(first, counts, strict=True))

    def class_of(self, rank: int) -> int:
        """The number of the class that a device is in."""
        return int(self._classes[rank])

    def program(self, rank: int = 0) -> Function:
        """What the device does: a function of its parts of the inputs that returns its parts of the outputs.

        Ops are those of the table, on local shapes, and between them collectives.  Random numbers and counted places
        are those that the part has in the whole.  With symbolic numbers of devices that of the first device, whose
        parts begin at 0.
        """
        if self.devices.symbolic:
            return self._programs.setdefault(-1, _program(self, dict.fromkeys(self.devices.shape, 0), 0))
        number = self.class_of(rank)
        found = self._programs.get(number)
        if found is None:
            first = self.classes[number].rank
            found = self._programs[number] = _program(self, self.mesh.index(first), first)
        return found if rank == self.classes[number].rank else _moved(self, found, self.mesh.index(rank))

    def received(self, rank: int = 0) -> tuple[int, ...]:
        """The bytes that each op of its program receives from other devices, exactly: where an array does not divide by
        the devices that reduce it, `Op.bytes_received` is that of the first of them only."""
        found = []
        for op in self.function.ops:
            for move in self._moves(op):
                found.append(self.received_by(move, rank))
            if op.kind != "reshard":
                found.append(0)
        return tuple(found)

    def part(self, value: Value, rank: int = 0) -> tuple[slice, ...]:
        """Where the part of a value that the device holds lies in the whole."""
        return layout_of(value).slices(tuple(map(int, value.type.shape)), self.mesh, rank)

    def received_by(self, move: Move, rank: int) -> int:
        """The bytes that a device receives in one op of its program."""
        return int(self._received(move.step)[self._place(move.step.mesh)[rank]])

    def _moves(self, op: Op) -> tuple[Move, ...]:
        if op.kind != "reshard":
            return ()
        before, after = op.inputs[0], op.outputs[0]
        return moves(layout_of(before), layout_of(after), after.type, self.devices)

    # -- who does the same ---------------------------------------------------------------------------------------------

    @cached_property
    def _programs(self) -> dict[int, Function]:
        return {}

    @cached_property
    def _coordinates(self) -> dict[str, NDArray[np.int64]]:
        sizes = tuple(self.mesh.shape.values())
        return dict(zip(self.mesh.axes, np.unravel_index(np.arange(self.mesh.size), sizes), strict=True))

    @cached_property
    def _places(self) -> dict[Mesh, NDArray[np.int64]]:
        return {}

    def _place(self, mesh: Mesh) -> NDArray[np.int64]:
        """By rank, the rank on a mesh of some of the axes."""
        found = self._places.get(mesh)
        if found is None:
            found = np.zeros(self.mesh.size, np.int64)
            for axis, n in mesh.shape.items():
                found = found * n + self._coordinates.get(axis, 0)
            self._places[mesh] = found
        return found

    @cached_property
    def _columns(self) -> dict[ReshardingStep, NDArray[np.int64]]:
        return {}

    def _received(self, step: ReshardingStep) -> NDArray[np.int64]:
        found = self._columns.get(step)
        if found is None:
            found = self._columns[step] = np.array(step.bytes_received, np.int64)
        return found

    @cached_property
    def _classes(self) -> NDArray[np.int64]:
        """By rank, the number of the class, in the order of their lowest ranks."""
        number = np.zeros(self.mesh.size, np.int64)
        for column in self._differing():
            number = np.unique(number * (column.max() + 1) + column, return_inverse=True)[1].reshape(-1)
        _, first, number = np.unique(number, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))
        return np.asarray(order[number.reshape(-1)])

    def _differing(self) -> list[NDArray[np.int64]]:
        """What is not the same for all, by rank: extents of uneven parts, bytes received."""
        cuts: dict[tuple[Extent, Axes], None] = {}
        steps: dict[ReshardingStep, None] = {}
        seen: set[tuple[tuple[Extent, ...], TensorSharding]] = set()
        for op in self.function.ops:
            for move in self._moves(op):
                steps[move.step] = None
        laid = [(value.type.shape, layout_of(value)) for value in self.function.values]
        for shape, layout in [*laid, *((step.shape, step.after) for step in steps)]:
            if (shape, layout) not in seen:
                seen.add((shape, layout))
                cuts.update(dict.fromkeys((n, dim.axes) for n, dim in zip(shape, layout.dims, strict=True) if dim.axes))
        columns = []
        for extent, axes in cuts:
            sizes = self.devices.cut(extent, axes)
            if sizes is not None:
                place = np.zeros(self.mesh.size, np.int64)
                for axis in axes:
                    place = place * self.mesh.shape[axis] + self._coordinates[axis]
                columns.append(np.array(sizes, np.int64)[place])
        for step in steps:
            received = self._received(step)
            if received.min() != received.max():
                columns.append(np.unique(received, return_inverse=True)[1].reshape(-1)[self._place(step.mesh)])
        return columns


def localize(function: Function, mesh: Mesh | Mapping[str, Extent]) -> Localized:
    """Lays a program out on devices: layouts that are missing are found by `propagate`.

    A number of devices may be a symbol, ``{"dp": ir.symbol("dp"), "tp": 2}``: then extents are taken to divide, and
    `Localized.program` is an expression of it.  ``ValueError`` for axes that the mesh has not, and for a program with
    collectives, which is one of a device already.
    """
    devices = Devices.of(mesh)
    return Localized(placed(propagate(function, mesh), devices), devices)


def layout_of(value: Value) -> TensorSharding:
    """That of a value which has one."""
    assert value.layout is not None, value
    return value.layout


# -- the program of one device -----------------------------------------------------------------------------------------


class _Local:
    """The parts of one device."""

    def __init__(self, devices: Devices, place: Mapping[str, int]) -> None:
        self.devices = devices
        self.place = place
        self._types: dict[tuple[TensorType, TensorSharding], TensorType] = {}

    def block(self, shape: Sequence[Extent], layout: TensorSharding) -> list[tuple[Extent, Extent]]:
        """For each dim where the part begins, and its extent."""
        return [self.devices.part(n, dim.axes, self.place) for n, dim in zip(shape, layout.dims, strict=True)]

    def type(self, type: TensorType, layout: TensorSharding) -> TensorType:
        found = self._types.get((type, layout))
        if found is None:
            found = TensorType(type.dtype, [size for _, size in self.block(type.shape, layout)])
            self._types[type, layout] = found
        return found

    def attributes(self, op: Op) -> Any:
        names = op.operator.attributes
        if "shape" not in names and "starts" not in names:
            return op.attributes
        block = self.block(op.outputs[0].type.shape, layout_of(op.outputs[0]))
        return of_a_part(op.attributes, [size for _, size in block], [start for start, _ in block])


def _program(localized: Localized, place: Mapping[str, int], rank: int) -> Function:
    function, devices = localized.function, localized.devices
    local = _Local(devices, place)
    names = {value.name for value in function.values}
    values: dict[str, Value] = {
        value.name: Value(value.name, local.type(value.type, layout_of(value))) for value in function.inputs
    }
    ops: list[Op] = []
    for op in function.ops:
        if op.kind != "reshard":
            outputs = [Value(value.name, local.type(value.type, layout_of(value))) for value in op.outputs]
            values.update((value.name, value) for value in outputs)
            inputs = tuple(values[value.name] for value in op.inputs)
            ops.append(Op(op.kind, inputs, local.attributes(op), tuple(outputs), op.region))
            continue
        x, whole, result = values[op.inputs[0].name], op.outputs[0].type, op.outputs[0].name
        todo = localized._moves(op)
        for count, move in enumerate(todo, 1):
            received = 0 if devices.symbolic else localized.received_by(move, rank)
            attributes = move.attributes(whole, devices, local.type(whole, move.after).shape, received)
            name = result if count == len(todo) else _free(f"{result}.{count}", names)
            y = Value(name, local.type(whole, move.after))
            ops.append(Op(move.kind, (x,), tuple(attributes.items()), (y,), op.region))
            x = y
        values[result] = x
    made = (values[value.name] for value in function.outputs)
    return Function(function.name, tuple(values[value.name] for value in function.inputs), tuple(ops), tuple(made))


def _free(name: str, names: set[str]) -> str:
    while name in names:
        name += ".1"
    names.add(name)
    return name


def _moved(localized: Localized, program: Function, place: Mapping[str, int]) -> Function:
    """The program of another device of the class: the same, but for where its parts begin."""
    local = _Local(localized.devices, place)
    starting = {
        op.outputs[0].name: local.attributes(op) for op in localized.function.ops if "starts" in op.operator.attributes
    }
    if not starting:
        return program
    ops = [
        Op(op.kind, op.inputs, starting[op.outputs[0].name], op.outputs, op.region)
        if op.outputs and op.outputs[0].name in starting else op for op in program.ops
    ]
    return Function(program.name, program.inputs, tuple(ops), program.outputs)
