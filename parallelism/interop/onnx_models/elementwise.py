"""What elementwise operators mean."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from parallelism.dtypes import common_dtype, is_floating, is_integer, limits_of
from parallelism.interop.folding import (
    convert,
    emit,
    known,
    of_extents,
    spread,
    traced,
    unspread,
    whole,
)
from parallelism.interop.moving_elements import divided, integer_power, number, rounded_once
from parallelism.interop.onnx_models.files import dtype_of
from parallelism.interop.onnx_models.graph import GraphNode
from parallelism.interop.onnx_models.reading import Reader, meaning, with_optional
from parallelism.ir.core import broadcast


def ew(kind: str, *operands: Any, **attributes: Any) -> Any:
    """An elementwise operator; operands are broadcast as in NumPy.  What is broadcast later stays so."""
    if any(x.dtype == object for x in operands):
        if (found := of_extents(kind, operands)) is not None:
            return found
        if any(x.dtype != object and is_floating(x.dtype) for x in operands):
            raise ValueError(f"{kind} of extents with symbols and floats is not supported")
    shape = broadcast([tuple(x.shape) for x in operands])
    result = emit(kind, *map(unspread, operands), **attributes)
    if tuple(result.shape) == tuple(shape):
        return result
    own = (1,) * (len(shape) - result.ndim) + tuple(result.shape)
    return spread(result if len(own) == result.ndim else emit("reshape", result, shape=own), shape)


_SAME = {
    "Abs": "absolute",
    "Neg": "negative",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Asin": "arcsin",
    "Acos": "arccos",
    "Atan": "arctan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Tanh": "tanh",
    "Asinh": "arcsinh",
    "Acosh": "arccosh",
    "Atanh": "arctanh",
    "Ceil": "ceil",
    "Floor": "floor",
    "Round": "rint",
    "Sign": "sign",
    "Erf": "erf",
    "Reciprocal": "reciprocal",
    "IsNaN": "isnan",
    "Not": "logical_not",
    "BitwiseNot": "invert",
    "Add": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "And": "logical_and",
    "Or": "logical_or",
    "Xor": "logical_xor",
    "Equal": "equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Where": "where",
    "Relu": "maximum",
}


def _plain(kind: str, reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    if node.kind == "Relu":
        return ew("maximum", x[0], number(0, x[0])) if not is_floating(x[0].dtype) else ew("relu", x[0])
    result = ew(kind, *x)
    if x[0].dtype == bool or kind in _BOOLEAN or object in (x[-1].dtype, result.dtype):
        return result
    return convert(result, x[-1].dtype)


_BOOLEAN = (
    "isnan",
    "logical_not",
    "logical_and",
    "logical_or",
    "logical_xor",
    "equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
)
for _theirs, _ours in _SAME.items():
    meaning(_theirs)(partial(_plain, _ours))


@meaning("Identity", "Dropout")
def _identity(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """A dropout of a trained model keeps everything."""
    if node.kind == "Identity":
        detached = node.is_detached and is_floating(x[0].dtype) and known(x[0]) is None
        return emit("stop_gradient", whole(x[0])) if detached else x[0]
    a, ratio, training = with_optional(x, 3)
    if training is not None and _may_be(training) and (ratio is None or _may_be(ratio)):
        raise node.unsupported(
            "a dropout in training is random: export the model in evaluation; in PyTorch F.dropout(x, p, self.training) "
            "drops nothing there"
        )
    return [a, spread(np.ones((1,) * len(a.shape), bool), a.shape)]


def _may_be(x: Any) -> bool:
    """Whether an array may have an element that is true, or not zero."""
    found = known(x)
    return found is None or bool(np.any(found))


@meaning("Div")
def _div(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    if object in (x[0].dtype, x[1].dtype):
        return ew("floor_divide", *x)
    return divided(x[0], x[1], ew)


@meaning("Mod")
def _mod(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """With fmod=0 the result has the sign of the divisor; opset 28 defines that of floats, too."""
    return ew("fmod" if node.get("fmod", 0) else "remainder", *x)


@meaning("Pow")
def _pow(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    base, exponent = x
    if base.dtype == exponent.dtype and is_floating(base.dtype):
        return ew("power", base, exponent)
    if is_integer(base.dtype) and is_integer(exponent.dtype):
        wide = common_dtype(base.dtype, exponent.dtype)
        if is_integer(wide):  # int64 and uint64 have no common dtype of integers
            return convert(integer_power(convert(base, wide), convert(exponent, wide), ew), base.dtype)
    wide = np.dtype(np.float64)
    return convert(ew("power", convert(base, wide), convert(exponent, wide)), base.dtype)


@meaning("BitShift")
def _bit_shift(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return ew("left_shift" if node.get("direction") == "LEFT" else "right_shift", *x)


@meaning("Max", "Min", "Sum", "Mean")
def _folded(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    kind = {"Max": "maximum", "Min": "minimum"}.get(node.kind, "add")
    total = x[0]
    for part in x[1:]:
        total = ew(kind, total, part)
    return ew("divide", total, number(len(x), total)) if node.kind == "Mean" else total


@meaning("IsInf")
def _is_inf(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    up, down = (ew("equal", x[0], number(sign * math.inf, x[0])) for sign in (1, -1))
    both = [
        each for each, wanted in ((up, "detect_positive"), (down, "detect_negative")) if node.get(wanted, 1)
    ]
    if not both:
        return ew("not_equal", ew("isnan", x[0]), ew("isnan", x[0]))
    return ew("logical_or", *both) if len(both) == 2 else both[0]


@meaning("Clip")
def _clip(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    """A number that is equal to a bound has its gradient, as in PyTorch: `maximum` and `minimum` would halve it."""
    result = x[0]
    for bound, kind, is_beyond in zip(x[1:], ("maximum", "minimum"), ("less", "greater"), strict=False):
        if bound is None:
            continue
        if is_floating(result.dtype) and known(result) is None:
            result = ew("where", ew(is_beyond, result, bound), bound, result)
        else:
            result = ew(kind, result, bound)
    return result


@meaning("Cast", "CastLike")
def _cast(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    wanted = dtype_of(node.get("to", 0)) if node.kind == "Cast" else x[1].dtype
    if not isinstance(wanted, str) and wanted.kind == "O":  # extents with symbols
        wanted = np.dtype(np.int64)
    if isinstance(wanted, str):
        raise node.unsupported(f"{wanted} is not supported")
    if x[0].dtype == object:
        return number(x[0].item(), np.empty(0, wanted)) if is_floating(wanted) and x[0].size == 1 else x[0]
    if wanted.name.startswith("float8"):
        return to_float8(node, x[0], wanted)
    if wanted.kind == "b" and x[0].dtype.kind != "b":
        return ew("not_equal", x[0], number(0, x[0]))
    return convert(x[0], wanted)


def to_float8(node: GraphNode, x: Any, wanted: np.dtype[Any]) -> Any:
    """The numbers in 8 bits.  With ``saturate``, which is the rule, those that are too large are the largest."""
    if not node.get("saturate", 1):
        return convert(x, wanted)
    most = float(limits_of(wanted).max)
    wide = convert(x, np.dtype(np.float32)) if not is_floating(x.dtype) or x.dtype.itemsize < 4 else x
    return convert(ew("minimum", ew("maximum", wide, number(-most, wide)), number(most, wide)), wanted)


@meaning("BitCast")
def _bit_cast(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    wanted = dtype_of(node.get("to", 0))
    if isinstance(wanted, str):
        raise node.unsupported(f"{wanted} is not supported")
    if wanted.kind == "b" or x[0].dtype.kind == "b":
        raise node.unsupported("bools have no bits that could be another number's")
    return x[0] if wanted == x[0].dtype else ew("bitcast", x[0], dtype=wanted)


# -- activations -------------------------------------------------------------------------------------------------------


def where_positive(x: Any, positive: Any, other: Any) -> Any:
    """Elements of ``positive`` where ``x`` is above 0."""
    return ew("where", ew("greater", x, number(0, x)), positive, other)


@meaning("Sigmoid")
@rounded_once
def _sigmoid(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return ew("sigmoid", x[0])


@meaning("LeakyRelu", "PRelu")
def _leaky(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    slope = x[1] if node.kind == "PRelu" else number(node.get("alpha", 0.01), x[0])
    return where_positive(x[0], x[0], ew("multiply", x[0], slope))


@meaning("Elu", "Selu", "Celu")
@rounded_once
def _elu(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a = x[0]
    alpha = node.get("alpha", {"Selu": 1.67326319217681884765625}.get(node.kind, 1.0))
    inner = ew("divide", a, number(alpha, a)) if node.kind == "Celu" else a
    low = ew(
        "expm1", where_positive(a, number(0, a), inner)
    )  # 0 where the other is taken: no exponential overflows
    result = where_positive(a, a, ew("multiply", low, number(alpha, a)))
    gamma = node.get("gamma", 1.05070102214813232421875)
    return ew("multiply", result, number(gamma, a)) if node.kind == "Selu" else result


@meaning("HardSigmoid")
@rounded_once
def _hard_sigmoid(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    line = ew(
        "add", ew("multiply", x[0], number(node.get("alpha", 0.2), x[0])), number(node.get("beta", 0.5), x[0])
    )
    return ew("maximum", ew("minimum", line, number(1, x[0])), number(0, x[0]))


@meaning("ThresholdedRelu")
def _thresholded(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return ew("where", ew("greater", x[0], number(node.get("alpha", 1.0), x[0])), x[0], number(0, x[0]))


@meaning("Softplus")
def _softplus(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return ew("logaddexp", x[0], number(0, x[0]))


@meaning("Softsign")
@rounded_once
def _softsign(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    return ew("divide", x[0], ew("add", ew("absolute", x[0]), number(1, x[0])))


@meaning("Shrink")
def _shrink(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    a = x[0]
    bias = node.get("bias", 0.0)
    edge = node.get("lambd", 0.5)
    above, below = (ew(kind, a, number(sign * edge, a)) for kind, sign in (("greater", 1), ("less", -1)))
    low = ew("where", below, ew("add", a, number(bias, a)), number(0, a))
    return ew("where", above, ew("subtract", a, number(bias, a)), low)


@meaning("Gelu")
@rounded_once
def _gelu(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    if node.get("approximate", "none") == "tanh":
        return ew("gelu", x[0])
    part = ew("erf", ew("multiply", x[0], number(math.sqrt(0.5), x[0])))
    return ew("multiply", ew("multiply", x[0], number(0.5, x[0])), ew("add", part, number(1, x[0])))


@meaning("HardSwish")
@rounded_once
def _hard_swish(reader: Reader, node: GraphNode, x: list[Any]) -> Any:
    line = ew("add", ew("multiply", x[0], number(1 / 6, x[0])), number(0.5, x[0]))
    return ew("multiply", x[0], ew("maximum", ew("minimum", line, number(1, x[0])), number(0, x[0])))


def exact(x: Any) -> Any:
    """The array as a value of the program."""
    return traced(x)
