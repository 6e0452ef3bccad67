"""Any value is encoded as one block of shared memory to travel between endpoints.

A block is a header of eight words, a description, and the bytes of the arrays, each array on cache lines of its own.
The description of a single array is its dtype and shape. The description of any other value is a pickle that refers to
the arrays out of band. Devices and host run one user's code and trust each other. Data from outside is never read so.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import NUMERIC_KINDS
from parallelism.operation.trees import leaves, rebuild
from vcluster.code.pickling import dump
from vcluster.memory import LINE
from vcluster.messages.forms import as_array

HEADER_BYTES = 64


@dataclass(slots=True)
class Encoded:
    """A value ready to be written. ``nbytes`` is the size of its arrays in bytes."""

    description: bytes
    buffers: list[Any]
    nbytes: int

    @property
    def block_nbytes(self) -> int:
        total = HEADER_BYTES + _aligned(len(self.description))
        for buffer in self.buffers:
            total += _aligned(buffer.nbytes)
        return total

    def write_description(self, block: NDArray[np.uint8] | memoryview) -> None:
        """Write the description to its place in ``block``."""
        block[HEADER_BYTES : HEADER_BYTES + len(self.description)] = memoryview(self.description)

    def write(self, block: NDArray[np.uint8] | memoryview) -> None:
        """Write everything but the header into ``block``."""
        self.write_description(block)
        place = HEADER_BYTES + _aligned(len(self.description))
        for buffer in self.buffers:
            nbytes = buffer.nbytes
            if nbytes:
                np.copyto(
                    np.frombuffer(block, np.uint8, nbytes, place),
                    np.frombuffer(buffer, np.uint8, nbytes) if not isinstance(buffer, np.ndarray) else _flat(buffer),
                )
            place += _aligned(nbytes)


    def alone(self) -> bytearray:
        """The block as a bytearray of its own, for a value small enough to travel inside another message."""
        block = bytearray(self.block_nbytes)
        self.write(memoryview(block))
        return block


def encode_message(value: Any) -> Encoded:
    """Encode a message: an array, a scalar, or tuples, lists and dicts of them. Other leaves are pickled whole."""
    if type(value) is np.ndarray and value.dtype.kind in NUMERIC_KINDS:
        return _array(np.ascontiguousarray(value).reshape(value.shape))
    buffers: list[Any] = []

    def quickly(obj: Any) -> bytes:
        try:
            return pickle.dumps(obj, 5, buffer_callback=lambda b: buffers.append(b.raw()))
        except Exception:  # it may refer to a class of a script, a notebook or a test, which travels by value
            buffers.clear()
            return dump(obj, "a message", lambda b: buffers.append(b.raw()))

    return _pickled(quickly, rebuild(value, [_sendable(leaf) for leaf in leaves(value)]), buffers)


def encode(value: Any, subject: str) -> Encoded:
    """Encode any value, functions included. ``subject`` names it in the ``TypeError`` if it cannot be pickled."""
    kind = type(value)
    if kind in _PLAIN:
        return _pickled(pickle.dumps, value, [])
    if kind is np.ndarray and value.dtype.kind in NUMERIC_KINDS and value.flags.c_contiguous:
        return _array(value)
    buffers: list[Any] = []
    return _pickled(lambda obj: dump(obj, subject, lambda b: buffers.append(b.raw())), value, buffers)


def decode(block: NDArray[np.uint8]) -> Any:
    """The value in a block. Its arrays lie in the block and keep it alive."""
    view = block.data
    size, count = struct.unpack_from("<qq", view, HEADER_BYTES)
    start = HEADER_BYTES + 16
    place = HEADER_BYTES + _aligned(16 + 8 * count + size)
    buffers = []
    for nbytes in struct.unpack_from(f"<{count}q", view, start):
        buffers.append(block[place : place + nbytes])
        place += _aligned(nbytes)
    pickled = view[start + 8 * count : start + 8 * count + size]
    if size and pickled[0] == _ARRAY_MARK:
        dtype, shape = pickle.loads(pickled[1:])
        return np.ndarray(shape, dtype, buffers[0])
    return pickle.loads(pickled, buffers=buffers)


def decode_alone(block: bytearray) -> Any:
    """The value in a block from `Encoded.alone`."""
    return decode(np.frombuffer(block, np.uint8))


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_ARRAY_MARK = 0  # no pickle begins with this byte
_descriptions: dict[tuple[np.dtype[Any], tuple[int, ...]], bytes] = {}


def _array_description(dtype: np.dtype[Any], shape: tuple[int, ...], nbytes: int) -> bytes:
    key = dtype, shape
    description = _descriptions.get(key)
    if description is None:
        body = bytes([_ARRAY_MARK]) + pickle.dumps((dtype.str, shape), 5)
        description = struct.pack("<qqq", len(body), 1, nbytes) + body
        if len(_descriptions) < 4096:
            _descriptions[key] = description
    return description


def _array(array: NDArray[Any]) -> Encoded:
    return Encoded(_array_description(array.dtype, array.shape, array.nbytes), [array], array.nbytes)


def _pickled(dump: Callable[[Any], bytes], value: Any, buffers: list[Any]) -> Encoded:
    body = dump(value)
    sizes = [b.nbytes for b in buffers]
    head = struct.pack(f"<qq{len(sizes)}q", len(body), len(sizes), *sizes)
    return Encoded(head + body, buffers, sum(sizes))


def _sendable(leaf: Any) -> Any:
    return as_array("a message", leaf)[0] if isinstance(leaf, np.ndarray) else leaf


def _flat(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
