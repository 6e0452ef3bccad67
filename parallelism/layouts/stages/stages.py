"""A program cut into stages, as a value: for each the functions of its forward and of its backward, and what crosses.

All functions of a stage speak of values by the names that they have in the whole program, so what one returns is found
by what takes it:

    received ─┐               ┌─ sent  ──────>  next stage
    data     ─┤ forward       │
    weights  ─┘               └─ saved ──┐
    weights  ────────────────────────────┤ backward   ┌─ gradients of `returned`  ──────>  stage before
    gradients of `answered`, from next  ─┘            └─ gradients of `trained`, added up over the microbatches

The backward in two halves, for schedules that split it: `backward_input` makes the gradients of `returned` and what is
`kept` of its work, `backward_weights` those of `trained` from that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from parallelism.ir import Function
from parallelism.ir.core import Extent

GRADIENT = "grad."
"""Before the name of a value: the input of a backward that is its gradient."""


@dataclass(frozen=True)
class StageFunctions:
    """One stage: its functions, for a single microbatch, and the names of what goes in and comes out.

    ``weights``
        inputs of the program that are the same for every microbatch, as far as this stage reads them.
    ``trained``
        those of them whose gradients the backward returns, after the gradients of ``returned``.
    ``data``
        inputs that have a row for each example, or are handed over with each microbatch: dealt to every stage that
        reads them, wherever it is.
    ``received``, ``sent``
        the values of the message from the stage before, and of that to the next one; of the last stage, the outputs of
        the program.  One that is used further on is received and sent on by every stage between.
    ``returned``, ``answered``
        those of ``received``, and of ``sent``, whose gradients go backward: ``answered`` of a stage is ``returned`` of
        the next one, and of the last stage the loss, whose gradient is 1, if weights are trained for it.
    ``saved``
        what is kept from the forward to the backward, weights aside: inputs of the forward, and what it returns after
        ``sent``.
    ``forward``
        ``(received, data, weights) -> (sent, those of saved that it makes and does not send)``.
    ``recompute``
        None if ``saved`` has all that the backward reads.  Otherwise ``(saved, weights) -> what it reads besides``.
    ``backward``
        ``(what it reads of the forward, weights, grad.name for each of answered) -> gradients of (returned, trained)``.
        An output that no gradient reaches is a constant of zeros.
    ``backward_input``, ``backward_weights``
        its halves: ``(as backward) -> (gradients of returned, then those of between that it makes besides)`` and
        ``(between, weights) -> gradients of trained``.  The first has just what the gradients of ``returned`` need, so
        on a stage that returns none it has nothing to do.
    ``between``
        what is kept from the one half to the other, weights aside: inputs and outputs of the first.

    The inputs of each function are the values that it reads and no others, in no order to rely on: they are found by
    name.  Its outputs are in the order given here.
    """

    forward: Function
    backward: Function
    backward_input: Function
    backward_weights: Function
    recompute: Function | None
    weights: tuple[str, ...]
    trained: tuple[str, ...]
    data: tuple[str, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    returned: tuple[str, ...]
    answered: tuple[str, ...]
    saved: tuple[str, ...]
    between: tuple[str, ...]

    def __post_init__(self) -> None:
        given = {*self.received, *self.data, *self.weights}
        grads = {f"{GRADIENT}{name}" for name in self.answered}
        kept = {*self.saved, *self.weights, *grads}
        again = set() if self.recompute is None else {value.name for value in self.recompute.outputs}
        for function, there in (
            (self.forward, given), (self.backward, kept | again), (self.backward_input, kept | again),
            (self.backward_weights, {*self.between, *self.weights}),
        ):
            if missing := {value.name for value in function.inputs} - there:
                raise ValueError(f"@{function.name} takes {', '.join(sorted(missing))}, which its stage has not then")
        if tuple(value.name for value in self.forward.outputs)[:len(self.sent)] != self.sent:
            raise ValueError(f"@{self.forward.name} returns other values than are sent: {', '.join(self.sent)}")

    def specialize(self, **numbers: Extent) -> StageFunctions:
        """With these in place of symbols, in every function that has them."""
        def known(function: Function) -> Function:
            return function.specialize(**{name: numbers[name] for name in numbers.keys() & function.symbols})

        return replace(
            self, forward=known(self.forward), backward=known(self.backward),
            backward_input=known(self.backward_input), backward_weights=known(self.backward_weights),
            recompute=self.recompute and known(self.recompute))

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The names that stand for extents in its functions."""
        functions = (self.forward, self.backward, self.backward_input, self.backward_weights, self.recompute)
        return frozenset().union(*(function.symbols for function in functions if function is not None))


@dataclass(frozen=True)
class Stages:
    """A program cut into stages, as `parallelism.layouts.stages.partition` makes it."""

    function: Function
    """The program that was cut: of one microbatch."""
    functions: tuple[StageFunctions, ...]
    """Of each stage, in order."""
    batch: str
    """The symbol for the rows of a microbatch; those of the whole batch are ``B_whole``, the first one ``B_first``."""

    def __post_init__(self) -> None:
        for number, (stage, following) in enumerate(zip(self.functions, self.functions[1:], strict=False)):
            if (stage.sent, stage.answered) != (following.received, following.returned):
                raise ValueError(f"stage {number} of @{self.function.name} sends {', '.join(stage.sent)}, and stage "
                                 f"{number + 1} receives {', '.join(following.received)}")

    def __len__(self) -> int:
        return len(self.functions)

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that have a copy of each weight."""
        found: dict[str, list[int]] = {}
        for number, stage in enumerate(self.functions):
            for name in stage.weights:
                found.setdefault(name, []).append(number)
        return {name: tuple(numbers) for name, numbers in found.items()}

    def specialize(self, **numbers: Extent) -> Stages:
        """With these in place of the symbols, some or all, as `Function.specialize` does it."""
        known = {name: numbers[name] for name in numbers.keys() & self.function.symbols}
        return replace(
            self, function=self.function.specialize(**known),
            functions=tuple(stage.specialize(**numbers) for stage in self.functions))
