"""A block of shared memory is written by one endpoint and read by another; its header says when it is free again.

One word of the header tells that the content was taken, so that the sender may send another message. A second tells
that the memory was released, so that its owner may reuse it. The reader does not copy a large block: the arrays lie in
it, and it is released when the last of them is gone.

Messages that have the signature of an earlier one use reusable blocks. The second time that a small array with the same
peer, tag, dtype and shape is sent, it gets a block that it keeps. The header and the description are written once;
later messages only write the elements. Each such block has a number, by which the receiver recognises that it has
already read the description.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.arrays import Array
from vcluster.memory import Arena, Loan, when_gone
from vcluster.messages.encoding import HEADER_BYTES, Encoded, decode
from vcluster.tracing import Template

if TYPE_CHECKING:
    from vcluster.messages.endpoint import Endpoint

TAKEN, RELEASED, LANE, TAG, BLOCK_NBYTES, NBYTES, HOLDER, NUMBER = range(8)
"""The words of a header. ``NUMBER`` is 0, except in the reusable blocks."""

COPIED_BYTES = 1 << 14
"""Blocks up to this size in bytes are copied when they are read, so that a small array does not keep its block long."""

REUSED_BYTES = 1 << 16
"""Size limit, in bytes, of arrays that use reusable blocks."""
MOST_BLOCKS = 32
"""Maximal number of blocks of one signature to one peer. While all are in use, further messages are sent normally."""

_numbers = itertools.count(1)


def lend_block(endpoint: Endpoint, nbytes: int, holder: int) -> tuple[int, memoryview, Loan]:
    """Allocate a block that another endpoint will read and release. Returns its offset, its header and the loan."""
    offset = endpoint.heap.allocate(nbytes)
    header = endpoint.arena.words(offset, HEADER_BYTES // 8)
    header[TAKEN] = header[RELEASED] = header[NUMBER] = 0
    header[HOLDER] = holder
    return offset, header, endpoint.heap.lend(offset, header[RELEASED : RELEASED + 1])


def hand_over(endpoint: Endpoint, encoded: Encoded, holder: int) -> int:
    """Write a value into a block for ``holder``, which learns the offset in another way and calls `adopt`."""
    offset, header, _ = lend_block(endpoint, encoded.block_nbytes, holder)
    header[BLOCK_NBYTES], header[NBYTES] = encoded.block_nbytes, encoded.nbytes
    encoded.write(endpoint.arena.view[offset : offset + encoded.block_nbytes])
    return offset


def release(arena: Arena, offset: int) -> None:
    """Release a block that was handed over and is no longer needed."""
    arena.words(offset, HEADER_BYTES // 8)[RELEASED] = 1


def adopt(arena: Arena, offset: int, held: memoryview) -> Any:
    """The content of a block. ``held`` counts the blocks of its owner in which arrays of this endpoint lie."""
    header = arena.words(offset, HEADER_BYTES // 8)
    header[TAKEN] = 1
    block_nbytes = header[BLOCK_NBYTES]
    if block_nbytes <= COPIED_BYTES or header[NUMBER]:
        content = bytearray(arena.view[offset : offset + block_nbytes])
        header[RELEASED] = 1
        return decode(np.frombuffer(content, np.uint8))
    block = np.frombuffer(arena.view, np.uint8, block_nbytes, offset)
    held[0] += 1

    def give_back() -> None:
        header[RELEASED] = 1
        held[0] -= 1

    when_gone(block, give_back)
    return decode(block)


class Block:
    """One reusable block, as its sender or its receiver sees it."""

    __slots__ = ("elements", "header", "loan", "nbytes", "number", "offset", "released", "template")

    def __init__(self, endpoint: Endpoint, offset: int) -> None:
        self.offset = offset
        self.header = endpoint.arena.words(offset, HEADER_BYTES // 8)
        self.released = self.header[RELEASED : RELEASED + 1]
        self.number = self.header[NUMBER]
        self.nbytes = self.header[NBYTES]
        content = np.frombuffer(endpoint.arena.view, np.uint8, self.header[BLOCK_NBYTES], offset)
        self.elements: Array = decode(content)
        self.loan: Loan | None = None
        """For the sender: the loan of the message that lies in the block."""
        self.template: Template | None = None
        """For the receiver: the template of the event of the last message in the block."""

    def copied(self) -> Array:
        """For the receiver: a copy of the message.  From now on the sender may write the next one."""
        content = self.elements.copy()
        self.header[RELEASED] = 1
        return content


class ReusedBlocks:
    """The blocks for messages of one signature to one peer, in the memory of the sender."""

    def __init__(self, endpoint: Endpoint, peer: int, like: Encoded) -> None:
        """``like`` is an encoded message of that signature: one array."""
        self._endpoint = endpoint
        self._peer = peer
        self._like = Encoded(like.description, [], like.nbytes)
        self._block_nbytes = like.block_nbytes
        self._blocks: deque[Block] = deque()

    def take(self, tag: int) -> tuple[Block, Loan] | None:
        """A block to fill and send, and its loan. None if too many blocks are in use."""
        blocks = self._blocks
        if blocks and blocks[0].released[0]:
            block = blocks[0]
            blocks.rotate(-1)
            if block.loan is not None:
                block.loan.ended = True
        elif len(blocks) < MOST_BLOCKS:
            block = self._make()
            blocks.append(block)
        else:
            return None
        header = block.header
        header[TAKEN] = header[RELEASED] = 0
        header[TAG] = tag
        loan = block.loan = Loan(block.offset, block.released)
        return block, loan

    def give_back(self) -> None:
        """Free the blocks. No endpoint reads them any more."""
        while self._blocks:
            self._endpoint.heap.free(self._blocks.pop().offset)

    def _make(self) -> Block:
        arena = self._endpoint.arena
        offset = self._endpoint.heap.allocate(self._block_nbytes)
        header = arena.words(offset, HEADER_BYTES // 8)
        header[LANE] = 0
        header[BLOCK_NBYTES], header[NBYTES] = self._block_nbytes, self._like.nbytes
        header[HOLDER], header[NUMBER] = self._peer, next(_numbers)
        self._like.write(arena.view[offset : offset + self._block_nbytes])
        return Block(self._endpoint, offset)
