"""Reverse-mode differentiation of a function, by the derivatives in the table of operators."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.core import Builder, Function, Op, TensorType, Value
from parallelism.ir.core.lines import on_line
from parallelism.ir.core.regions import joined
from parallelism.ir.operators import layout_text
from parallelism.ir.tracing import Traced, apply, emit, recording
from parallelism.sharding import TensorSharding

MARK = "gradient"
"""The region of the backward ops: the backward of ``block.0`` is ``gradient.block.0``, that of ops without a region
``gradient``."""
UPDATE = "update"
"""The region of the update of a training step."""
DELAYED = "delayed."
"""The prefix of a scale of numbers in 8 bits that is from earlier steps.  Its gradient is the largest size of these
numbers: of several microbatches and devices it is the largest one, and no sum."""
GRADIENT = "grad."
"""The prefix of a gradient's name: a backward takes the gradient of value x as its input ``grad.x``."""


def gradient(
    function: Function,
    with_respect_to: str | int | Sequence[str | int] | None = None,
    *,
    keep_outputs: bool = False,
    of: str | Sequence[str] | None = None,
) -> Function:
    """A function of the same inputs that returns the gradients with respect to the chosen inputs, in that order.

    ``with_respect_to`` holds names or numbers of inputs; None means all floating-point inputs.  If the function
    returns a single floating-point number (a loss), that is differentiated.  Otherwise the result takes additional
    inputs at the end, ``grad.0``, ``grad.1``, ...: the gradient with respect to each floating-point output.
    ``of`` names the outputs to differentiate, whatever their shape; the additional inputs are then named after them,
    ``grad.x``.  One name alone is that of a loss, whose gradient is 1.  With ``keep_outputs`` the outputs of the function
    come before the gradients.

    Ops that no gradient needs are left out.  The backward ops of region ``block.0`` have the region
    ``gradient.block.0``, also those that bring a gradient into its value's layout.  These come right after the last op
    that adds to it.  The backward ops of ops without a region are in the region ``gradient``.

    An op ``stop_gradient`` lets no gradient pass.  A ``local_loss`` is differentiated, too, wherever it stands.

    ``ValueError`` for an input or output that does not exist or has no gradient, and for an operator without a
    derivative.
    """
    chosen = _chosen(function, with_respect_to)
    builder = Builder()
    builder.copy(function)
    with recording(builder):
        backward = _Backward(function, chosen, builder)
        with builder.region(MARK):
            for value, seed in _seeds(function, of, builder):
                _accumulate(backward.grads, value, seed)
        first_read = _first_read(function, chosen)
        for number, op in reversed([*enumerate(function.ops)]):
            if backward.needs(op):
                backward.add(op)
            for value in first_read.get(number, ()):
                backward.complete(value)
        gradients = [backward.complete(value) for value in chosen]
    kept = function.outputs if keep_outputs else ()
    return builder.function(f"{function.name}.gradient", [*kept, *gradients], prune=True)


class _Backward:
    """The backward ops of a function, which are added from its last op to its first."""

    def __init__(self, function: Function, chosen: Sequence[Value], builder: Builder) -> None:
        self.function, self.builder = function, builder
        self.traced = {value: Traced(builder, value) for value in function.values}
        self.grads: dict[Value, Traced] = {}
        """The sum of the gradients of each value so far."""
        self.rounded = rounded_values(function)
        self.depends = depending(function, chosen, self.rounded)
        self._regions: dict[Value, str | None] = {}
        """The region of the op that reads a value first: its gradient is complete there."""
        self._complete: dict[Value, Value] = {}

    def needs(self, op: Op) -> bool:
        """Whether a gradient passes through an op, or starts there."""
        if op.operator.gradient == "starts" and not self.depends.isdisjoint(op.inputs):
            return True
        return not self.depends.isdisjoint(op.outputs) and not self.grads.keys().isdisjoint(op.outputs)

    def add(self, op: Op) -> None:
        """Adds the backward of an op."""
        derivative = op.operator.derivative
        if derivative is None:
            raise ValueError(
                f"@{self.function.name}: the operator {op.kind} has no derivative: {op}{on_line(op.line)}"
            )
        inputs = [self.traced[value] for value in op.inputs]
        outputs = [self.traced[value] for value in op.outputs]
        with self.builder.region(joined(MARK, op.region), op.line):
            grads = [self._gradient(value) for value in op.outputs]
            g, y = (grads[0], outputs[0]) if len(op.outputs) == 1 else (tuple(grads), tuple(outputs))
            parts = derivative(g, y, *inputs, **dict(op.attributes))
            for value, part in zip(op.inputs, parts, strict=True):
                if part is not None and value in self.depends:
                    _accumulate(self.grads, value, part, is_rounded=value in self.rounded)
                    self._regions[value] = op.region

    def _gradient(self, value: Value) -> Traced | None:
        return _of(self.grads, value, self.builder) if value in self.grads else None

    def complete(self, value: Value) -> Value:
        """The gradient of a value, when no op can add to it any more."""
        if value not in self._complete:
            region = self._regions.get(value)
            with self.builder.region(joined(MARK, region)):
                self._complete[value] = _of(self.grads, value, self.builder).value
        return self._complete[value]


