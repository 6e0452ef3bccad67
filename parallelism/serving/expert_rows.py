"""What a step asks of experts: the rows that its tokens have there, and the weights of the experts that have one.

A program has room for as many rows of every expert, at least one, because nobody knows before which expert a token takes.
Software that serves sorts the rows by experts, and its products read the weights of those that have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from parallelism.arrays import Floats
from parallelism.ir.core.extents import is_rounded
from parallelism.models import Experts
from parallelism.symbolic.events import Event, Formulas

MANY = 2**12
"""So many tokens for each expert that the rows of all are whole."""


@dataclass(frozen=True)
class ExpertRows:
    """The numbers of events of a stage whose experts' rows are those that there are.

    ``sharing`` replicas, each with tokens of its own, share the experts.  Every choice of experts is as likely.
    """

    experts: Experts
    sharing: int
    tokens: str
    """The name of the symbol for the tokens of a replica."""

    def reached(self, tokens: int) -> float:
        """The part of the experts that at least one token takes, in the mean: of so many tokens of each replica."""
        missed = 1.0 - self.experts.chosen / self.experts.count
        return 1.0 - missed ** (tokens * self.sharing)

    def numbers(self, events: Sequence[Event], formulas: Formulas, numbers: Mapping[str, int]) -> Floats:
        """All extents of the events of a step with these numbers.

        Without rounding, those of rows grow evenly from those of no token, which are the weights.
        """
        tokens, many = numbers[self.tokens], self.experts.count * MANY
        found, none, large = (
            formulas.at({**numbers, self.tokens: count}).astype(np.float64) for count in (tokens, 0, many)
        )
        rows = (large - none) * (tokens / many)
        reached, end = self.reached(tokens), 0
        for event in events:
            own = slice(end, end := end + len(event.extents))
            rounded = [is_rounded(extent) for extent in event.extents]
            if not any(rounded):
                continue
            found[own] = none[own] * reached + rows[own]
            if event.kind.extents:
                shape = slice(end - event.kind.extents, end)
                found[shape] = self._shape(none[shape], rows[shape], rounded[-event.kind.extents :], reached)
        return found

    @staticmethod
    def _shape(none: Floats, rows: Floats, rounded: list[bool], reached: float) -> Floats:
        """The shape of a product: experts that have rows, and as many rows of each."""
        experts = max(round(none[0] * reached), 1)
        found = none.copy()
        for dim, is_of_rows in enumerate(rounded):
            if is_of_rows:
                found[dim] = max(ceil(rows[dim] * none[0] / experts), 1)
        found[0] = experts
        return found
