"""What ops make of slots that hold no row: these are zeros, and a division by them has no number.

No token reads such a slot.  But the gradient of a weight is a sum over all slots, in which zero times infinity is no number.
So an operand that an op must not have as zero is another number in these slots.
"""

from __future__ import annotations

from parallelism.interop.expert_rows.dealt_program import SLOTS, DealtProgram, Rows
from parallelism.ir.core import Op, Value

FILLED: dict[str, tuple[tuple[int, ...], float]] = {
    **dict.fromkeys(("divide", "floor_divide", "remainder", "fmod"), ((1,), 1)),
    **dict.fromkeys(
        ("log", "log2", "log10", "log1p", "sqrt", "cbrt", "reciprocal", "power", "rsqrt"), ((0,), 1)
    ),
    **dict.fromkeys(("hypot", "arctan2"), ((0, 1), 1)),
    **dict.fromkeys(("arcsin", "arccos", "arctanh"), ((0,), 0)),
    "arccosh": ((0,), 2),
}
"""The operands of ops that have no number, or no derivative, for all values; and what is a good one."""
_KEEPING = "reshape", "transpose", "broadcast_to", "slice", "convert", "stop_gradient", "sum", "max", "min"
"""Ops whose result is positive if the operand is."""
_MOST = 40
"""So many ops before an operand are looked at."""


def filled(at: DealtProgram, op: Op, i: int, x: Value, rows: Rows) -> Value:
    """The operand number ``i`` of an op on ``rows``, with a good number in each slot that holds no row."""
    operands, number = FILLED.get(op.kind, ((), 0))
    if i not in operands or x.type.shape[:SLOTS] != rows.of.shape or _is_positive(at, x, _MOST):
        return x
    held = at.emit("greater_equal", rows.of.experts, at.constant(0, rows.of.experts))
    is_held = at.emit("dispatch_gates", held, rows.of.experts, shape=rows.of.shape, **rows.of.how)
    wide = at.reshaped(is_held, (*rows.of.shape, *[1] * (x.type.ndim - SLOTS)))
    return at.emit("where", wide, x, at.constant(number, x))


def _is_positive(at: DealtProgram, x: Value, most: int) -> bool:
    """Whether all numbers are greater than zero in any slot, as far as so many ops before them tell."""
    op = at.builder.maker(x)
    if op is None or most < 0:
        return False
    if op.kind in ("exp", "constant"):
        return op.kind == "exp" or (isinstance(op["value"], int | float) and op["value"] > 0)
    if op.kind in _KEEPING:
        return _is_positive(at, op.inputs[0], most - 1)
    if op.kind in ("add", "maximum"):
        a, b = op.inputs
        for one, other in ((a, b), (b, a)):
            is_enough = op.kind == "maximum" or _is_not_negative(at, other, most - 1)
            if is_enough and _is_positive(at, one, most // 2):
                return True
        return False
    if op.kind in ("multiply", "divide"):
        return all(_is_positive(at, value, most // 2) for value in op.inputs)
    return op.kind == "sqrt" and _is_positive(at, op.inputs[0], most - 1)


def _is_not_negative(at: DealtProgram, x: Value, most: int) -> bool:
    op = at.builder.maker(x)
    if op is None or most < 0:
        return False
    if op.kind in ("square", "absolute", "sqrt", "softmax", "relu"):
        return True
    if op.kind in _KEEPING:
        return _is_not_negative(at, op.inputs[0], most - 1)
    if op.kind in ("multiply", "divide"):
        a, b = op.inputs
        is_square = a == b and op.kind == "multiply"
        return is_square or all(_is_not_negative(at, value, most // 2) for value in (a, b))
    return _is_positive(at, x, most - 1)
