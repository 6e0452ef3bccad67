"""Rates that are reached, beside those that a datasheet states: of products by their shape, of links by their use.

`Products` cuts a product into tiles, which units of the device compute in waves (NVIDIA, *Matrix Multiplication
Background User's Guide*, 2023: tile and wave quantization).  `Reached` has for a level of links what messages and
collectives reach of its wire rate, and what a collective takes before its first byte (Thakur, Rabenseifner and Gropp,
*Optimization of Collective Communication Operations in MPICH*, 2005, for the form; NCCL's src/graph/tuning.cc has a
base, a latency of a step and a bus rate, too).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, NamedTuple

from parallelism.algorithms import KINDS
from parallelism.hardware import fields as checked

Shape = tuple[int, ...]
"""Of products: (count, m, n, k), so many products of m x k with k x n matrices."""


def by_collective(field: str, values: Any) -> Mapping[str, float]:
    """A checked table of bytes per second, by collective."""
    kinds = tuple(KINDS.records)
    return checked.numbers(field, values, kinds, "of bytes a second", what="numbers by collective")


def _tiles(field: str, tiles: Any) -> tuple[tuple[int, int], ...]:
    listed = isinstance(tiles, list | tuple) and len(tiles) > 0
    if not listed or any(not isinstance(tile, list | tuple) or len(tile) != 2 for tile in tiles):
        raise ValueError(f"{field} must be a list of pairs of rows and columns; got {checked.shown(tiles)}")
    pairs = []
    for rows, columns in tiles:
        pairs.append((checked.whole_number(field, rows), checked.whole_number(field, columns)))
    return tuple(pairs)


class Split(NamedTuple):
    """A product whose terms are cut into parts."""

    reached: float
    """The part of the peak, without the sums of the parts."""
    sum_bytes: int
    """The parts in float32, written and read."""


_OF_PARTS = 4
"""Bytes of an element of a part."""


@dataclass(frozen=True)
class Products:
    """The part of the peak rate that products of matrices reach, by their shape.

    The library computes the result tile by tile; ``units`` tiles are computed at once, and it takes the fastest of
    ``tiles``, pairs of rows and columns.  A tile of r x c reaches ``q = a / (a + half_intensity)`` of the rate, where
    ``a = r c / (r + c)``: so many multiply-adds follow from each number that is read.  It takes as long as k +
    ``half_depth`` steps: filling and draining it counts, too.  Then

        waves = ceil(count * ceil(m / r) * ceil(n / c) / units)
        reached = count m n k / (waves * units * r c (k + half_depth) / q)

    Products of several matrices in one call, as those of experts, reach ``grouped`` times that.  One with a vector, where m
    or n is 1, fills no tile.  Libraries have kernels of their own for it, which read each number once: it takes what its
    bytes take, and reaches 1 here.

    Where tiles leave units idle, as those of the gradient of a convolution's weight, the k terms of each element are cut into
    as many parts as there are units for, of at least ``split_depth`` terms, and the parts are added up (CUTLASS, *Efficient
    GEMM in CUDA*: parallelized reductions; cuBLASLt: split-K).  0: they never are.  See `split`.

    A product whose result is added to an array in float32, as to the gradient of a weight, reads and writes each tile of it
    when the tile is done.  Units that share a tile have nothing to multiply meanwhile (CUTLASS, *Efficient GEMM in CUDA*:
    cooperative kernels of Hopper, whose epilogue lies beside no other tile): they wait for the part ``accumulated`` of it.

    >>> products = Products(108, ((256, 128),))
    >>> products.reached((1, 256 * 108, 128, 4096)), products.reached((1, 256 * 109, 128, 4096))
    (1.0, 0.5046296296296297)
    """

    units: int
    tiles: tuple[tuple[int, int], ...] = ((256, 128), (128, 128), (128, 64), (64, 64))
    half_depth: float = 0.0
    half_intensity: float = 0.0
    grouped: float = 1.0
    accumulated: float = 0.0
    split_depth: int = 0

    def __post_init__(self) -> None:
        checked.check(
            self,
            units=partial(checked.whole_number, most=1 << 20),
            tiles=_tiles,
            half_depth=checked.number,
            half_intensity=checked.number,
            grouped=checked.share,
            accumulated=partial(checked.number, most=1),
            split_depth=partial(checked.whole_number, least=0),
        )

    def reached(self, shape: Shape) -> float:
        """The part of the peak that products of ``shape`` reach; 1 for empty ones, and for those with a vector."""
        count, m, n, k = shape
        if not count * m * n * k or min(m, n) == 1:
            return 1.0
        least = min(
            ceil(count * ceil(m / rows) * ceil(n / columns) / self.units)
            * self.units
            * (rows * columns + self.half_intensity * (rows + columns))
            for rows, columns in self.tiles
        )
        alone = count * m * n * k / (least * (k + self.half_depth))
        return alone if count == 1 else self.grouped * alone

    def split(self, shape: Shape) -> tuple[Split, ...]:
        """The ways to cut the terms of one product with few tiles into parts; none for others."""
        count, m, n, k = shape
        if not self.split_depth or count != 1 or not m * n * k or min(m, n) == 1:
            return ()
        found = []
        for rows, columns in self.tiles:
            parts = min(self.units // (ceil(m / rows) * ceil(n / columns)), k // self.split_depth)
            if parts > 1:
                tile = rows * columns + self.half_intensity * (rows + columns)
                reached = m * n * k / (self.units * tile * (k / parts + self.half_depth))
                found.append(Split(reached, 2 * parts * m * n * _OF_PARTS))
        return tuple(found)


@dataclass(frozen=True)
class Reached:
    """What messages and collectives reach on a level of links, beside the rate of the wire and its latency.

    What is not given is as the wire says.  A collective over this level, and none above, takes ``base_seconds`` more,
    whatever its size, and ``step_seconds`` in place of the latency of each of its steps.  ``bus_bytes_per_second`` is
    the rate of a port in collectives, what nccl-tests call busbw in large ones.  ``in_switch_bytes_per_second`` has
    those of collectives that the switch computes, by their names, over groups of at least ``in_switch_from`` devices.
    """

    message_bytes_per_second: float | None = None
    bus_bytes_per_second: float | None = None
    base_seconds: float = 0.0
    step_seconds: float | None = None
    in_switch_bytes_per_second: Mapping[str, float] = checked.Table({})
    in_switch_from: int = 2

    def __post_init__(self) -> None:
        rates = ("message_bytes_per_second", "bus_bytes_per_second")
        checked.check(
            self,
            **{field: checked.bandwidth for field in rates if getattr(self, field) is not None},
            base_seconds=checked.seconds,
            in_switch_bytes_per_second=by_collective,
            in_switch_from=partial(checked.whole_number, least=2),
        )
        if self.step_seconds is not None:
            checked.check(self, step_seconds=checked.seconds)

    def slowed(self, factor: float) -> Reached:
        """The same with each rate multiplied by ``factor``."""
        rates = {
            name: factor * rate
            for name in ("message_bytes_per_second", "bus_bytes_per_second")
            if (rate := getattr(self, name)) is not None
        }
        in_switch = {name: factor * rate for name, rate in self.in_switch_bytes_per_second.items()}
        return replace(self, **rates, in_switch_bytes_per_second=in_switch)

    def bus(self, collective: str, size: int) -> float | None:
        """The rate of a port in a collective over ``size`` devices; None: that of the wire."""
        if size >= self.in_switch_from and collective in self.in_switch_bytes_per_second:
            return self.in_switch_bytes_per_second[collective]
        return self.bus_bytes_per_second
