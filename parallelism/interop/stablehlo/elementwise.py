"""What elementwise ops mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from parallelism.dtypes import (
    as_dtype,
    bits_of,
    integer_limits,
    integer_of,
    is_floating,
    is_integer,
    limits_of,
)
from parallelism.interop.folding import (
    Spread,
    convert,
    elementwise as ew,
    emit,
    filled,
    known,
    same_everywhere,
    whole,
)
from parallelism.interop.moving_elements import divided, integer_power, number, rounded_once
from parallelism.interop.stablehlo.module import STOPS_GRADIENT, Node
from parallelism.interop.stablehlo.own_derivatives import is_rectifier
from parallelism.interop.stablehlo.reading import Reader, meaning

_SAME = {
    "add": "add",
    "subtract": "subtract",
    "multiply": "multiply",
    "atan2": "arctan2",
    "negate": "negative",
    "abs": "absolute",
    "sqrt": "sqrt",
    "cbrt": "cbrt",
    "exponential": "exp",
    "exponential_minus_one": "expm1",
    "log": "log",
    "log_plus_one": "log1p",
    "sine": "sin",
    "cosine": "cos",
    "tan": "tan",
    "tanh": "tanh",
    "floor": "floor",
    "ceil": "ceil",
    "sign": "sign",
    "round_nearest_even": "rint",
    "is_finite": "isfinite",
    "shift_left": "left_shift",
    "xor": "bitwise_xor",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "not": "invert",
}
"""Ops that are operators of the IR under another name.  On bools the bitwise operators are the logical ones."""
_CHLO = {
    "acos": "arccos",
    "asin": "arcsin",
    "atan": "arctan",
    "sinh": "sinh",
    "cosh": "cosh",
    "asinh": "arcsinh",
    "acosh": "arccosh",
    "atanh": "arctanh",
    "erf": "erf",
    "tan": "tan",
}
_COMPARISONS = {
    "EQ": "equal",
    "NE": "not_equal",
    "LT": "less",
    "LE": "less_equal",
    "GT": "greater",
    "GE": "greater_equal",
}


def _register() -> None:
    for theirs, ours in {
        **{f"stablehlo.{k}": v for k, v in _SAME.items()},
        **{f"chlo.{k}": v for k, v in _CHLO.items()},
    }.items():
        meaning(theirs)(partial(_plain, ours))


def _plain(kind: str, reader: Reader, node: Node, x: list[Any]) -> Any:
    if kind == "add" and x[0].dtype == bool:
        return ew("logical_or", *x)
    if kind in ("multiply",) and x[0].dtype == bool:
        return ew("logical_and", *x)
    if kind == "invert" and x[0].dtype == bool:
        return ew("logical_not", *x)
    if kind in ("floor", "ceil", "rint", "sign") and not is_floating(x[0].dtype) and kind != "sign":
        return x[0]
    result = ew(kind, *x)
    wanted = node.type().dtype
    if result.dtype == object:  # an extent with symbols
        return result
    return result if result.dtype == wanted else convert(result, wanted)


_register()


@meaning("stablehlo.power")
@rounded_once
def _power(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The power of C.  NumPy takes the square root if 0.5 is the one exponent of all: it differs for -inf and -0."""
    base, exponent = x
    if not is_floating(base.dtype):
        return integer_power(base, exponent)
    result = _plain("power", reader, node, x)
    shared = prod(exponent.array.shape if isinstance(exponent, Spread) else exponent.shape) == 1
    value = same_everywhere(exponent)
    if not shared or not is_floating(base.dtype) or value not in (None, 0.5):
        return result
    infinite = ew("equal", base, number(-math.inf, base))
    root = ew("add", ew("where", infinite, number(math.inf, base), result), number(0, base))
    return (
        root if value is not None else ew("where", ew("equal", exponent, number(0.5, exponent)), root, result)
    )


@meaning("stablehlo.rsqrt")
@rounded_once
def _rsqrt(reader: Reader, node: Node, x: list[Any]) -> Any:
    return ew("reciprocal", ew("sqrt", x[0]))


@meaning("stablehlo.divide")
def _divide(reader: Reader, node: Node, x: list[Any]) -> Any:
    a, b = x
    if not is_integer(a.dtype):
        return ew("divide", a, b)
    lowest, highest = integer_limits(a.dtype)
    return _of_nonzero(divided, a, b, number(-1 if lowest else highest, a))


