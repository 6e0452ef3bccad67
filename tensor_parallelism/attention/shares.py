"""The rows of the sequence and the heads that each device of a group has.

Rows are split as any dim is, as by `numpy.array_split`.  In this order the last device has the most work in causal
attention.  In *zigzag* order each device has a piece near the front and the piece at the same distance from the end.
Twelve rows on three devices:

    in order    0 1 2 3     4 5 6 7     8 9 10 11
    zigzag      0 1 10 11   2 3 8 9     4 5 6 7

If a device has an odd number of rows, its front piece is the longer one.  If each device has at least as many rows as
there are devices, their work differs by less than one block of rows and columns; with equal pieces it is equal.
Brandon et al., *Striped Attention*, 2023, arXiv:2311.09431, section 2, describe the cost of the plain order.  Llama 3
splits its context as a zigzag (Grattafiori et al., *The Llama 3 Herd of Models*, 2024, arXiv:2407.21783, section
3.3.2).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism.kernels import Mask
from parallelism.mesh import split_sizes
from parallelism.mesh.uneven import starts

Runs = tuple[range, ...]
"""The places in the sequence of the rows of one device, as consecutive ranges."""


def runs_of(extent: int, factors: Sequence[int], *, zigzag: bool = False) -> tuple[Runs, ...]:
    """The rows of each position in a group, which is split by each factor in turn, outermost first.

    >>> runs_of(7, (2,)), runs_of(7, (2,), zigzag=True)
    (((range(0, 4),), (range(4, 7),)), ((range(0, 2), range(5, 7)), (range(2, 4), range(4, 5))))
    """
    sizes = split_sizes(extent, tuple(factors))
    if not zigzag:
        return tuple((range(start, start + size),) for start, size in zip(starts(sizes), sizes, strict=False))
    runs, begin, end = [], 0, extent
    for size in sizes:  # the larger half of its rows from the front, the others from the back
        back = size // 2
        runs.append((range(begin, begin + size - back), range(end - back, end)))
        begin, end = begin + size - back, end - back
    return tuple(runs)


def zigzag_order(extent: int, parts: int | Sequence[int]) -> NDArray[np.intp]:
    """The order of the rows in which contiguous shards are a zigzag: ``x[:, zigzag_order(sequence, devices)]``.

    ``parts`` is the number of devices along an axis, or the numbers along several axes, outermost first.  The gradient
    is in this order, too; ``numpy.argsort`` of the order gives the inverse.

    >>> zigzag_order(12, 3).tolist()
    [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    """
    factors = (parts,) if isinstance(parts, int) else parts
    runs = runs_of(extent, factors, zigzag=True)
    return np.array([place for mine in runs for run in mine for place in run], np.intp)


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
