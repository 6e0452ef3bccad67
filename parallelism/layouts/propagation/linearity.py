"""Which ops a pending sum may go through, so that it is done later, once for several, or on fewer bytes.

The sum of what an op makes of the terms must be what it makes of their sum: of ops that move elements, add, negate, sum
up, or multiply or divide by a constant that is finite and not zero.  (A product with any other value would do in real
numbers; but with an infinite factor terms give a nan where their sum gives none.)  It goes through where that makes no
more bytes, and where nothing else needs the value.  Other reductions go through ops that move elements only, and so do
those of bools, of which the sum is *or*.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from parallelism.ir.core import Expression, Function, Op

MOVING = frozenset(("reshape", "transpose", "flip", "slice"))
ADDING = frozenset(("add", "subtract", "negative", "sum"))
SCALING = frozenset(("multiply", "divide"))


def finite_constants(function: Function) -> frozenset[str]:
    """The names of the values that are one finite number and not zero."""
    return frozenset(
        op.outputs[0].name for op in function.ops if op.kind == "constant" and _usual(dict(op.attributes)["value"])
    )


def _usual(value: object) -> bool:
    return isinstance(value, Expression) or (isinstance(value, int | float) and isfinite(value) and value != 0)


def carries(op: Op, pending: Mapping[str, str], constants: frozenset[str]) -> bool:
    """Whether ``op`` makes of the terms of its inputs the terms of its output; ``pending`` has the names of the inputs
    that are partial, and by which operation."""
    if not pending or len(op.outputs) != 1:
        return False
    if op.kind in MOVING:
        return True
    values = (*op.inputs, *op.outputs)
    if set(pending.values()) != {"sum"} or len({value.type.dtype for value in values}) > 1:
        return False
    if op.outputs[0].type.dtype.kind == "b":
        return False
    if op.kind in ADDING:
        return all(value.name in pending for value in op.inputs)
    factors = op.inputs[1:] if op.kind == "divide" else op.inputs
    return op.kind in SCALING and len(pending) == 1 and any(
        value.name in constants and value.name not in pending for value in factors
    )
