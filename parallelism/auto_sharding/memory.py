"""What a device holds while each op of a program runs, for any choice of layouts.

    inputs       always; a donated one until an output takes its place
    values       from the op that makes them to the last that reads them, or to the end if they are returned
    copies       values in another layout than their own: from the first op of a phase that needs the copy to the last

The phases are the forward, the backward and what follows it.  A copy that forward and backward need is kept from one
to the other, or made twice: the integer program chooses (`Choice.kept`).  Not counted are the buffers inside of a
change of layout; `auto_shard` finds those with the real peak, and leaves room for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Ints
from parallelism.auto_sharding.problem import Problem, ValueChoices
from parallelism.ir import Function, TensorType
from parallelism.ir.passes import donations
from parallelism.ir.passes.donation import owners
from parallelism.sharding import TensorSharding


class Held(NamedTuple):
    """A part of what is held: so many bytes, at each op, for a class of values."""

    what: str
    """``inputs``, ``values`` or ``copies``."""
    nbytes: Ints


@dataclass(frozen=True)
class Lifetimes:
    """While which ops the values of a class are held: for each op, how many of them."""

    owned: Ints
    """Values that own memory."""
    viewed: Ints
    """Values that are views of others.  Only those whose layout is not the one that they are made in take memory."""
    made: Ints
    """Values that this op makes."""
    spans: dict[int, Ints]
    """Copies, by the phase whose ops need them."""
    between: Ints
    """Copies that are kept from the forward to the backward."""


@dataclass(frozen=True)
class Memory:
    """What a device holds in the choices of a problem, all of which are even: every device holds equally much."""

    problem: Problem
    donate: tuple[str, ...] = ()
    """Names of inputs in whose memory outputs are made, or the beginnings of names before a dot."""
    lifetimes: tuple[Lifetimes, ...] = field(init=False)
    """The lifetimes of each class of values."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lifetimes", tuple(_lifetimes(self.problem, self.donate)))

    def bytes_of(self, value: ValueChoices, layout: TensorSharding) -> int:
        """The bytes of one value of a class in a layout, on a device."""
        return shard_bytes(value.type, layout, self.problem)

    def held(
        self, sharding_of: Sequence[int], layout_of: Sequence[int], kept: Iterable[tuple[int, int]]
    ) -> Iterator[Held]:
        """The parts of what a choice holds; their sum is what is held while each op runs."""
        kept = set(kept)
        for number, (value, at, lifetimes) in enumerate(
            zip(self.problem.values, layout_of, self.lifetimes, strict=True)
        ):
            shard = self.bytes_of(value, value.layouts[at])
            yield Held("inputs" if value.made_by is None else "values", lifetimes.owned * shard)
            if value.made_by is not None:
                op, made = value.made_by
                before = value.made[made[sharding_of[op]]]
                if before != value.layouts[at]:
                    yield Held("values", lifetimes.viewed * shard)
                    yield Held("copies", lifetimes.made * self.bytes_of(value, before))
            for phase, needed in self.problem.copies(number, sharding_of, at):
                nbytes = self.bytes_of(value, value.needed[needed])
                yield Held("copies", lifetimes.spans[phase] * nbytes)
                if phase == 0 and (number, needed) in kept:
                    yield Held("copies", lifetimes.between * nbytes)

    def total(
        self, sharding_of: Sequence[int], layout_of: Sequence[int], kept: Iterable[tuple[int, int]]
    ) -> Ints:
        """The bytes that a device holds while each op runs."""
        held = self.held(sharding_of, layout_of, kept)
        return sum((each.nbytes for each in held), np.zeros(len(self.problem.function.ops), int))


def shard_bytes(type: TensorType, layout: TensorSharding, problem: Problem) -> int:
    """The bytes of an even shard."""
    parts = prod(problem.mesh.shape[axis] for dim in layout.dims for axis in dim.axes)
    return int(type.nbytes) // parts


def _lifetimes(problem: Problem, donate: Sequence[str]) -> Iterator[Lifetimes]:
    """The lifetimes of each class of values."""
    function = problem.function
    count = len(function.ops)
    first, last, owns = _spans_of_values(function, donate)
    positions: dict[str, dict[int, list[int]]] = {}
    for at, (op, number) in enumerate(zip(function.ops, problem.class_of_op, strict=True)):
        for read in op.inputs:
            positions.setdefault(read.name, {}).setdefault(problem.phases[number], []).append(at)
    for value in problem.values:
        owned, viewed, made, between = (np.zeros(count + 1, np.int64) for _ in range(4))
        spans = {phase: np.zeros(count + 1, np.int64) for phase in range(PHASES)}
        for name in value.names:
            _add(owned if owns[name] else viewed, first[name], last[name])
            if value.made_by is not None:
                _add(made, first[name], first[name])
            used = positions.get(name, {})
            for phase, reading in used.items():
                _add(spans[phase], min(reading), max(reading))
            if 0 in used and 1 in used:
                _add(between, max(used[0]) + 1, min(used[1]) - 1)
        yield Lifetimes(
            _summed(owned),
            _summed(viewed),
            _summed(made),
            {phase: _summed(each) for phase, each in spans.items()},
            _summed(between),
        )


PHASES = 3
"""The forward, the backward, and what follows it."""


def _summed(changes: Ints) -> Ints:
    """The counts of which these are the changes from op to op."""
    return np.cumsum(changes)[:-1]


def _add(changes: Ints, first: int, last: int) -> None:
    """Counts one more from op ``first`` to op ``last``."""
    if first <= last:
        changes[first] += 1
        changes[last + 1] -= 1


def _spans_of_values(
    function: Function, donate: Sequence[str]
) -> tuple[dict[str, int], dict[str, int], dict[str, bool]]:
    """For each value: the op that makes it, the last op that reads it or a view of it, and whether it owns memory."""
    end = len(function.ops) - 1
    owner = owners(function, donations(function, donate) if donate else {})
    first = {value.name: 0 for value in function.inputs}
    last: dict[str, int] = {value.name: end for value in (*function.inputs, *function.outputs)}
    for at, op in enumerate(function.ops):
        first.update((value.name, at) for value in op.outputs)
        for value in (*op.inputs, *op.outputs):
            for name in (value.name, owner[value].name):
                last[name] = max(last.get(name, 0), at)
    for value in function.outputs:
        last[owner[value].name] = end
    return first, last, {value.name: owner[value] is value for value in function.values}
