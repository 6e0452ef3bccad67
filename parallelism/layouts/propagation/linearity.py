"""Ops through which a pending sum may be carried, so that it is reduced later, once for several, or on fewer bytes.

Such an op is linear: its output for a sum of terms is the sum of its outputs for the terms.  These are ops that move
elements, add, negate, sum, or multiply or divide by a finite constant that is not zero.  (In real numbers any other
factor would do; but an infinite factor can give nan for the terms where it gives none for their sum.)  A sum is carried
through an op only if that needs no more bytes, and if nothing else needs the value.  Other reductions, and sums of
bools (*or*), are carried only through ops that move elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from parallelism.ir.core import Expression, Function, Op

MOVING = frozenset(("reshape", "transpose", "flip", "slice"))
ADDING = frozenset(("add", "subtract", "negative", "sum"))
SCALING = frozenset(("multiply", "divide"))


def finite_constants(function: Function) -> frozenset[str]:
    """The names of the constants that are a single finite number other than zero."""
    return frozenset(
        op.outputs[0].name for op in function.ops if op.kind == "constant" and _usual(dict(op.attributes)["value"])
    )


def _usual(value: object) -> bool:
    return isinstance(value, Expression) or (isinstance(value, int | float) and isfinite(value) and value != 0)


def carries(op: Op, pending: Mapping[str, str], constants: frozenset[str]) -> bool:
    """Whether ``op`` maps the terms of its partial inputs to the terms of its output.

    ``pending`` holds the reduction of each partial input, by name.
    """
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
