"""ONNX models from programs without collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallelism.interop.errors import UnsupportedError
from parallelism.interop.onnx_models import files
from parallelism.interop.written.onnx_nodes import Nodes
from parallelism.interop.written.onnx_operators import OPERATORS
from parallelism.interop.written.onnx_windows import Windowed, windowed
from parallelism.ir.core import Function, Op, Value

OPSET = 20


def to_onnx(function: Function, weights: Mapping[str, Any] | None = None) -> Any:
    """The ``onnx.ModelProto`` of a program without collectives, checked by ``onnx``.

    ``weights`` are arrays for inputs, by name, which become initializers.  Convolutions and pools, which are windows and
    products or sums in a program, are written as such.  `UnsupportedError` for an operator that has no counterpart, for
    symbols, and for an `Executable` or a pipeline.
    """
    if not isinstance(function, Function):
        raise UnsupportedError(f"a Function can be written as ONNX, got {type(function).__name__}")
    if names := ", ".join(sorted(function.symbols)):
        raise UnsupportedError(f"extents must be numbers; give values to {names} with specialize")
    given = dict(weights or {})
    nodes = Nodes(given, OPSET)
    for op, together in _needed(function):
        if together is None:
            _write(nodes, op)
        else:
            together.write(nodes, op.outputs[0].name)
    outputs: list[Value] = []
    for value in function.outputs:  # an output of ONNX has a name of its own
        again = value in outputs or value in function.inputs
        name = nodes.node("Identity", value.name, output=f"out.{len(outputs)}") if again else value.name
        outputs.append(Value(name, value.type))
    inputs = [value for value in function.inputs if value.name not in given]
    return files.written(function.name, nodes.nodes, nodes.tensors, inputs, outputs, nodes.opset)


def _needed(function: Function) -> list[tuple[Op, Windowed | None]]:
    """The ops that are written, each with what it is together with the ops before it, which need not be written then."""
    together = windowed(function)
    needed = {value.name for value in function.outputs}
    found: list[tuple[Op, Windowed | None]] = []
    for op in reversed(function.ops):
        if needed.isdisjoint(value.name for value in op.outputs):
            continue
        whole = together.get(op.outputs[0].name)
        needed.update(whole.inputs if whole else (value.name for value in op.inputs))
        found.append((op, whole))
    return found[::-1]


def _write(nodes: Nodes, op: Op) -> None:
    if op.kind not in OPERATORS:
        raise UnsupportedError("this operator has no counterpart in ONNX here", op.kind, op.region or "")
    OPERATORS[op.kind](nodes, op, [value.name for value in op.inputs], [value.name for value in op.outputs])
