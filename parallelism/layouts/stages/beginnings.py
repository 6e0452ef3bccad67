"""What of a batch is known before its first microbatch: numbers that depend on data alone, such as how many targets count.

A mean over the targets that count is a quotient of two sums over all rows.  Its numerator adds up over microbatches; its
denominator must be that of the whole batch.  It depends on no trained weight, so a program of its own, the *beginning*,
computes it from all rows, and the program of a microbatch takes it as an input.  The numerator divided by it is then a
sum over the rows again, and the gradients of all microbatches add up to that of the whole batch.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from parallelism.ir import Function, Op, Value
from parallelism.layouts.stages.backwards import needed_ops
from parallelism.layouts.stages.microbatches import has_rows, is_sum


class Begun(NamedTuple):
    """A function, of which a part is computed before."""

    function: Function
    """It has the outputs of the beginning as inputs, after its own."""
    beginning: Function | None
    """A function of inputs of the whole; None if nothing must be known."""


def begun(function: Function, batch: str, trained: Collection[str]) -> Begun:
    """The function such that it can be cut into microbatches, and what must be known of the whole batch before.

    ``trained`` names the inputs that the beginning must not depend on.  A value is known before if it is computed from
    data alone, is a sum (or another reduction) over rows, and an op uses it in another way than a sum: it divides by it,
    or combines it with single rows.  What cannot be cut into microbatches for another reason stays as it is.
    """
    if batch not in function.symbols:
        return Begun(function, None)
    given = _of_data(function, batch, trained)
    known = set[Value]()
    while more := _needed_first(function, batch, given, known):
        known |= more
    if not known:
        return Begun(function, None)
    ops = needed_ops(function.ops, function.outputs, lambda op: known.isdisjoint(op.outputs))
    read = {value for op in ops for value in op.inputs} | {*function.outputs}
    first = [value for value in function.values if value in known & read]
    own = needed_ops(function.ops, first)
    used = {value for op in own for value in op.inputs}
    inputs = tuple(value for value in function.inputs if value in used)
    return Begun(
        replace(function, inputs=(*function.inputs, *first), ops=tuple(ops)),
        Function(f"{function.name}.beginning", inputs, tuple(own), tuple(first)),
    )


def _of_data(function: Function, batch: str, trained: Collection[str]) -> set[Value]:
    """The values that depend on data, and on no trained input."""
    learning = {value for value in function.inputs if value.name in trained}
    rows = {value for value in function.inputs if has_rows(value, batch)} - learning
    for op in function.ops:
        if not learning.isdisjoint(op.inputs):
            learning.update(op.outputs)
        elif not rows.isdisjoint(op.inputs):
            rows.update(op.outputs)
    return rows


def _needed_first(function: Function, batch: str, given: set[Value], known: set[Value]) -> set[Value]:
    """The values of data that the first op needs for which sums over rows do not do; empty if there is no such op."""
    sums = set[Value]()
    for op in function.ops:
        if not known.isdisjoint(op.outputs):
            continue
        try:
            added = is_sum(op, batch, sums)
        except ValueError:
            return sums & given & {*op.inputs} or _reduced(op, batch, given)
        if added:
            sums.update(op.outputs)
    return set()


def _reduced(op: Op, batch: str, given: set[Value]) -> set[Value]:
    """The outputs of an op if they depend on data alone, and have no rows."""
    outputs = {*op.outputs}
    return outputs if outputs <= given and not any(has_rows(value, batch) for value in outputs) else set()
