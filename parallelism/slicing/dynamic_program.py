"""The dynamic program over slices and submeshes: which stages on which submeshes take the least time.

After Zheng et al., *Alpa*, 2022, arXiv:2201.12023, section 5.  A step of K microbatches takes the sum of the stages'
seconds and K - 1 times those of the slowest stage.  For a bound on the slowest stage,

    least(n stages, block k, d devices) = min over submesh m and next cut j of
        seconds[k, j, m] + least(n - 1, j, d - devices of m)

over the slices that keep to the bound, and that fit the memory as the n-th stage from the end.  All blocks j, numbers
n and d are computed at once.  The least sum falls as the bound rises.  So the bounds, which are the seconds of slices,
are not tried one after the other: between two bounds that were tried, every step takes at least the sum of the upper
one and K - 1 times the least bound between.  Where that is no better than what is known, nothing between is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count as numbers_from, product
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Floats
from parallelism.display.quantities import decimal_bytes, plural
from parallelism.slicing.slices import NoSlicingFits, Slice, Slices, Slicing, check_at_least

MOST_STAGES = 16
"""Stages are at most so many, unless another number is given."""


def best_slicing(
    slices: Slices,
    *,
    devices: int,
    microbatches: int,
    memory_bytes: float | None = None,
    most_stages: int = MOST_STAGES,
) -> Slicing:
    """The slicing in at most ``most_stages`` stages on exactly ``devices`` devices that takes the least time.

    Its `Slicing.seconds` are the least of all slicings in which no device holds more than ``memory_bytes``.

    >>> best_slicing(Slices.of_blocks([[4.0, 2.0]] * 3, (1, 2)), devices=4, microbatches=8).seconds
    34.0

    `NoSlicingFits` if there is none, with the tightest need; ``ValueError`` for numbers that are no counts.
    """
    return best_slicings(
        slices,
        devices=devices,
        microbatches=microbatches,
        memory_bytes=memory_bytes,
        most_stages=most_stages,
        count=1,
    )[0]


def best_slicings(
    slices: Slices,
    *,
    devices: int,
    microbatches: int,
    memory_bytes: float | None = None,
    most_stages: int = MOST_STAGES,
    count: int = 50,
) -> tuple[Slicing, ...]:
    """At most ``count`` different slicings, the best first: `best_slicing`, and good ones that differ from it.

    Each is the best of those with its number of stages that keep to some bound on the slowest stage.

    >>> found = best_slicings(Slices.of_blocks([[4.0, 2.0]] * 2, (1, 2)), devices=2, microbatches=2)
    >>> [(len(each.slices), each.seconds) for each in found]
    [(1, 8.0), (2, 12.0)]
    """
    check_at_least(1, devices=devices, microbatches=microbatches, most_stages=most_stages, count=count)
    search = _Search(
        slices, devices, microbatches, memory_bytes, min(most_stages, slices.blocks, devices), count
    )
    search.run()
    if not search.found:
        raise _none_fits(search)
    order = sorted(search.found.values(), key=lambda each: (each.seconds, each.slices))
    return tuple(order[:count])


class _Interval(NamedTuple):
    """Bounds between two that were tried: the numbers of the two, and the least sums by number of stages."""

    low: int
    high: int
    low_sums: Floats
    high_sums: Floats


class _Search:
    """The bounds on the slowest stage, tried in the order of what they may give."""

    def __init__(
        self,
        slices: Slices,
        devices: int,
        microbatches: int,
        memory_bytes: float | None,
        stages: int,
        count: int,
    ) -> None:
        self.slices, self.devices, self.microbatches, self.stages = slices, devices, microbatches, stages
        self.memory_bytes, self.count = memory_bytes, count
        self.sizes = tuple(sorted({size for size in slices.devices if size <= devices}))
        self.of_size = [np.flatnonzero(np.array(slices.devices) == size) for size in self.sizes]
        blocks = slices.blocks
        is_slice = np.arange(blocks)[:, None] < np.arange(blocks + 1)
        self.seconds: Floats = np.where(is_slice[:, :, None], slices.seconds, np.inf)
        """The seconds of each slice: an array ``[first block, end, submesh]``."""
        held, each = slices.held_bytes, slices.microbatch_bytes
        assert held is not None and each is not None
        kept = np.minimum(np.arange(1, stages + 1), microbatches)[:, None, None, None]
        self.bytes: Floats = held + kept * each
        """The bytes of each slice: ``[stages left - 1, first block, end, submesh]``."""
        fitting = np.inf if memory_bytes is None else memory_bytes
        self.cost: Floats = np.where(self.bytes <= fitting, self.seconds, np.inf)
        """The seconds of slices that fit the memory, infinite for others; its axes are those of ``bytes``."""
        self.found: dict[tuple[Slice, ...], Slicing] = {}
        self.tried = 0

    def run(self) -> None:
        """Finds the best slicings."""
        bounds = np.unique(self.cost[np.isfinite(self.cost)])
        if not len(bounds) or not self.sizes:
            return
        more, order = self.microbatches - 1, numbers_from()
        nothing = np.full(self.stages, np.inf)
        waiting: list[tuple[float, int, _Interval]] = []

        def add(low: int, high: int, low_sums: Floats, high_sums: Floats) -> None:
            better = high_sums < low_sums
            if high - low > 1 and better.any():
                least = float(high_sums[better].min()) + more * float(bounds[low + 1])
                heappush(waiting, (least, next(order), _Interval(low, high, low_sums, high_sums)))

        last = len(bounds) - 1
        add(-1, last, nothing, self._try(float(bounds[last]), float(bounds[0])))
        while waiting:
            least, _, (low, high, low_sums, high_sums) = heappop(waiting)
            if least >= self._limit():
                return
            middle = (low + high) // 2
            sums = self._try(float(bounds[middle]), float(bounds[low + 1]))
            add(low, middle, low_sums, sums)
            add(middle, high, sums, high_sums)

    def _limit(self) -> float:
        """The seconds of the last slicing that is wanted; infinite if there are fewer."""
        seconds = sorted(each.seconds for each in self.found.values())
        return seconds[self.count - 1] if len(seconds) >= self.count else np.inf

    def _try(self, bound: float, lowest: float) -> Floats:
        """The least sums by number of stages, minus 1, with a bound on the slowest stage; keeps their slicings."""
        self.tried += 1
        cost = np.where(self.cost <= bound, self.cost, np.inf)
        table = least_table(self._by_size(cost), self.sizes, self.devices, np.add)
        sums: Floats = table[1:, 0, self.devices]
        limit = self._limit()
        for stages in np.flatnonzero(np.isfinite(sums)) + 1:
            if sums[stages - 1] + (self.microbatches - 1) * lowest < limit:
                chosen = self.chosen(cost, table, int(stages), np.add)
                self.found.setdefault(
                    chosen,
                    Slicing(
                        chosen,
                        tuple(float(self.seconds[first, end + 1, submesh]) for first, end, submesh in chosen),
                        self.microbatches,
                    ),
                )
        return sums

    def _by_size(self, cost: Floats) -> Floats:
        """The least costs of the submeshes of each size."""
        return np.stack([cost[..., own].min(axis=-1) for own in self.of_size], axis=-1)

    def chosen(
        self, cost: Floats, table: Floats, stages: int, combine: Callable[..., Any]
    ) -> tuple[Slice, ...]:
        """The slices that a table has the least costs of, for so many stages."""
        found, first, left = list[Slice](), 0, self.devices
        needed = np.array(self.slices.devices)
        for n in range(stages, 0, -1):
            rest = np.full((self.slices.blocks + 1, len(needed)), np.inf)
            fits = needed <= left
            rest[:, fits] = table[n - 1][:, left - needed[fits]]
            end, submesh = divmod(int(np.argmin(combine(cost[n - 1, first], rest))), len(needed))
            found.append(Slice(first, end - 1, submesh))
            first, left = end, left - int(needed[submesh])
        return tuple(found)

    def least_memory(self) -> tuple[float, tuple[Slice, ...]]:
        """The bytes of the slicing whose fullest device holds least; infinite if there is no slicing at all."""
        cost = np.where(np.isfinite(self.seconds), self.bytes, np.inf)
        table = least_table(self._by_size(cost), self.sizes, self.devices, np.maximum)
        least: Floats = table[1:, 0, self.devices]
        stages = int(np.argmin(least)) + 1
        if not np.isfinite(least[stages - 1]):
            return np.inf, ()
        return float(least[stages - 1]), self.chosen(cost, table, stages, np.maximum)


def least_table(cost: Floats, sizes: tuple[int, ...], devices: int, combine: Callable[..., Any]) -> Floats:
    """The least cost of the blocks from k on, in n stages on exactly d devices: ``[n, k, d]``.

    ``cost[n - 1, first, end, size]`` is that of a slice as the n-th stage from the end, and ``combine`` puts it
    together with what comes after it: ``numpy.add``, or ``numpy.maximum``.
    """
    stages, blocks = cost.shape[:2]
    table = np.full((stages + 1, blocks + 1, devices + 1), np.inf)
    table[0, blocks, 0] = 0.0
    for first, (number, size) in product(range(blocks - 1, -1, -1), enumerate(sizes)):
        own = cost[:, first, first + 1 :, number]
        ends = np.flatnonzero(np.isfinite(own).any(axis=0))
        if len(ends):
            after = table[:-1, ends + first + 1, : devices + 1 - size]
            least = combine(own[:, ends, None], after).min(axis=1)
            np.minimum(table[1:, first, size:], least, out=table[1:, first, size:])
    return table


def _none_fits(search: _Search) -> NoSlicingFits:
    """Why there is no slicing."""
    slices = search.slices
    what = (
        f"{plural(slices.blocks, 'block')} in at most {plural(search.stages, 'stage')} on exactly "
        f"{plural(search.devices, 'device')}"
    )
    least, chosen = search.least_memory() if search.sizes else (np.inf, ())
    if not chosen:
        sizes = ", ".join(map(str, sorted(set(slices.devices)))) or "none"
        return NoSlicingFits(
            f"no slicing has {what}: the submeshes have {sizes} devices, and no stages on such "
            "submeshes, where their blocks can lie, use all devices"
        )
    left, each = max(
        ((len(chosen) - place, each) for place, each in enumerate(chosen)),
        key=lambda pair: slices.bytes_of(pair[1], min(pair[0], search.microbatches)),
    )
    assert search.memory_bytes is not None
    return NoSlicingFits(
        f"no slicing has {what} with {decimal_bytes(search.memory_bytes)} a device: the one that needs least, in "
        f"{plural(len(chosen), 'stage')}, needs {decimal_bytes(least)} for blocks {each.first} to {each.last} on "
        f"{plural(slices.devices[each.submesh], 'device')}, which keep "
        f"what {min(left, search.microbatches)} of the microbatches need",
        least,
    )
