"""What elementwise ops mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from parallelism.dtypes import as_dtype, bits_of, integer_limits, integer_of, is_floating, is_integer, limits_of
from parallelism.interop.arrays import divided, integer_power, number
from parallelism.interop.folding import Spread, convert, elementwise as ew, filled, known, same_everywhere
from parallelism.interop.stablehlo.module import Node
from parallelism.interop.stablehlo.reading import Meaning, Reader, meaning

_SAME = {
    "add": "add", "subtract": "subtract", "multiply": "multiply", "maximum": "maximum",
    "minimum": "minimum", "atan2": "arctan2", "negate": "negative", "abs": "absolute", "sqrt": "sqrt",
    "cbrt": "cbrt", "exponential": "exp", "exponential_minus_one": "expm1", "log": "log", "log_plus_one": "log1p",
    "sine": "sin", "cosine": "cos", "tan": "tan", "tanh": "tanh", "floor": "floor", "ceil": "ceil", "sign": "sign",
    "round_nearest_even": "rint", "is_finite": "isfinite", "logistic": "sigmoid", "shift_left": "left_shift",
    "xor": "bitwise_xor", "and": "bitwise_and", "or": "bitwise_or", "not": "invert",
}
"""Ops that are operators of the IR under another name.  On bools the bitwise operators are the logical ones."""
_CHLO = {
    "acos": "arccos", "asin": "arcsin", "atan": "arctan", "sinh": "sinh", "cosh": "cosh", "asinh": "arcsinh",
    "acosh": "arccosh", "atanh": "arctanh", "erf": "erf", "tan": "tan",
}
_COMPARISONS = {"EQ": "equal", "NE": "not_equal", "LT": "less", "LE": "less_equal", "GT": "greater",
                "GE": "greater_equal"}


def _register() -> None:
    for theirs, ours in {**{f"stablehlo.{k}": v for k, v in _SAME.items()},
                         **{f"chlo.{k}": v for k, v in _CHLO.items()}}.items():
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
    return result if result.dtype == wanted else convert(result, wanted)


_register()


def _in_float32(means: Meaning) -> Meaning:
    """The meaning of an op that takes several steps: numbers of 16 bits or fewer are rounded once, at the end."""
    def computed(reader: Reader, node: Node, x: list[Any]) -> Any:
        dtype = x[0].dtype
        if not is_floating(dtype) or dtype.itemsize > 2:
            return means(reader, node, x)
        return convert(means(reader, node, [convert(each, np.dtype(np.float32)) for each in x]), dtype)

    return computed


@meaning("stablehlo.power")
@_in_float32
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
    return root if value is not None else ew("where", ew("equal", exponent, number(0.5, exponent)), root, result)


@meaning("stablehlo.rsqrt")
@_in_float32
def _rsqrt(reader: Reader, node: Node, x: list[Any]) -> Any:
    return ew("reciprocal", ew("sqrt", x[0]))


@meaning("stablehlo.divide")
def _divide(reader: Reader, node: Node, x: list[Any]) -> Any:
    a, b = x
    return _of_nonzero(divided, a, b, number(-1 if integer_limits(a.dtype)[0] else integer_limits(a.dtype)[1], a)) \
        if is_integer(a.dtype) else ew("divide", a, b)


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
    direction = _word(node.attributes["comparison_direction"])
    if direction not in _COMPARISONS:
        raise node.unsupported(f"the comparison {direction} is not supported")
    a, b = x
    if "TOTALORDER" in str(node.attributes.get("compare_type", "")) and is_floating(a.dtype):
        a, b = total_order(a), total_order(b)
    return ew(_COMPARISONS[direction], a, b)


def total_order(x: Any) -> Any:
    """Integers in the total order of floats: -nan < -inf < ... < -0 < 0 < ... < inf < nan."""
    words = integer_of(bits_of(x.dtype), signed=True)
    bits = ew("bitcast", x, dtype=words)
    rest = number(np.iinfo(words).max, bits)
    return ew("where", ew("less", bits, number(0, bits)), ew("bitwise_xor", bits, rest), bits)


def _word(attribute: Any) -> str:
    """``LT`` of ``#stablehlo<comparison_direction LT>``."""
    return str(attribute).rstrip(">").split()[-1].split("<")[-1]


@meaning("stablehlo.select")
def _select(reader: Reader, node: Node, x: list[Any]) -> Any:
    return ew("where", *x)


@meaning("stablehlo.clamp")
def _clamp(reader: Reader, node: Node, x: list[Any]) -> Any:
    least, given, most = x
    return ew("minimum", ew("maximum", given, least), most)


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
    names = {(5, 2): "float8_e5m2", (5, 10): "float16", (8, 7): "bfloat16", (8, 23): "float32", (11, 52): "float64"}
    if bits not in names:
        raise node.unsupported(f"a precision of {bits[0]} bits of exponent and {bits[1]} of mantissa is no dtype")
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


# -- special functions -------------------------------------------------------------------------------------------------


