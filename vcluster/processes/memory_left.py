"""The start of a cluster that is too large for the memory of the machine ends with a sentence, before others are killed."""

from __future__ import annotations

from typing import NamedTuple

from parallelism.display import quantities
from vcluster.code import ClusterError


class Memory(NamedTuple):
    of_a_device: int
    """Bytes that one device has for itself alone."""
    left: int
    """Bytes that the system can still give, swap included."""


def measured_memory(pid: int) -> Memory | None:
    """The memory of the device with this process, and what is left; None if the system does not tell."""
    import psutil

    try:
        own = psutil.Process(pid).memory_full_info().uss
        return Memory(own, psutil.virtual_memory().available + psutil.swap_memory().free)
    except (psutil.Error, OSError, AttributeError):
        return None


def refuse_without_memory(pid: int, started: int, size: int) -> None:
    """Raise `ClusterError` if the devices that are still to start need more memory than is left.

    The device with this process has started, and the others will need as much, for they have as many peers. Runs
    come on top.
    """
    memory = measured_memory(pid)
    if memory is None or (size - started) * memory.of_a_device <= memory.left:
        return
    raise ClusterError(
        f"a cluster of {size} devices cannot be started: each needs {quantities.nbytes(memory.of_a_device)} of memory, "
        f"{quantities.nbytes(size * memory.of_a_device)} together, and {quantities.nbytes(memory.left)} are left after "
        f"the first {started}"
    )
