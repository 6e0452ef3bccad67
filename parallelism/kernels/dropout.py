"""Dropout whose mask is a pure function of a seed, a step and the position of an element in the whole tensor.

So each device computes the mask of its own shard, and devices that hold the same element agree.  The random bits come
from SplitMix64.  Its i-th number is a hash of ``seed + (i + 1) * gamma``, so it needs no state: Steele, Lea and Flood,
*Fast Splittable Pseudorandom Number Generators*, OOPSLA 2014, figures 16 and 17 (with the constants of mix64variant13).
Dropout: Srivastava et al., JMLR 15, 2014; here the values are scaled in training.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array, Bools

_GAMMA, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def splitmix64(seed: int, index: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """The numbers at positions ``index`` (from 0) of the SplitMix64 sequence of ``seed``: uint64, shape of ``index``.

    >>> splitmix64(1234567, [0, 1]).tolist()
    [6457827717110365317, 3203168211198807973]
    """
    state = (np.atleast_1d(np.asarray(index, np.uint64)) + np.uint64(1)) * _GAMMA
    state += np.uint64(seed)
    return _mixed(state).reshape(np.shape(index))


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The hashes of these states, computed in place."""
    shifted = np.empty_like(z)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        np.right_shift(z, np.uint64(shift), out=shifted)
        z ^= shifted
        if factor is not None:
            z *= factor
    return z


def dropout_mask(
    rate: float,
    seed: int,
    step: int,
    shape: Sequence[int],
    block: Sequence[slice | npt.NDArray[np.intp]] | None = None,
) -> Bools:
    """A mask that is true for the elements that are kept, each with probability 1 - ``rate``.

    ``shape`` is that of the whole tensor.  ``block`` selects a part: a slice or an array of indices for each dim; None
    selects everything.  The mask has the shape of the block.

    The element at row-major position i of the whole tensor is kept if the upper 53 bits of ``splitmix64(key, i)`` are
    at least ``rate * 2**53``, where ``key`` is number ``step`` of the sequence of ``seed``.
    """
    places = []
    for part in map(slice, shape) if block is None else block:
        places.append(np.arange(part.start or 0, part.stop) if isinstance(part, slice) else part)
    # The state of position i is key + (i + 1) gamma.  It is a sum over dims: multiply along each dim, then add.
    state, stride = splitmix64(seed, [step]) + _GAMMA, 1
    for dim in reversed(range(len(shape))):
        along = places[dim].astype(np.uint64) * np.uint64(stride) * _GAMMA
        state = state + along.reshape(-1, *[1] * (len(shape) - 1 - dim))
        stride *= max(1, shape[dim])
    mask: Bools = _mixed(state) >= np.uint64(int(rate * 2**53) << 11)
    return mask.reshape([len(place) for place in places])


def dropout(x: Array, mask: Bools, rate: float) -> Array:
    """``x / (1 - rate)`` where the mask is true, 0 elsewhere.  The backward is the same function of the gradient."""
    y = np.zeros_like(x)
    np.multiply(x, x.dtype.type(1 / (1 - rate)), out=y, where=mask)
    return y
