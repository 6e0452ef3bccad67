"""Fences: bytes on both sides of each block of shared memory, or of an array, that nobody may change."""

from __future__ import annotations

import numpy as np

from vcluster.memory.arena import LINE, PAGE, Heap

FENCE = 0xA5


class FencedHeap(Heap):
    """A heap whose blocks have fences.  Blocks from before it was fenced have none."""

    def allocate(self, nbytes):
        width = PAGE if nbytes >= PAGE else LINE    # so that a block is aligned as without fences
        start = super().allocate(nbytes + 2 * width)
        place = start + width
        self.fenced[start] = place, nbytes, width
        self.starts[place] = start
        for fence in self._fences(start):
            fence[:] = FENCE
        return place

    def free(self, offset):
        super().free(self.starts.get(offset, offset))

    def lend(self, offset, released):
        return super().lend(self.starts.get(offset, offset), released)

    def _put_back(self, offset, size):
        if offset in self.fenced:
            self._look_at(offset)
            place, _, _ = self.fenced.pop(offset)
            del self.starts[place]
        super()._put_back(offset, size)

    def broken_fences(self):
        """What was written beyond blocks since the last look, one text for each place."""
        for start in self.fenced:
            self._look_at(start)
        found, self.broken = self.broken, []
        return found

    def _look_at(self, start):
        place, nbytes, _ = self.fenced[start]
        for side, fence in zip(("before", "behind"), self._fences(start), strict=True):
            changed = np.count_nonzero(fence != FENCE)
            if changed:
                self.broken.append(f"{changed} bytes {side} a block of {nbytes} at {place} were written")
                fence[:] = FENCE

    def _fences(self, start):
        place, nbytes, width = self.fenced[start]
        return (
            np.frombuffer(self.arena.view, np.uint8, width, start),
            np.frombuffer(self.arena.view, np.uint8, width, place + nbytes),
        )


def fence(heap):
    """Put fences around each block of a heap that is allocated from now on."""
    if not isinstance(heap, FencedHeap):
        heap.fenced, heap.starts, heap.broken = {}, {}, []
        heap.__class__ = FencedHeap
    return heap


class FencedArray:
    """An array of private memory between two fences."""

    def __init__(self, shape, dtype):
        nbytes = int(np.prod(shape)) * dtype.itemsize
        self._memory = np.full(nbytes + 2 * PAGE, FENCE, np.uint8)
        self.array = self._memory[PAGE : PAGE + nbytes].view(dtype).reshape(shape)

    def is_whole(self):
        """Whether nobody has written beyond the array."""
        return bool((self._memory[:PAGE] == FENCE).all() and (self._memory[len(self._memory) - PAGE :] == FENCE).all())
