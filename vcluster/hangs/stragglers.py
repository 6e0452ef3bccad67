"""The rank that the others wait for most often, by the times at which calls were found to have started and ended.

The clocks of the ranks may differ by seconds. A collective ends everywhere at nearly one moment, so the median distance
of a rank's ends from those of the others is the error of its clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from parallelism.arrays import Ints
from parallelism.display.quantities import seconds
from vcluster.hangs.matching import Matching
from vcluster.hangs.records import UNKNOWN_TIME

MOST_COLLECTIVES = 200
FEWEST_COLLECTIVES = 5
FAR_CLOCK_SECONDS = 0.5
"""A clock that is off by so much is told."""


class Straggler(NamedTuple):
    """The rank that came last most often."""

    rank: int
    times: int
    of: int
    """How many collectives were looked at; to `times` of them it came last."""
    late_seconds: float
    """The median of how long after the median of the members it came."""
    clocks: dict[int, float]
    """By rank, the seconds by which its clock is ahead, where they are many."""

    def __str__(self) -> str:
        line = (
            f"rank {self.rank} came last to {self.times} of the last {self.of} collectives that all ended, "
            f"{seconds(self.late_seconds)} after the others"
        )
        far = []
        for rank, ahead in self.clocks.items():
            far.append(f"rank {rank} {seconds(abs(ahead))} {'ahead' if ahead > 0 else 'behind'}")
        if far:
            line += f" (the clocks differ, and were set equal by the ends of calls: {', '.join(far[:8])})"
        return line


def straggler_of(matching: Matching, group: int) -> Straggler | None:
    """The rank that came last to more than half of a group's collectives; None if there is none, or no times are known."""
    records = matching.records
    ranks = [rank for rank in records.members(group) if rank in records.ranks]
    if len(ranks) < 2:
        return None
    shared = matching.collectives(ranks[0], group)[0]
    for rank in ranks[1:]:
        shared = np.intersect1d(shared, matching.collectives(rank, group)[0])
    begins, ends = _times(matching, group, ranks, shared[-MOST_COLLECTIVES:])
    known = ((begins != UNKNOWN_TIME) & (ends != UNKNOWN_TIME)).all(axis=0)
    if known.sum() < FEWEST_COLLECTIVES:
        return None
    zero = ends[0, known][0]
    begin = (begins[:, known] - zero) / 1e9
    end = (ends[:, known] - zero) / 1e9
    ahead = np.median(end - np.median(end, axis=0), axis=1)
    came = begin - ahead[:, None]
    last = came.argmax(axis=0)
    counts = np.bincount(last, minlength=len(ranks))
    place = int(counts.argmax())
    late = float(np.median(came[place] - np.median(came, axis=0)))
    if late <= 0 or 2 * counts[place] <= known.sum():
        return None
    clocks = {
        rank: float(off) for rank, off in zip(ranks, ahead, strict=True) if abs(off) >= FAR_CLOCK_SECONDS
    }
    return Straggler(ranks[place], int(counts[place]), int(known.sum()), late, clocks)


def _times(matching: Matching, group: int, ranks: list[int], numbers: Ints) -> tuple[Ints, Ints]:
    """For each rank and collective, when it began and when it was found to have ended."""
    begins = np.full((len(ranks), len(numbers)), UNKNOWN_TIME)
    ends = begins.copy()
    for row, rank in enumerate(ranks):
        its, places = matching.collectives(rank, group)
        at = places[np.searchsorted(its, numbers)]
        record = matching.records.ranks[rank]
        begins[row] = np.where(record.started[at] == UNKNOWN_TIME, record.created[at], record.started[at])
        ends[row] = record.completed[at]
    return begins, ends
