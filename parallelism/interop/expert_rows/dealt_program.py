"""`DealtProgram`: a program that is written anew, in which the rows of choices lie in slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from parallelism.interop.expert_rows.choices import Choice, even_slots, sequences_of
from parallelism.ir.core import Builder, Extent, Function, Op, Value
from parallelism.models.expert_feed_forward import Slots

SLOTS = 3
"""The first dims of a value in slots: experts, sequences, slots."""


class Kept(Exception):
    """Rows of a choice are used in a way that slots have no counterpart of."""

    def __init__(self, choice: Choice, op: Op) -> None:
        where = f"{op.kind} at {op.line}" if op.line else op.kind
        is_of_groups = op.kind == "dispatch"
        super().__init__(
            "a product has other groups than those of the experts"
            if is_of_groups
            else f"{where} does not take each of them alone"
        )
        self.choice = choice


class Dealing(NamedTuple):
    """How the rows of a choice are dealt."""

    choice: Choice
    experts: Value
    """The choices, of shape ``(batch, length, chosen)``."""
    slots: Slots

    @property
    def how(self) -> dict[str, Any]:
        """Attributes of the operators that deal these rows."""
        return {"each": self.slots.each, "first": 0, "drops": False}

    @property
    def shape(self) -> tuple[Extent, ...]:
        """Experts, sequences and slots."""
        return self.choice.of, self.experts.type.shape[0], self.slots.rows


@dataclass(frozen=True)
class Rows:
    """What a value of the program is in slots."""

    of: Dealing
    value: Value
    """Experts, sequences, slots, and the dims that are not those of rows."""
    dims: tuple[int, ...]
    """The dims of rows in the program: one, or those of tokens and of their choices."""
    is_sorted: bool
    """By expert; else as the tokens and their choices lie."""
    of_experts: int | None = None
    """The dim of experts, of which each has only its own rows, and zeros for the others."""
    in_groups: bool = False
    """Whether the program has dealt them to its `Groups`: ``dims`` are groups, one sequence, and slots."""

    @property
    def are_in_slots(self) -> bool:
        """Whether each slot has a row; else each expert has one for all, such as its bias."""
        return self.value.type.shape[:SLOTS] == self.of.shape

    def others(self, ndim: int) -> list[int]:
        """The other dims of the value in the program, which has so many."""
        return [d for d in range(ndim) if d not in self.dims and d != self.of_experts]


class DealtProgram:
    """The program is written anew, op by op."""

    def __init__(
        self, function: Function, meant: Mapping[Choice, Mapping[Value, str]], own: frozenset[Value]
    ) -> None:
        self.old = function
        self.builder = Builder()
        self.builder.copy(replace(function, ops=(), outputs=()))
        self.builder.reserve(value.name for value in function.values)
        self.values: dict[Value, Value] = {}
        """Those that have another counterpart than themselves."""
        self.rows: dict[Value, Rows] = {}
        self.makers = {value: op for op in function.ops for value in op.outputs}
        self.meant = {
            value: (choice, name) for choice, names in meant.items() for value, name in names.items()
        }
        self.own = own
        """What follows from choices alone."""
        self.dealings: dict[Choice, Dealing] = {}

    def now(self, value: Value) -> Value:
        return self.values.get(value, value)

    def name(self, places: Value, choice: Choice) -> str | None:
        """What numbers mean that follow from a choice."""
        of, name = self.meant.get(places, (None, None))
        return name if of == choice else None

    # -- slots ---------------------------------------------------------------------------------------------------------

    def emit(self, kind: str, *inputs: Value, **attributes: Any) -> Value:
        """The result of a new op."""
        return self.builder.emit(kind, inputs, attributes)[0]

    def constant(self, number: float, like: Value) -> Value:
        """One number, of the dtype of another value."""
        dtype = like.type.dtype
        kind = int if dtype.kind in "iu" else float
        return self.emit("constant", value=kind(number), shape=(), dtype=dtype)

    def reshaped(self, x: Value, shape: Sequence[Extent]) -> Value:
        """The same elements in another shape."""
        if x.type.shape == tuple(shape):
            return x
        made = self.builder.maker(x)
        if made is not None and made.kind == "reshape" and made.inputs[0].type.shape == tuple(shape):
            return made.inputs[0]
        return self.emit("reshape", x, shape=tuple(shape))

    def dealing(self, choice: Choice) -> Dealing:
        """How the rows of a choice are dealt."""
        if choice not in self.dealings:
            batch = sequences_of(self.makers.get, choice.value, choice.tokens)
            length = choice.tokens // batch
            experts = self.reshaped(self.now(choice.value), (batch, length, choice.chosen))
            slots = even_slots(choice.chosen, choice.of, length)
            self.dealings[choice] = Dealing(choice, experts, slots)
        return self.dealings[choice]

    def of_tokens(self, x: Value, choice: Choice, others: Sequence[Extent]) -> Value:
        """The rows of tokens in slots; ``x`` has the tokens first."""
        of = self.dealing(choice)
        rows = self.reshaped(x, (*of.experts.type.shape[:2], prod(others)))
        dealt = self.emit("dispatch", rows, of.experts, shape=(*of.shape, prod(others)), **of.how)
        return self.reshaped(dealt, (*of.shape, *others))

    def of_choices(self, x: Value, choice: Choice) -> Value:
        """One number for each choice of each token, in slots."""
        of = self.dealing(choice)
        gates = self.reshaped(x, of.experts.type.shape)
        return self.emit("dispatch_gates", gates, of.experts, shape=of.shape, **of.how)

    def combined(self, rows: Rows, shape: Sequence[Extent]) -> Value | None:
        """For each token the sum of its rows, of this shape; None if it is another, or if there are no rows in slots."""
        own = rows.value.type.shape[SLOTS:]
        if not rows.are_in_slots or prod(shape) != rows.of.choice.tokens * prod(own):
            return None
        flat = self.reshaped(rows.value, (*rows.of.shape, prod(own)))
        return self.reshaped(self.emit("combine", flat, rows.of.experts, **rows.of.how), shape)

    # -- inputs of an op -----------------------------------------------------------------------------------------------

    def aligned(self, x: Value, ndim: int, like: Rows) -> Value | None:
        """An operand of an op on rows, whose result has ``ndim`` dims and rows like ``like``; None if it does not fit."""
        more = ndim - x.type.ndim
        if (rows := self.rows.get(x)) is not None:
            own = tuple([d + more for d in rows.dims])
            if own != like.dims or rows.is_sorted != like.is_sorted or rows.of_experts is not None:
                return None
            kept = rows.value.type.shape[SLOTS:]
            ones = ndim - len(like.dims) - len(kept)
            return self.reshaped(rows.value, (*rows.value.type.shape[:SLOTS], *[1] * ones, *kept))
        shape = (*[1] * more, *x.type.shape)
        of_rows = [shape[d] for d in like.dims]
        others = [n for d, n in enumerate(shape) if d not in like.dims]
        now = self.now(x)
        if all(n == 1 for n in of_rows):
            return self.reshaped(now, others)
        if like.is_sorted:
            return None
        choice = like.of.choice
        if prod(of_rows) == choice.rows and all(n == 1 for n in others):
            return self.reshaped(self.of_choices(now, choice), (*like.of.shape, *others))
        if (
            prod(of_rows) == choice.tokens
            and of_rows[-1] == 1
            and like.dims[-1] == like.dims[0] + len(like.dims) - 1
        ):
            before = prod(shape[: like.dims[0]])
            return self.of_tokens(now, choice, others) if before == 1 else None
        return None
