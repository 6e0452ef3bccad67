"""How values travel: any value as one block of shared memory between endpoints, that of a collective as one array.

A block is a header of eight words, a description, and the bytes of the arrays, each array on cache lines of its own.
The description of a single array is its dtype and shape. The description of any other value is a pickle that refers to
the arrays out of band. Devices and host run one user's code and trust each other. Data from outside is never read so.

The value that a kernel passes to a collective is an array, a scalar, or tuples, lists and dicts of them. It travels as
one contiguous array. Its *form* describes how the receiver rebuilds the value from that array.
"""

import pickle
import struct
from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from parallelism.arrays import Array
from parallelism.collectives import ARRAY, SCALAR, checked_array, is_tree
from parallelism.dtypes import code_of, is_numeric, of_code
from parallelism.operation.trees import leaf_types, leaves, rebuild
from vcluster.code.pickling import as_writable, dump, is_from_handler
from vcluster.memory import LINE

try:
    from _blake2 import (
        blake2b as blake2b,
    )  # hashlib takes it from there, but loads OpenSSL, too: 5 ms of a start
except ImportError:  # not CPython
    from hashlib import blake2b as blake2b

HEADER_BYTES = 64
MOST_PLAIN_PARTS = 64


class Encoded(NamedTuple):
    """A value ready to be written. ``nbytes`` is the size of its arrays in bytes."""

    description: bytes
    buffers: list[Any]
    nbytes: int

    @property
    def block_nbytes(self) -> int:
        total = HEADER_BYTES + aligned(len(self.description))
        for buffer in self.buffers:
            total += aligned(buffer.nbytes)
        return total

    @property
    def digest(self) -> bytes:
        """Equal for equal values, and in practice only for these."""
        hashed = blake2b(self.description, digest_size=16)
        for buffer in self.buffers:
            hashed.update(buffer)
        return hashed.digest()

    def write(self, block: NDArray[np.uint8] | memoryview) -> None:
        """Write everything but the header into ``block``."""
        block[HEADER_BYTES : HEADER_BYTES + len(self.description)] = memoryview(self.description)
        place = HEADER_BYTES + aligned(len(self.description))
        for buffer in self.buffers:
            nbytes = buffer.nbytes
            if nbytes:
                is_array = isinstance(buffer, np.ndarray)
                content = (
                    buffer.reshape(-1).view(np.uint8) if is_array else np.frombuffer(buffer, np.uint8, nbytes)
                )
                np.copyto(np.frombuffer(block, np.uint8, nbytes, place), content)
            place += aligned(nbytes)

    def alone(self) -> bytearray:
        """The block as a bytearray of its own, for a value small enough to travel inside another message."""
        block = bytearray(self.block_nbytes)
        self.write(memoryview(block))
        return block


def encode_message(value: Any) -> Encoded:
    """Encode a message: an array, a scalar, or tuples, lists and dicts of them. Other leaves are pickled whole."""
    if type(value) is np.ndarray and is_numeric(value.dtype):
        return _array(np.ascontiguousarray(value).reshape(value.shape))
    buffers: list[Any] = []

    def quickly(obj: Any) -> bytes:
        try:
            return pickle.dumps(obj, 5, buffer_callback=lambda b: buffers.append(b.raw()))
        except (
            Exception
        ) as error:  # it may refer to a class of a script, a notebook or a test, which travels by value
            if is_from_handler(error):
                raise
            buffers.clear()
            return dump(obj, "a message", lambda b: buffers.append(b.raw()))

    if any(issubclass(kind, np.ndarray) for kind in leaf_types(value)):
        value = rebuild(value, list(map(_plain_leaf, leaves(value))))
    return _pickled(quickly, value, buffers)


def _plain_leaf(leaf: Any) -> Any:
    return as_writable(as_array("a message", leaf)[0]) if isinstance(leaf, np.ndarray) else leaf


def encode(value: Any, subject: str) -> Encoded:
    """Encode any value, functions included. ``subject`` names it in the ``TypeError`` if it cannot be pickled."""
    if type(value) in _PLAIN:
        return _pickled(pickle.dumps, value, [])
    if type(value) is np.ndarray and is_numeric(value.dtype) and value.flags.c_contiguous:
        return _array(value)
    buffers: list[Any] = []
    if _has_plain_parts(value):
        return _pickled(partial(_dump_plain, buffers), value, buffers)
    return _pickled(lambda obj: dump(obj, subject, lambda b: buffers.append(b.raw())), value, buffers)


