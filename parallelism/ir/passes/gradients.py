"""Reverse accumulation: from a function the one that returns its gradients, by the derivatives in the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.ir.core import Builder, Function, TensorType, Value
from parallelism.ir.operators.reshard_op import written
from parallelism.ir.tracing import Traced
from parallelism.ir.tracing.current import recording
from parallelism.ir.tracing.tracing import apply, emit
from parallelism.sharding import TensorSharding

MARK = "gradient"
"""The region of what goes back through a region, in front of its path."""


def gradient(
    function: Function, with_respect_to: str | int | Sequence[str | int] | None = None, *, keep_outputs: bool = False,
    of: Sequence[str] | None = None,
) -> Function:
    """The function of the same inputs that returns the gradient for each input named, in that order.

    ``with_respect_to`` are names of inputs or their numbers; None: all that are floating-point.  A function that
    returns one single floating-point number, a loss, is differentiated as it is.  Any other takes further inputs, in
    the end: ``grad.0``, ``grad.1``, ..., the gradient of something with respect to each of its floating-point outputs.
    ``of`` are the names of some of the outputs: then these are differentiated, a single number or not, and the further
    inputs are named after them, ``grad.x``.  With ``keep_outputs`` the outputs come first.  What no gradient needs is
    left out.  The ops that go back through one of the region ``block.0`` are marked ``gradient.block.0``.  The gradient
    of a value with a layout lies as the value.

    ``ValueError`` for an input or output that is not there or has no gradient, and for an operator without a
    derivative.
    """
    chosen = _chosen(function, with_respect_to)
    builder = Builder()
    builder.copy(function)
    with recording(builder):
        traced = {value: Traced(builder, value) for value in function.values}
        found: dict[Value, Traced] = {}
        for value, seed in _seeds(function, of, builder):
            _accumulate(found, value, seed)
        depends = _depending(function, chosen)
        for op in reversed(function.ops):
            if depends.isdisjoint(op.outputs) or found.keys().isdisjoint(op.outputs):
                continue
            derivative = op.operator.derivative
            if derivative is None:
                raise ValueError(f"@{function.name}: the operator {op.kind} has no derivative: {op}")
            grads = [_laid(_of(found, value, builder), value) for value in op.outputs]
            outputs = [traced[value] for value in op.outputs]
            g, y = (grads[0], outputs[0]) if len(op.outputs) == 1 else (tuple(grads), tuple(outputs))
            with builder.region(op.region and f"{MARK}.{op.region}"):
                parts = derivative(g, y, *(traced[value] for value in op.inputs), **dict(op.attributes))
                for value, part in zip(op.inputs, parts, strict=True):
                    if part is not None and value in depends:
                        _accumulate(found, value, part)
        returned = [_laid(_of(found, value, builder), value).value for value in chosen]
    if keep_outputs:
        returned = [*function.outputs, *returned]
    return builder.function(f"{function.name}.gradient", returned, prune=True)


def _chosen(function: Function, names: str | int | Sequence[str | int] | None) -> list[Value]:
    if names is None:
        return [value for value in function.inputs if value.type.dtype.kind == "f"]
    by_name: dict[str | int, Value] = {value.name: value for value in function.inputs}
    by_name.update(enumerate(function.inputs))
    found = []
    for name in [names] if isinstance(names, str | int) else names:
        if name not in by_name:
            known = ", ".join(value.name for value in function.inputs) or "none"
            raise ValueError(f"@{function.name} has no input {name!r}: its inputs are {known}")
        if by_name[name].type.dtype.kind != "f":
            raise ValueError(f"@{function.name}: input {by_name[name]} has no gradient, it is not floating-point")
        found.append(by_name[name])
    return found


def _seeds(function: Function, of: Sequence[str] | None, builder: Builder) -> list[tuple[Value, Traced]]:
    if of is not None:
        by_name = {value.name: value for value in function.outputs if value.type.dtype.kind == "f"}
        if unknown := set(of) - by_name.keys():
            raise ValueError(f"@{function.name} returns no floating-point {', '.join(sorted(unknown))}")
        return [(by_name[name], Traced(builder, builder.input(f"grad.{name}", by_name[name].type))) for name in of]
    outputs = [value for value in function.outputs if value.type.dtype.kind == "f"]
    if not outputs:
        raise ValueError(f"@{function.name} returns no floating-point number to differentiate")
    if len(function.outputs) == 1 and not outputs[0].type.shape:
        return [(outputs[0], _filled(builder, outputs[0].type, 1))]
    return [(value, Traced(builder, builder.input(f"grad.{i}", value.type))) for i, value in enumerate(outputs)]


def _depending(function: Function, chosen: Sequence[Value]) -> set[Value]:
    """The values that have a gradient and change with the chosen inputs."""
    found = set(chosen)
    for op in function.ops:
        if not found.isdisjoint(op.inputs):
            found.update(value for value in op.outputs if value.type.dtype.kind == "f")
    return found


def _accumulate(found: dict[Value, Traced], value: Value, part: Any) -> None:
    fitting = _fitted(part, value.type)
    found[value] = found[value] + fitting if value in found else fitting


def _fitted(part: Any, type: TensorType) -> Any:
    """A gradient in the shape and dtype of what it is for: summed over what was broadcast."""
    extra = part.ndim - type.ndim
    spread = tuple(range(extra)) + tuple(
        d + extra for d, extent in enumerate(type.shape) if extent == 1 and part.shape[d + extra] != 1
    )
    if spread:
        part = np.sum(part, axis=spread, keepdims=True)
    if part.shape != type.shape:
        part = part.reshape(type.shape)
    return part.astype(type.dtype)


def _of(found: dict[Value, Traced], value: Value, builder: Builder) -> Traced:
    return found[value] if value in found else _filled(builder, value.type, 0)


def _laid(grad: Traced, value: Value) -> Traced:
    """The gradient of a value that lies somehow lies so, too; nothing is pending."""
    if value.layout is None:
        return grad
    laid: Traced = apply("reshard", grad, layout=written(TensorSharding(*value.layout.dims)))
    return laid


def _filled(builder: Builder, type: TensorType, value: int) -> Traced:
    filled: Traced = emit(builder, "constant", value=value, shape=type.shape, dtype=type.dtype)
    return filled