def _polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """The polynomial with these coefficients, the highest power first."""
    total: Any = number(coefficients[0], x)
    for coefficient in coefficients[1:]:
        total = ew("add", ew("multiply", total, x), number(coefficient, x))
    return total


@meaning("chlo.erfc")
@_in_float32
def _erfc(reader: Reader, node: Node, x: list[Any]) -> Any:
    return ew("subtract", number(1, x[0]), ew("erf", x[0]))


@meaning("chlo.square")
def _square(reader: Reader, node: Node, x: list[Any]) -> Any:
    return ew("multiply", x[0], x[0])


_NEAR = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
         0.246640727, 1.50140941)
_FAR = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
        1.00167406, 2.83297682)


@meaning("chlo.erf_inv")
@_in_float32
def _erf_inv(reader: Reader, node: Node, x: list[Any]) -> Any:
    """M. Giles, *Approximating the erfinv function*, 2010, in single precision; two Newton steps for doubles."""
    a = x[0]
    w = ew("negative", ew("log1p", ew("negative", ew("multiply", a, a))))
    near = _polynomial(ew("subtract", w, number(2.5, a)), _NEAR)
    far = _polynomial(ew("subtract", ew("sqrt", w), number(3, a)), _FAR)
    y = ew("multiply", ew("where", ew("less", w, number(5, a)), near, far), a)
    edge = ew("equal", ew("absolute", a), number(1, a))
    if a.dtype == np.float64:
        for _ in range(2):
            slope = ew("multiply", ew("exp", ew("negative", ew("multiply", y, y))), number(2 / math.sqrt(math.pi), a))
            y = ew("subtract", y, ew("divide", ew("subtract", ew("erf", y), a), slope))
    return ew("where", edge, ew("multiply", a, number(math.inf, a)), y)


_LANCZOS = (0.99999999999980993227684700473478, 676.520368121885098567009190444019, -1259.13921672240287047156078755283,
            771.3234287776530788486528258894, -176.61502916214059906584551354, 12.507343278686904814458936853,
            -0.13857109526572011689554707, 9.984369578019570859563e-6, 1.50563273514931155834e-7)


def _lanczos(x: Any) -> tuple[Any, Any, Any]:
    """The series of Lanczos at ``x`` - 1, with g = 7 and 9 terms: its sum, the sum's derivative, and t = x + 6.5."""
    z = ew("subtract", x, number(1, x))
    total, slope = number(_LANCZOS[0], x), number(0, x)
    for i, coefficient in enumerate(_LANCZOS[1:], 1):
        part = ew("reciprocal", ew("add", z, number(i, x)))
        term = ew("multiply", part, number(coefficient, x))
        total, slope = ew("add", total, term), ew("subtract", slope, ew("multiply", term, part))
    return total, slope, ew("add", z, number(7.5, x))


@meaning("chlo.lgamma")
@_in_float32
def _lgamma(reader: Reader, node: Node, x: list[Any]) -> Any:
    """By reflection below 1/2: lgamma(x) = log(pi / |sin(pi x)|) - lgamma(1 - x)."""
    a = x[0]
    small = ew("less", a, number(0.5, a))
    z = ew("where", small, ew("subtract", number(1, a), a), a)
    total, _, t = _lanczos(z)
    half = ew("subtract", z, number(0.5, a))
    direct = ew("add", ew("subtract", ew("multiply", half, ew("log", t)), t),
                ew("add", ew("log", total), number(0.5 * math.log(2 * math.pi), a)))
    sine = ew("absolute", ew("sin", ew("multiply", ew("subtract", a, ew("floor", a)), number(math.pi, a))))
    return ew("where", small, ew("subtract", ew("log", ew("divide", number(math.pi, a), sine)), direct), direct)


@meaning("chlo.digamma")
@_in_float32
def _digamma(reader: Reader, node: Node, x: list[Any]) -> Any:
    a = x[0]
    small = ew("less", a, number(0.5, a))
    z = ew("where", small, ew("subtract", number(1, a), a), a)
    total, slope, t = _lanczos(z)
    direct = ew("subtract", ew("add", ew("log", t), ew("divide", slope, total)), ew("divide", number(7, a), t))
    angle = ew("multiply", ew("subtract", a, ew("floor", a)), number(math.pi, a))
    turned = ew("subtract", direct, ew("divide", number(math.pi, a), ew("tan", angle)))
    return ew("where", small, turned, direct)


@meaning("chlo.is_inf", "chlo.is_pos_inf", "chlo.is_neg_inf")
def _is_inf(reader: Reader, node: Node, x: list[Any]) -> Any:
    size = x[0] if "pos" in node.kind else ew("negative", x[0]) if "neg" in node.kind else ew("absolute", x[0])
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
    return ew("where", ew("equal", a, b), b, ew("where", ew("isnan", ew("add", a, b)), ew("add", a, b), moved))


@meaning("stablehlo.constant")
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
    return x
