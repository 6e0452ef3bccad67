"""Elementwise operators that ONNX does not have, each as a few that it has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from parallelism.interop.written.onnx_nodes import Nodes
from parallelism.ir.core import Op

Write = Callable[[Nodes, Op, list[str], list[str]], Any]
"""Writes an op, given the names of its inputs and of its results."""

_BITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def _is_integer(op: Op) -> bool:
    return op.inputs[0].type.dtype.kind in "iu"


def _isfinite(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    w.node("Not", w.node("Or", w.node("IsInf", x[0]), w.node("IsNaN", x[0])), output=y[0])


def _trunc(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    below = w.node("Less", x[0], w.number(0, op.inputs[0].type.dtype))
    w.node("Where", below, w.node("Ceil", x[0]), w.node("Floor", x[0]), output=y[0])


def _bits(name: str, logical: str) -> Write:
    """An operation on bits, which is a logical one on truth values."""

    def write(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
        w.node(logical if op.inputs[0].type.dtype.kind == "b" else name, *x, output=y[0])

    return write


# -- quotients ---------------------------------------------------------------------------------------------------------


def _remainder(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """That of a quotient rounded down: it has the sign of the divisor, which ``Mod`` gives for integers alone."""
    if _is_integer(op):
        w.node("Mod", *x, output=y[0])
        return
    zero = w.number(0, op.inputs[0].type.dtype)
    rest = w.node("Mod", *x, fmod=1)
    turned = w.node("Xor", w.node("Less", rest, zero), w.node("Less", x[1], zero))
    other = w.node("And", turned, w.node("Not", w.node("Equal", rest, zero)))
    w.node("Where", other, w.node("Add", rest, x[1]), rest, output=y[0])


def _floor_divide(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """The dividend without the remainder is a multiple of the divisor, so that nothing is rounded down twice."""
    rest = f"{y[0]}.remainder"
    _remainder(w, op, x, [rest])
    quotient = w.node("Div", w.node("Sub", x[0], rest), x[1])
    if _is_integer(op):
        w.node("Identity", quotient, output=y[0])
        return
    by_zero = w.node("Equal", x[1], w.number(0, op.inputs[0].type.dtype))
    w.node("Where", by_zero, w.node("Div", *x), w.node("Round", quotient), output=y[0])


def _shift(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """``BitShift`` takes numbers without signs.  Of a negative number shifted right, the bits that come in are ones."""
    dtype = op.inputs[0].type.dtype
    direction = "LEFT" if op.kind == "left_shift" else "RIGHT"
    if dtype.kind == "u":
        w.node("BitShift", *x, output=y[0], direction=direction)
        return
    plain = np.dtype(_BITS[dtype.itemsize])
    negative = w.node("Less", x[0], w.number(0, dtype))
    turns = direction == "RIGHT"
    given = w.node("Where", negative, w.node("BitwiseNot", x[0]), x[0]) if turns else x[0]
    moved = w.node("BitShift", w.cast(given, plain), w.cast(x[1], plain), direction=direction)
    back = w.cast(moved, dtype, None if turns else y[0])
    if turns:
        w.node("Where", negative, w.node("BitwiseNot", back), back, output=y[0])


# -- functions ---------------------------------------------------------------------------------------------------------


def _expm1(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """exp(x) - 1 = 2 exp(x / 2) sinh(x / 2), which loses no digits near 0."""
    dtype = op.inputs[0].type.dtype
    half = w.node("Mul", x[0], w.number(0.5, dtype))
    product = w.node("Mul", w.node("Exp", half), w.node("Sinh", half))
    is_below = w.node("Less", x[0], w.number(-1, dtype))  # there the product could overflow
    plain = w.node("Sub", w.node("Exp", x[0]), w.number(1, dtype))
    twice = w.node("Mul", product, w.number(2, dtype))
    w.node("Where", is_below, plain, twice, output=y[0])


def _log1p(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """With u = 1 + x rounded: log(u) x / (u - 1) (Kahan; Goldberg, What every computer scientist should know, th. 4)."""
    one = w.number(1, op.inputs[0].type.dtype)
    u = w.node("Add", x[0], one)
    itself = w.node("Or", w.node("Equal", u, one), w.node("IsInf", u))
    made = w.node("Mul", w.node("Log", u), w.node("Div", x[0], w.node("Sub", u, one)))
    w.node("Where", itself, x[0], made, output=y[0])


def _logaddexp(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """The larger one plus log1p(exp(-|x - y|)).  Two equal ones, as two infinities, have no difference to take."""
    dtype = op.inputs[0].type.dtype
    distance = w.node("Abs", w.node("Sub", *x))
    share = w.node("Exp", w.node("Neg", distance))
    more = f"{y[0]}.more"
    _log1p(w, op, [share], [more])
    is_equal = w.node("Equal", *x)
    of_equal = w.number(math.log(2), dtype)
    larger = w.node("Max", *x)
    w.node("Add", larger, w.node("Where", is_equal, of_equal, more), output=y[0])


def _hypot(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """The larger side times the root of 1 + (smaller / larger)^2, which does not overflow."""
    dtype = op.inputs[0].type.dtype
    sides = [w.node("Abs", each) for each in x]
    larger, smaller = w.node("Max", *sides), w.node("Min", *sides)
    is_zero = w.node("Equal", larger, w.number(0, dtype))
    is_itself = w.node("Or", is_zero, w.node("IsInf", larger))
    share = w.node("Div", smaller, larger)
    square = w.node("Mul", share, share)
    root = w.node("Sqrt", w.node("Add", square, w.number(1, dtype)))
    w.node("Where", is_itself, larger, w.node("Mul", larger, root), output=y[0])


def _arctan2(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    """The arc tangent of the quotient, turned by pi where ``x`` is negative; a zero has a sign, which 1 / zero shows."""
    dtype = op.inputs[0].type.dtype
    zero, one = w.number(0, dtype), w.number(1, dtype)

    def is_negative(value: str) -> str:
        below = w.node("Less", value, zero)
        return w.node("Or", below, w.node("Less", w.node("Div", one, value), zero))

    def sign_of(value: str) -> str:
        return w.node("Where", is_negative(value), w.number(-1, dtype), one)

    up, right = x
    up_sign, right_sign = sign_of(up), sign_of(right)
    # Two infinities, and two zeros, have no quotient: their signs stand for them.
    infinite = w.node("And", w.node("IsInf", up), w.node("IsInf", right))
    zeros = w.node("And", w.node("Equal", up, zero), w.node("Equal", right, zero))
    over = w.node("Where", infinite, up_sign, up)
    under = w.node("Where", w.node("Or", zeros, infinite), right_sign, right)
    is_left = is_negative(right)
    half_turn = w.node("Mul", up_sign, w.number(math.pi, dtype))
    turn = w.node("Where", is_left, half_turn, zero)
    w.node("Add", w.node("Atan", w.node("Div", over, under)), turn, output=y[0])


def _times(kind: str, factor: float) -> Write:
    """A function of ONNX times a number."""

    def write(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
        w.node("Mul", w.node(kind, x[0]), w.number(factor, op.inputs[0].type.dtype), output=y[0])

    return write


def _cbrt(w: Nodes, op: Op, x: list[str], y: list[str]) -> None:
    third = w.number(1 / 3, op.inputs[0].type.dtype)
    w.node("Mul", w.node("Sign", x[0]), w.node("Pow", w.node("Abs", x[0]), third), output=y[0])


ARITHMETIC: dict[str, Write] = {
    "isfinite": _isfinite,
    "trunc": _trunc,
    "bitwise_and": _bits("BitwiseAnd", "And"),
    "bitwise_or": _bits("BitwiseOr", "Or"),
    "bitwise_xor": _bits("BitwiseXor", "Xor"),
    "invert": _bits("BitwiseNot", "Not"),
    "remainder": _remainder,
    "fmod": lambda w, op, x, y: w.node("Mod", *x, output=y[0], fmod=1),
    "floor_divide": _floor_divide,
    "left_shift": _shift,
    "right_shift": _shift,
    "expm1": _expm1,
    "log1p": _log1p,
    "logaddexp": _logaddexp,
    "hypot": _hypot,
    "arctan2": _arctan2,
    "log2": _times("Log", 1 / math.log(2)),
    "log10": _times("Log", 1 / math.log(10)),
    "exp2": lambda w, op, x, y: w.node("Pow", w.number(2, op.inputs[0].type.dtype), x[0], output=y[0]),
    "cbrt": _cbrt,
}
"""How the ops of these kinds are written."""
