"""Ops through which a pending sum may be carried, so that it is reduced later, once for several, or on fewer bytes.

Such an op is linear: its output for a sum of terms is the sum of its outputs for the terms.  Its operator says so in
the table.  If it is linear in one input alone, as a product is, then the other inputs must be finite constants that are
not zero.  (In real numbers any other factor would do; but an infinite factor can give nan for the terms where it gives
none for their sum.)  A sum is carried through an op only if that needs no more bytes, and if nothing else needs the
value.  Other reductions, and sums of bools (*or*), are carried only through ops that move elements.  The operator
``widen`` carries any pending sum of floats, so that the sum is computed in the wider dtype, on more bytes.
"""

from collections.abc import Mapping
from math import isfinite

from parallelism.ir.core import Expression, Function, Op


def finite_constants(function: Function) -> frozenset[str]:
    """The names of the constants that are a single finite number other than zero."""
    return frozenset(
        op.outputs[0].name
        for op in function.ops
        if op.kind == "constant" and _usual(dict(op.attributes)["value"])
    )


def _usual(value: object) -> bool:
    return isinstance(value, Expression) or (
        isinstance(value, int | float) and isfinite(value) and value != 0
    )


def carries(op: Op, pending: Mapping[str, str], constants: frozenset[str]) -> bool:
    """Whether ``op`` maps the terms of its partial inputs to the terms of its output.

    ``pending`` holds the reduction of each partial input, by name.
    """
    entry, waiting = op.operator, [i for i, value in enumerate(op.inputs) if value.name in pending]
    if not waiting or len(op.outputs) != 1 or entry.grows or not entry.is_linear_in(waiting, len(op.inputs)):
        return False
    if entry.linear == "moves":
        return len({*pending.values()}) == 1
    dtypes = {value.type.dtype for value in (*op.inputs, *op.outputs)}
    if set(pending.values()) != {"sum"} or (len(dtypes) > 1 and op.kind != "widen"):
        return False
    return op.outputs[0].type.dtype.kind != "b" and all(
        value.name in pending or value.name in constants for value in op.inputs
    )
