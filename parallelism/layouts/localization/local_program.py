"""The program of one device: ops on its shards, and collectives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from parallelism.ir.core import Attributes, Extent, Function, Op, TensorType, Value, of_a_part
from parallelism.layouts.localization.moves import Move, moves
from parallelism.layouts.propagation import Devices
from parallelism.memoized import memoized
from parallelism.sharding import TensorSharding


def layout_of(value: Value) -> TensorSharding:
    """The layout of a value that has one."""
    assert value.layout is not None, value
    return value.layout


def moves_of(op: Op, devices: Devices) -> tuple[Move, ...]:
    """The moves that carry out a ``reshard`` op; empty for other ops."""
    if op.kind != "reshard":
        return ()
    return moves(layout_of(op.inputs[0]), layout_of(op.outputs[0]), op.outputs[0].type, devices)


@dataclass
class _Shards:
    """The shards that one device holds."""

    devices: Devices
    place: Mapping[str, int]

    def block(self, shape: Sequence[Extent], layout: TensorSharding) -> list[tuple[Extent, Extent]]:
        """The start and the extent of the shard along each dim."""
        return [self.devices.part(n, dim.axes, self.place) for n, dim in zip(shape, layout.dims, strict=True)]

    @memoized
    def type(self, type: TensorType, layout: TensorSharding) -> TensorType:
        return TensorType(type.dtype, [size for _, size in self.block(type.shape, layout)])

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
    """The program of the device at the coordinates ``place``, from a function in which every op is placed.

    ``received(move)`` is the number of bytes that the device receives in a move.
    """
    shards = _Shards(devices, place)
    names = {value.name for value in function.values}
    values = {value.name: shards.value(value) for value in function.inputs}
    ops: list[Op] = []
    for op in function.ops:
        if op.kind != "reshard":
            outputs = tuple(map(shards.value, op.outputs))
            values.update((value.name, value) for value in outputs)
            inputs = tuple(values[value.name] for value in op.inputs)
            given = shards.attributes(op)
            same = given is op.attributes
            ops.append(op.with_values(inputs, outputs) if same else Op(op.kind, inputs, given, outputs, op.region))
            continue
        x, result = values[op.inputs[0].name], op.outputs[0]
        todo = moves_of(op, devices)
        for count, move in enumerate(todo, 1):
            name = result.name if count == len(todo) else free_name(f"{result.name}.{count}", names)
            y = Value(name, shards.type(result.type, move.after))
            attributes = move.attributes(result.type, devices, y.type.shape, received(move))
            ops.append(Op(move.kind, (x,), tuple(attributes.items()), (y,), op.region))
            x = y
        values[result.name] = x
    inputs, outputs = (tuple(values[value.name] for value in side) for side in (function.inputs, function.outputs))
    return Function(function.name, inputs, tuple(ops), outputs)


def free_name(name: str, names: set[str]) -> str:
    """``name``, lengthened until it is not one of ``names``; it is one of them afterwards."""
    while name in names:
        name += ".1"
    names.add(name)
    return name


def begun_at(program: Function, whole: Function, devices: Devices, place: Mapping[str, int]) -> Function:
    """The program of another device of the same class: only the positions of its shards differ."""
    shards = _Shards(devices, place)
    starts = {op.outputs[0].name: shards.attributes(op) for op in whole.ops if "starts" in op.operator.attributes}
    if not starts:
        return program
    return replace(program, ops=tuple(
        replace(op, attributes=starts[op.outputs[0].name]) if op.outputs and op.outputs[0].name in starts else op
        for op in program.ops
    ))
