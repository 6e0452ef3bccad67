"""How fast this machine copies: what every other figure is held against.

One process, or two at once, copies an array of its own again and again: within the cache where it fits, beyond it where
it does not.  This is a system like the others and takes its turns among them, so that the rate belongs to the same
minutes.
"""

from __future__ import annotations

import numpy as np

from benchmarks.cases import COPY, Case, Times, Trial, timed_rounds
from benchmarks.plan import KIB, MIB
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
PROCESSES = (1, 2)
BYTES_A_ROUND = 16 * MIB
"""Small arrays are copied so often that a round takes a millisecond."""


def name_of(processes: int) -> str:
    """What so many copying processes are called among the systems."""
    return f"machine x{processes}"


def cases(devices: int, most_bytes: int) -> list[Case]:
    """The sizes that tell about operations on ``devices`` of buffers up to ``most_bytes``: see `benchmarks.traffic`."""
    return [Case(COPY, nbytes) for nbytes in SIZES if nbytes <= max(64 * KIB, devices * most_bytes // 2)]


class Copying:
    """So many processes, each copying."""

    def __init__(self, processes: int) -> None:
        self.name = name_of(processes)
        self.devices = processes
        self._cluster = VirtualCluster(processes)

    def supports(self, case: Case) -> bool:
        return case.operation == COPY

    def rounds(self, case: Case, count: int) -> list[Times]:
        return self._cluster.run(_copy, case, count).outputs

    def close(self) -> None:
        self._cluster.close()


def _copy(device: VirtualDevice, case: Case, count: int) -> Times:
    """Rounds that end when one copy would have taken its part of the time."""
    trial = Trial(case, device.rank, device.size)
    times = max(1, BYTES_A_ROUND // case.nbytes)

    def call() -> object:
        for _ in range(times):
            np.copyto(trial.out, trial.x)
        return trial.out

    rounds = timed_rounds(trial, count, device.barrier, call)
    return [(start, start + (end - start) / times) for start, end in rounds]
