"""Conflicts: values that have one layout and are needed in another, and the origin of both layouts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.core.printing import names
from parallelism.layouts.propagation.placement import Placement, dims_of, moved_dim
from parallelism.layouts.propagation.relations import relation
from parallelism.sharding import TensorSharding


class Origin(NamedTuple):
    """The origin of the axes of a dim."""

    value: str
    """The name of the value whose layout was given."""
    dim: int
    """The dim of that value."""
    ops: tuple[Op, ...]
    """The ops through which the axes were propagated from there, in order."""

    def __str__(self) -> str:
        through = ", ".join(f"{op.kind} {names(op.outputs)}" for op in self.ops)
        return f"%{self.value}, dim {self.dim}{', through ' * bool(through)}{through}"


@dataclass(frozen=True)
class Conflict:
    """A value that has one layout and is needed in another, so that it is resharded at an op."""

    op: Op
    """The op that needs the value, or computes it."""
    value: Value
    lies: TensorSharding
    """The layout that the value has."""
    wanted: TensorSharding
    """The layout that is needed."""
    dim: int
    """The first dim that differs in more than a further split."""
    lies_from: Origin | None
    """The origin of the layout; None if the op that computes the value determines it."""
    wanted_from: Origin | None
    """The origin of the wanted layout; None if the op needs this dim whole."""

    def __str__(self) -> str:
        wanted = f"from {self.wanted_from}" if self.wanted_from else f"because it needs dim {self.dim} whole"
        if self.value in self.op.outputs:
            return (
                f"%{self.value.name}: {self.op.kind} computes it as {self.lies.short()}; it must have layout "
                f"{self.wanted.short()}, {wanted}"
            )
        lies = f", from {self.lies_from}" if self.lies_from else ", as it is computed"
        return (
            f"%{self.value.name} has layout {self.lies.short()}{lies}; {self.op.kind} needs it as "
            f"{self.wanted.short()}, {wanted}"
        )


class Paths:
    """The propagation of axes from dim to dim, kept to explain conflicts."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.before: dict[tuple[str, int], tuple[int, str, int]] = {}
        """For a value and its dim: the number of the op at which it got its axes, and from which value and dim."""

    def origin(self, name: str, dim: int) -> Origin:
        """The origin of the axes of a dim."""
        numbers: list[int] = []
        while (name, dim) in self.before:
            number, name, dim = self.before[name, dim]
            numbers.append(number)
        return Origin(name, dim, tuple(self.function.ops[number] for number in reversed(numbers)))

    def conflicts(
        self, op: Op, layouts: Mapping[str, TensorSharding], placed: Placement
    ) -> Iterator[Conflict]:
        """The conflicts at one op, given the layouts of its values and its placement."""
        for value, wanted in zip(op.inputs, placed.inputs, strict=True):
            lies = layouts[value.name]
            if (dim := moved_dim(lies, wanted)) is not None:
                yield Conflict(
                    op,
                    value,
                    lies,
                    wanted,
                    dim,
                    self._of(value.name, dim, lies),
                    self._wish(op, value, layouts, placed, dim),
                )
        for value, computed in zip(op.outputs, placed.outputs, strict=True):
            wanted = layouts[value.name]
            if (dim := moved_dim(computed, wanted)) is not None:
                yield Conflict(op, value, computed, wanted, dim, None, self._of(value.name, dim, wanted))

    def _of(self, name: str, dim: int, layout: TensorSharding) -> Origin | None:
        origin = self.origin(name, dim)
        return origin if dims_of(layout)[dim] or not origin.ops else None

    def _wish(
        self, op: Op, value: Value, layouts: Mapping[str, TensorSharding], placed: Placement, dim: int
    ) -> Origin | None:
        """The origin of a wanted layout.

        It is the dim of another value with the same letter and these axes, or a dim with another letter that took the
        axis.
        """
        rule = relation(op.kind, op.types, op.attributes)
        place = op.inputs.index(value)
        letter = rule.inputs[place][dim]
        axes = dims_of(placed.inputs[place])[dim]
        lost = set(dims_of(layouts[value.name])[dim]) - set(axes)
        sides = [
            *zip(op.inputs, rule.inputs, placed.inputs, strict=True),
            *zip(op.outputs, rule.outputs, placed.outputs, strict=True),
        ]
        for other, letters, wanted in sides:
            for d, now in enumerate(dims_of(layouts[other.name])):
                same = axes and letters[d] == letter and other != value and now[: len(axes)] == axes
                instead = letters[d] != letter and not lost.isdisjoint(now) and dims_of(wanted)[d] == now
                if same or instead:
                    return self.origin(other.name, d)
        return None
