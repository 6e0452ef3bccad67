"""Every change of layout of a program as an op of its own, so that each op finds its inputs as it needs them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.core.regions import inside
from parallelism.ir.operators.reshard_op import written
from parallelism.ir.passes import MARK
from parallelism.layouts.propagation import Devices, finite_constants, op_placement
from parallelism.sharding import TensorSharding

KEPT = 24
"""How many ops may lie between two uses of what was gathered, for it to be kept from the one to the other."""


def placed(function: Function, devices: Devices) -> Function:
    """The function with an op ``reshard`` wherever a value is needed, or made, otherwise than it lies.

    What an op makes is brought at once to where it shall lie; what an op needs is laid out right before it, and used
    again by those that need it in the same way.  What takes more memory than it did is used again only by ops that
    follow soon, and not by gradients if it was for the forward pass: a gathered weight, or activation, is gathered once
    more and does not stay in memory meanwhile.
    """
    return _Placed(function, devices).function()


class _Placed:
    def __init__(self, function: Function, devices: Devices) -> None:
        self.whole = function
        self.devices = devices
        self.constants = finite_constants(function)
        self.names = {value.name for value in function.values}
        self.ops: list[Op] = []
        self.copies: dict[tuple[str, TensorSharding], tuple[Value, int, bool]] = {}
        """The value, the op that used it last, whether that goes back."""

    def function(self) -> Function:
        for number, op in enumerate(self.whole.ops):
            if op.kind == "reshard":
                value, = op.outputs
                self._reshard(op.inputs[0], value, op)
            else:
                self._place(number, op)
        return replace(self.whole, ops=tuple(self.ops))

    def _place(self, number: int, op: Op) -> None:
        layouts, homes = ([_layout(value) for value in side] for side in (op.inputs, op.outputs))
        found = op_placement(op, tuple(layouts), tuple(homes), self.devices, self.constants)
        inputs = [self._laid(number, op, *each) for each in zip(op.inputs, found.inputs, strict=True)]
        made = [
            value if layout == value.layout else Value(self._name(value), value.type, layout)
            for value, layout in zip(op.outputs, found.outputs, strict=True)
        ]
        self.ops.append(Op(op.kind, tuple(inputs), op.attributes, tuple(made), op.region))
        for value, raw in zip(op.outputs, made, strict=True):
            if raw is not value:
                self._reshard(raw, value, op)

    def _laid(self, number: int, op: Op, value: Value, layout: TensorSharding) -> Value:
        """The value as an op needs it."""
        if layout == value.layout:
            return value
        back = inside(op, MARK)
        copy, last, was_back = self.copies.get((value.name, layout), (None, number, back))
        fresh = number - last <= KEPT and back == was_back
        if copy is None or not (fresh or self._pieces(layout) >= self._pieces(_layout(value))):
            copy = Value(self._name(value), value.type, layout)
            self._reshard(value, copy, op)
        self.copies[value.name, layout] = copy, number, back
        return copy

    def _pieces(self, layout: TensorSharding) -> int:
        mesh = self.devices.stand_in.shape
        return prod(mesh[axis] for axis in layout.axes)

    def _reshard(self, before: Value, after: Value, op: Op) -> None:
        layout = {"layout": written(_layout(after))}
        self.ops.append(Op("reshard", (before,), tuple(layout.items()), (after,), op.region))

    def _name(self, value: Value) -> str:
        count = 1
        while (name := f"{value.name}.{count}") in self.names:
            count += 1
        self.names.add(name)
        return name


def _layout(value: Value) -> TensorSharding:
    assert value.layout is not None, value
    return value.layout
