"""Messages between stages: several values are packed into one array."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from parallelism.arrays import Array
from parallelism.ir import TensorType


def packed(arrays: Sequence[Array]) -> Array:
    """The message that carries these arrays.

    A single array is its own message.  Several arrays, or none, become one ``uint8`` array of shape ``(bytes,)`` with
    their bytes one after the other.  It has no header: the receiver knows the types.
    """
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([np.zeros(0, np.uint8), *(np.ravel(x).view(np.uint8) for x in arrays)])


def unpacked(message: Array, types: Sequence[TensorType]) -> list[Array]:
    """The arrays in a message, given their types.  Each owns its memory, so they can be freed one by one.

    ``ValueError`` for a message of the wrong size.
    """
    if len(types) == 1:
        return [message]
    sizes = [prod(type.shape) * type.dtype.itemsize for type in types]
    if message.dtype != np.uint8 or message.shape != (sum(sizes),):
        raise ValueError(
            f"a message of {', '.join(map(str, types)) or 'nothing'} has {sum(sizes)} bytes, got "
            f"{message.dtype}{list(message.shape)}"
        )
    places = pairwise(accumulate(sizes, initial=0))
    return [
        message[start:stop].copy().view(type.dtype).reshape(type.shape)
        for type, (start, stop) in zip(types, places, strict=True)
    ]
