"""Shared memory: one anonymous file, mapped by every endpoint of a cluster, which cannot leak.

The file has no name (`memfd_create`, or elsewhere a temporary file that is unlinked at once). The kernel therefore
frees it when the last process that maps it ends, in whatever way. The file is sparse: untouched pages use no memory.

An `Arena` is the mapping. A `Heap` allocates in one endpoint's region of it. Only the owner allocates there, so no
other process needs a lock. A block that another endpoint reads (a message, a result) is released by a word in its
header.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from parallelism.arrays import Array
from vcluster.memory import forks

PAGE = 4096
LINE = 64
"""Bytes of a cache line. Words that different devices write lie at least this far apart."""

CACHED_BYTES_LIMIT = 256 << 20
"""Bytes of freed blocks that a heap keeps mapped. Beyond that, the memory of the oldest goes back to the system."""

LARGE_BYTES = 1 << 20
"""Size in bytes from which blocks count towards `CACHED_BYTES_LIMIT`."""


class Arena:
    """A shared mapping of ``nbytes`` bytes. An offset means the same place in every process."""

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        """Map the file behind ``fd``, which the arena then owns, or a new anonymous file if ``fd`` is None."""
        self.nbytes = nbytes
        self.cancel_place = 0
        """Offset of the word that says whether the run is cancelled."""
        self.asleep: set[int] = set()
        """The threads of this process that sleep in calls."""
        if sys.platform == "win32":  # there is only the thread backend, so private pages suffice
            self.fd = -1
            self._mapping = mmap.mmap(-1, nbytes)
        else:
            self.fd = _anonymous_file(nbytes) if fd is None else fd
            try:
                self._mapping = mmap.mmap(self.fd, nbytes)
            except BaseException:
                self.close_descriptor()
                raise
        self.view = memoryview(self._mapping)
        self.address = np.frombuffer(self.view, np.uint8, 1).ctypes.data
        forks.members.add(self)

    def words(self, offset: int, count: int = 1) -> memoryview:
        """``count`` signed 64-bit words at ``offset``, which is a multiple of 8."""
        return self.view[offset : offset + 8 * count].cast("q")

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """The memory at ``offset`` as an array. The caller must keep the block alive."""
        return np.ndarray(shape, dtype, self.view, offset)

    def offset_of(self, array: Array) -> int | None:
        """The offset of a contiguous array in the arena. None if the array lies elsewhere."""
        offset = int(array.__array_interface__["data"][0]) - self.address
        return offset if offset >= 0 and offset + array.nbytes <= self.nbytes else None

    def clear(self, offset: int, nbytes: int) -> None:
        """Set whole pages to zero and give their memory back to the system."""
        if nbytes <= 0:
            return
        if hasattr(mmap, "MADV_REMOVE"):
            self._mapping.madvise(mmap.MADV_REMOVE, offset, nbytes)
        else:
            for start in range(offset, offset + nbytes, 1 << 20):
                stop = min(start + (1 << 20), offset + nbytes)
                self.view[start:stop] = bytes(stop - start)

    def forked(self, *, keep: bool) -> None:
        """In a forked copy of this process: leave the shared memory. With ``keep``, held blocks become private copies."""
        if not keep:  # a device that starts maps the file itself
            return
        self.close_descriptor()
        blocks = [block for each in list(forks.held) if (block := each()) is not None]
        if forks.make_private(self.address, self.nbytes, blocks):
            self.words(self.cancel_place)[0] = 1  # whoever waits in this copy for the others is cancelled

    def close_descriptor(self) -> None:
        """Close the file. The mapping stays until the last array in it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Loan:
    """A block that another endpoint holds. Once the loan has ``ended``, the block may be reused."""

    __slots__ = ("ended", "offset", "released")

    def __init__(self, offset: int, released: memoryview) -> None:
        self.offset = offset
        self.released = released
        self.ended = False


