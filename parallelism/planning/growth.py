"""The events of a stage of any number of blocks, from those of one block and of two.

The events of two blocks are those of one with segments inserted; those of n blocks have each segment n - 1 times,
because every block but the first and the last does the same between the same neighbours.  A forward or a backward has
one such segment.  The update of a stage has several: it does one thing for all parameters, then the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.planning.sheets import Unpriceable

Ints = npt.NDArray[np.int64]

WINDOWS = 64, 32, 16, 8
"""So many events after a segment must be those that followed without it.  Where the segment repeats the events before
it, few are enough; otherwise as many as can be."""


class Segment(NamedTuple):
    """Events that follow each other."""

    start: int
    end: int
    """Their places among those of two blocks."""
    one: int
    """The place of the first among those of one block; -1 for a segment that only two blocks have."""


def segments_between(one: Sequence[object], two: Sequence[object]) -> tuple[Segment, ...]:
    """The events of two blocks as segments, those of one block and those that repeat in turn.

    `Unpriceable` if they are not those of one block with segments inserted.
    """
    found, i, j = list[Segment](), 0, 0
    while True:
        begun = j
        while i < len(one) and j < len(two) and one[i] == two[j]:
            i, j = i + 1, j + 1
        found.append(Segment(begun, j, i - (j - begun)))
        if i == len(one) and j == len(two):
            return tuple(found)
        more = _inserted(one, two, i, j)
        found.append(Segment(j, j + more, -1))
        j += more


def _inserted(one: Sequence[object], two: Sequence[object], i: int, j: int) -> int:
    """The length of the segment that begins at ``two[j]``, where ``one`` goes on with ``one[i]``."""
    most = (len(two) - j) - (len(one) - i)
    if i == len(one):
        return most
    for window, again in ((WINDOWS[-1], True), *((window, False) for window in WINDOWS)):
        following = list(one[i:i + window])
        for length in range(1, most + 1):
            if (
                two[j + length] == following[0] and list(two[j + length:j + length + len(following)]) == following
                and (not again or list(two[j:j + length]) == list(two[max(j - length, 0):j]))
            ):
                return length
    raise Unpriceable("the events of a stage do not repeat with its blocks")


def spliced(own: Sequence[int], one: Sequence[int], two: Sequence[int]) -> list[tuple[int, bool]]:
    """The events of a stage with two blocks, from its ``own`` with one and from those of another with one and with two.

    Each segment that the other stage has more is put between the events between which it is there.  An event is given
    by a number, equal for equal events.  The result has places: of ``two`` if the flag is set, else of ``own``.

    `Unpriceable` if there is no such place, or more than one.
    """
    found, done = list[tuple[int, bool]](), 0
    mine, other = np.array(own, np.int64), np.array(one, np.int64)
    place = 0
    for start, end, first in segments_between(one, two):
        if first >= 0:
            place = first + end - start
            continue
        at = _between(mine, other, place)
        if at < done:
            raise Unpriceable("the blocks of a stage do other things than those of the stages between")
        found += [(i, False) for i in range(done, at)] + [(i, True) for i in range(start, end)]
        done = at
    return found + [(i, False) for i in range(done, len(own))]


def _between(own: Ints, one: Ints, place: int) -> int:
    """The place in ``own`` that has most of the same events before and after it as ``place`` has in ``one``."""
    same, alive = np.zeros((2, len(own) + 1), np.int64), np.ones((2, len(own) + 1), np.bool_)
    for i in range(min(WINDOWS[0], place, len(own))):
        alive[0, :i + 1] = False
        alive[0, i + 1:] &= own[:len(own) - i] == one[place - 1 - i]
        same[0] += alive[0]
    for i in range(min(WINDOWS[0], len(one) - place, len(own))):
        alive[1, len(own) - i:] = False
        alive[1, :len(own) - i] &= own[i:] == one[place + i]
        same[1] += alive[1]
    total = same.sum(axis=0)
    best = int(total.argmax())
    if total[best] < WINDOWS[-1] or np.count_nonzero(total == total[best]) > 1:
        raise Unpriceable("the place of a block in a stage is not known")
    return best


class Growth(NamedTuple):
    """The changes of memory in each segment, for any number of blocks."""

    parts: tuple[tuple[bool, int, int, Ints, Ints], ...]
    """Of each segment: whether it repeats; the largest sum of the first changes, and the sum of all, of one block; the
    changes of one block; and those that every further block adds to them, which are none if it repeats."""

    @classmethod
    def of(cls, segments: Sequence[Segment], one: Ints, two: Ints) -> Growth:
        """``one`` and ``two`` have the changes of one block and of two, in order; 0 stands for no change.  What a
        segment that does not repeat changes is affine in the blocks."""
        parts = []
        for start, end, first in segments:
            if start == end:
                continue
            again = first < 0
            changes = two[start:end] if again else one[first:first + end - start]
            more = changes[:0] if again else two[start:end] - changes
            sums = np.cumsum(changes)
            parts.append((again, int(sums.max()), int(sums[-1]), changes, more if more.any() else changes[:0]))
        return cls(tuple(parts))

    def peak(self, blocks: int) -> tuple[int, int]:
        """The largest sum of the first changes, and the sum of all, for so many blocks."""
        level, most = 0, 0
        for again, highest, change, changes, more in self.parts:
            times = blocks - 1 if again else 1
            if len(more):
                sums = np.cumsum(changes + (blocks - 1) * more)
                highest, change = int(sums.max()), int(sums[-1])
            if times:
                most = max(most, level + highest + max(0, (times - 1) * change))
                level += times * change
        return most, level