@meaning("stablehlo.remainder")
def _remainder(reader: Reader, node: Node, x: list[Any]) -> Any:
    a, b = x
    return _of_nonzero(partial(ew, "fmod"), a, b, a) if is_integer(a.dtype) else ew("fmod", a, b)


def _of_nonzero(function: Callable[[Any, Any], Any], a: Any, b: Any, other: Any) -> Any:
    """``function(a, b)`` of integers, and ``other`` where ``b`` is 0: XLA gives an integer there, too."""
    numbers = known(b)
    if numbers is not None and numbers.all():
        return function(a, b)
    zero = ew("equal", b, number(0, b))
    return ew("where", zero, other, function(a, ew("where", zero, number(1, b), b)))


@meaning("stablehlo.compare", "chlo.broadcast_compare")
def _compare(reader: Reader, node: Node, x: list[Any]) -> Any:
    direction = node.word("comparison_direction")
    if direction not in _COMPARISONS:
        raise node.unsupported(f"the comparison {direction} is not supported")
    a, b = x
    if "TOTALORDER" in str(node.attributes.get("compare_type", "")) and is_floating(a.dtype):
        a, b = total_order(a), total_order(b)
    return ew(_COMPARISONS[direction], a, b)


def total_order(x: Any) -> Any:
    """Integers in the total order of floats: -nan < -inf < ... < -0 < 0 < ... < inf < nan.

    The kinds of 8 bits whose one nan has the bits of -0 have it first, as in XLA.
    """
    if x.dtype.name.endswith("fnuz"):
        wide = convert(x, np.dtype(np.float32))
        x = ew("where", ew("isnan", wide), number(-math.inf, wide), wide)  # they have no infinities
    words = integer_of(bits_of(x.dtype), signed=True)
    bits = ew("bitcast", x, dtype=words)
    rest = number(np.iinfo(words).max, bits)
    return ew("where", ew("less", bits, number(0, bits)), ew("bitwise_xor", bits, rest), bits)


@meaning("stablehlo.select")
def _select(reader: Reader, node: Node, x: list[Any]) -> Any:
    return ew("where", *x)


@meaning("stablehlo.maximum")
def _maximum(reader: Reader, node: Node, x: list[Any]) -> Any:
    """Of equal operands each has half of the gradient, as in JAX; but zero has none in ``jax.nn.relu``."""
    rectifies = is_rectifier(reader.callees, node.place) and is_floating(x[0].dtype)
    return (
        ew("relu", x[0]) if rectifies and same_everywhere(x[1]) == 0 else _plain("maximum", reader, node, x)
    )


@meaning("stablehlo.minimum")
def _minimum(reader: Reader, node: Node, x: list[Any]) -> Any:
    rectifies = is_rectifier(reader.callees, node.place) and same_everywhere(x[1]) is not None
    return _at_most(*x) if rectifies else _plain("minimum", reader, node, x)


@meaning("stablehlo.clamp")
def _clamp(reader: Reader, node: Node, x: list[Any]) -> Any:
    """A number that is equal to a bound has no gradient, as in JAX: `maximum` would halve it."""
    least, given, most = x
    if not is_floating(given.dtype):
        return ew("minimum", ew("maximum", given, least), most)
    return _at_most(ew("where", ew("less_equal", given, least), least, given), most)


def _at_most(given: Any, most: Any) -> Any:
    return ew("where", ew("greater_equal", given, most), most, given)


@meaning("stablehlo.convert")
def _convert(reader: Reader, node: Node, x: list[Any]) -> Any:
    wanted = node.type().dtype
    if wanted.kind == "b" and x[0].dtype.kind != "b":
        return ew("not_equal", x[0], number(0, x[0]))
    if is_floating(x[0].dtype) and is_integer(wanted):
        return ew("saturate", x[0], dtype=wanted)
    return convert(x[0], wanted)


@meaning("stablehlo.reduce_precision")
def _reduce_precision(reader: Reader, node: Node, x: list[Any]) -> Any:
    bits = node.attributes["exponent_bits"], node.attributes["mantissa_bits"]
    names = {
        (5, 2): "float8_e5m2",
        (5, 10): "float16",
        (8, 7): "bfloat16",
        (8, 23): "float32",
        (11, 52): "float64",
    }
    if bits not in names:
        raise node.unsupported(
            f"a precision of {bits[0]} bits of exponent and {bits[1]} of mantissa is no dtype"
        )
    return convert(convert(x[0], as_dtype(names[bits])), x[0].dtype)


