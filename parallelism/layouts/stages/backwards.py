"""The backward of a stage: separated from its forward, with the values to keep, and split into two halves.

The gradient of a stage is one program that contains the forward.  It is cut with one question: which ops are left to
compute some values if others exist already?  The answer gives the ops and the values that they read.  Nothing is
computed twice, except ops that cost nothing.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from parallelism.ir import Function, Op, Value, gradient
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.layouts.stages.stages import StageFunctions
from parallelism.shared_results import shared

MOST_STAGES = 64
"""The most stages whose gradients are kept for others: those that run other parts again have the same."""


class Rewriting(Protocol):
    """A change of a backward: given the ``joint`` function of a forward and its backward, it returns that one changed."""

    def __call__(self, joint: Function, forward: Function) -> Function: ...

    def mark(self, op: Op) -> str | None:
        """A text for an op that the change treats apart, else None.  Functions that differ only in these texts are alike."""


def with_backward(
    forward: Function,
    received: Sequence[Value],
    data: Sequence[Value],
    weights: Sequence[Value],
    trained: Sequence[Value],
    learning: Collection[Value],
    answering: Sequence[Value],
    *,
    recompute: bool,
    rewritten: Rewriting | None = None,
) -> StageFunctions:
    """The functions of a stage, given its forward, which returns the values that the stage sends.

    ``learning`` holds the values that have a gradient; ``answering`` are the outputs whose gradients are given, if they
    have one.  With ``recompute`` only inputs of the forward are kept.
    ``rewritten`` changes the backward before it is separated from the forward.
    """
    are_weights = {*weights}
    returned = [value for value in received if value in learning]
    answered = [value for value in answering if value in learning]
    joint = _with_gradient(forward, returned, trained, answered)
    joint = joint if rewritten is None else rewritten(joint, forward)
    backward = left_over(f"{forward.name}.backward", joint, [*forward.values], joint.outputs)
    given, read_backwards = {*forward.inputs}, {*backward.inputs}.difference(weights)
    needed = [value for value in forward.values if value in read_backwards]
    kept = [value for value in needed if value not in given]
    again = (
        left_over(f"{forward.name}.recompute", forward, forward.inputs, kept) if recompute and kept else None
    )
    if again is not None:
        read = {*needed, *again.inputs}
        needed = [value for value in forward.inputs if value in read and value not in are_weights]
        kept = []
    returns = backward.outputs[: len(returned)]
    first = left_over(f"{backward.name}_input", backward, backward.inputs, returns)
    second = left_over(
        f"{backward.name}_weights",
        backward,
        [*backward.inputs, *(v for op in first.ops for v in op.outputs)],
        backward.outputs[len(returned) :],
    )
    between = [value for value in second.inputs if value not in are_weights]
    known, sent = {*backward.inputs, *returns}, {*forward.outputs}
    handed_on = [value for value in between if value not in known]
    return StageFunctions(
        forward=replace(
            forward,
            name=f"{forward.name}.forward",
            outputs=(*forward.outputs, *(value for value in kept if value not in sent)),
        ),
        backward=backward,
        backward_input=replace(first, outputs=(*returns, *handed_on)),
        backward_weights=second,
        recompute=again,
        weights=_names(weights),
        trained=_names(trained),
        data=_names(data),
        received=_names(received),
        sent=_names(forward.outputs),
        returned=_names(returned),
        answered=_names(answered),
        saved=_names(needed),
        between=_names(between),
    )


def _with_gradient(
    forward: Function, returned: Sequence[Value], trained: Sequence[Value], answered: Sequence[Value]
) -> Function:
    """A stage with the gradients of what it returns and trains, of some outputs; a search makes it once for equal stages."""
    # A gradient of a weight gets its layout where the stages do: until then the sum of its terms may wait.
    bare = laid_out(forward, dict.fromkeys(_names(trained)))
    by, of = _names([*returned, *trained]), _names(answered)
    joint = shared("gradients", lambda: gradient(bare, by, of=of), by=(bare, by, of), most=MOST_STAGES)
    return laid_out(joint, {value.name: value.layout for value in trained})


def left_over(name: str, function: Function, there: Collection[Value], wanted: Sequence[Value]) -> Function:
    """The part of a function that computes ``wanted`` if the values ``there`` exist already.  It takes those it reads.

    Constants, ``iota`` and views cost nothing: they are computed again instead of taken.  A change of layout is not,
    because it may communicate.
    """
    taken = set(there)
    ops = needed_ops(function.ops, wanted, lambda op: taken.isdisjoint(op.outputs) or _costs_nothing(op))
    needed, computed = {*wanted, *(v for op in ops for v in op.inputs)}, {v for op in ops for v in op.outputs}
    inputs = [value for value in function.values if value in needed and value not in computed]
    return Function(name, tuple(inputs), tuple(ops), tuple(wanted))


def needed_ops(
    ops: Sequence[Op], wanted: Collection[Value], allowed: Callable[[Op], bool] = lambda _: True
) -> list[Op]:
    """The ops that compute ``wanted``, of those that are allowed."""
    needed, kept = set(wanted), []
    for op in reversed(ops):
        if not needed.isdisjoint(op.outputs) and allowed(op):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]


def _costs_nothing(op: Op) -> bool:
    return (op.operator.view and op.kind != "reshard") or (not op.inputs and op.operator.received is None)


def _names(values: Sequence[Value]) -> tuple[str, ...]:
    return tuple(value.name for value in values)
