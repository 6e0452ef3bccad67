"""The program of one device: ops on its shards, and collectives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from parallelism.algorithms import Deduplicated
from parallelism.ir.core import Attributes, Extent, Function, Op, Span, TensorType, Value, of_a_part
from parallelism.layouts.localization.moves import Move, moves
from parallelism.layouts.propagation import Devices
from parallelism.memoized import memoized
from parallelism.sharding import TensorSharding

_NDIM_OF_ROWS = 4
"""Rows of experts, and scales of these: (experts, sequences, slots, features)."""


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

    def block(self, shape: Sequence[Extent], layout: TensorSharding) -> list[Span]:
        """The start and the extent of the shard along each dim."""
        return [self.devices.part(n, dim.axes, self.place) for n, dim in zip(shape, layout.dims, strict=True)]

    @memoized
    def type(self, type: TensorType, layout: TensorSharding) -> TensorType:
        return TensorType(type.dtype, [size for _, size in self.block(type.shape, layout)])

    def value(self, value: Value) -> Value:
        return Value(value.name, self.type(value.type, layout_of(value)))

    def part(self, op: Op) -> tuple[str, Attributes]:
        """The kind and the attributes of the op that computes the shards of the outputs of ``op``."""
        if op.kind == "ring_shift":
            pairs = tuple((place, (place + 1) % op["group"]) for place in range(op["group"]))
            return "permute", (("axes", op["axes"]), ("group", op["group"]), ("pairs", pairs))
        if "shape" not in op.operator.attributes and not _has_place(op):
            return op.kind, op.attributes
        output = op.outputs[0]
        if dict(op.attributes).get("shape") not in (
            None,
            output.type.shape,
        ):  # the shape is that of another output
            output = op.outputs[-1]
        return of_a_part(
            op.kind, op.attributes, self.block(output.type.shape, layout_of(output)), self._indexed(op)
        )

    def _indexed(self, op: Op) -> tuple[Span, Extent] | None:
        """The part of the letter along which the op picks elements, and its whole extent; None if it is not split."""
        letter = op.operator.indexed
        if letter is None:
            return None
        rule = op.rule
        for values, side in ((op.inputs, rule.inputs), (op.outputs, rule.outputs)):
            for value, dims in zip(values, side, strict=True):
                for dim, split, extent in zip(dims, layout_of(value).dims, value.type.shape, strict=True):
                    if dim == (letter,) and split.axes:
                        return self.devices.part(extent, split.axes, self.place), extent
        return None


def _has_place(op: Op) -> bool:
    """Whether the op of a device may depend on the place of its shards in the whole tensors."""
    return op.operator.indexed is not None or "starts" in op.operator.attributes


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
    sent = _sent(function)
    tokens = Deduplicated.of(sent)
    for op in function.ops:
        if op.kind != "reshard":
            outputs = tuple(map(shards.value, op.outputs))
            values.update((value.name, value) for value in outputs)
            inputs = tuple(values[value.name] for value in op.inputs)
            kind, attributes = shards.part(op)
            same = kind == op.kind and attributes is op.attributes
            ops.append(
                op.with_values(inputs, outputs)
                if same
                else Op(kind, inputs, attributes, outputs, op.region, op.line)
            )
            continue
        x, result = values[op.inputs[0].name], op.outputs[0]
        todo = moves_of(op, devices)
        for count, move in enumerate(todo, 1):
            name = result.name if count == len(todo) else free_name(f"{result.name}.{count}", names)
            y = Value(name, shards.type(result.type, move.after))
            given = move.attributes(result.type, devices, y.type.shape, received(move))
            if tokens and _is_of_all_experts(move, x, y, result, tokens.experts):
                given["algorithm"] = sent
            ops.append(Op(move.kind, (x,), tuple(given.items()), (y,), op.region))
            x = y
        values[result.name] = x
    inputs = tuple(values[value.name] for value in function.inputs)
    outputs = tuple(values[value.name] for value in function.outputs)
    return Function(function.name, inputs, tuple(ops), outputs, function.attributes)


def _sent(function: Function) -> str | None:
    """How rows travel that are dealt to experts, or come back from them, where an op says it."""
    return next((value for op in function.ops for name, value in op.attributes if name == "sent"), None)


def _is_of_all_experts(move: Move, x: Value, y: Value, whole: Value, experts: int) -> bool:
    """Whether a move takes each row of tokens from any expert, or to any.  Where experts are split over several axes, the
    other moves are among those of one place along the first axis: a token has few of these."""
    shape = whole.type.shape
    if move.kind != "all_to_all" or len(shape) != _NDIM_OF_ROWS or shape[0] != experts:
        return False
    many = {move.dim: x, move.other: y}.get(0)
    return many is not None and many.type.shape[0] == experts


def free_name(name: str, names: set[str]) -> str:
    """``name``, lengthened until it is not one of ``names``; it is one of them afterwards."""
    while name in names:
        name += ".1"
    names.add(name)
    return name


def begun_at(program: Function, whole: Function, devices: Devices, place: Mapping[str, int]) -> Function:
    """The program of another device of the same class: only the positions of its shards differ."""
    shards = _Shards(devices, place)
    places = {op.outputs[0].name: shards.part(op)[1] for op in whole.ops if _has_place(op)}
    if not places:
        return program
    ops = []
    for op in program.ops:
        begins = places.get(op.outputs[0].name) if op.outputs else None
        ops.append(op if begins is None else replace(op, attributes=begins))
    return replace(program, ops=tuple(ops))
