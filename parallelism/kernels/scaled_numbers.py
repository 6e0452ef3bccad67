"""Numbers in 8 and 4 bits with scales: which elements share a scale, how it is chosen, and how two of 4 bits lie in a byte.

The recipes are those of NVIDIA's Transformer Engine: one scale for a tensor (Micikevicius et al., *FP8 Formats for Deep
Learning*, 2022, arXiv:2209.05433); 1 x 128 elements of activations and 128 x 128 of weights (DeepSeek-AI, *DeepSeek-V3
Technical Report*, 2024, arXiv:2412.19437, section 3.3); 32 elements (Rouhani et al., *Microscaling Data Formats for
Deep Learning*, 2023, arXiv:2310.10537); and NVFP4: 16 elements of activations and 16 x 16 of weights in 4 bits, whose
scales in 8 bits have one more scale for all of the tensor (NVIDIA, *Pretraining Large Language Models with NVFP4*, 2025,
arXiv:2509.25149, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.dtypes import FLOAT4, as_dtype, limits_of

WHOLE = 0
"""The extent of a block that has all that a device has of a dim."""
APART = 0
"""The grain of a tensor's scales along a dim each of whose elements is a tensor of its own."""
EXPONENTS = np.dtype(np.uint8)
"""The dtype of scales that are powers of 2, as exponents plus 127 (E8M0)."""
PAIRS = np.dtype(np.uint8)
"""The dtype of bytes with two numbers of 4 bits: the first one in the lower bits."""
_BIAS = 127


@dataclass(frozen=True)
class Recipe:
    """How operands of products are scaled."""

    name: str
    block: int
    """The elements of the contracted dim that share a scale; `WHOLE`: all of the tensor."""
    square: bool = False
    """Whether blocks of weights are square, so that both passes use one copy."""
    scales: str = "float32"
    """The dtype of the scales; ``uint8``: exponents."""
    power_of_two: bool = False
    """Whether scales are powers of 2."""
    forward: str = "float8_e4m3fn"
    """The dtype of weights and activations; ``uint8``: `PAIRS`."""
    backward: str = "float8_e4m3fn"
    """The dtype of the gradients of results, unless it is said."""

    @property
    def pairs(self) -> bool:
        """Whether two numbers of 4 bits lie in a byte."""
        return self.forward == PAIRS.name

    @property
    def nested(self) -> bool:
        """Whether scales are in 8 bits themselves, and have a scale in float32 for all of the tensor."""
        return self.scales.startswith("float8")


RECIPES = {
    each.name: each
    for each in (
        Recipe("tensor", WHOLE, backward="float8_e5m2"),
        Recipe("block", 128, square=True, power_of_two=True),
        Recipe("mx", 32, scales="uint8", power_of_two=True),
        Recipe("nvfp4", 16, square=True, scales="float8_e4m3fn", forward="uint8", backward="uint8"),
    )
}
"""The recipes by name."""
MOST_PARTS = 16
"""The scale of a whole tensor is kept for each of so many parts of a dim: over so many devices it can be split."""
LEAST_PARTS = 8
"""The scales of blocks are kept for each of a multiple of so many parts of a dim, if its extent is one."""


