"""Random bits from a counter, as XLA's ``rng_bit_generator`` makes them: ThreeFry-2x32 and Philox-4x32.

J. K. Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC 2011.  The state is an array of uint64: the key,
then the counter, of one word for ThreeFry and of one or two for Philox.  The order in which XLA puts the words of the
generators into an array is part of what a program means, so it is the same here.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Bits = tuple[npt.NDArray[np.uint64], npt.NDArray[Any]]

_LOW, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def _words(x: Any) -> tuple[Words, Words]:
    """The lower and the upper 32 bits of numbers of 64 bits."""
    wide = np.asarray(x, np.uint64)
    return (wide & _LOW).astype(np.uint32), (wide >> _WORD).astype(np.uint32)


def _joined(low: Words, high: Words) -> npt.NDArray[np.uint64]:
    return low.astype(np.uint64) | high.astype(np.uint64) << _WORD


def threefry(key: tuple[Any, Any], x: tuple[Words, Words]) -> tuple[Words, Words]:
    """ThreeFry-2x32 of 20 rounds: the two words for each counter ``x``."""
    keys = [np.asarray(k, np.uint32) for k in key]
    keys.append(keys[0] ^ keys[1] ^ np.uint32(0x1BD11BDA))
    a, b = x[0] + keys[0], x[1] + keys[1]
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            a = a + b
            b = a ^ (b << np.uint32(turn) | b >> np.uint32(32 - turn))
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + np.uint32(group + 1)
    return a, b


def philox(key: tuple[Any, Any], x: tuple[Words, ...]) -> tuple[Words, ...]:
    """Philox-4x32 of 10 rounds: the four words for each counter ``x`` of four words."""
    a, b = (np.asarray(k, np.uint32) for k in key)
    for _ in range(10):
        first = x[0].astype(np.uint64) * np.uint64(0xD2511F53)
        second = x[2].astype(np.uint64) * np.uint64(0xCD9E8D57)
        (low, high), (other_low, other_high) = _words(first), _words(second)
        x = (other_high ^ x[1] ^ a, other_low, high ^ x[3] ^ b, low)
        a, b = a + np.uint32(0x9E3779B9), b + np.uint32(0xBB67AE85)
    return x


def threefry_bits(state: npt.NDArray[np.uint64], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Bits:
    """The next state, and random bits of this shape.  ``state`` has two words."""
    key, wide = _words(state[:1]), dtype.itemsize == 8
    cut = shape or (1,)
    split = next((d for d, n in enumerate(cut) if n % 2 == 0), int(np.argmax(cut)))
    half = cut if wide else (*cut[:split], (cut[split] + 1) // 2, *cut[split + 1 :])
    counters = np.arange(prod(half), dtype=np.uint64).reshape(half) + state[1]
    low, high = threefry(key, _words(counters))
    if wide:
        bits: Any = _joined(low, high)
    else:
        pairs = np.stack([low, high], split + 1)
        both = pairs.reshape(*half[:split], 2 * half[split], *half[split + 1 :])
        asked = (*(slice(None),) * split, slice(0, cut[split]))  # of an odd extent one is left over
        bits = both[asked]
    following = np.array(state, np.uint64)
    following[1:] += np.uint64(counters.size)
    return following, bits.astype(np.dtype(f"u{dtype.itemsize}")).view(dtype).reshape(shape)


def philox_bits(state: npt.NDArray[np.uint64], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Bits:
    """The next state, and random bits of this shape.  ``state`` has two or three words.

    With two words, XLA takes the key for the upper word of the counter.
    """
    size, each = prod(shape), 2 if dtype.itemsize == 8 else 4
    blocks = -(-size // each)
    low = np.arange(blocks, dtype=np.uint64) + state[1]
    high = (state[2] if len(state) == 3 else state[0]) + (low < state[1])
    words = philox(_words(state[:1]), (*_words(low), *_words(high)))
    if each == 2:
        bits: Any = np.stack([_joined(*words[:2]), _joined(*words[2:])], -1)
    else:
        bits = np.stack(words, -1)
    following = np.array(state, np.uint64)
    following[1:2] += np.uint64(blocks)
    following[2:] += following[1:2] < state[1:2]
    return following, bits.reshape(-1)[:size].astype(np.dtype(f"u{dtype.itemsize}")).view(dtype).reshape(
        shape
    )


BIT_GENERATORS: dict[str, tuple[tuple[int, ...], Callable[..., Bits]]] = {
    "three_fry": ((2,), threefry_bits),
    "philox": ((2, 3), philox_bits),
}
"""By the name of an algorithm: the numbers of words that its state may have, and what makes its bits."""
