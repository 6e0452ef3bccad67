"""Mistakes in reductions: how often each rank's element is in each sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallelism.operation import ranks_in_words
from vcluster.check.cases import Array
from vcluster.check.results import Mistake, Results, first_of, is_one_block, shift


def _other_block(results: Results) -> str:
    """Of reductions that are cut into blocks: whether each rank has the block of another one."""
    size = results.size
    if not results.case.kind.cuts:
        return ""
    by = shift(results)
    if by:
        off = by if by <= size // 2 else by - size
        other = f"j {'+' if off > 0 else '-'} {abs(off)}"
        if abs(off) == 1:
            return f"off by one: rank j has block {other}, and should have block j"
        return f"rank j has the block of rank {other}"
    return "all ranks have the same block" if is_one_block(results) else ""


def _not_brought_back(results: Results) -> str:
    right = sorted(set(results.arrays) - set(results.wrong))
    for rank in results.wrong:
        own = np.arange(results.size) == rank
        if not right or np.any(results.counts[rank] != own):
            return ""
    return f"only {ranks_in_words(right)} has the sum: it does not come back to the others"


def _of_counts(results: Results) -> str:
    """The mistake, if all elements of a rank have the same contributions."""
    rows = {}
    for rank in results.wrong:
        counts = results.counts[rank]
        if not len(counts) or np.any(counts != counts[0]):
            return ""
        rows[rank] = counts[0]
    return first_of(_OF_ROWS, _Rows(rows, results.size, results.received))


def _second_half(results: Results) -> str:
    """Of an algorithm in two halves, whose pieces are summed in the first one and joined in the second."""
    size, some = results.size, results.wrong[0]
    shares = [float(np.mean(np.all(results.counts[rank] == 1, axis=1))) for rank in results.wrong]
    if all(shares):
        if max(shares) < 2 / size + 1e-9:
            return (
                "each rank has the whole sum of one piece only: the second half, which brings the pieces to all "
                "ranks, is missing"
            )
        return (
            "some pieces are complete and some are not: the second half stops too early, or begins with the wrong "
            "piece (off by one)"
        )
    if results.received[some] >= size:
        return (
            "the second half begins with the wrong piece (off by one): pieces that are not complete take the place "
            "of others"
        )
    return "no piece is complete: the piece that is sent, or the one that is added to, is off by one"


OF_SUMS: tuple[Callable[[Results], str], ...] = (
    _other_block,
    Mistake[Results](
        lambda results: not results.counts,
        "elements of different places are added to each other: sender and receiver mean different pieces",
    ),
    _not_brought_back,
    _of_counts,
    Mistake[Results](
        lambda results: any(np.any(results.counts[rank] > 1) for rank in results.wrong),
        "parts that are summed already are added once more: the second half of the algorithm adds where it should copy "
        "(sum in place of copy)",
    ),
    _second_half,
)


# -- ... if all elements of a rank have the same contributions ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rows:
    """By rank, how often it has the element of each source."""

    rows: dict[int, Array]
    size: int
    received: Sequence[int]

    @property
    def some(self) -> int:
        """A rank whose result is wrong."""
        return next(iter(self.rows))

    @property
    def repeated(self) -> bool:
        """Whether an element is there several times."""
        return any(row.max() > 1 for row in self.rows.values())

    @property
    def alike(self) -> bool:
        """Whether all ranks have the same of themselves and of their neighbours."""
        return len({tuple(np.roll(row, -rank).tolist()) for rank, row in self.rows.items()}) == 1

    def each(self, holds: Callable[[int, Array], Any]) -> bool:
        """Whether something holds of all ranks: of how often they have their own elements, and those of others."""
        return all(holds(int(row[rank]), np.delete(row, rank)) for rank, row in self.rows.items())


def _extreme(found: _Rows) -> str:
    """Whether all have the array of the last rank, whose elements are the largest ones, or that of the first."""
    held = {tuple(row.tolist()) for row in found.rows.values()}
    if len(found.rows) < found.size or found.size < 3 or len(held) != 1:
        return ""
    (counts,) = held
    if sum(counts) != 1 or max(counts) != 1:
        return ""
    source = counts.index(1)
    if source not in (0, found.size - 1):
        return ""
    which, name = ("smallest", "minimum") if source == 0 else ("largest", "maximum")
    held_by_all = f"all ranks have the array of rank {source}, which has the {which} elements"
    return f"{held_by_all}: a {name}, or a copy, stands for the sum"


def _summed_again(found: _Rows) -> str:
    times = {number for row in found.rows.values() for number in row.tolist()}
    return (
        f"every array is counted {times.pop()} times: the sum is summed once more" if len(times) == 1 else ""
    )


def _own_twice(found: _Rows) -> str:
    if not found.each(lambda own, others: own == 2 and np.all(others == 1)):
        return ""
    came = found.received[found.some]
    if came >= found.size:
        return (
            "the own array is counted twice: one step too many, in which it comes back to its rank (a rank receives "
            f"{came} messages)"
        )
    return "the own array is counted twice: it is in the start value, and is added again"


def _one_travels(found: _Rows) -> str:
    """Whether the array of one rank, and of no other, comes to all others, and comes to them again and again."""
    others = {rank: set(np.flatnonzero(row).tolist()) - {rank} for rank, row in found.rows.items()}
    came = set().union(*others.values())
    if len(came) != 1 or found.size < 3 or len(found.rows) < found.size or not found.repeated:
        return ""
    (source,) = came
    return (
        f"only the array of rank {source} travels: each other rank sends on what has just arrived, before it has sent "
        "its own array"
    )


def _one_twice(found: _Rows) -> str:
    """Whether all arrays have come, and one of them is counted twice."""
    if found.size < 4:  # so few ranks that pass on their running totals count as often
        return ""
    twice = {rank: np.flatnonzero(row == 2).tolist() for rank, row in found.rows.items()}
    if any(len(twice[rank]) != 1 or row.sum() != found.size + 1 for rank, row in found.rows.items()):
        return ""
    rank, (source,) = next(iter(twice.items()))
    return f"all arrays come, and one is added twice: rank {rank} has that of rank {source} twice"


def _missing(found: _Rows) -> str:
    missing = {rank: np.flatnonzero(row == 0).tolist() for rank, row in found.rows.items()}
    some = max(missing, key=lambda rank: len(missing[rank]) > 0)  # the first one that lacks an array
    if all(len(each) == 1 for each in missing.values()):
        source = missing[some][0]
        if all(each == [source] for each in missing.values()):
            return f"the array of rank {source} is in no result: off by one in a range of ranks"
        if found.alike:
            return (
                f"off by one: a step too few. Rank {some} lacks the array of rank {source}, the one that has the "
                "longest way"
            )
    if found.alike and np.count_nonzero(found.rows[some]) == 2:
        return (
            "each rank has only its own array and that of a neighbour: there is one step, and more are needed"
        )
    return f"arrays are missing: rank {some} lacks those of {ranks_in_words(missing[some])}, the steps end too early"


_OF_ROWS: tuple[Callable[[_Rows], str], ...] = (
    Mistake[_Rows](
        lambda found: found.each(lambda own, others: own == 0 and not others.any()),
        "the result is still zero: nothing is added to it",
    ),
    Mistake[_Rows](
        lambda found: found.each(lambda own, others: own == 1 and not others.any()),
        "each rank returns its own array: what it receives is not added, or nothing is received",
    ),
    Mistake[_Rows](
        lambda found: found.each(lambda own, others: own == 0 and np.all(others == 1)),
        "the own array is forgotten: the sum has all others only",
    ),
    _extreme,
    Mistake[_Rows](
        lambda found: found.each(lambda own, others: own + others.sum() == 1),
        "a copy stands for a sum: what arrives replaces the value, in place of being added to it",
    ),
    _summed_again,
    _own_twice,
    Mistake[_Rows](
        lambda found: (
            found.repeated
            and found.each(lambda own, others: own >= others.max() and np.all(others == others[0]))
        ),
        "the own array is added in every step, in place of what arrives",
    ),
    _one_travels,
    Mistake[_Rows](
        lambda found: found.repeated and all(np.count_nonzero(row) <= 2 for row in found.rows.values()),
        "the own array is sent in every step, and the same array arrives again and again",
    ),
    _one_twice,
    Mistake[_Rows](
        lambda found: found.repeated,
        "some arrays are counted several times: a rank passes on its running total, in place of what has just arrived",
    ),
    _missing,
)
