"""Why a value has its layout: the least seconds of the program for each other layout of the value.

    print(solution.why("p.w0"))

For each other layout the value is held in it, and the integer program is solved again.  So the difference is what that
layout costs after all else has been chosen anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelism.auto_sharding.integer_program import Choice, NoLayoutFits, solve
from parallelism.auto_sharding.memory import Memory
from parallelism.auto_sharding.problem import Problem
from parallelism.display import quantities
from parallelism.sharding import TensorSharding

ROUNDING = 1e-15
"""Differences below this many seconds are errors of rounding."""


@dataclass(frozen=True)
class Alternative:
    """Another layout of a value, with the best choice that has it."""

    layout: TensorSharding
    more_seconds: float
    """By how many seconds the program is slower than with the chosen layout; infinite if no choice has this one."""
    more_op_seconds: float
    """The part of ``more_seconds`` that ops take."""
    more_move_seconds: float
    """The part of ``more_seconds`` that changes of layout take."""
    is_proved: bool
    """Whether no choice with this layout takes less.  False if the solver ran out of time."""
    moved: tuple[str, ...]
    """The other values that would get another layout, one of each class of values."""

    def __str__(self) -> str:
        if self.more_seconds == float("inf"):
            return f"{self.layout.short()}: no choice of layouts has it"
        more = f"{_signed(self.more_seconds)}{'' if self.is_proved else ' at most'}"
        others = f"; other layouts that change: {len(self.moved)}" if self.moved else ""
        return (
            f"{self.layout.short()}: {more} (ops {_signed(self.more_op_seconds)}, changes of layout "
            f"{_signed(self.more_move_seconds)}{others})"
        )


@dataclass(frozen=True)
class Why:
    """The layout of a value, and what each other one would cost."""

    name: str
    layout: TensorSharding
    seconds: float
    """The seconds of the program, with this layout."""
    made_by: str | None
    """The op that makes the value, split as it is.  None for inputs."""
    used_by: tuple[str, ...]
    """The ops that use the value, one of each class, split as they are."""
    alternatives: tuple[Alternative, ...]
    """The cheapest first.  Empty if the layout was given."""

    def __str__(self) -> str:
        lines = [
            f"%{self.name} lies as {self.layout.short()}: the program takes {quantities.seconds(self.seconds)}"
        ]
        if self.made_by is not None:
            lines.append(f"  made by {self.made_by}")
        lines += [f"  used by {each}" for each in self.used_by]
        lines += [f"  as {each}" for each in self.alternatives] or ["  there is no other layout to choose"]
        return "\n".join(lines)


def why(
    problem: Problem,
    choice: Choice,
    name: str,
    *,
    time_limit: float | None = None,
    donate: tuple[str, ...] = (),
) -> Why:
    """What other layouts of a value would cost, within the same memory.  ``KeyError`` if there is no such value."""
    number = problem.number(name)
    value = problem.values[number]
    alternatives = [
        _alternative(problem, choice, number, layout, time_limit, donate)
        for layout in range(len(value.layouts))
        if layout != choice.layout_of[number]
    ]
    using = dict.fromkeys(use.op for use in value.uses)
    return Why(
        name,
        value.layouts[choice.layout_of[number]],
        choice.seconds,
        None if value.made_by is None else _split(problem, choice, value.made_by[0]),
        tuple(_split(problem, choice, op) for op in using),
        tuple(sorted(alternatives, key=lambda each: each.more_seconds)),
    )


def _alternative(
    problem: Problem,
    choice: Choice,
    number: int,
    layout: int,
    time_limit: float | None,
    donate: tuple[str, ...],
) -> Alternative:
    other_layout = problem.values[number].layouts[layout]
    held = problem.holding(number, layout)
    memory = None if choice.limit_bytes is None else Memory(held, donate)
    try:
        other = solve(held, time_limit=time_limit, memory=memory, limit_bytes=choice.limit_bytes)
    except NoLayoutFits:
        return Alternative(other_layout, float("inf"), float("inf"), float("inf"), True, ())
    # In the held problem the value has one layout, number 0.
    layout_of = [*other.layout_of[:number], layout, *other.layout_of[number + 1 :]]
    return Alternative(
        other_layout,
        other.seconds - choice.seconds,
        problem.op_seconds(other.sharding_of) - problem.op_seconds(choice.sharding_of),
        problem.move_seconds(other.sharding_of, layout_of, other.kept)
        - problem.move_seconds(choice.sharding_of, choice.layout_of, choice.kept),
        not other.gap,
        tuple(_moved(problem, choice.layout_of, layout_of, number)),
    )


def _moved(problem: Problem, before: tuple[int, ...], after: list[int], but: int) -> Iterator[str]:
    """A name of each class of values, but one, whose layouts differ."""
    for at, (value, one, other) in enumerate(zip(problem.values, before, after, strict=True)):
        if one != other and at != but:
            yield value.names[0]


def _split(problem: Problem, choice: Choice, number: int) -> str:
    """An op of a class with the layouts of its inputs and outputs."""
    sharding = problem.ops[number].shardings[choice.sharding_of[number]]
    inputs = ", ".join(layout.short() for layout in sharding.inputs)
    outputs = ", ".join(layout.short() for layout in sharding.outputs)
    return f"{sharding.op.kind}: {inputs} -> {outputs}"


def _signed(seconds: float) -> str:
    if abs(seconds) < ROUNDING:
        return "+0 s"
    return f"{'-' if seconds < 0 else '+'}{quantities.seconds(abs(seconds))}"
