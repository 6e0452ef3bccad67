"""Where the blocks of a tensor lie under any layout on a mesh, for all ranks at once.

Axes are numbers here, those of the mesh in its order; a dim's axes are a tuple of them, outermost first.  A layout's
*pieces* of a dim are its different non-empty intervals: layouts with the same pieces differ only in who holds which.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelism.mesh import split_sizes
from parallelism.mesh.uneven import starts

Axes = tuple[int, ...]
Dims = tuple[Axes, ...]
Layout = tuple[Dims, Axes]
"""The dims, and the axes that are partial."""
ByRank = NDArray[np.int64]


class Blocks:
    """The blocks of a tensor of ``shape``; what was asked once is remembered.

    An axis may be made of several that stay together: ``factors`` has their extents for each axis.
    """

    def __init__(self, shape: Sequence[int], factors: Sequence[Sequence[int]]) -> None:
        self.shape = tuple(shape)
        self.factors = tuple(map(tuple, factors))
        self.extents = tuple(map(prod, self.factors))
        self.size = prod(self.extents)
        self.elements = prod(self.shape)
        flat = [factor for axis in self.factors for factor in axis]
        places = iter(np.indices(flat, np.int64).reshape(len(flat), self.size))
        self._places = [tuple((factor, next(places)) for factor in axis) for axis in self.factors]
        """For each axis the extents it is made of, and where each rank is along them."""
        self._intervals: dict[tuple[int, Axes], tuple[ByRank, ByRank]] = {}
        self._split_by: dict[Axes, tuple[int, ...]] = {}
        self._splits: dict[tuple[int, Axes], int] = {}
        self._pieces: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._numbers: dict[Any, int] = {}
        self._largest: dict[tuple[int, Axes], int] = {}

    def interval(self, extent: int, axes: Axes) -> tuple[ByRank, ByRank]:
        """Where each rank's part of a dim of ``extent`` starts, and where it stops."""
        found = self._intervals.get((extent, axes))
        if found is None:
            if not axes:
                start = np.zeros(self.size, np.int64)
                found = start, start + extent
            else:
                found = self.interval(extent, axes[:-1])
                for factor, here in self._places[axes[-1]]:
                    start, stop = found
                    least, more = np.divmod(stop - start, factor)
                    start = start + here * least + np.minimum(here, more)
                    found = start, start + least + (here < more)
            self._intervals[extent, axes] = found
        return found

    def sizes(self, dims: Dims) -> ByRank:
        """How many elements each rank holds."""
        held = np.ones(self.size, np.int64)
        for extent, axes in zip(self.shape, dims, strict=True):
            start, stop = self.interval(extent, axes)
            held *= stop - start
        return held

    def overlap(self, dims: Dims, others: Sequence[Dims]) -> NDArray[np.int64]:
        """How many elements of its block under ``dims`` each rank holds under each of the others: (others, ranks)."""
        common = np.ones((len(others), self.size), np.int64)
        for d, extent in enumerate(self.shape):
            start, stop = self.interval(extent, dims[d])
            theirs = [self.interval(extent, other[d]) for other in others]
            first = np.maximum([interval[0] for interval in theirs], start)
            last = np.minimum([interval[1] for interval in theirs], stop)
            common *= np.maximum(last - first, 0)
        return common

    def signature(self, dims: Dims) -> bytes:
        """The same for layouts that give every rank the same block; all empty ones are alike."""
        parts = [self.interval(extent, axes) for extent, axes in zip(self.shape, dims, strict=True)]
        full = np.logical_and.reduce([start < stop for start, stop in parts])
        return b"".join((array * full).tobytes() for part in parts for array in part)

    def moved(self, before: Layout, after: Layout) -> ByRank:
        """How many elements each rank receives when ``before`` is permuted to ``after``: its block, or nothing."""
        return np.where(self._keys(*before) == self._keys(*after), 0, self.sizes(after[0]))

    def permuted_along(self, before: Layout, after: Layout) -> Axes:
        """The axes along which blocks move when ``before`` is permuted to ``after``: those that change their part."""
        (dims, partial), (new_dims, new_partial) = before, after
        changed = {axis for old, new in zip(dims, new_dims, strict=True) if old != new for axis in (*old, *new)}
        if partial != new_partial:
            changed.update(partial, new_partial)
        axes = tuple(sorted(changed))
        return axes if self.donors(before, after, axes) is not None else tuple(range(len(self.extents)))

    def donors(self, before: Layout, after: Layout, axes: Axes) -> ByRank | None:
        """From whom in its group along ``axes`` each rank gets its block when ``before`` is permuted to ``after``.

        Itself, where it has it or there is nothing to have.  None if the groups do not have what they need.
        """
        has, wants = self._keys(*before), self._keys(*after)
        group = self.index([axis for axis in range(len(self.extents)) if axis not in axes])
        giving = np.flatnonzero((has != wants) & (has >= 0))
        taking = np.flatnonzero((has != wants) & (wants >= 0))
        giving = giving[np.lexsort((group[giving], has[giving]))]
        taking = taking[np.lexsort((group[taking], wants[taking]))]
        if len(giving) != len(taking) or (has[giving] != wants[taking]).any() or (group[giving] != group[taking]).any():
            return None
        donors = np.arange(self.size)
        donors[taking] = giving
        return donors

    def _keys(self, dims: Dims, partial: Axes) -> ByRank:
        """A number for the block that each rank has, and the term; -1 for nothing."""
        key = self.index(partial)
        full = np.ones(self.size, bool)
        for extent, axes in zip(self.shape, dims, strict=True):
            start, stop = self.interval(extent, axes)
            key = key * (extent + 1) + start
            full &= start < stop
        return np.where(full, key, -1)

    def index(self, axes: Sequence[int]) -> ByRank:
        """The number of each rank among those that differ along ``axes``, the first the slowest."""
        number = np.zeros(self.size, np.int64)
        for axis in axes:
            for factor, here in self._places[axis]:
                number = number * factor + here
        return number

    def pieces(self, extent: int, axes: Axes) -> int:
        """A number for the pieces of a dim: the same for the same pieces."""
        found = self._splits.get((extent, axes))
        if found is None:
            found = self._splits[extent, axes] = self._pieces_of(extent, axes)[0]
        return found

    def has_empty(self, extent: int, axes: Axes) -> bool:
        """Whether somebody has nothing of a dim."""
        factors = self._factors(axes)
        return self._pieces_of(extent, axes)[1] < prod(factors)

    def count(self, axes: Axes) -> int:
        """How many ranks differ along the axes."""
        return prod(self.extents[axis] for axis in axes)

    def copies(self, dims: Dims) -> int:
        """On how many ranks each block lies."""
        return self.size // prod(map(self.count, dims))

    def held(self, dims: Dims) -> int:
        """The elements that all ranks together hold."""
        return self.elements * self.copies(dims)

    def class_of(self, dims: Dims) -> tuple[int, ...]:
        """The same for layouts with the same pieces of every dim, on as many ranks."""
        return (*map(self.pieces, self.shape, dims), self.copies(dims))

    def largest(self, dims: Dims) -> int:
        """The size of the largest block, in elements."""
        size = 1
        known = self._largest
        for part in zip(self.shape, dims, strict=True):
            extent = known.get(part)
            if extent is None:
                extent, axes = part
                for factor in self._factors(axes):
                    extent = -(-extent // factor)
                known[part] = extent
            size *= extent
        return size

    def _factors(self, axes: Axes) -> tuple[int, ...]:
        found = self._split_by.get(axes)
        if found is None:
            found = self._split_by[axes] = tuple(factor for axis in axes for factor in self.factors[axis])
        return found

    def _pieces_of(self, extent: int, axes: Axes) -> tuple[int, int]:
        """Their number, and how many they are."""
        factors = self._factors(axes)
        found = self._pieces.get((extent, factors))
        if found is None:
            count = prod(factors)
            if extent % count == 0 and extent:
                key: Any = extent, count
            else:
                sizes = split_sizes(extent, factors)
                cuts = tuple(place for place, size in zip(starts(sizes), sizes, strict=False) if size)
                count = len(cuts)
                even = count and extent % count == 0 and all(cut == i * (extent // count) for i, cut in enumerate(cuts))
                key = (extent, count) if even else (extent, cuts)
            found = self._pieces[extent, factors] = self._numbers.setdefault(key, len(self._numbers)), count
        return found
