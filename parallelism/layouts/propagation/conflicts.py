"""Where two wishes about one value meet, and where each comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from parallelism.ir.core import Function, Op, Value
from parallelism.layouts.propagation.placement import Placement, dims_of
from parallelism.layouts.propagation.relations import relation
from parallelism.sharding import TensorSharding


class Origin(NamedTuple):
    """What a dim has its axes from: the value that was given them, and the ops from there to here."""

    value: str
    dim: int
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        through = [f"{op.kind} {', '.join(f'%{value.name}' for value in op.outputs)}" for op in self.ops]
        return f"%{self.value}, dim {self.dim}{', through ' if through else ''}{', '.join(through)}"


@dataclass(frozen=True)
class Conflict:
    """A value that lies in one way and is needed in another: it is laid out anew there."""

    op: Op
    """The op that needs it, or makes it."""
    value: Value
    lies: TensorSharding
    wanted: TensorSharding
    dim: int
    """The first dim that differs in more than being cut further."""
    lies_from: Origin | None
    """Where the layout comes from; None: it is how an op makes it."""
    wanted_from: Origin | None
    """Where the wish comes from; None: the op sees this dim whole."""

    def __str__(self) -> str:
        wanted = f"from {self.wanted_from}" if self.wanted_from else f"it sees dim {self.dim} whole"
        if self.value in self.op.outputs:
            return (f"%{self.value.name}: {self.op.kind} makes it as {self.lies.short()}; it is to lie as "
                    f"{self.wanted.short()}, {wanted}")
        lies = f", from {self.lies_from}" if self.lies_from else ", as it is made"
        return (f"%{self.value.name} lies as {self.lies.short()}{lies}; {self.op.kind} needs it as "
                f"{self.wanted.short()}, {wanted}")


class Paths:
    """From where every dim has its axes."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._before: dict[tuple[str, int], tuple[int, str, int]] = {}

    def came(self, value: Value, dim: int, number: int, source: Value, place: int) -> None:
        """A dim took its axes, at an op, from a dim of another value."""
        self._before[value.name, dim] = number, source.name, place

    def origin(self, name: str, dim: int) -> Origin:
        """The value at which it began, and the ops on the way."""
        numbers: list[int] = []
        while (name, dim) in self._before:
            number, name, dim = self._before[name, dim]
            numbers.append(number)
        return Origin(name, dim, tuple(self.function.ops[number] for number in reversed(numbers)))

    def conflicts(
        self, op: Op, layouts: Mapping[str, TensorSharding], found: Placement
    ) -> Iterator[Conflict]:
        """Those of one op, given how its values lie and how it is placed."""
        for value, wanted in zip(op.inputs, found.inputs, strict=True):
            dim = _differing(layouts[value.name], wanted)
            if dim is not None:
                lies = layouts[value.name]
                yield Conflict(op, value, lies, wanted, dim, self._of(value.name, dim, lies),
                               self._wish(op, value, layouts, found, dim))
        for value, made in zip(op.outputs, found.outputs, strict=True):
            dim = _differing(made, layouts[value.name])
            if dim is not None:
                yield Conflict(op, value, made, layouts[value.name], dim, None,
                               self._of(value.name, dim, layouts[value.name]))

    def _of(self, name: str, dim: int, layout: TensorSharding) -> Origin | None:
        origin = self.origin(name, dim)
        return origin if dims_of(layout)[dim] or not origin.ops else None

    def _wish(
        self, op: Op, value: Value, layouts: Mapping[str, TensorSharding], found: Placement, dim: int
    ) -> Origin | None:
        """Whose wish it is: another value's with the letter split so, or with another letter split over the axis."""
        of = relation(op.kind, op.types, op.attributes)
        place = op.inputs.index(value)
        letter, axes = of.inputs[place][dim], dims_of(found.inputs[place])[dim]
        lost = set(dims_of(layouts[value.name])[dim]) - set(axes)
        sides = [*zip(op.inputs, of.inputs, found.inputs, strict=True),
                 *zip(op.outputs, of.outputs, found.outputs, strict=True)]
        for other, letters, wanted in sides:
            for d, now in enumerate(dims_of(layouts[other.name])):
                same = axes and letters[d] == letter and other != value and now[:len(axes)] == axes
                instead = letters[d] != letter and not lost.isdisjoint(now) and dims_of(wanted)[d] == now
                if same or instead:
                    return self.origin(other.name, d)
        return None


def _differing(lies: TensorSharding, wanted: TensorSharding) -> int | None:
    pairs = enumerate(zip(dims_of(lies), dims_of(wanted), strict=True))
    return next((d for d, (old, new) in pairs if old != new[:len(old)]), None)
