"""The program of one device: its parts of all values, and what it says to others, as ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from parallelism.ir.core import Attributes, Extent, Function, Op, TensorType, Value, of_a_part
from parallelism.layouts.localization.moves import Move, moves
from parallelism.layouts.propagation import Devices
from parallelism.sharding import TensorSharding


def layout_of(value: Value) -> TensorSharding:
    """That of a value which has one."""
    assert value.layout is not None, value
    return value.layout


def moves_of(op: Op, devices: Devices) -> tuple[Move, ...]:
    """What an op ``reshard`` comes to; nothing for others."""
    if op.kind != "reshard":
        return ()
    return moves(layout_of(op.inputs[0]), layout_of(op.outputs[0]), op.outputs[0].type, devices)


class _Parts:
    """What one device holds."""

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

    def value(self, value: Value) -> Value:
        return Value(value.name, self.type(value.type, layout_of(value)))

    def attributes(self, op: Op) -> Attributes:
        names = op.operator.attributes
        if "shape" not in names and "starts" not in names:
            return op.attributes
        block = self.block(op.outputs[0].type.shape, layout_of(op.outputs[0]))
        return of_a_part(op.attributes, [size for _, size in block], [start for start, _ in block])


def local_program(
    function: Function, devices: Devices, place: Mapping[str, int], received: Callable[[Move], int]
) -> Function:
    """The program of the device at ``place``, of a function that is laid out and placed; ``received`` says how many
    bytes it receives in a move."""
    parts = _Parts(devices, place)
    names = {value.name for value in function.values}
    values = {value.name: parts.value(value) for value in function.inputs}
    ops: list[Op] = []
    for op in function.ops:
        if op.kind != "reshard":
            outputs = tuple(map(parts.value, op.outputs))
            values.update((value.name, value) for value in outputs)
            inputs = tuple(values[value.name] for value in op.inputs)
            ops.append(Op(op.kind, inputs, parts.attributes(op), outputs, op.region))
            continue
        x, result = values[op.inputs[0].name], op.outputs[0]
        todo = moves_of(op, devices)
        for count, move in enumerate(todo, 1):
            name = result.name if count == len(todo) else _free(f"{result.name}.{count}", names)
            y = Value(name, parts.type(result.type, move.after))
            attributes = move.attributes(result.type, devices, y.type.shape, received(move))
            ops.append(Op(move.kind, (x,), tuple(attributes.items()), (y,), op.region))
            x = y
        values[result.name] = x
    inputs, outputs = (tuple(values[value.name] for value in side) for side in (function.inputs, function.outputs))
    return Function(function.name, inputs, tuple(ops), outputs)


def _free(name: str, names: set[str]) -> str:
    while name in names:
        name += ".1"
    names.add(name)
    return name


def begun_at(program: Function, whole: Function, devices: Devices, place: Mapping[str, int]) -> Function:
    """The program of another device with the same shapes: the same, but for where its parts begin."""
    parts = _Parts(devices, place)
    starts = {op.outputs[0].name: parts.attributes(op) for op in whole.ops if "starts" in op.operator.attributes}
    if not starts:
        return program
    ops = tuple(
        replace(op, attributes=starts[op.outputs[0].name]) if op.outputs and op.outputs[0].name in starts else op
        for op in program.ops
    )
    return replace(program, ops=ops)
