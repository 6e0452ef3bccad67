"""The rows of a sequence that each device has, in order or as a zigzag.

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

import numpy as np
from numpy.typing import NDArray

from parallelism.mesh.uneven import split_sizes, starts

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
