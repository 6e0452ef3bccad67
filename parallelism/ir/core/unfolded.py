"""Extents that follow from numbers, but by no formula: they stay open until all of their symbols are numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from parallelism.ir.core.extents import Extent, OpenCall, atom_of, names_in, specialized


class Unfolded(Protocol):
    """A number that follows from others, but by no expression."""

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols for which it needs numbers."""

    def at(self, numbers: Mapping[str, Extent]) -> int:
        """The number, by numbers for all symbols."""


@dataclass(frozen=True)
class Peak(OpenCall):
    """An `Unfolded` number, for which some symbols are numbers or other expressions already."""

    of: Unfolded
    known: tuple[tuple[str, Extent], ...] = ()

    @property
    def symbols(self) -> frozenset[str]:
        open_ = self.of.symbols - {name for name, _ in self.known}
        return open_.union(*(names_in(extent) for _, extent in self.known))

    def specialize(self, numbers: Mapping[str, Extent]) -> Extent:
        """It with other numbers in place of symbols."""
        known = {name: specialized(extent, numbers) for name, extent in self.known}
        known |= {name: numbers[name] for name in self.of.symbols & numbers.keys() if name not in known}
        found = Peak(self.name, (), self.of, tuple(sorted(known.items())))
        return atom_of(found) if found.symbols else self.of.at(known)

    def __str__(self) -> str:
        return (
            f"{self.name}({', '.join([str(self.of), *(f'{name}={extent}' for name, extent in self.known)])})"
        )


def unfolded(number: Unfolded) -> Extent:
    """The number as an extent, which is computed when numbers stand for all of its symbols."""
    return atom_of(Peak("peak", (), number))
