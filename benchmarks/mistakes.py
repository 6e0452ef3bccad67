"""The mistakes that cost people days, as kernels, each with the error that it must end in and within which time.

A kernel notes the moment from which nothing can save its run, as it makes the mistake: the clock is the same in all
processes of a machine.
"""

from __future__ import annotations

import linecache
import os
import resource
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.cases import WrongAnswerError
from vcluster.code import ClusterError, CollectiveMismatchError, DeadlockError, DeviceFailedError
from vcluster.device import VirtualDevice

Kernel = Callable[[VirtualDevice, str], object]

_MOMENT = "d"
_NBYTES = struct.calcsize(_MOMENT)


@dataclass(frozen=True)
class Mistake:
    """One of them; the odd one out is rank 1."""

    kernel: Kernel
    error: type[ClusterError]
    words: tuple[str, ...]
    """What its text must hold."""
    bound_seconds: float = 0.5
    ends_process: bool = False

    def check(self, name: str, error: BaseException, size: int) -> None:
        """`WrongAnswerError` unless ``error`` is the right one: its ranks, its operation, its lines."""
        text = str(error)
        if not isinstance(error, self.error):
            raise WrongAnswerError(f"{name} on {size} devices ended in {type(error).__name__}: {text.splitlines()[0]}")
        missing = [word for word in self.words if word not in text]
        if missing:
            raise WrongAnswerError(f"{name} on {size} devices does not tell {missing[0]!r}: {text.splitlines()[0]}")
        ended = self.error is DeviceFailedError
        if not error.ranks or (1 not in error.ranks if ended else error.operation is None):
            raise WrongAnswerError(f"{name} on {size} devices names ranks {error.ranks}, operation {error.operation}")
        for place in error.locations:
            filename, _, line = place.rpartition(":")
            called = error.operation or ""  # or the sendrecv that it is part of
            if filename != __file__ or called not in linecache.getline(filename, int(line)):
                raise WrongAnswerError(f"{name} on {size} devices names the line {place}")


def note(moments: str, device: VirtualDevice, ahead_seconds: float = 0.0) -> None:
    """In a kernel: nothing can save the run, now that this rank does what it does next."""
    fd = os.open(moments, os.O_WRONLY)
    os.pwrite(fd, struct.pack(_MOMENT, time.monotonic() + ahead_seconds), _NBYTES * device.rank)
    os.close(fd)


def last_moment(moments: Path, size: int) -> float:
    """When the last rank made it unavoidable; and forget all moments."""
    data = moments.read_bytes()
    moments.write_bytes(bytes(_NBYTES * size))
    return float(max(moment for (moment,) in struct.iter_unpack(_MOMENT, data)))


def _shape(device: VirtualDevice, moments: str) -> None:
    x = np.ones(3 if device.rank == 1 else 4)
    note(moments, device)
    device.all_reduce(x, out=x)


def _dtype(device: VirtualDevice, moments: str) -> None:
    x = np.ones(4, "i4" if device.rank == 1 else "f4")
    note(moments, device)
    device.all_reduce(x, out=x)


def _op(device: VirtualDevice, moments: str) -> None:
    x = np.ones(4)
    note(moments, device)
    device.all_reduce(x, out=x, op="max" if device.rank == 1 else "sum")


def _collective(device: VirtualDevice, moments: str) -> None:
    x = np.ones(4)
    note(moments, device)
    device.broadcast(x, out=x) if device.rank == 1 else device.all_reduce(x, out=x)


def _group(device: VirtualDevice, moments: str) -> None:
    ranks = list(range(device.size))
    note(moments, device)
    device.barrier(groups=[ranks[::-1] if device.rank == 1 else ranks])


def _order(device: VirtualDevice, moments: str) -> None:
    """Two groups, the whole and pairs, entered in different orders."""
    pairs = [[rank + 1, rank] for rank in range(0, device.size - 1, 2)]
    first, second = ([list(range(device.size))], pairs) if device.rank == 1 else (pairs, [list(range(device.size))])
    note(moments, device)
    device.barrier(groups=first if device.rank < 2 else second)
    device.barrier(groups=second)


