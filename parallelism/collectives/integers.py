"""Integers among the arguments of a call: ranks, positions, dims, extents.

Those of NumPy and bools count, and become Python's own: with ``np.uint8(1)`` as a rank, a place in memory overflows.
Other numbers and texts do not count, even if they could be converted.
"""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np


def integer(name: str, value: Any) -> int:
    """``value`` as Python's integer; ``TypeError``, with its name, if it is none."""
    try:
        return index(bool(value) if isinstance(value, np.bool_) else value)
    except TypeError:
        raise TypeError(f"{name} is an integer, got {value!r}") from None


def integers(name: str, values: Any, of: str) -> tuple[int, ...]:
    """Several integers, each called ``of`` in errors."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is a list of integers, got {values!r}")
    return tuple(integer(of, value) for value in values)


def plain_pairs(pairs: Sequence[tuple[int, int]] | None) -> tuple[tuple[int, int], ...] | None:
    """Pairs of positions."""
    if pairs is None:
        return None
    found = []
    for pair in pairs:
        positions = integers("a pair", pair, "a position in a pair")
        if len(positions) != 2:
            raise ValueError(f"a pair is (source, target), two positions in the group; got {pair!r}")
        found.append((positions[0], positions[1]))
    return tuple(found)
