"""The one rule for splitting an extent over devices.

A dim is split axis by axis, outermost first.  Each part of n elements is split into k pieces as by
`numpy.array_split`: the first ``n % k`` pieces have one more element.  So adding an innermost axis is always a local
slice, and removing it is a gather.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate


@lru_cache(maxsize=4096)
def split_sizes(extent: int, factors: tuple[int, ...]) -> tuple[int, ...]:
    """The extents of the pieces when ``extent`` is split by each factor in turn, outermost first.

    >>> split_sizes(7, (3,))
    (3, 2, 2)
    >>> split_sizes(4, (2, 3))          # 4 = 2 + 2, and each 2 = 1 + 1 + 0
    (1, 1, 0, 1, 1, 0)
    """
    pieces = [extent]
    for factor in factors:
        pieces = [n // factor + (i < n % factor) for n in pieces for i in range(factor)]
    return tuple(pieces)


def starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """The start of each piece, and the end of the last one: one more number than ``sizes``.

    >>> starts((3, 2, 2))
    (0, 3, 5, 7)
    """
    return tuple(accumulate(sizes, initial=0))
