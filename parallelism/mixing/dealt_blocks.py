"""How many blocks each stage has, where stages are not equally fast: all ways whose slowest stage is not too slow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Bools, Floats


class Dealt(NamedTuple):
    """Ways to deal blocks to stages."""

    counts: list[tuple[int, ...]]
    """The blocks of each stage."""
    others: float
    """A lower bound of the loads of all other ways; infinite if there are none."""


def least_load(loads: Floats, blocks: int) -> float:
    """The load of the stage with most load, of the way in which that is least; infinite if there is no way.

    ``loads[stage, count - 1]`` is that of a stage with so many blocks.

    >>> least_load(np.array([[1.0, 2.0, 3.0], [3.0, 6.0, 9.0]]), 4)
    3.0
    """
    values = _values(loads)
    first = bisect_right(values, False, key=lambda value: _ways(loads <= value, blocks) > 0)
    return values[first] if first < len(values) else np.inf


def dealt(loads: Floats, blocks: int, most: int, limit: float = np.inf) -> Dealt:
    """The ways to deal blocks to stages in which no stage has more load than some bound.

    The bound is the highest below ``limit`` at which there are at most ``most`` ways; if there are more at the lowest,
    the first of those are taken.

    >>> dealt(np.array([[1.0, 2.0, 3.0], [3.0, 6.0, 9.0]]), 4, most=2)
    Dealt(counts=[(2, 2), (3, 1)], others=9.0)
    """
    values = [value for value in _values(loads) if value < limit]
    first = bisect_right(values, False, key=lambda value: _ways(loads <= value, blocks) > 0)
    if first == len(values):
        return Dealt([], np.inf if np.isinf(limit) else limit)
    last = bisect_right(values, False, key=lambda value: _ways(loads <= value, blocks) > most) - 1
    chosen = values[max(first, last)]
    found = _first_ways(loads <= chosen, blocks, most)
    if last < first:
        return Dealt(found, chosen)
    above = values[last + 1] if last + 1 < len(values) else limit
    return Dealt(found, above)


def _values(loads: Floats) -> list[float]:
    """The different loads that are finite, ascending."""
    found: list[float] = np.unique(loads[np.isfinite(loads)]).tolist()
    return found


def _ways(allowed: Bools, blocks: int) -> float:
    """How many ways there are to deal all blocks."""
    return _table(allowed, blocks)[0][blocks]


def _table(allowed: Bools, blocks: int) -> Sequence[Sequence[float]]:
    """``[stage][left]``: how many ways there are to deal so many blocks to the stages from this one on."""
    ways = np.zeros(blocks + 1)
    ways[0] = 1
    table = [ways]
    for row in allowed[::-1]:
        counts = np.concatenate([[0.0], row])[: blocks + 1]
        ways = np.convolve(ways, counts)[: blocks + 1]
        table.append(ways)
    return [each.tolist() for each in table[::-1]]


def _first_ways(allowed: Bools, blocks: int, most: int) -> list[tuple[int, ...]]:
    table = _table(allowed, blocks)
    found: list[tuple[int, ...]] = []
    for counts in _each(allowed, table, (), blocks):
        found.append(counts)
        if len(found) == most:
            break
    return found


def _each(
    allowed: Bools, table: Sequence[Sequence[float]], counts: tuple[int, ...], left: int
) -> Iterator[tuple[int, ...]]:
    """All ways that begin with these counts, with so many blocks left."""
    stage = len(counts)
    if stage == len(allowed):
        yield counts
        return
    for count in (np.flatnonzero(allowed[stage, :left]) + 1).tolist():
        if table[stage + 1][left - count]:
            yield from _each(allowed, table, (*counts, count), left - count)
