"""Which ops a pending sum may go through, so that it is done later, once for several, or on fewer bytes.

The sum of what an op makes of the terms must be what it makes of their sum: the operator is linear, as its entry in
the table says.  Where it is linear in one input alone, as a product is, the others must be constants that are finite
and not zero.  (Any other factor would do in real numbers; but with an infinite one terms give a nan where their sum
gives none.)  A sum goes through where that makes no more bytes, and where nothing else needs the value.  Other
reductions go through ops that move elements only, and so do those of bools, of which the sum is *or*.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from parallelism.ir.core import Expression, Function, Op


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
    entry, waiting = op.operator, [i for i, value in enumerate(op.inputs) if value.name in pending]
    if not waiting or len(op.outputs) != 1 or entry.grows or not entry.is_linear_in(waiting, len(op.inputs)):
        return False
    if entry.linear == "moves":
        return len({*pending.values()}) == 1
    values = (*op.inputs, *op.outputs)
    if set(pending.values()) != {"sum"} or len({value.type.dtype for value in values}) > 1:
        return False
    return op.outputs[0].type.dtype.kind != "b" and all(
        value.name in pending or value.name in constants for value in op.inputs
    )
