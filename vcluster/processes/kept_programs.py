"""The programs that a device keeps from run to run, so that it unpickles and prepares each of them once."""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from vcluster.memory import Arena
from vcluster.messages.encoding import decode

MOST_PROGRAMS = 8
MOST_BYTES = 32 << 20
"""A device keeps at most this many programs, of at most this many encoded bytes; the one used longest ago goes first.
"""


class SentProgram(NamedTuple):
    """A program that devices may keep, as the host hands it over in every run: a device that has it reads only this."""

    place: int
    """The offset of its block in shared memory."""
    block_nbytes: int
    digest: bytes
    """Equal for equal encoded programs."""


class KeptPrograms:
    """The programs of one device, by their digests."""

    def __init__(self) -> None:
        self._programs: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._nbytes = 0

    def load(self, arena: Arena, sent: SentProgram) -> Any:
        """The program: the one that is kept, or a new one from the block.  Its arrays are read-only."""
        if sent.digest in self._programs:
            self._programs.move_to_end(sent.digest)
            return self._programs[sent.digest][0]
        block = bytes(arena.view[sent.place : sent.place + sent.block_nbytes])
        program = decode(np.frombuffer(block, np.uint8))
        self._programs[sent.digest] = program, sent.block_nbytes
        self._nbytes += sent.block_nbytes
        while len(self._programs) > MOST_PROGRAMS or self._nbytes > MOST_BYTES:
            self.drop(next(iter(self._programs)))
        return program

    def drop(self, digest: bytes) -> None:
        """Keep this program no longer."""
        _, nbytes = self._programs.pop(digest, (None, 0))
        self._nbytes -= nbytes

    def clear(self) -> None:
        """Keep no program."""
        self._programs.clear()
        self._nbytes = 0
