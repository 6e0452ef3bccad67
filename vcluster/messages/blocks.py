"""Blocks of shared memory that one endpoint writes and another reads: their header, and how they are given back.

The header says when the content was taken (the sender of a message may send another) and when the memory was released
(its owner may use it again).  A large block is not copied by who reads it: the arrays lie in it, and it is released
when the last of them has gone.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from vcluster.messages.encoding import HEADER_BYTES, Encoded, decode

if TYPE_CHECKING:
    from vcluster.memory import Arena, Loan
    from vcluster.messages.endpoint import Endpoint

TAKEN, RELEASED, LANE, TAG, BLOCK_NBYTES, NBYTES, HOLDER, NUMBER = range(8)
"""The words of a header; ``NUMBER`` is 0 but for blocks that are used again (`vcluster.messages.block_cache`)."""

COPIED_BYTES = 1 << 14
"""A block up to this size is copied out, so that a small array kept for long does not hold it."""


def lend_block(endpoint: Endpoint, nbytes: int, holder: int) -> tuple[int, memoryview, Loan]:
    """A block for somebody else to read and release: its offset, its header and the loan."""
    offset = endpoint.heap.allocate(nbytes)
    header = endpoint.arena.words(offset, HEADER_BYTES // 8)
    header[TAKEN] = header[RELEASED] = header[NUMBER] = 0
    header[HOLDER] = holder
    return offset, header, endpoint.heap.lend(offset, header[RELEASED : RELEASED + 1])


def hand_over(endpoint: Endpoint, encoded: Encoded, holder: int) -> int:
    """Write a value into a block for ``holder``, who gets its offset some other way and calls `adopt`."""
    offset, header, _ = lend_block(endpoint, encoded.block_nbytes, holder)
    header[BLOCK_NBYTES], header[NBYTES] = encoded.block_nbytes, encoded.nbytes
    encoded.write(endpoint.arena.view[offset : offset + encoded.block_nbytes])
    return offset


def release(arena: Arena, offset: int) -> None:
    """Nobody needs a block any more that was handed over."""
    arena.words(offset, HEADER_BYTES // 8)[RELEASED] = 1


def adopt(arena: Arena, offset: int, held: memoryview) -> Any:
    """The content of a block; ``held`` counts those of its owner that lie in arrays here."""
    header = arena.words(offset, HEADER_BYTES // 8)
    header[TAKEN] = 1
    block_nbytes = header[BLOCK_NBYTES]
    if block_nbytes <= COPIED_BYTES or header[NUMBER]:
        content = bytearray(arena.view[offset : offset + block_nbytes])
        header[RELEASED] = 1
        return decode(np.frombuffer(content, np.uint8))
    block = np.frombuffer(arena.view, np.uint8, block_nbytes, offset)
    held[0] += 1
    _borrowed.add(_Borrowed(block, header, held))
    return decode(block)


class _Borrowed(weakref.ref):  # type: ignore[type-arg]
    """Notices that the last array in a block of somebody else has gone."""

    __slots__ = ("header", "held")

    def __new__(cls, block: Any, header: memoryview, held: memoryview) -> _Borrowed:
        return super().__new__(cls, block, _give_back)

    def __init__(self, block: Any, header: memoryview, held: memoryview) -> None:
        self.header = header
        self.held = held

    def __hash__(self) -> int:
        return id(self)


_borrowed: set[_Borrowed] = set()


def _give_back(borrowed: weakref.ref[Any]) -> None:
    assert isinstance(borrowed, _Borrowed)
    _borrowed.discard(borrowed)
    borrowed.header[RELEASED] = 1
    borrowed.held[0] -= 1