def grain_of(extent: Any, block: int, least: int = 1) -> int:
    """The elements along a dim of this extent for which one scale is kept, where blocks are so long.

    It is the whole block, unless the dim could then not be split over 8 devices, and a multiple of ``least``.
    """
    if not isinstance(extent, int):
        return 1
    if block == WHOLE:
        return extent // gcd(extent, MOST_PARTS) if extent else 1
    parts = gcd(extent, LEAST_PARTS)
    grains = (n for n in range(min(block, extent), 0, -1) if extent % n == block % n == n % least == 0)
    return next((n for n in grains if (extent // n) % parts == 0), least)


# -- to few bits -------------------------------------------------------------------------------------------------------


def quantized(
    x: Array,
    dtype: Any,
    grains: Sequence[int],
    blocks: Sequence[int],
    recipe: str,
    packed: int | None = None,
    tensor_grains: Sequence[int] | None = None,
) -> tuple[Array, ...]:
    """The numbers in few bits, their scales, and with ``tensor_grains`` the scales of these.

    ``packed`` is the dim along which two numbers of 4 bits lie in a byte.
    """
    how, wide = RECIPES[recipe], x.astype(np.float32, copy=False)
    sizes = np.abs(wide)
    largest = _largest(sizes, grains, blocks)
    if tensor_grains is not None:
        return _nested(wide, sizes, largest, how, packed, tensor_grains)
    most = np.float32(limits_of(dtype).max)
    scales = np.where(largest > 0, largest / most, np.float32(1))
    exponents = _exponents(scales)
    if how.power_of_two:
        scales = np.ldexp(np.float32(1), exponents)
    scaled = np.clip(wide / _spread(scales, wide.shape), -most, most)
    kept = (exponents + _BIAS).astype(EXPONENTS) if how.scales == EXPONENTS.name else scales
    return scaled.astype(dtype), kept


def quantized_by(x: Array, scale: Array, dtype: Any) -> tuple[Array, Array]:
    """The numbers in 8 bits with a scale that is given, and the largest size among them before."""
    wide = x.astype(np.float32, copy=False)
    most = np.float32(limits_of(dtype).max)
    largest = np.abs(wide).max(initial=0)
    return np.clip(wide / scale, -most, most).astype(dtype), np.asarray(largest, np.float32)


def recorded(history: Array, maximum: Array, out: Array | None = None) -> Array:
    """A history of maxima, the newest one first, with one more in place of the oldest; ``out`` is its memory."""
    longer = np.empty_like(history) if out is None else out
    longer[1:] = history[:-1]
    longer[0] = maximum
    return longer


def scale_of(history: Array, scale: Array, most: float, *, newest: bool) -> Array:
    """The scale that takes the largest of a history of maxima to ``most``; with ``newest`` the newest one.

    ``scale``, the one of before, stays where that is 0 or not finite, as in Transformer Engine.
    """
    largest = history[0] if newest else history.max()
    is_known = bool(largest > 0) and bool(np.isfinite(largest))
    found: Array = np.asarray(largest / np.float32(most) if is_known else scale, scale.dtype)
    return found.reshape(())


def _nested(
    wide: Array, sizes: Array, largest: Array, how: Recipe, packed: int | None, tensor_grains: Sequence[int]
) -> tuple[Array, Array, Array]:
    """Numbers in 4 bits: the largest of the tensor is the largest number times the largest scale times its scale."""
    of_scales = as_dtype(how.scales)
    most, most_scale = (np.float32(limits_of(each).max) for each in (as_dtype(FLOAT4), of_scales))
    of_tensor = _largest(
        sizes,
        [grain or 1 for grain in tensor_grains],
        [1 if grain == APART else WHOLE for grain in tensor_grains],
    )
    tensor_scales = np.where(of_tensor > 0, of_tensor / (most * most_scale), np.float32(1))
    shares = largest / (most * _at_parts(tensor_scales, largest.shape))
    scales = np.clip(shares, 0, most_scale).astype(of_scales)
    steps = _spread(scales.astype(np.float32), wide.shape) * _spread(tensor_scales, wide.shape)
    scaled = np.divide(wide, steps, out=np.zeros_like(wide), where=steps > 0)
    return packed_pairs(np.clip(scaled, -most, most), packed), scales, tensor_scales


def _exponents(scales: Array) -> Array:
    """The exponents of the least powers of 2 that are not less than the scales."""
    fractions, exponents = np.frexp(scales)
    return np.clip(np.where(fractions == 0.5, exponents - 1, exponents), 1 - _BIAS, _BIAS)


def _largest(sizes: Array, grains: Sequence[int], blocks: Sequence[int]) -> Array:
    """The largest size in the block of each grain."""
    if not sizes.size:
        return np.zeros([n // grain for n, grain in zip(sizes.shape, grains, strict=True)], np.float32)
    for dim, (grain, block) in enumerate(zip(grains, blocks, strict=True)):
        extent = sizes.shape[dim]
        starts = np.arange(0, extent, block or extent)
        of_blocks = np.maximum.reduceat(sizes, starts, axis=dim)
        sizes = np.take(of_blocks, np.arange(0, extent, grain) // (block or extent), axis=dim)
    return sizes


def _at_parts(scales: Array, parts: Sequence[int]) -> Array:
    """The scales for each of so many parts of the dims."""
    for dim, count in enumerate(parts):
        kept = scales.shape[dim]
        if kept != count:
            scales = np.take(scales, np.arange(count) * kept // max(count, 1), axis=dim)
    return scales


def _spread(scales: Array, shape: Sequence[int]) -> Array:
    """The scales for each element of an array of this shape."""
    if not scales.ndim:
        return scales
    for dim, extent in enumerate(shape):
        kept = scales.shape[dim]
        if kept != extent:
            scales = np.repeat(scales, extent // kept, axis=dim)
    return scales


def packed_pairs(x: Array, dim: int | None) -> Array:
    """``x`` rounded to floats of 4 bits (e2m1).  Two neighbours along ``dim``, whose extent is even, share a byte."""
    assert dim is not None
    return packed_codes(x.astype(as_dtype(FLOAT4)).view(PAIRS), dim)


def packed_codes(codes: Array, dim: int) -> Array:
    """The lowest 4 bits of each code.  Two neighbours along ``dim``, whose extent is even, share a byte."""
    first, second = (codes[_every_second(dim, start)] & 15 for start in (0, 1))
    pairs: Array = first | second << 4
    return pairs


def unpacked_integers(pairs: Array, packed: int, dtype: Any) -> Array:
    """The signed integers of 4 bits, in a wider dtype, of bytes that have two each."""
    shape, codes = [*pairs.shape], pairs.astype(PAIRS, copy=False)
    shape[packed] *= 2
    numbers = np.empty(shape, np.int8)
    numbers[_every_second(packed, 0)] = (codes << 4).view(np.int8) >> 4
    numbers[_every_second(packed, 1)] = codes.view(np.int8) >> 4
    return numbers.astype(dtype)


def unpacked_pairs(pairs: Array, dim: int) -> Array:
    """The numbers in float32 of bytes that have two each."""
    shape = [*pairs.shape]
    shape[dim] *= 2
    numbers = np.empty(shape, np.float32)
    numbers[_every_second(dim, 0)] = _values()[pairs & 15]
    numbers[_every_second(dim, 1)] = _values()[pairs >> 4]
    return numbers


def _every_second(dim: int, start: int) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, slice(start, None, 2))


@cache
def _values() -> Array:
    """The numbers of 4 bits by their codes."""
    values: Array = np.arange(16, dtype=np.uint8).view(as_dtype(FLOAT4)).astype(np.float32)
    return values


# -- and back ----------------------------------------------------------------------------------------------------------


def restored(q: Array, *scales: Array, packed: int | None = None) -> Array:
    """The numbers in float32 that quantized ones stand for."""
    wide = q.astype(np.float32, copy=False) if packed is None else unpacked_pairs(q, packed)
    for each in scales:
        factors = np.exp2(each.astype(np.float32) - _BIAS) if each.dtype == EXPONENTS else each
        wide = wide * _spread(factors.astype(np.float32, copy=False), wide.shape)
    return wide
