"""The results of a collective beside those that there should be, and lists of the mistakes that explain them.

A mistake is a function that says its sentence if it explains all wrong results, and an empty text otherwise.  They stand
in lists, in the order in which they are tried: the first that explains the results is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from vcluster.check.cases import Array, Case
from vcluster.check.contributions import digits_of

Found = TypeVar("Found")


@dataclass(frozen=True)
class Mistake(Generic[Found]):
    """A mistake whose sentence is always the same."""

    explains: Callable[[Found], Any]
    sentence: str

    def __call__(self, found: Found) -> str:
        return self.sentence if self.explains(found) else ""


def first_of(mistakes: Iterable[Callable[[Found], str]], found: Found) -> str:
    """The sentence of the first mistake that explains what was found; empty if none does."""
    return next(filter(None, (mistake(found) for mistake in mistakes)), "")


@dataclass(frozen=True, eq=False)
class Results:
    """The results of the ranks beside those that are right."""

    case: Case
    outputs: Sequence[Any]
    wrong: Sequence[int]
    """The ranks whose results are wrong."""
    received: Sequence[int]
    """The number of messages, by rank."""
    all_rounded: bool

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.case.size

    @cached_property
    def arrays(self) -> dict[int, Array]:
        """The results of the ranks that should have one."""
        return {rank: np.asarray(self.outputs[rank]) for rank in self.due}

    @cached_property
    def due(self) -> list[int]:
        """The ranks that should have a result."""
        return [rank for rank in range(self.size) if self.case.expected[rank] is not None]

    @cached_property
    def held(self) -> dict[int, Array]:
        """The digits of the results; empty if one is no sum of elements."""
        digits = {rank: digits_of(array, self.size) for rank, array in self.arrays.items()}
        found = {rank: each for rank, each in digits.items() if each is not None}
        return found if len(found) == len(digits) else {}

    @cached_property
    def counts(self) -> dict[int, Array]:
        """By element and source, how often it is in a sum; empty if elements of different places are in one."""
        counts = {}
        for rank, held in self.held.items():
            numbers = digits_of(np.asarray(self.case.expected[rank]), self.size)
            assert numbers is not None
            numbers = np.maximum(numbers, 1)
            if np.any(held % numbers):
                return {}
            counts[rank] = (held // numbers).reshape(-1, self.size)
        return counts

    @cached_property
    def origin(self) -> dict[int, list[int]]:
        """Of what is joined: the source of each element; -1 where there is none."""
        sources = {}
        for rank in self.wrong:
            rows = self.held[rank].reshape(-1, self.size)
            sources[rank] = np.where(rows.any(axis=1), rows.argmax(axis=1), -1).tolist()
        return sources

    @cached_property
    def blocks(self) -> dict[int, list[int]]:
        """Of what is joined: the source of each block; -2 for one that is mixed."""
        blocks = {}
        for rank, sources in self.origin.items():
            blocks[rank] = [_one_of(part) for part in np.array_split(sources, self.size)]
        return blocks

    def joined_from(self, sources: Callable[[int], Sequence[int]]) -> bool:
        """Whether the blocks of each rank are of these sources."""
        return all(blocks == list(sources(rank)) for rank, blocks in self.blocks.items())


def _one_of(part: Array) -> int:
    return int(part[0]) if len(part) and np.all(part == part[0]) else -2


def is_one_block(results: Results) -> bool:
    """Whether all ranks have the same block."""
    first, *others = results.arrays.values()
    return results.case.kind.cuts and all(np.array_equal(array, first) for array in others)


def shift(results: Results) -> int:
    """By how many ranks all blocks are shifted; 0 if they are not."""
    for by in range(1, results.size):
        others = {rank: results.case.expected[(rank + by) % results.size] for rank in results.arrays}
        if all(np.array_equal(array, others[rank]) for rank, array in results.arrays.items()):
            return by
    return 0