class Heap:
    """Allocates blocks in one region of an arena, for the endpoint that owns the region.

    Blocks come in size classes and are reused, so that their page faults are paid only once. Freeing is safe at any
    moment, also from a garbage collection in the middle of an allocation. Any thread may allocate.
    """

    def __init__(self, arena: Arena, start: int, nbytes: int, top: memoryview | None = None) -> None:
        """``top`` is a shared word with the end of the used part, for the successor of an owner that died."""
        self.arena = arena
        self._start = start
        self._end = start + nbytes
        self._top = top if top is not None else memoryview(bytearray(8)).cast("q")
        self._next = max(start, self._top[0])
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}
        self._freed: deque[int] = deque()
        self._lent: dict[int, deque[Loan]] = {}
        self._kept: dict[int, int] = {}
        """Large free blocks whose memory is still mapped: offset to size, the one freed longest ago first."""
        self._kept_nbytes = 0

    def allocate(self, nbytes: int) -> int:
        """The offset of a block of at least ``nbytes`` bytes. It is a multiple of 64, and of 4096 for large blocks."""
        size = _size_class(nbytes)
        with self._lock:
            if self._freed:
                self._collect()
            free = self._free.get(size)
            if (
                not free or size >= LARGE_BYTES
            ) and size in self._lent:  # a block released now may be in the cache
                self._collect_lent(size)
                free = self._free.get(size)
            if free:
                offset = free.pop()
                self._kept_nbytes -= self._kept.pop(offset, 0)
            else:
                align = PAGE if size >= PAGE else LINE
                offset = -(-self._next // align) * align
                if offset + size > self._end:
                    raise MemoryError(
                        f"the shared memory of one device holds {(self._end - self._start) >> 20} MiB; "
                        f"{nbytes} bytes more do not fit"
                    )
                self._next = self._top[0] = offset + size
            self._sizes[offset] = size
            return offset

    def free(self, offset: int) -> None:
        """Free a block. This only notes the offset; the next allocation sorts it in."""
        self._freed.append(offset)

    def lend(self, offset: int, released: memoryview) -> Loan:
        """Lend a block to another endpoint until the word ``released[0]`` is not 0."""
        loan = Loan(offset, released)
        with self._lock:
            self._lent.setdefault(self._sizes[offset], deque()).append(loan)
        return loan

    def reclaim(self, is_stray: Callable[[int], bool]) -> None:
        """Take back the lent blocks for which ``is_stray(offset)`` is true: no endpoint will release them."""
        for size in list(self._lent):
            for loan in self._lent[size]:
                if is_stray(loan.offset):
                    loan.released[0] = 1
            self._collect_lent(size)

    def used_bytes(self) -> int:
        """The bytes of the blocks in use: neither freed, nor lent and released."""
        with self._lock:
            self._collect()
            for size in list(self._lent):
                self._collect_lent(size)
            return sum(self._sizes.values())

    def block(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """A block and its offset. The block is freed when the last array in it is gone."""
        offset = self.allocate(nbytes)
        block = np.frombuffer(self.arena.view, np.uint8, nbytes, offset)
        when_gone(block, partial(self.free, offset))
        return offset, block

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A new, uninitialised array in the region."""
        return np.ndarray(shape, dtype, self.block(dtype.itemsize * prod(shape))[1])

    def _collect(self) -> None:
        freed, sizes = self._freed, self._sizes
        while freed:
            offset = freed.popleft()
            self._put_back(offset, sizes.pop(offset))

    def _collect_lent(self, size: int) -> None:
        lent = self._lent[size]
        for _ in range(len(lent)):
            loan = lent.popleft()
            if loan.released[0]:
                loan.ended = True
                self._put_back(loan.offset, self._sizes.pop(loan.offset))
            else:
                lent.append(loan)
        if not lent:
            del self._lent[size]

    def _put_back(self, offset: int, size: int) -> None:
        self._free.setdefault(size, []).append(offset)
        if size >= LARGE_BYTES:
            self._kept[offset] = size
            self._kept_nbytes += size
            while self._kept_nbytes > CACHED_BYTES_LIMIT:
                oldest = next(iter(self._kept))
                nbytes = self._kept.pop(oldest)
                self._kept_nbytes -= nbytes
                self.arena.clear(oldest, nbytes)


class _Watched(weakref.ref):  # type: ignore[type-arg]
    """A block and what is called when it is gone."""

    __slots__ = ("then",)

    def __new__(cls, block: NDArray[np.uint8], then: Callable[[], object]) -> _Watched:
        return super().__new__(cls, block, _is_gone)

    def __init__(self, block: NDArray[np.uint8], then: Callable[[], object]) -> None:
        self.then = then

    def __hash__(self) -> int:  # a dead reference cannot be hashed by its referent
        return id(self)


def when_gone(block: NDArray[np.uint8], then: Callable[[], object]) -> None:
    """Call ``then`` when the last array in a block is gone."""
    forks.held.add(_Watched(block, then))


def _is_gone(block: weakref.ref[Any]) -> None:
    assert isinstance(block, _Watched)
    forks.held.discard(block)
    block.then()


def _size_class(nbytes: int) -> int:
    """The size class of a block: powers of two up to a page, then eight steps for each power of two."""
    if nbytes <= PAGE:
        return max(LINE, 1 << (nbytes - 1).bit_length()) if nbytes > 1 else LINE
    step = max(PAGE, 1 << ((nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


def _anonymous_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("vcluster")
    else:
        import tempfile

        fd, path = tempfile.mkstemp(prefix="vcluster-")
        os.unlink(path)  # noqa: PTH108
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd
