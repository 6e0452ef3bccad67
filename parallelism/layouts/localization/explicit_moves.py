"""Explicit changes of layout: ``reshard`` ops are inserted so that each op has its inputs in the layouts it needs."""

from dataclasses import replace
from math import prod

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.core.derived import repeated_op
from parallelism.ir.core.regions import inside
from parallelism.ir.operators import layout_text
from parallelism.ir.operators.context_attention import KINDS as CONTEXT
from parallelism.ir.passes import MARK
from parallelism.ir.passes.overlapping import layer_of
from parallelism.layouts.localization.local_program import layout_of
from parallelism.layouts.localization.sequences import steps_of
from parallelism.layouts.propagation import Devices, finite_constants, op_placement
from parallelism.sharding import TensorSharding

KEPT = 24
"""A gathered value is kept for a second use if at most this many ops lie between the two uses."""


def placed(function: Function, devices: Devices) -> Function:
    """The function with a ``reshard`` op wherever a value is needed, or computed, in another layout than its own.

    The output of an op is resharded right after the op; an input right before the op.  Later ops that need the same
    layout use the same copy.  If the copy takes more memory than the value, only ops that follow soon use it, or, of an
    input, those of the same numbered layer; and a copy for the forward is not used by gradients: a gathered weight or
    activation is gathered again instead of being kept in memory.  A layer gathers a weight once in its forward and once in
    its backward, also where that computes the forward again.
    """
    return _Placed(function, devices).function()


class _Placed:
    def __init__(self, function: Function, devices: Devices) -> None:
        self.whole = function
        self.devices = devices
        self.constants = finite_constants(function)
        self.inputs = {value.name for value in function.inputs}
        self.names = {value.name for value in function.values}
        self.ops: list[Op] = []
        self.copies: dict[tuple[str, TensorSharding], tuple[Value, int, Op]] = {}
        """The copy of a value in a layout, the number of the op that used it last, and that op."""

    def function(self) -> Function:
        for number, op in enumerate(self.whole.ops):
            if op.kind in ("reshard", "deal"):
                self._reshard(op.inputs[0], op.outputs[0], op)
            else:
                self._place(number, op)
        return replace(self.whole, ops=tuple(self.ops))

    def _place(self, number: int, op: Op) -> None:
        layouts, homes = (tuple(map(layout_of, side)) for side in (op.inputs, op.outputs))
        place = op_placement(op, layouts, homes, self.devices, self.constants)
        inputs = [self._laid(number, op, *each) for each in zip(op.inputs, place.inputs, strict=True)]
        computed = []
        for value, layout in zip(op.outputs, place.outputs, strict=True):
            computed.append(value if layout == value.layout else Value(self._name(value), value.type, layout))
        if op.kind in CONTEXT:
            self.ops += steps_of(op, inputs, computed, self.devices, self._name)
        else:
            self.ops.append(repeated_op(op, inputs, computed))
        for value, raw in zip(op.outputs, computed, strict=True):
            if raw is not value:
                self._reshard(raw, value, op)

    def _laid(self, number: int, op: Op, value: Value, layout: TensorSharding) -> Value:
        """The value in the layout that an op needs."""
        if layout == value.layout:
            return value
        copy, last, user = self.copies.get((value.name, layout), (None, number, op))
        is_kept = number - last <= KEPT or (value.name in self.inputs and _are_of_one_layer(op, user))
        fresh = is_kept and inside(op, MARK) == inside(user, MARK)
        if copy is None or not (fresh or self._pieces(layout) >= self._pieces(layout_of(value))):
            copy = Value(self._name(value), value.type, layout)
            self._reshard(value, copy, op)
        self.copies[value.name, layout] = copy, number, op
        return copy

    def _pieces(self, layout: TensorSharding) -> int:
        return prod(self.devices.stand_in.shape[axis] for axis in layout.axes)

    def _reshard(self, before: Value, after: Value, op: Op) -> None:
        layout = "layout", layout_text(layout_of(after))
        self.ops.append(Op("reshard", (before,), (layout,), (after,), op.region))

    def _name(self, value: Value) -> str:
        count = 1
        while (name := f"{value.name}.{count}") in self.names:
            count += 1
        self.names.add(name)
        return name


def _are_of_one_layer(one: Op, other: Op) -> bool:
    """Whether two ops are in the same layer that has a number."""
    layer = layer_of(one)
    return layer is not None and layer.rpartition(".")[2].isdecimal() and layer == layer_of(other)
