"""A program cut into stages: the forward and backward functions of each stage, and the values that they exchange.

All functions of a stage use the names that values have in the whole program.  So outputs of one function are matched to
inputs of another by name:

    received ─┐               ┌─ sent  ──────>  next stage
    data     ─┤ forward       │
    weights  ─┘               └─ saved ──┐
    weights  ────────────────────────────┤ backward   ┌─ gradients of `returned`  ──────>  stage before
    gradients of `answered`, from next  ─┘            └─ gradients of `trained`, summed over the microbatches

For schedules that split the backward there are two halves: `backward_input` computes the gradients of `returned` and
the values `between`, `backward_weights` computes the gradients of `trained` from these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from parallelism.ir import Function
from parallelism.ir.core import Extent
from parallelism.ir.passes import Form, Renaming
from parallelism.ir.passes.gradients import GRADIENT as GRADIENT


@dataclass(frozen=True)
class StageFunctions:
    """The functions of one stage for a single microbatch, and the names of the values that they exchange.

    ``weights``
        inputs of the program that are the same for every microbatch, if this stage reads them.
    ``trained``
        the weights whose gradients the backward returns, after the gradients of ``returned``.
    ``data``
        inputs that have a row for each example, or are given with each microbatch.  Every stage that reads them gets
        them directly.
    ``received``, ``sent``
        the values in the message from the previous stage, and in that to the next one; for the last stage, the outputs
        of the program.  A value that is used further on passes through every stage between.
    ``returned``, ``answered``
        the values of ``received``, and of ``sent``, that have gradients.  ``answered`` of a stage is ``returned`` of
        the next one; for the last stage it is the loss, whose gradient is 1, if weights are trained for it.
    ``saved``
        the values, other than weights, that are kept from the forward for the backward: inputs of the forward, and its
        outputs after ``sent``.
    ``forward``
        ``(received, data, weights) -> (sent, the values of saved that it computes and does not send)``.
    ``recompute``
        None if ``saved`` holds everything that the backward reads.  Otherwise ``(saved, weights) -> the other values``.
    ``backward``
        ``(saved and recomputed values, weights, grad.name for each of answered) -> gradients of (returned, trained)``.
        An output that no gradient reaches is a constant of zeros.
    ``backward_input``, ``backward_weights``
        the halves: ``(as backward) -> (gradients of returned, then the other values of between that it computes)`` and
        ``(between, weights) -> gradients of trained``.  The first has only the ops that the gradients of ``returned``
        need, so it is empty on a stage that returns none.
    ``between``
        the values, other than weights, that are kept from one half to the other: inputs and outputs of the first.

    The inputs of each function are exactly the values that it reads.  Their order is not defined: look them up by name.
    The outputs are in the order given here.
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
        for function, known in (
            (self.forward, given),
            (self.backward, kept | again),
            (self.backward_input, kept | again),
            (self.backward_weights, {*self.between, *self.weights}),
        ):
            if missing := {value.name for value in function.inputs} - known:
                raise ValueError(
                    f"@{function.name} takes {', '.join(sorted(missing))}, which its stage does not have"
                )
        if tuple(value.name for value in self.forward.outputs)[: len(self.sent)] != self.sent:
            raise ValueError(
                f"@{self.forward.name} must return the values that are sent first: {', '.join(self.sent)}"
            )

    def specialize(self, **numbers: Extent) -> StageFunctions:
        """The stage with symbols replaced by ``numbers`` in every function."""
        if not numbers:
            return self

        return replace(
            self,
            forward=with_numbers(self.forward, numbers),
            backward=with_numbers(self.backward, numbers),
            backward_input=with_numbers(self.backward_input, numbers),
            backward_weights=with_numbers(self.backward_weights, numbers),
            recompute=self.recompute and with_numbers(self.recompute, numbers),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Its fields; all else is computed again where it is needed."""
        return {name: self.__dict__[name] for name in (*_FUNCTIONS, *_NAMES)}

    @property
    def name(self) -> str:
        """The name of the program and the number of the stage, with which the names of its functions begin."""
        return self.forward.name.removesuffix(".forward")

    @property
    def functions(self) -> tuple[Function | None, ...]:
        """Forward, backward, its halves, and recompute or None."""
        return tuple(getattr(self, field) for field in _FUNCTIONS)

    @cached_property
    def form(self) -> Form:
        """Equal for stages that differ in names alone, which are thus laid out, localized and priced alike."""
        return Form(self.functions, [getattr(self, field) for field in _NAMES])

    def renamed(self, to: Renaming, name: str) -> StageFunctions:
        """The stage with other names, the functions called after the forward's new ``name``.

        ``ValueError`` if two values would have one name.
        """
        length = len(self.name)
        functions = {
            field: function and to.function_later(function, f"{name}{function.name[length:]}")
            for field, function in zip(_FUNCTIONS, self.functions, strict=True)
        }
        names = {field: tuple(map(to.name, getattr(self, field))) for field in _NAMES}
        made = object.__new__(
            StageFunctions
        )  # not checked again, for which the functions would have to be made
        made.__dict__.update(
            **functions,
            **names,
            origin=Origin(self, to),
            form=self.form,
            symbols=self.symbols,
            symbols_of_work=self.symbols_of_work,
        )
        return made

    @cached_property
    def origin(self) -> Origin | None:
        """What this was `renamed` from; None if its functions were made for it."""
        return None

    @cached_property
    def values(self) -> tuple[str, ...]:
        """The names of the values of its forward, in their order."""
        if self.origin is not None:
            return tuple(map(self.origin.to.name, self.origin.stage.values))
        return tuple(value.name for value in self.forward.values)

    def renaming_of(self, other: StageFunctions) -> Renaming:
        """The names of ``other`` in place of those of this one; both are of one form."""
        if other.origin is not None and other.origin.stage is self:
            return other.origin.to
        return Renaming.between(self.functions, other.functions)

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The names of the symbolic extents in its functions."""
        return frozenset().union(*(function.symbols for function in self.functions if function is not None))

    @cached_property
    def symbols_of_work(self) -> frozenset[str]:
        """Those of its functions that more than values depend on: see `Function.symbols_of_work`."""
        return frozenset().union(
            *(function.symbols_of_work for function in self.functions if function is not None)
        )


class Origin(NamedTuple):
    """A stage from which another was made by a renaming."""

    stage: StageFunctions
    to: Renaming


_FUNCTIONS = "forward", "backward", "backward_input", "backward_weights", "recompute"
_NAMES = "weights", "trained", "data", "received", "sent", "returned", "answered", "saved", "between"


@dataclass(frozen=True)
class Stages:
    """A program cut into stages: the result of `parallelism.layouts.stages.partition`."""

    function: Function
    """The program that was cut, for one microbatch."""
    functions: tuple[StageFunctions, ...]
    """The functions of each stage, in order."""
    batch: str
    """The symbol B for the rows of a microbatch.  ``B_whole`` is the number of rows of the whole batch, ``B_first`` the
    number of the microbatch's first row."""
    beginning: Function | None = None
    """What is computed of all rows before the first microbatch; its outputs are inputs of ``function``.  None: nothing."""
    ending: Function | None = None
    """What is computed of the sums of all microbatches: it takes outputs of ``function``, and of the beginning."""
    results: tuple[str, ...] = ()
    """The names of the loss and its metrics, among the outputs of ``function`` and of its beginning and ending."""

    def __post_init__(self) -> None:
        for number, (stage, following) in enumerate(zip(self.functions, self.functions[1:], strict=False)):
            if (stage.sent, stage.answered) != (following.received, following.returned):
                raise ValueError(
                    f"stage {number} of @{self.function.name} sends {', '.join(stage.sent)}, but stage "
                    f"{number + 1} receives {', '.join(following.received)}"
                )

    def __len__(self) -> int:
        return len(self.functions)

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that have a copy of each weight."""
        return holders_of(self.functions)

    @cached_property
    def known(self) -> frozenset[str]:
        """The names of what the beginning computes: inputs of ``function`` that nobody gives."""
        return frozenset(value.name for value in self.beginning.outputs) if self.beginning else frozenset()

    @cached_property
    def given(self) -> Function:
        """The name of the program, and its inputs that are given; it computes nothing."""
        inputs = tuple(value for value in self.function.inputs if value.name not in self.known)
        return Function(self.function.name, inputs, (), ())

    def specialize(self, **numbers: Extent) -> Stages:
        """The stages with some or all symbols replaced; see `Function.specialize`."""
        return replace(
            self,
            function=with_numbers(self.function, numbers),
            functions=tuple(stage.specialize(**numbers) for stage in self.functions),
            beginning=self.beginning and with_numbers(self.beginning, numbers),
            ending=self.ending and with_numbers(self.ending, numbers),
        )


def with_numbers(function: Function, numbers: Mapping[str, Extent]) -> Function:
    """The function with those of its symbols replaced that have a number; there may be numbers of others."""
    return function.specialize(**{name: numbers[name] for name in numbers.keys() & function.symbols})


def holders_of(stages: Sequence[StageFunctions]) -> dict[str, tuple[int, ...]]:
    """The numbers of the stages that have a copy of each weight, by its name."""
    holders: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for name in stage.weights:
            holders.setdefault(name, []).append(number)
    return {name: tuple(numbers) for name, numbers in holders.items()}
