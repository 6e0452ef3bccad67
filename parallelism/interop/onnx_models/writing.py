"""ONNX models from programs without collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parallelism.interop.errors import UnsupportedError
from parallelism.interop.onnx_models import files
from parallelism.ir.core import Function, Op, Value

OPSET = 20
_SAME = {
    "add": "Add",
    "subtract": "Sub",
    "multiply": "Mul",
    "divide": "Div",
    "power": "Pow",
    "maximum": "Max",
    "minimum": "Min",
    "negative": "Neg",
    "absolute": "Abs",
    "sqrt": "Sqrt",
    "reciprocal": "Reciprocal",
    "exp": "Exp",
    "log": "Log",
    "sin": "Sin",
    "cos": "Cos",
    "tan": "Tan",
    "arcsin": "Asin",
    "arccos": "Acos",
    "arctan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "tanh": "Tanh",
    "arcsinh": "Asinh",
    "arccosh": "Acosh",
    "arctanh": "Atanh",
    "sign": "Sign",
    "floor": "Floor",
    "ceil": "Ceil",
    "rint": "Round",
    "equal": "Equal",
    "less": "Less",
    "less_equal": "LessOrEqual",
    "greater": "Greater",
    "greater_equal": "GreaterOrEqual",
    "logical_and": "And",
    "logical_or": "Or",
    "logical_xor": "Xor",
    "logical_not": "Not",
    "isnan": "IsNaN",
    "where": "Where",
    "bitwise_and": "BitwiseAnd",
    "bitwise_or": "BitwiseOr",
    "bitwise_xor": "BitwiseXor",
    "invert": "BitwiseNot",
    "matmul": "MatMul",
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "erf": "Erf",
    "reshard": "Identity",
}
_REDUCTIONS = {"sum": "ReduceSum", "prod": "ReduceProd", "max": "ReduceMax", "min": "ReduceMin"}


class _Writer:
    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        for name, array in weights.items():
            self.tensor(np.asarray(array), name)

    def tensor(self, array: Any, name: str | None = None) -> str:
        name = name or f"const.{len(self.tensors)}"
        self.tensors.append(files.tensor_proto(np.ascontiguousarray(array) if array.ndim else array, name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.tensor(np.array(numbers, np.int64))

    def node(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        name = output or f"part.{len(self.nodes)}"
        self.nodes.append(files.node_proto(kind, inputs, [name], f"{kind}_{len(self.nodes)}", attributes))
        return name

    def op(self, op: Op) -> None:
        inputs, outputs = ([value.name for value in side] for side in (op.inputs, op.outputs))
        if op.kind in _SAME:
            self.node(_SAME[op.kind], *inputs, output=outputs[0])
        elif op.kind == "split":
            sizes = self.ints(*map(int, op["sizes"]))
            self.nodes.append(
                files.node_proto(
                    "Split", [inputs[0], sizes], outputs, f"Split_{len(self.nodes)}", {"axis": op["axis"]}
                )
            )
        elif op.kind in _OPS:
            _OPS[op.kind](self, op, inputs, outputs[0])
        else:
            raise UnsupportedError("this operator has no counterpart in ONNX here", op.kind, op.region or "")


def _not_equal(w: _Writer, op: Op, x: list[str], y: str) -> None:
    w.node("Not", w.node("Equal", *x), output=y)


def _reduced(w: _Writer, op: Op, x: list[str], y: str) -> None:
    w.node(
        _REDUCTIONS[op.kind],
        x[0],
        w.ints(*op["axes"]),
        output=y,
        keepdims=int(op["keepdims"]),
        noop_with_empty_axes=1,
    )


def _slice(w: _Writer, op: Op, x: list[str], y: str) -> None:
    parts = (w.ints(int(op[name])) for name in ("begin", "end", "axis", "step"))
    w.node("Slice", x[0], *parts, output=y)


def _place(w: _Writer, op: Op, x: list[str], y: str) -> None:
    if op["step"] != 1:
        raise UnsupportedError("zeros between elements have no counterpart in ONNX", op.kind)
    ndim, axis, n = op.inputs[0].type.ndim, op["axis"], int(op.inputs[0].type.shape[op["axis"]])
    ends = [op["begin"], op["extent"] - op["begin"] - n]
    pads = [ends[side] if d == axis else 0 for side in (0, 1) for d in range(ndim)]
    w.node("Pad", x[0], w.ints(*map(int, pads)), output=y)


def _constant(w: _Writer, op: Op, x: list[str], y: str) -> None:
    value, dtype = op["value"], op["dtype"]
    shape = tuple(map(int, op["shape"]))
    w.tensor(
        np.array(value, dtype).reshape(shape) if isinstance(value, tuple) else np.full(shape, value, dtype), y
    )


def _iota(w: _Writer, op: Op, x: list[str], y: str) -> None:
    shape, dim = tuple(map(int, op["shape"])), op["dim"]
    numbers = np.arange(op["starts"][dim], op["starts"][dim] + shape[dim]).astype(op["dtype"])
    w.tensor(np.broadcast_to(numbers.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape), y)


_OPS: dict[str, Callable[[_Writer, Op, list[str], str], Any]] = {
    "not_equal": _not_equal,
    **dict.fromkeys(_REDUCTIONS, _reduced),
    "slice": _slice,
    "place": _place,
    "constant": _constant,
    "iota": _iota,
    "square": lambda w, op, x, y: w.node("Mul", x[0], x[0], output=y),
    "einsum": lambda w, op, x, y: w.node("Einsum", *x, output=y, equation=op["equation"]),
    **dict.fromkeys(
        ("convert", "saturate"),
        lambda w, op, x, y: w.node(  # ONNX leaves it open what does not fit
            "Cast", x[0], output=y, to=files.code_of(op["dtype"])
        ),
    ),
    "reshape": lambda w, op, x, y: w.node(
        "Reshape", x[0], w.ints(*map(int, op["shape"])), output=y, allowzero=1
    ),
    "transpose": lambda w, op, x, y: w.node("Transpose", x[0], output=y, perm=op["permutation"]),
    "broadcast_to": lambda w, op, x, y: w.node("Expand", x[0], w.ints(*map(int, op["shape"])), output=y),
    "concatenate": lambda w, op, x, y: w.node("Concat", *x, output=y, axis=op["axis"]),
    "take": lambda w, op, x, y: w.node("Gather", *x, output=y, axis=op["axis"]),
    "take_along": lambda w, op, x, y: w.node("GatherElements", *x, output=y, axis=op["axis"]),
    "softmax": lambda w, op, x, y: w.node("Softmax", x[0], output=y, axis=op["axis"]),
    "log_softmax": lambda w, op, x, y: w.node("LogSoftmax", x[0], output=y, axis=op["axis"]),
    "gelu": lambda w, op, x, y: w.node("Gelu", x[0], output=y, approximate="tanh"),
    "silu": lambda w, op, x, y: w.node("Mul", x[0], w.node("Sigmoid", x[0]), output=y),
    "argmax": lambda w, op, x, y: w.node("ArgMax", x[0], output=y, axis=op["axis"], keepdims=0),
    "argmin": lambda w, op, x, y: w.node("ArgMin", x[0], output=y, axis=op["axis"], keepdims=0),
    "cumsum": lambda w, op, x, y: w.node("CumSum", x[0], w.tensor(np.asarray(op["axis"])), output=y),
}


def to_onnx(function: Function, weights: Mapping[str, Any] | None = None) -> Any:
    """The ``onnx.ModelProto`` of a program without collectives, checked by ``onnx``.

    ``weights`` are arrays for inputs, by name, which become initializers.  `UnsupportedError` for an operator that has
    no counterpart, for symbols, and for an `Executable` or a pipeline.
    """
    if not isinstance(function, Function):
        raise UnsupportedError(f"a Function can be written as ONNX, got {type(function).__name__}")
    if names := ", ".join(sorted(function.symbols)):
        raise UnsupportedError(f"extents must be numbers; give values to {names} with specialize")
    given = dict(weights or {})
    writer = _Writer(given)
    for op in function.ops:
        writer.op(op)
    outputs: list[Value] = []
    for value in function.outputs:  # an output of ONNX has a name of its own
        again = value in outputs or value in function.inputs
        name = writer.node("Identity", value.name, output=f"out.{len(outputs)}") if again else value.name
        outputs.append(Value(name, value.type))
    inputs = [value for value in function.inputs if value.name not in given]
    return files.written(function.name, writer.nodes, writer.tensors, inputs, outputs, OPSET)
