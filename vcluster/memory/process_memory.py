"""Direct reads and writes of the private memory of other devices, where the system allows it.

An array outside shared memory can be read by peers without a copy to shared memory. On Linux this uses
`process_vm_readv`, if the ptrace rules let processes of one user access each other. Threads of one process read it
directly. Each connection is tried once before it is used.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from parallelism.arrays import Array
from vcluster.code import ClusterError
from vcluster.memory.arena import Arena
from vcluster.memory.layout import PROCESS, Layout
from vcluster.memory.signals import Signals

_PROBE = 0x76636C7573746572


class _Stretch(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


class Peers:
    """The private memory of the devices of a cluster, as one device accesses it."""

    def __init__(self, arena: Arena, layout: Layout, number: int, signals: Signals) -> None:
        self._signals = signals
        self._words = [arena.words(layout.word(endpoint, PROCESS), 2) for endpoint in range(layout.endpoints)]
        self._probe = np.array([_PROBE])
        self._can: dict[int, bool] = {}
        """By process id: whether its memory can be read."""
        mine = self._words[number]
        mine[1] = address_of(self._probe)
        mine[0] = os.getpid()

    def can_be_read(self, ranks: Iterable[int]) -> bool:
        """Whether the members of a group can read and write this device's private memory, and this device theirs."""
        return all(self._try(*self._words[rank]) for rank in ranks)

    def view(self, rank: int, address: int, dtype: np.dtype[Any], count: int) -> Array | None:
        """``count`` elements in the memory of a thread of this process. None if ``rank`` is another process."""
        if self._words[rank][0] != os.getpid():
            return None
        memory: Any = (ctypes.c_char * max(1, dtype.itemsize * count)).from_address(address)
        return np.ndarray((count,), dtype, memory)

    def read(self, rank: int, address: int, into: Array) -> None:
        """Fill the contiguous array ``into`` from the memory of ``rank``."""
        self._move(_calls()[0], rank, address, into)

    def write(self, rank: int, address: int, array: Array) -> None:
        """Copy a contiguous array into the memory of ``rank``."""
        self._move(_calls()[1], rank, address, array)

    def _move(self, move: Callable[..., int], rank: int, address: int, array: Array) -> None:
        here, there, left = address_of(array), address, array.nbytes
        while left:
            done = move(self._words[rank][0], _Stretch(here, left), 1, _Stretch(there, left), 1, 0)
            if done <= 0:
                self._signals.check()
                if (
                    ctypes.get_errno() == _ESRCH
                ):  # the process died; the host notices, too, and cancels the run
                    self._signals.wait(lambda: False)
                raise ClusterError(
                    f"the memory of rank {rank} cannot be accessed: {os.strerror(ctypes.get_errno())}",
                    ranks=[rank],
                )
            here, there, left = here + done, there + done, left - done

    def _try(self, pid: int, probe: int) -> bool:
        readable = self._can.get(pid)
        if readable is None:
            readable = pid == os.getpid()
            if not readable and pid and sys.platform == "linux":
                value = np.zeros(1, self._probe.dtype)
                done = _calls()[0](pid, _Stretch(address_of(value), 8), 1, _Stretch(probe, 8), 1, 0)
                readable = done == 8 and int(value[0]) == _PROBE
            self._can[pid] = readable
        return readable


_ESRCH = 3


@functools.cache
def _calls() -> tuple[Callable[..., int], Callable[..., int]]:
    libc = ctypes.CDLL(None, use_errno=True)
    calls = libc.process_vm_readv, libc.process_vm_writev
    for call in calls:
        call.argtypes = [
            ctypes.c_int,
            ctypes.POINTER(_Stretch),
            ctypes.c_ulong,
            ctypes.POINTER(_Stretch),
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]
        call.restype = ctypes.c_ssize_t
    return calls


def address_of(array: Array) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])
