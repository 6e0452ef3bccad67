"""Where things lie in the shared memory of a cluster, and the few words that all its members watch.

    page 0            the cancel word, and how often traffic was forgotten
    a page each       of every endpoint: the word it is woken by, whether it sleeps, the top of its heap, whether a ring
                      to it was found full, its process
    eight pages each  of every device: what it is doing (`vcluster.memory.status`)
    a row each        of every endpoint: how many blocks it holds of each other's heap
    four pages each   of every device: notes between it and the host (`vcluster.processes.command_link`)
    a directory each  of every endpoint: where its slot for a group lies (`vcluster.collectives.group`)
    a page a pair     of endpoints: the ring of messages from one to the other (`vcluster.messages.channel`)
    a region each     of every endpoint: its heap

The endpoints are the devices by rank, and then the host.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from parallelism.events import HOST
from vcluster.memory.arena import LINE, PAGE, Arena

EPOCH = LINE
"""The word that says how often traffic was forgotten: what was sent before is not for those who receive after."""
DIRECTORY_ENTRIES = 4096
DIRECTORY_BYTES = 16 * DIRECTORY_ENTRIES
STATUS_BYTES = 8 * PAGE
WIRE_BYTES = 4 * PAGE


@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets, for a cluster of ``size`` devices whose heaps are ``region_nbytes`` each."""

    size: int
    region_nbytes: int
    cores: int = 1
    """That the host may use, and so the devices: a number that all of them know alike."""

    @classmethod
    def for_devices(cls, size: int, *, sparse: bool = True) -> Layout:
        """Regions as large as the memory of the machine: they are sparse, so that is only address space."""
        region = 1 << (_memory_nbytes() - 1).bit_length() if sparse else (1 << 30) // (size + 1)
        while sparse and region * (size + 1) > 1 << 45:  # of the 47 bits that a process can address
            region >>= 1
        return cls(size, region // PAGE * PAGE, _cores())

    @property
    def endpoints(self) -> int:
        return self.size + 1

    @property
    def host(self) -> int:
        """The endpoint of the host."""
        return self.size

    def endpoint(self, rank: int) -> int:
        return self.size if rank == HOST else rank

    def rank(self, endpoint: int) -> int:
        return HOST if endpoint == self.size else endpoint

    def wake_word(self, endpoint: int) -> int:
        return PAGE * (1 + endpoint)

    def sleeping_word(self, endpoint: int) -> int:
        return PAGE * (1 + endpoint) + LINE

    def top_word(self, endpoint: int) -> int:
        return PAGE * (1 + endpoint) + 2 * LINE

    def crowded_word(self, endpoint: int) -> int:
        return PAGE * (1 + endpoint) + 3 * LINE

    def process_word(self, endpoint: int) -> int:
        return PAGE * (1 + endpoint) + 4 * LINE

    def status(self, rank: int) -> int:
        return PAGE * (1 + self.endpoints) + STATUS_BYTES * rank

    def held_word(self, holder: int, owner: int) -> int:
        return self.status(self.size) + 8 * (holder * self.endpoints + owner)

    def wire(self, rank: int) -> int:
        pages = -(-self.held_word(self.endpoints, 0) // PAGE)
        return PAGE * pages + WIRE_BYTES * rank

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
        """Empty every ring and directory.  Only while no device is running."""
        start = self.directory(0)
        arena.clear(start, self.region(0) - start)
        arena.words(EPOCH)[0] += 1


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_nbytes() -> int:
    if hasattr(os, "sysconf"):  # a tenth of the time that importing psutil takes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import psutil

    return int(psutil.virtual_memory().total)
