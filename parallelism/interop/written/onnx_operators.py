"""What the operators of programs are in ONNX."""

from __future__ import annotations

import numpy as np

from parallelism.arrays import vector_shape
from parallelism.interop.onnx_models import files
from parallelism.interop.written.onnx_arithmetic import ARITHMETIC, Write
from parallelism.interop.written.onnx_nodes import Nodes
from parallelism.ir.core import Op

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
    "matmul": "MatMul",
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "erf": "Erf",
    "reshard": "Identity",
    "stop_gradient": "Identity",
    "copied": "Identity",
    "accumulate": "Add",
}
_SCATTERED = {"sum": "add", "prod": "mul", "set": "none"}
_REDUCTIONS = {"sum": "ReduceSum", "prod": "ReduceProd", "max": "ReduceMax", "min": "ReduceMin"}


def _as(name: str) -> Write:
    """One node with the same inputs."""
    return lambda w, op, x, y: w.node(name, *x, output=y[0])


def _not_equal(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    w.node("Not", w.node("Equal", *x), output=y[0])


def _reduced(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    w.node(
        _REDUCTIONS[op.kind],
        x[0],
        w.ints(*op["axes"]),
        output=y[0],
        keepdims=int(op["keepdims"]),
        noop_with_empty_axes=1,
    )


def _slice(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    parts = (w.ints(int(op[name])) for name in ("begin", "end", "axis", "step"))
    w.node("Slice", x[0], *parts, output=y[0])


def _place(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """Zeros around the elements, and between them: those are behind each one in a dim of its own, cut off at the end."""
    shape = [*map(int, op.inputs[0].type.shape)]
    axis = op["axis"]
    step = op["step"]
    n, name = shape[axis], x[0]
    if step != 1 and n > 1:
        with_dim = w.ints(*shape[: axis + 1], 1, *shape[axis + 1 :])
        apart = w.node("Reshape", name, with_dim, allowzero=1)
        apart = w.node("Pad", apart, w.ints(*_at(len(shape) + 1, axis + 1, 0, step - 1)))
        shape[axis] = n * step
        wide = w.node("Reshape", apart, w.ints(*shape), allowzero=1)
        n = (n - 1) * step + 1
        name = w.node("Slice", wide, w.ints(0), w.ints(n), w.ints(axis))
    begin, extent = int(op["begin"]), int(op["extent"])
    w.node("Pad", name, w.ints(*_at(len(shape), axis, begin, extent - begin - n)), output=y[0])


def _at(ndim: int, axis: int, low: int, high: int) -> list[int]:
    """The pads of one dim, as ONNX lists them: first the low ones of all dims, then the high ones."""
    pads = [0] * 2 * ndim
    pads[axis], pads[ndim + axis] = low, high
    return pads


def _windows(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """The elements of each window are gathered, and their dim goes to the end."""
    axis = op["axis"]
    size = op["size"]
    step = op["step"]
    ndim = op.inputs[0].type.ndim
    count = int(op.outputs[0].type.shape[axis])
    places = np.arange(count)[:, None] * step + np.arange(size)
    gathered = w.node("Gather", x[0], w.tensor(places.astype(np.int64)), axis=axis)
    order = [d for d in range(ndim + 1) if d != axis + 1]
    w.node("Transpose", gathered, output=y[0], perm=[*order, axis + 1])


def _flip(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    parts = (w.ints(each) for each in (-1, np.iinfo(np.int64).min, op["axis"], -1))
    w.node("Slice", x[0], *parts, output=y[0])


def _sorted(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """``TopK`` of all elements; of equal ones it takes that with the lower index first."""
    count = w.ints(int(op.inputs[0].type.shape[op["axis"]]))
    places = f"{y[0]}.other"
    outputs = [y[0], places] if op.kind == "sort" else [places, y[0]]
    w.several("TopK", [x[0], count], outputs, axis=op["axis"], largest=0, sorted=1)


def _split(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    w.several("Split", [x[0], w.ints(*map(int, op["sizes"]))], y, axis=op["axis"])


def _scatter(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """The dim comes first.  An index out of range is that of a row which is put behind it, and taken away again."""
    data, indices, updates = x
    of_data, of_indices = (value.type for value in op.inputs[:2])
    shape, axis = [*map(int, of_data.shape)], op["axis"]
    count = shape[axis]
    others = [d for d in range(len(shape)) if d != axis]
    order = [axis, *others]
    table, updates = (w.node("Transpose", each, perm=order) for each in (data, updates))
    row_behind = w.tensor(np.zeros((1, *(shape[d] for d in others)), of_data.dtype))
    table = w.node("Concat", table, row_behind, axis=0)
    behind = w.number(count, of_indices.dtype)
    is_below = w.node("Less", indices, behind)
    is_inside = w.node("And", is_below, w.node("GreaterOrEqual", indices, w.number(0, of_indices.dtype)))
    places = w.cast(w.node("Where", is_inside, indices, behind), np.dtype(np.int64))
    places = w.node("Unsqueeze", places, w.ints(1))
    reduction = _SCATTERED.get(op["op"], op["op"])
    made = w.node("ScatterND", table, places, updates, reduction=reduction)
    kept = w.node("Slice", made, w.ints(0), w.ints(count), w.ints(0))
    w.node("Transpose", kept, output=y[0], perm=[order.index(d) for d in range(len(shape))])


def _one_hot(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    places = w.tensor(np.arange(int(op["extent"]), dtype=op.inputs[0].type.dtype))
    column = w.node("Unsqueeze", x[0], w.ints(op.inputs[0].type.ndim))
    w.cast(w.node("Equal", column, places), op["dtype"], y[0])


def _truths(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """Whether any or all are true: the largest or smallest of 0 and 1."""
    kind = "ReduceMax" if op.kind == "any" else "ReduceMin"
    numbers = w.cast(w.cast(x[0], np.dtype(bool)), np.dtype(np.int32))
    found = w.node(kind, numbers, w.ints(*op["axes"]), keepdims=int(op["keepdims"]), noop_with_empty_axes=1)
    w.cast(found, np.dtype(bool), y[0])


def _rms_norm(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    square = w.node("ReduceMean", w.node("Mul", x[0], x[0]), w.ints(-1))
    root = w.node("Sqrt", w.node("Add", square, w.number(op["epsilon"], op.inputs[0].type.dtype)))
    w.node("Mul", w.node("Div", x[0], root), x[1], output=y[0])


def _silu(w: Nodes, x: str, output: str | None = None) -> str:
    return w.node("Mul", x, w.node("Sigmoid", x), output=output)


def _weighted_swiglu(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    activated = w.node("Mul", _silu(w, x[0]), x[1])
    w.node("Mul", activated, w.node("Unsqueeze", x[2], w.ints(-1)), output=y[0])


def _convert(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """A float of 8 bits that is too large is the largest one only of ``saturate``; of other dtypes ONNX leaves it open."""
    narrow = op["dtype"].name.startswith("float8") and op.kind == "convert"
    w.node("Cast", x[0], output=y[0], to=files.code_of(op["dtype"]), **({"saturate": 0} if narrow else {}))


def _bitcast(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    w.needs(26)
    w.node("BitCast", x[0], output=y[0], to=files.code_of(op["dtype"]))


def _constant(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    value, dtype = op["value"], op["dtype"]
    shape = tuple(map(int, op["shape"]))
    w.tensor(
        np.array(value, dtype).reshape(shape) if isinstance(value, tuple) else np.full(shape, value, dtype),
        y[0],
    )


def _iota(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    shape, dim = tuple(map(int, op["shape"])), op["dim"]
    begin = int(op["starts"][dim])
    numbers = np.arange(begin, begin + shape[dim]).astype(op["dtype"])
    w.tensor(np.broadcast_to(numbers.reshape(vector_shape(len(shape), dim)), shape), y[0])


OPERATORS: dict[str, Write] = {
    **{kind: _as(name) for kind, name in _SAME.items()},
    **ARITHMETIC,
    "not_equal": _not_equal,
    **dict.fromkeys(_REDUCTIONS, _reduced),
    "slice": _slice,
    "place": _place,
    "constant": _constant,
    "iota": _iota,
    "square": lambda w, op, x, y: w.node("Mul", x[0], x[0], output=y[0]),
    "einsum": lambda w, op, x, y: w.node("Einsum", *x, output=y[0], equation=op["equation"]),
    **dict.fromkeys(("convert", "saturate"), _convert),
    "reshape": lambda w, op, x, y: w.node(
        "Reshape", x[0], w.ints(*map(int, op["shape"])), output=y[0], allowzero=1
    ),
    "transpose": lambda w, op, x, y: w.node("Transpose", x[0], output=y[0], perm=op["permutation"]),
    "broadcast_to": lambda w, op, x, y: w.node("Expand", x[0], w.ints(*map(int, op["shape"])), output=y[0]),
    "concatenate": lambda w, op, x, y: w.node("Concat", *x, output=y[0], axis=op["axis"]),
    "take": lambda w, op, x, y: w.node("Gather", *x, output=y[0], axis=op["axis"]),
    "take_along": lambda w, op, x, y: w.node("GatherElements", *x, output=y[0], axis=op["axis"]),
    "softmax": lambda w, op, x, y: w.node("Softmax", x[0], output=y[0], axis=op["axis"]),
    "log_softmax": lambda w, op, x, y: w.node("LogSoftmax", x[0], output=y[0], axis=op["axis"]),
    "gelu": lambda w, op, x, y: w.node("Gelu", x[0], output=y[0], approximate="tanh"),
    "silu": lambda w, op, x, y: _silu(w, x[0], y[0]),
    "argmax": lambda w, op, x, y: w.node("ArgMax", x[0], output=y[0], axis=op["axis"], keepdims=0),
    "argmin": lambda w, op, x, y: w.node("ArgMin", x[0], output=y[0], axis=op["axis"], keepdims=0),
    "cumsum": lambda w, op, x, y: w.node("CumSum", x[0], w.tensor(np.asarray(op["axis"])), output=y[0]),
    "windows": _windows,
    "flip": _flip,
    **dict.fromkeys(("sort", "argsort"), _sorted),
    "split": _split,
    "scatter": _scatter,
    "one_hot": _one_hot,
    **dict.fromkeys(("any", "all"), _truths),
    "rms_norm": _rms_norm,
    "layer_norm": lambda w, op, x, y: w.node("LayerNormalization", *x, output=y[0], epsilon=op["epsilon"]),
    "swiglu": lambda w, op, x, y: w.node("Mul", _silu(w, x[0]), x[1], output=y[0]),
    "weighted_swiglu": _weighted_swiglu,
    "gelu_exact": lambda w, op, x, y: w.node("Gelu", x[0], output=y[0]),
    "bitcast": _bitcast,
}
"""How the ops of each kind are written."""
