"""What of a batch is computed as a whole: before its first microbatch what depends on data alone, such as how many targets
count, and after the last one what metrics make of sums.

A mean over the targets that count is a quotient of two sums over all rows.  Its numerator adds up over microbatches; its
denominator must be that of the whole batch.  It depends on no trained weight, so a program of its own, the *beginning*,
computes it from all rows, and the program of a microbatch takes it as an input.  The numerator divided by it is then a
sum over the rows again, and the gradients of all microbatches add up to that of the whole batch.

A metric beside the loss may be any function of sums over the rows, as a perplexity or a quotient.  The program of a
microbatch returns the sums, and the *ending* computes the metrics from their totals.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from parallelism.ir import Function, Op, Value
from parallelism.ir.core import Extent
from parallelism.ir.core.lines import line_of, on_line
from parallelism.layouts.stages.backwards import needed_ops
from parallelism.layouts.stages.microbatches import has_rows, is_sum, microbatched


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


class ByRows(NamedTuple):
    """A loss of a batch, and its metrics, in parts."""

    function: Function
    """The program of a microbatch, whose outputs add up (`microbatched`)."""
    beginning: Function | None
    """As of `Begun`."""
    ending: Function | None
    """As of `Ended`."""
    results: tuple[str, ...]
    """As of `Ended`."""


def by_rows(function: Function, batch: str, trained: Collection[str]) -> ByRows:
    """What is computed of each microbatch, and what of the whole batch before the first and after the last one.

    ``ValueError`` names the op that keeps a function from being cut into microbatches, and its line.
    """
    given = begun(function, batch, trained)
    known = [value.name for value in given.beginning.outputs] if given.beginning else []
    cut = ended(given.function, batch, known)
    return ByRows(microbatched(cut.function, batch), given.beginning, cut.ending, cut.results)


class Ended(NamedTuple):
    """A function of which the metrics are computed after."""

    function: Function
    """It returns the loss, and then the other sums that the ending takes, and those that are metrics themselves."""
    ending: Function | None
    """A function of outputs of it, and of a beginning; None if the metrics are such sums."""
    results: tuple[str, ...]
    """The names of the loss and of the metrics, in order: of outputs of the function, of the ending or of a beginning."""


def ended(function: Function, batch: str, known: Collection[str]) -> Ended:
    """The function that returns sums over the rows alone.  ``known`` names its inputs that a beginning computes.

    What has no rows, and what only metrics need, is computed in the ending.  ``ValueError`` for a metric that has rows,
    or that is computed from weights alone.
    """
    loss, *metrics = function.outputs
    results = tuple(value.name for value in function.outputs)
    if not metrics:
        return Ended(function, None, results)
    for value in metrics:
        if has_rows(value, batch):
            raise ValueError(
                f"@{function.name}: output {value} has rows of the batch {batch}, of which each microbatch has "
                f"some; beside a loss a pipeline returns sums, means and what is computed from these"
                f"{on_line(line_of(function, value))}"
            )
    # What is computed from the beginning and from constants alone is made once more: the loss and a metric may share it.
    again = _computed_from(function, known)
    of_loss = {value for op in needed_ops(function.ops, [loss]) for value in op.outputs} - again
    late = [op for op in function.ops if _is_late(op, batch, of_loss)]
    own = needed_ops(late, metrics)
    made = {value for op in own for value in op.outputs}
    wanted = {value for op in own for value in op.inputs} | {*metrics}
    taken = [value for value in function.values if value in wanted - made]
    given = {value for value in function.inputs if value.name not in known}
    if weights := [value for value in taken if value in given]:
        raise ValueError(
            f"@{function.name}: a metric is computed from {weights[0]} alone; a pipeline returns metrics of the batch"
            f"{on_line(next(op.line for op in own if weights[0] in op.inputs) if own else None)}"
        )
    sums = [value for value in taken if value.name not in known and value != loss]
    outputs = (loss, *sums)
    ops = needed_ops(function.ops, outputs)
    ending = Function(
        f"{function.name}.ending",
        tuple(taken),
        tuple(own),
        tuple(value for value in metrics if value in made),
    )
    return Ended(replace(function, ops=tuple(ops), outputs=outputs), ending if own else None, results)


def _computed_from(function: Function, known: Collection[str]) -> set[Value]:
    """The values that are computed from inputs of these names, and from constants, alone."""
    found = {value for value in function.inputs if value.name in known}
    for op in function.ops:
        if found.issuperset(op.inputs):
            found.update(op.outputs)
    return found


def _is_late(op: Op, batch: str, of_loss: set[Value]) -> bool:
    """Whether an op computes something without rows from something without rows, which the loss does not need."""
    return of_loss.isdisjoint(op.outputs) and not any(
        has_rows(value, batch) for value in (*op.inputs, *op.outputs)
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
    sums, outside = set[Value](), dict[Value, Extent]()
    for op in function.ops:
        if not known.isdisjoint(op.outputs):
            continue
        try:
            added = is_sum(op, batch, sums, outside)
        except ValueError:
            return sums & given & {*op.inputs} or _reduced(op, batch, given)
        if added:
            sums.update(op.outputs)
    return set()


def _reduced(op: Op, batch: str, given: set[Value]) -> set[Value]:
    """The outputs of an op if they depend on data alone, and have no rows."""
    outputs = {*op.outputs}
    return outputs if outputs <= given and not any(has_rows(value, batch) for value in outputs) else set()