def _has_plain_parts(value: Any) -> bool:
    """Whether a value is made of few plain values and arrays, in lists, tuples and dicts.

    Python's own pickler does the same with them as `dump`, in a fifth of the time. A long value is not looked through.
    """
    parts = [value]
    for part in parts:  # which grows
        kind = type(part)
        if kind is list or kind is tuple:
            parts.extend(part)
        elif kind is dict:
            parts.extend(part)
            parts.extend(part.values())
        elif kind is np.ndarray:
            if not (part.flags.forc and part.flags.writeable and is_numeric(part.dtype)):
                return False
        elif kind not in _PLAIN:
            return False
        if len(parts) > MOST_PLAIN_PARTS:
            return False
    return True


def _dump_plain(buffers: list[Any], value: Any) -> bytes:
    return pickle.dumps(value, 5, buffer_callback=lambda b: buffers.append(b.raw()))


def decode(block: NDArray[np.uint8]) -> Any:
    """The value in a block. Its arrays lie in the block and keep it alive."""
    view = block.data
    size, count = struct.unpack_from("<qq", view, HEADER_BYTES)
    start = HEADER_BYTES + 16
    place = HEADER_BYTES + aligned(16 + 8 * count + size)
    buffers = []
    for nbytes in struct.unpack_from(f"<{count}q", view, start):
        buffers.append(block[place : place + nbytes])
        place += aligned(nbytes)
    pickled = view[start + 8 * count : start + 8 * count + size]
    if size and pickled[0] == _ARRAY_MARK:
        dtype, shape = _dtype_and_shape(bytes(pickled[1:]))
        return np.ndarray(shape, dtype, buffers[0])
    return pickle.loads(pickled, buffers=buffers)


def decode_alone(block: bytearray) -> Any:
    """The value in a block from `Encoded.alone`."""
    return decode(np.frombuffer(block, np.uint8))


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_ARRAY_MARK = 0  # no pickle begins with this byte


@lru_cache(maxsize=4096)
def _array_description(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    body = bytes([_ARRAY_MARK]) + pickle.dumps((code_of(dtype), shape), 5)
    return struct.pack("<qqq", len(body), 1, dtype.itemsize * prod(shape)) + body


@lru_cache(maxsize=4096)
def _dtype_and_shape(description: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    dtype, shape = pickle.loads(description)
    return of_code(dtype), shape


def _array(array: Array) -> Encoded:
    return Encoded(_array_description(array.dtype, array.shape), [array], array.nbytes)


def _pickled(dump: Callable[[Any], bytes], value: Any, buffers: list[Any]) -> Encoded:
    body = dump(value)
    sizes = [b.nbytes for b in buffers]
    head = struct.pack(f"<qq{len(sizes)}q", len(body), len(sizes), *sizes)
    return Encoded(head + body, buffers, sum(sizes))


def aligned(nbytes: int) -> int:
    """Bytes of whole cache lines."""
    return -(-nbytes // LINE) * LINE


# -- the values of collectives ---------------------------------------------------------------------------------------


def as_array(what: str, x: Any) -> tuple[Array, bytes]:
    """``x`` as a C-contiguous array, and its form; ``TypeError`` for what holds no numbers."""
    array, form = checked_array(what, x)
    return (array if array.flags.c_contiguous else np.ascontiguousarray(array)), form


def pack(tree: Any) -> tuple[NDArray[np.uint8], bytes]:
    """A tree as an array of bytes, and its form."""
    arrays = [as_array("a tree of arrays", leaf) for leaf in leaves(tree)]
    structure = rebuild(tree, list(range(len(arrays))))
    form = cloudpickle.dumps((structure, [(code_of(a.dtype), a.shape, leaf_form) for a, leaf_form in arrays]))
    return np.frombuffer(b"".join(a.tobytes() for a, _ in arrays), np.uint8), form


def from_form(form: bytes, array: Array) -> Any:
    """Rebuild the value from its form and the array."""
    if form == ARRAY:
        return array
    if form == SCALAR:
        return array[()]
    structure, signatures = pickle.loads(form)
    content = array.tobytes()
    values, offset = [], 0
    for dtype, shape, leaf_form in signatures:
        leaf = np.ndarray(shape, of_code(dtype), content, offset).copy()
        offset += leaf.nbytes
        values.append(from_form(leaf_form, leaf))
    return rebuild(structure, values)


def zeros_like(x: Any) -> Any:
    """Zeros in the shape of a value, which may be a tree."""
    if is_tree(x):
        return rebuild(x, [zeros_like(leaf) for leaf in leaves(x)])
    array, form = as_array("a rank that receives nothing", x)
    return from_form(form, np.zeros_like(array))
