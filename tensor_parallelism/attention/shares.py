"""The rows of the sequence and the heads that each device of a group has, and the tiles of their scores.

In what order rows are dealt is said in `parallelism.mesh.zigzag`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from parallelism.kernels import Mask
from parallelism.mesh.uneven import starts
from parallelism.mesh.zigzag import Runs as Runs, runs_of as runs_of, zigzag_order as zigzag_order


class Tile(NamedTuple):
    """Rows and columns that are computed together, as local slices."""

    run: int
    """The number of the run that the rows belong to."""
    rows: slice
    columns: slice
    masked: bool
    """Whether some row does not attend to some column."""


@lru_cache(maxsize=1024)
def tiles(rows: Runs, columns: Runs, mask: Mask) -> tuple[Tile, ...]:
    """The tiles of the scores of some rows and columns; those that are masked completely are left out."""
    found = []
    for number, run, row in _placed(rows):
        for _, other, column in _placed(columns):
            if not mask.hides_all(run, other):
                found.append(Tile(number, row, column, mask.hides_some(run, other)))
    return tuple(found)


def _placed(runs: Runs) -> list[tuple[int, range, slice]]:
    places = starts([len(run) for run in runs])
    return [(i, run, slice(places[i], places[i + 1])) for i, run in enumerate(runs)]


class Heads(NamedTuple):
    """The query heads of one device and the key-value heads that these attend with, as ranges."""

    queries: range
    keys: range
    serves: tuple[int, ...]
    """The key-value head of each query head, counted from the first of `keys`."""


def heads_of(heads: int, kv_heads: int, factors: Sequence[int]) -> tuple[Heads, ...]:
    """The heads of each position in a group over which the query heads are split.

    ``heads / kv_heads`` consecutive query heads share a key-value head, which several positions may need.

    >>> [(list(one.queries), list(one.keys)) for one in heads_of(6, 2, (4,))]
    [([0, 1], [0]), ([2, 3], [0, 1]), ([4], [1]), ([5], [1])]
    """
    share = heads // kv_heads if kv_heads else 1
    by_position = []
    for (run,) in runs_of(heads, factors):
        keys = range(run[0] // share, run[-1] // share + 1) if run else range(0)
        by_position.append(Heads(run, keys, tuple(head // share - keys.start for head in run)))
    return tuple(by_position)
