"""The blocks of a tensor under any layout on a mesh, computed for all ranks at once.

Axes are numbered in the order of the mesh.  The axes of a dim are a tuple of numbers, outermost first.  The *pieces* of
a dim under a layout are its different non-empty intervals; layouts with the same pieces differ only in which rank holds
which piece.
"""

from collections.abc import Sequence
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from parallelism.arrays import Ints
from parallelism.memoized import memoized
from parallelism.mesh import split_sizes
from parallelism.mesh.uneven import starts

Axes = tuple[int, ...]
Dims = tuple[Axes, ...]
NumberedLayout = tuple[Dims, Axes]
"""The axes of each dim, and the partial axes."""
ByRank = Ints


class Blocks:
    """The blocks of a tensor of ``shape``.  Results are memoized.

    An axis may be a bundle of several: ``factors`` has, for each axis, their extents.
    """

    def __init__(self, shape: Sequence[int], factors: Sequence[Sequence[int]]) -> None:
        self.shape = tuple(shape)
        self.factors = tuple(map(tuple, factors))
        self.extents = tuple(map(prod, self.factors))
        self.size = prod(self.extents)
        self.elements = prod(self.shape)
        flat = [factor for axis in self.factors for factor in axis]
        coordinates = zip(flat, np.indices(flat, np.int64).reshape(len(flat), self.size), strict=True)
        self._coordinates = [tuple(islice(coordinates, len(axis))) for axis in self.factors]
        """For each axis, pairs of an extent and the coordinates of all ranks along it."""
        self._numbers: dict[Any, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:  # without what is remembered
        return Blocks, (self.shape, self.factors)

    @memoized
    def interval(self, extent: int, axes: Axes) -> tuple[ByRank, ByRank]:
        """The start and the end of each rank's part of a dim of ``extent``: two arrays of shape ``(ranks,)``."""
        if not axes:
            start = np.zeros(self.size, np.int64)
            return start, start + extent
        start, stop = self.interval(extent, axes[:-1])
        for factor, coordinate in self._coordinates[axes[-1]]:
            least, more = np.divmod(stop - start, factor)
            start = start + coordinate * least + np.minimum(coordinate, more)
            stop = start + least + (coordinate < more)
        return start, stop

    def sizes(self, dims: Dims) -> ByRank:
        """The number of elements that each rank holds."""
        held = np.ones(self.size, np.int64)
        for extent, axes in zip(self.shape, dims, strict=True):
            start, stop = self.interval(extent, axes)
            held *= stop - start
        return held

    def overlap(self, dims: Dims, others: Sequence[Dims]) -> Ints:
        """The number of elements that each rank holds under ``dims`` and under each of ``others``: (others, ranks)."""
        common = np.ones((len(others), self.size), np.int64)
        for d, extent in enumerate(self.shape):
            start, stop = self.interval(extent, dims[d])
            firsts, lasts = zip(*(self.interval(extent, other[d]) for other in others), strict=True)
            common *= np.maximum(np.minimum(lasts, stop) - np.maximum(firsts, start), 0)
        return common

    def signature(self, dims: Dims) -> bytes:
        """A key that is equal for layouts that give every rank the same block.  All empty blocks are equal."""
        parts = [self.interval(extent, axes) for extent, axes in zip(self.shape, dims, strict=True)]
        full = np.logical_and.reduce([start < stop for start, stop in parts])
        return b"".join((array * full).tobytes() for part in parts for array in part)

    def moved(self, before: NumberedLayout, after: NumberedLayout) -> ByRank:
        """The number of elements that each rank receives in a permutation: its whole block, or 0."""
        return np.where(self._keys(*before) == self._keys(*after), 0, self.sizes(after[0]))

    def permuted_along(self, before: NumberedLayout, after: NumberedLayout) -> Axes:
        """The axes along which blocks move when ``before`` is permuted to ``after``."""
        (dims, partial), (new_dims, new_partial) = before, after
        changed = {
            axis for old, new in zip(dims, new_dims, strict=True) if old != new for axis in (*old, *new)
        }
        if partial != new_partial:
            changed.update(partial, new_partial)
        axes = tuple(sorted(changed))
        return axes if self.donors(before, after, axes) is not None else tuple(range(len(self.extents)))

    def donors(self, before: NumberedLayout, after: NumberedLayout, axes: Axes) -> ByRank | None:
        """The rank from which each rank gets its block when ``before`` is permuted to ``after``.

        It is a member of the same group along ``axes``; the rank itself if it has the block already or gets none.
        None if a group lacks a block that its members need.
        """
        has, wants = self._keys(*before), self._keys(*after)
        group = self.index([axis for axis in range(len(self.extents)) if axis not in axes])
        giving = np.flatnonzero((has != wants) & (has >= 0))
        taking = np.flatnonzero((has != wants) & (wants >= 0))
        giving = giving[np.lexsort((group[giving], has[giving]))]
        taking = taking[np.lexsort((group[taking], wants[taking]))]
        if (
            len(giving) != len(taking)
            or (has[giving] != wants[taking]).any()
            or (group[giving] != group[taking]).any()
        ):
            return None
        donors = np.arange(self.size)
        donors[taking] = giving
        return donors

    def _keys(self, dims: Dims, partial: Axes) -> ByRank:
        """A number for the block and the term that each rank holds; -1 for an empty block."""
        key = self.index(partial)
        full = np.ones(self.size, bool)
        for extent, axes in zip(self.shape, dims, strict=True):
            start, stop = self.interval(extent, axes)
            key = key * (extent + 1) + start
            full &= start < stop
        return np.where(full, key, -1)

    def index(self, axes: Sequence[int]) -> ByRank:
        """The row-major index of each rank along ``axes``; the first varies slowest."""
        number = np.zeros(self.size, np.int64)
        for axis in axes:
            for factor, here in self._coordinates[axis]:
                number = number * factor + here
        return number

    @memoized
    def pieces(self, extent: int, axes: Axes) -> int:
        """A number that identifies the pieces of a dim: equal for equal pieces."""
        return self._pieces_of(extent, self._factors(axes))[0]

    @memoized
    def has_empty(self, extent: int, axes: Axes) -> bool:
        """Whether some rank has an empty part of a dim."""
        return self._pieces_of(extent, self._factors(axes))[1] < self.count(axes)

    def count(self, axes: Axes) -> int:
        """The number of ranks in a group along the axes."""
        return prod(self.extents[axis] for axis in axes)

    def copies(self, dims: Dims) -> int:
        """The number of ranks that hold each block."""
        return self.size // prod(map(self.count, dims))

    def held(self, dims: Dims) -> int:
        """The number of elements that all ranks hold together."""
        return self.elements * self.copies(dims)

    def class_of(self, dims: Dims) -> tuple[int, ...]:
        """A key that is equal for layouts with equal pieces of every dim on equally many ranks."""
        return (*map(self.pieces, self.shape, dims), self.copies(dims))

    def largest(self, dims: Dims) -> int:
        """The number of elements of the largest block."""
        return prod(map(self._longest, self.shape, dims))

    @memoized
    def _longest(self, extent: int, axes: Axes) -> int:
        """The extent of the longest piece of a dim."""
        for factor in self._factors(axes):
            extent = -(-extent // factor)
        return extent

    @memoized
    def _factors(self, axes: Axes) -> tuple[int, ...]:
        return tuple(factor for axis in axes for factor in self.factors[axis])

    @memoized
    def _pieces_of(self, extent: int, factors: tuple[int, ...]) -> tuple[int, int]:
        """The identifying number of the pieces of a dim, and their count."""
        count = prod(factors)
        key: Any = extent, count
        if extent % count or not extent:
            sizes = split_sizes(extent, factors)
            cuts = tuple(place for place, size in zip(starts(sizes), sizes, strict=False) if size)
            count = len(cuts)
            even = count and extent % count == 0 and cuts == tuple(range(0, extent, extent // count))
            key = extent, count if even else cuts
        return self._numbers.setdefault(key, len(self._numbers)), count
