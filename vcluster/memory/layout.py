"""The layout of a cluster's shared memory, with the few words that all endpoints watch.

    page 0                 the cancel word, and the number of times that traffic was reset
    a page per endpoint    its wake word, whether it sleeps, the top of its heap, whether a ring to it was full, its
                           process, the number of groups in its directory; over MPI, its own cancel word, and the last
                           reset that it has reached, and finished
    8 pages per device     its state (`vcluster.memory.status`)
    a row per endpoint     the number of blocks that it holds of each other endpoint's heap
    4 pages per device     notes between it and the host (`vcluster.processes.command_link`)
    a directory per endpoint   the place of its slot for each group (`vcluster.collectives.group`)
    a page per pair        of endpoints: the ring of messages from one to the other (`vcluster.messages.channel`)
    a region per endpoint  its heap

The endpoints are the devices by rank, followed by the host.
"""

import os
import sys
from typing import NamedTuple, Self

from parallelism.events import HOST
from vcluster.memory.arena import LINE, PAGE, Arena

if sys.platform == "win32":
    resource = None
else:
    import resource

EPOCH = LINE
"""Offset of a word that counts the resets of traffic. A message of an earlier epoch is discarded."""
WAKE, SLEEPING, TOP, CROWDED, PROCESS, GROUPS, CANCELLED, REACHED, EMPTIED = range(0, 9 * LINE, LINE)
"""Offsets of the words in the page of an endpoint."""
DIRECTORY_ENTRIES = 4096
DIRECTORY_BYTES = 16 * DIRECTORY_ENTRIES
KEPT_GROUPS = 1024
"""The number of groups of a device from which on all groups are made anew in the next run."""
STATUS_BYTES = 8 * PAGE
SMALLEST_REGION_BYTES = 1 << 20
MOST_ADDRESSES = 1 << 46
"""The most bytes that the regions of a cluster take, of the 2**47 bytes that a process can address."""
WIRE_BYTES = 4 * PAGE


class Layout(NamedTuple):
    """The offsets in bytes, for a cluster of ``size`` devices with heaps of ``region_nbytes`` bytes each."""

    size: int
    region_nbytes: int
    cores: int = 1
    """Number of cores that the host, and so the devices, may use. All endpoints use the same number."""

    @classmethod
    def for_devices(cls, size: int, *, sparse: bool = True) -> Self:
        """Regions as large as the memory of the machine. They are sparse, so they only use address space."""
        region = 1 << (_memory_nbytes() - 1).bit_length() if sparse else (1 << 30) // (size + 1)
        while sparse and region > SMALLEST_REGION_BYTES and region * (size + 1) > _most_nbytes():
            region >>= 1
        made = cls(size, region // PAGE * PAGE, _cores())
        if made.nbytes > MOST_ADDRESSES:
            raise ValueError(
                f"a cluster of {size} devices needs {made.nbytes >> 40} TiB of addresses for its shared memory, and a "
                f"process has no more than {MOST_ADDRESSES >> 40}; record() and simulate() take as many devices as you "
                f"like"
            )
        return made

    @property
    def endpoints(self) -> int:
        return self.size + 1

    @property
    def host(self) -> int:
        """The number of the host's endpoint."""
        return self.size

    def endpoint(self, rank: int) -> int:
        return self.size if rank == HOST else rank

    def rank(self, endpoint: int) -> int:
        return HOST if endpoint == self.size else endpoint

    def word(self, endpoint: int, which: int) -> int:
        """A word in the page of an endpoint: `WAKE` to `EMPTIED`."""
        return PAGE * (1 + endpoint) + which

    def top_word(self, endpoint: int) -> int:
        """The end of the used part of the endpoint's heap."""
        return self.word(endpoint, TOP)

    def status(self, rank: int) -> int:
        return PAGE * (1 + self.endpoints) + STATUS_BYTES * rank

    def held_word(self, holder: int, owner: int) -> int:
        return self.status(self.size) + 8 * (holder * self.endpoints + owner)

    def wire(self, rank: int) -> int:
        return -(-self.held_word(self.endpoints, 0) // PAGE) * PAGE + WIRE_BYTES * rank

    def directory(self, endpoint: int) -> int:
        return self.wire(self.size) + DIRECTORY_BYTES * endpoint

    def ring(self, source: int, target: int) -> int:
        return self.directory(self.endpoints) + PAGE * (source * self.endpoints + target)

    def region(self, endpoint: int) -> int:
        return self.ring(self.endpoints, 0) + self.region_nbytes * endpoint

    @property
    def nbytes(self) -> int:
        return self.region(self.endpoints)

    def forget_traffic(self, arena: Arena) -> None:
        """Empty every ring and directory. No device may be running."""
        start = self.directory(0)
        arena.clear(start, self.region(0) - start)
        self._count_no_groups(arena)
        arena.words(EPOCH)[0] += 1

    def forget_groups(self, arena: Arena) -> None:
        """Empty every directory. No device may be running."""
        arena.clear(self.directory(0), self.ring(0, 0) - self.directory(0))
        self._count_no_groups(arena)

    def most_groups(self, arena: Arena) -> int:
        """The number of groups in the fullest directory."""
        return max(arena.words(self.word(endpoint, GROUPS))[0] for endpoint in range(self.size))

    def _count_no_groups(self, arena: Arena) -> None:
        for endpoint in range(self.size):
            arena.words(self.word(endpoint, GROUPS))[0] = 0


def _most_nbytes() -> int:
    """The most that the regions may be together. A process can address 2**47 bytes, unless ulimit says less."""
    limits = [1 << 45]
    if resource is not None:
        files = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        space = resource.getrlimit(resource.RLIMIT_AS)[0]
        # A device that is forked maps the regions beside the mapping of the host, which it inherits.
        limits += [limit for limit in (files, space // 4) if limit > 0]
    return min(limits)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_nbytes() -> int:
    if hasattr(os, "sysconf"):  # this takes a tenth of the time of importing psutil
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import psutil

    return int(psutil.virtual_memory().total)
