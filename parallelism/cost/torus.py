"""Collectives that use every link of a ring or torus at once.

A buffer is cut into as many parts as each rank has links to neighbours: two for each of the D dims with more than one
rank.  A reduce_scatter takes each part through all dims, one after the other, round the rings along them; every part
begins with another dim or goes the other way round, so at any time each is on links of its own.  An all_gather is the
same backwards, an all_reduce both.  Over dims of equal extents n, g = n**D ranks in all, of S bytes,

    reduce_scatter, all_gather      D (n-1) a + (g-1)/g S b / 2D
    all_reduce                      twice that

Sources: Chan, Heimlich, Purkayastha and van de Geijn, *Collective communication: theory, practice, and experience*
(2007), bucket algorithms on meshes; Jain and Sabharwal, *Optimal bucket algorithms for large MPI collectives on torus
interconnects* (2010); Austin et al., *How to Scale Your Model* (2025), for TPUs.
"""

from collections.abc import Iterator
from math import prod

import numpy as np

from parallelism.algorithms import Phase, Phases
from parallelism.arrays import Ints, distinct
from parallelism.hardware import Hardware

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def positions_on_torus(hardware: Hardware, group: tuple[int, ...]) -> Ints | None:
    """The positions of a group as a grid, where it fills whole rings of one level; None where it does not.

    The grid has an axis for each dim of the torus that has more than one rank of the group.
    """
    if len(group) == 1 or all(link.shape not in ("ring", "torus") for link in hardware.links):
        return None
    places = np.array([hardware.place(rank) for rank in group], np.int64)
    level = max((hardware.level(group[0], rank) for rank in group[1:]), default=0)
    link, inside = hardware.links[level], hardware.inside(level)
    if link.shape not in ("ring", "torus"):
        return None
    coordinates = np.array(np.unravel_index(places // inside % link.units, link.extents))
    spread = [len(distinct(along)) for along in coordinates]
    whole = all(n in (1, extent) for n, extent in zip(spread, link.extents, strict=True))
    if not whole or len(distinct(places // inside)) < len(group) or prod(spread) != len(group):
        return None
    return np.lexsort(coordinates[::-1]).reshape([n for n in spread if n > 1])


def torus_phases(collective: str, grid: Ints) -> Phases:
    """The phases of a collective over a grid of positions, neighbours next to each other."""
    there = tuple(_reduce_scatter(grid))
    return there + there if collective == "all_reduce" else there  # an all_gather takes as long, and as much


def _reduce_scatter(grid: Ints) -> Iterator[Phase]:
    dims, size = grid.ndim, grid.size
    for stage in range(dims):
        moving = []  # of each part: the steps round its ring, to whom, how much
        for first in range(dims):
            through = [grid.shape[(first + earlier) % dims] for earlier in range(stage + 1)]
            for direction in (1, -1):
                to = np.roll(grid, -direction, (first + stage) % dims)
                moving.append((through[-1] - 1, to, size // prod(through)))
        done = 0
        for steps in sorted({steps for steps, _, _ in moving}):
            still = [(to, part) for least, to, part in moving if least >= steps]
            yield Phase(
                steps - done,
                np.tile(grid.ravel(), len(still)),
                np.concatenate([to.ravel() for to, _ in still]),
                np.repeat([part for _, part in still], size),
                2 * dims * size,
            )
            done = steps
