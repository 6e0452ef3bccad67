"""The patterns of phases that algorithms share: rounds, turns, swaps, one member with all others.

Positions are 0 to g-1; a message carries ``part`` of S over ``whole``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parallelism.algorithms.records import Phase


def around(g: int, distance: int, part: int, whole: int, times: int = 1) -> Phase:
    """A phase in which every position p sends to position p + distance."""
    here = np.arange(g)
    return Phase(times, here, (here + distance) % g, np.full(g, part), whole)


def turns(g: int, part: int, whole: int) -> Iterator[Phase]:
    """Every position sends to every other, the nearest first."""
    return (around(g, d, part, whole) for d in range(1, g))


def swap(g: int, distance: int, part: int, whole: int) -> Phase:
    """A phase in which positions at a distance exchange; g is a power of two."""
    here = np.arange(g)
    return Phase(1, here, here ^ distance, np.full(g, part), whole)


def with_root(g: int, root: int, away: bool, whole: int) -> Iterator[Phase]:
    """The root sends to one position after the other (``away``), or receives from them."""
    one = np.ones(1, np.int64)
    for d in range(1, g):
        here, there = one * root, one * ((root + d) % g)
        yield Phase(1, *((here, there) if away else (there, here)), one, whole)


def listed(moves: list[tuple[int, int, int]], whole: int, times: int = 1, piped: bool = False) -> Phase:
    """A phase of messages given one by one: (source, target, parts)."""
    ends = np.array(moves, np.int64).reshape(-1, 3)
    return Phase(times, ends[:, 0], ends[:, 1], ends[:, 2], whole, piped)