@meaning("stablehlo.shift_right_logical")
def _shift_logical(reader: Reader, node: Node, x: list[Any]) -> Any:
    words = integer_of(bits_of(x[0].dtype), signed=False)
    return convert(ew("right_shift", convert(x[0], words), convert(x[1], words)), x[0].dtype)


@meaning("stablehlo.shift_right_arithmetic")
def _shift_arithmetic(reader: Reader, node: Node, x: list[Any]) -> Any:
    words = integer_of(bits_of(x[0].dtype), signed=True)
    return convert(ew("right_shift", convert(x[0], words), convert(x[1], words)), x[0].dtype)


@meaning("stablehlo.round_nearest_afz")
def _round_away(reader: Reader, node: Node, x: list[Any]) -> Any:
    a = x[0]
    size = ew("absolute", a)
    down = ew("floor", size)
    half = ew("greater_equal", ew("subtract", size, down), number(0.5, a))
    up = ew("where", half, ew("add", down, number(1, a)), down)
    return ew("multiply", ew("sign", a), up)


@meaning("stablehlo.popcnt")
def _popcount(reader: Reader, node: Node, x: list[Any]) -> Any:
    return population(x[0])


def population(x: Any) -> Any:
    """The number of bits that are 1, by sums of ever wider fields."""
    width = bits_of(x.dtype)
    words = integer_of(width, signed=False)
    bits, step = convert(x, words), 1
    while step < width:
        mask = number(sum(((1 << step) - 1) << at for at in range(0, width, 2 * step)), bits)
        moved = ew("right_shift", bits, number(step, bits))
        bits = ew("add", ew("bitwise_and", bits, mask), ew("bitwise_and", moved, mask))
        step *= 2
    return convert(bits, x.dtype)


@meaning("stablehlo.count_leading_zeros")
def _leading_zeros(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The bits below the first 1 are filled with ones; the others are counted."""
    width = bits_of(x[0].dtype)
    bits, step = convert(x[0], integer_of(width, signed=False)), 1
    while step < width:
        bits = ew("bitwise_or", bits, ew("right_shift", bits, number(step, bits)))
        step *= 2
    return convert(population(ew("invert", bits)), x[0].dtype)


@meaning("chlo.is_inf", "chlo.is_pos_inf", "chlo.is_neg_inf")
def _is_inf(reader: Reader, node: Node, x: list[Any]) -> Any:
    size = x[0]
    if "pos" not in node.kind:
        size = ew("negative" if "neg" in node.kind else "absolute", size)
    return ew("equal", size, number(math.inf, x[0]))


@meaning("chlo.next_after")
def _next_after(reader: Reader, node: Node, x: list[Any]) -> Any:
    """One step in the total order of bits toward the other number."""
    a, b = x
    words = integer_of(bits_of(a.dtype), signed=True)
    bits = ew("bitcast", a, dtype=words)
    one = number(1, bits)
    tiny = number(limits_of(a.dtype).smallest_subnormal, a)
    up = ew("less", a, b)
    away = ew("equal", ew("less", number(0, a), a), up)
    moved = ew("bitcast", ew("where", away, ew("add", bits, one), ew("subtract", bits, one)), dtype=a.dtype)
    from_zero = ew("where", up, tiny, ew("negative", tiny))
    moved = ew("where", ew("equal", a, number(0, a)), from_zero, moved)
    moved = ew("where", ew("equal", a, b), b, moved)
    return ew(
        "where", ew("isnan", a), a, ew("where", ew("isnan", b), b, moved)
    )  # a sum of large numbers is nan


@meaning("stablehlo.constant", "sdy.constant")
def _constant(reader: Reader, node: Node, x: list[Any]) -> Any:
    type = node.type()
    array = node.attributes["value"]
    if not isinstance(array, np.ndarray):
        raise node.unsupported(f"the constant {str(array)[:80]} has no numbers here")
    if array.size and not any(array.strides):
        return filled(array.flat[0], type.shape, type.dtype)
    return np.asarray(array, type.dtype)


@meaning("stablehlo.optimization_barrier", "mhlo.optimization_barrier", "mhlo.copy")
def _barrier(reader: Reader, node: Node, x: list[Any]) -> Any:
    if STOPS_GRADIENT in node.attributes:
        return [emit("stop_gradient", whole(each)) if is_floating(each.dtype) else each for each in x]
    return x