def _chosen(function: Function, names: str | int | Sequence[str | int] | None) -> list[Value]:
    if names is None:
        return _floating(function.inputs)
    by_name: dict[str | int, Value] = {value.name: value for value in function.inputs}
    by_name.update(enumerate(function.inputs))
    wanted = [names] if isinstance(names, str | int) else names
    for name in wanted:
        if name not in by_name:
            known = ", ".join(value.name for value in function.inputs) or "none"
            raise ValueError(f"@{function.name} has no input {name!r}: its inputs are {known}")
        if not _floating([by_name[name]]):
            raise ValueError(
                f"@{function.name}: input {by_name[name]} has no gradient, it is not floating-point"
            )
    return [by_name[name] for name in wanted]


def _seeds(
    function: Function, of: str | Sequence[str] | None, builder: Builder
) -> list[tuple[Value, Traced]]:
    outputs = _floating(function.outputs)
    if of is not None:
        by_name = {value.name: value for value in outputs}
        if unknown := ({of} if isinstance(of, str) else set(of)) - by_name.keys():
            raise ValueError(f"@{function.name} returns no floating-point {', '.join(sorted(unknown))}")
        if isinstance(of, str):
            return [(by_name[of], _filled(builder, by_name[of].type, 1))]
        return [
            (by_name[name], Traced(builder, builder.input(f"{GRADIENT}{name}", by_name[name].type)))
            for name in of
        ]
    if not outputs:
        raise ValueError(f"@{function.name} returns no floating-point number to differentiate")
    if len(function.outputs) == 1 and not outputs[0].type.shape:
        return [(outputs[0], _filled(builder, outputs[0].type, 1))]
    return [
        (value, Traced(builder, builder.input(f"{GRADIENT}{i}", value.type)))
        for i, value in enumerate(outputs)
    ]


def _floating(values: Iterable[Value]) -> list[Value]:
    return [value for value in values if is_floating(value.type.dtype)]


def depending(
    function: Function, chosen: Sequence[Value], rounded: Collection[Value] | None = None
) -> set[Value]:
    """The floating-point values that depend on the chosen inputs, and those that are ``rounded`` (`rounded_values`)."""
    rounded = rounded_values(function) if rounded is None else rounded
    found = set(chosen)
    for op in function.ops:
        if op.operator.gradient == "passes" and not found.isdisjoint(op.inputs):
            found.update(value for value in op.outputs if value in rounded or is_floating(value.type.dtype))
    return found


def _first_read(function: Function, chosen: Sequence[Value]) -> dict[int, list[Value]]:
    """The chosen values that an op is the first to read, by the number of the op."""
    first: dict[Value, int] = {}
    for number, op in enumerate(function.ops):
        for value in op.inputs:
            first.setdefault(value, number)
    read: dict[int, list[Value]] = {}
    for value in dict.fromkeys(chosen):
        if value in first:
            read.setdefault(first[value], []).append(value)
    return read


def rounded_values(function: Function) -> set[Value]:
    """The values in bytes whose gradients have a wider dtype.

    Bytes that hold two numbers each are integers, and their gradients have the dims of the numbers.
    """
    ops = [op for op in function.ops if op.operator.passes_rounding]
    around = {value for op in ops for value in (*op.inputs, *op.outputs)}
    return {value for value in around if value.type.dtype.itemsize == 1}


def _accumulate(grads: dict[Value, Traced], value: Value, part: Any, *, is_rounded: bool = False) -> None:
    fitted = part if is_rounded else _fitted(part, value.type)
    grads[value] = grads[value] + fitted if value in grads else fitted


def _fitted(part: Any, type: TensorType) -> Any:
    """A gradient in the shape and dtype of its value: summed over the dims that were broadcast."""
    extra = part.ndim - type.ndim
    spread = tuple(range(extra)) + tuple(
        d + extra for d, extent in enumerate(type.shape) if extent == 1 and part.shape[d + extra] != 1
    )
    if spread:
        part = np.sum(part, axis=spread, keepdims=len(spread) > extra)
    return part.reshape(type.shape).astype(type.dtype)


def _of(grads: dict[Value, Traced], value: Value, builder: Builder) -> Any:
    """The gradient of a value so far, or zeros, in the layout of the value, without a pending reduction."""
    grad = grads[value] if value in grads else _filled(builder, value.type, 0)
    return (
        grad
        if value.layout is None
        else apply("reshard", grad, layout=layout_text(TensorSharding(*value.layout.dims)))
    )


def _filled(builder: Builder, type: TensorType, value: int) -> Any:
    return emit(builder, "constant", value=value, shape=type.shape, dtype=type.dtype)
