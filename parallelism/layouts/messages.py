"""Several values as the one array that passes between two stages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from parallelism.arrays import Array
from parallelism.ir import TensorType


def packed(arrays: Sequence[Array]) -> Array:
    """One array is its own message; of several, or none, their bytes one after the other, of dtype ``uint8``.

    The message has the bytes of the arrays and no more; what they are is known where it arrives.
    """
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([np.zeros(0, np.uint8), *(np.ravel(x).view(np.uint8) for x in arrays)])


def unpacked(message: Array, types: Sequence[TensorType]) -> list[Array]:
    """The arrays of these types that were packed; each owns its memory, so that one can go before the others.

    ``ValueError`` for a message that is not of their size.
    """
    if len(types) == 1:
        return [message]
    sizes = [prod(type.shape) * type.dtype.itemsize for type in types]
    if message.dtype != np.uint8 or message.shape != (sum(sizes),):
        raise ValueError(f"a message of {', '.join(map(str, types)) or 'nothing'} has {sum(sizes)} bytes, got "
                         f"{message.dtype}{list(message.shape)}")
    arrays, start = [], 0
    for type, size in zip(types, sizes, strict=True):
        arrays.append(message[start:start + size].copy().view(type.dtype).reshape(type.shape))
        start += size
    return arrays
