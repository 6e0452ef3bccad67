"""Reusable blocks for messages that have the signature of an earlier one.

The second time that a small array with the same peer, tag, dtype and shape is sent, it gets a block that it keeps. The
header and the description are written once; later messages only write the elements. Each such block has a number, by
which the receiver recognises that it has already read the description.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vcluster.memory import Loan
from vcluster.messages.blocks import BLOCK_NBYTES, HOLDER, LANE, NBYTES, NUMBER, RELEASED, TAG, TAKEN
from vcluster.messages.encoding import HEADER_BYTES, Encoded, decode
from vcluster.tracing import Template

if TYPE_CHECKING:
    from vcluster.messages.endpoint import Endpoint

REUSED_BYTES = 1 << 16
"""Size limit, in bytes, of arrays that use reusable blocks."""
MOST_BLOCKS = 32
"""Maximal number of blocks of one signature to one peer. While all are in use, further messages are sent normally."""

_numbers = itertools.count(1)


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
        self.elements: NDArray[Any] = decode(content)
        self.loan: Loan | None = None
        """For the sender: the loan of the message that lies in the block."""
        self.template: Template | None = None
        """For the receiver: the template of the event of the last message in the block."""


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