def _missing_rank(device: VirtualDevice, moments: str) -> None:
    note(moments, device)
    if device.rank != 1:
        device.barrier()


def _recv_cycle(device: VirtualDevice, moments: str) -> None:
    note(moments, device)
    device.recv((device.rank + 1) % device.size)


def _send_cycle(device: VirtualDevice, moments: str) -> None:
    x = np.ones(2)
    for _ in range(100):
        note(moments, device)
        device.send(x, (device.rank + 1) % device.size)


def _exception(device: VirtualDevice, moments: str) -> None:
    if device.rank == 1:
        note(moments, device)
        raise ValueError("a planted failure")
    device.barrier()


def _ends(end: Callable[[], object]) -> Kernel:
    def kernel(device: VirtualDevice, moments: str) -> None:
        device.barrier()
        if device.rank == 1:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            note(moments, device)
            end()
        device.barrier()

    return kernel


def _killed_anywhere(device: VirtualDevice, moments: str) -> None:
    """The signal comes at a random moment of a program that never ends; nobody handles it."""
    x = np.ones(1000)
    device.all_reduce(x, out=x)
    if device.rank == 1:
        delay = np.random.default_rng().uniform(1e-5, 2e-2)
        note(moments, device, delay)
        signal.setitimer(signal.ITIMER_REAL, delay)
    while True:
        device.all_reduce(x, out=x)
        device.sendrecv(x, (device.rank + 1) % device.size, (device.rank - 1) % device.size)
        x = np.sqrt(abs(x))


MISTAKES = {
    "shape": Mistake(_shape, CollectiveMismatchError, ("differ in shape", "rank 1 called all_reduce(float64[3]")),
    "dtype": Mistake(_dtype, CollectiveMismatchError, ("differ in dtype", "rank 1 called all_reduce(int32[4]")),
    "op": Mistake(_op, CollectiveMismatchError, ("differ in op", "rank 1 called all_reduce(float64[4], op='max'")),
    "collective": Mistake(_collective, CollectiveMismatchError, ("differ in what", "rank 1 called broadcast(")),
    "group": Mistake(_group, DeadlockError, ("deadlock", "in barrier() at ", "waiting for rank")),
    "order": Mistake(_order, DeadlockError, ("deadlock", "in barrier() at ", "waiting for rank")),
    "missing rank": Mistake(_missing_rank, DeadlockError, ("rank 1 returned without calling barrier",)),
    "recv cycle": Mistake(_recv_cycle, DeadlockError, ("rank 0 waits for rank 1", "in recv(from rank 1, tag 0) at ")),
    "send cycle": Mistake(_send_cycle, DeadlockError, ("rank 0 waits for rank 1", "in send(to rank 1, tag 0) at ")),
    "exception": Mistake(_exception, DeviceFailedError, ("rank 1 raised ValueError", "a planted failure")),
    "os._exit": Mistake(
        _ends(lambda: os._exit(3)), DeviceFailedError, ("the process of rank 1", "exit code 3"), 0.3, ends_process=True
    ),
    "SIGKILL": Mistake(
        _ends(lambda: os.kill(os.getpid(), signal.SIGKILL)), DeviceFailedError, ("process of rank 1", "SIGKILL"), 0.3,
        ends_process=True,
    ),
    "SIGSEGV": Mistake(
        _ends(lambda: os.kill(os.getpid(), signal.SIGSEGV)), DeviceFailedError, ("process of rank 1", "SIGSEGV"), 0.3,
        ends_process=True,
    ),
    "killed anywhere": Mistake(
        _killed_anywhere, DeviceFailedError, ("the process of rank 1", "SIGALRM"), 1.0, ends_process=True
    ),
}
"""By name, in the order of the report."""
