"""The least memory traffic of an operation, and the time it takes at the rate at which this machine copies.

S is the whole buffer of a case (`benchmarks.cases`), g the number of devices.  What must move at least, if all arrays
lie in memory that every device sees: each input is read once, each result is written once, whoever does it.

| operation | read | written | so many copies of S |
|---|---|---|---|
| all_reduce | g S | g S | g |
| all_gather | S: a shard of S/g from each | g S | (g + 1) / 2 |
| reduce_scatter | g S | S: a shard of S/g to each | (g + 1) / 2 |
| all_to_all | g S | g S | g |
| broadcast | S | g S: the root has an ``out=``, too | (g + 1) / 2 |
| round_trip | 2 S | 2 S | 2 |
| barrier | 0 | 0 | 0 |

An array that is read by several devices counts once: who reads it in pieces that stay in cache reads memory once.  A
copy of n bytes reads n and writes n, so traffic of T bytes is worth T/2 bytes of copying; the rate is that of two
processes at once (or one, whichever moves more in all), in the measured size whose arrays take most nearly as much
memory as those of the operation, so that what fits in the cache is held against copies that do.  Reading costs less
than writing on most machines, so an operation that reads most may come out below 1.
"""

from __future__ import annotations

import math

from benchmarks.cases import COPY
from benchmarks.copying import PROCESSES, name_of
from benchmarks.results import Measurement

KNOWN = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "round_trip", "barrier")


def least_bytes(operation: str, nbytes: int, devices: int) -> tuple[int, int]:
    """Bytes that must be read and bytes that must be written, in all."""
    everybody = devices * nbytes
    table = {
        "all_reduce": (everybody, everybody), "all_gather": (nbytes, everybody),
        "reduce_scatter": (everybody, nbytes), "all_to_all": (everybody, everybody), "broadcast": (nbytes, everybody),
        "round_trip": (2 * nbytes, 2 * nbytes), "barrier": (0, 0),
    }
    if operation not in table:
        raise ValueError(f"the least traffic is known of {', '.join(KNOWN)}, got {operation!r}")
    return table[operation]


class CopyRates:
    """What the copying processes reached beside the systems on some number of devices."""

    def __init__(self, measurements: list[Measurement]) -> None:
        """Those of one number of devices, of all systems."""
        self._seconds = {(m.system, m.nbytes): m.seconds.median for m in measurements if m.operation == COPY}
        self.sizes = tuple(sorted({nbytes for _, nbytes in self._seconds}))

    def rate(self, processes: int, nbytes: int) -> float | None:
        """Bytes a second that so many processes copy together, each an array of ``nbytes``."""
        seconds = self._seconds.get((name_of(processes), nbytes))
        return None if not seconds else processes * nbytes / seconds

    def least_seconds(self, operation: str, nbytes: int, devices: int) -> float | None:
        """What the least traffic takes at the best rate; None where no rate, or no traffic, is known."""
        if operation not in KNOWN:
            return None
        traffic = sum(least_bytes(operation, nbytes, devices))
        if not traffic or not self.sizes:
            return None
        alike = min(self.sizes, key=lambda size: abs(math.log(size / (traffic / (2 * max(PROCESSES))))))
        rates = [rate for processes in PROCESSES if (rate := self.rate(processes, alike))]
        return traffic / 2 / max(rates) if rates else None
