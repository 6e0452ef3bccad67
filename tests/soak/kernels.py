"""What the devices run in the soak. A kernel returns its token, so that a result of another run is seen."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
import threading
import tracemalloc
from contextlib import suppress

import stacks  # noqa: F401  (devices that are spawned show their stacks, too)
from random_programs import run_program

from parallelism.events import HOST
from vcluster import ClusterError, VirtualCluster


def right(device, token, steps, x):
    """A random program, then a sum of what the host gave."""
    run_program(device, steps)
    return token, device.rank, device.all_reduce(x)


def wrong(device, token, steps, mistake):
    run_program(device, steps, mistake)
    return token


class Unpicklable(Exception):
    def __init__(self, token):
        super().__init__(token)
        self.lock = threading.Lock()


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("of __str__")

    __repr__ = __str__


def raises(device, token, steps, rank, how):
    """Fails on one rank after the program."""
    run_program(device, steps)
    if device.rank == rank:
        if how == "unpicklable":
            raise Unpicklable(token)
        if how == "wordless":
            raise Wordless(token)
        if how == "exits":
            raise SystemExit(token)
        if how == "result":
            return threading.Lock()
    device.barrier()
    return token


def never_ends(device):
    while True:
        device.barrier()


def forks(device, token):
    """A copy of the device comes back from the kernel."""
    if os.fork() == 0:
        return "from the copy"
    code = os.waitstatus_to_exitcode(os.wait()[1])
    return token, code, int(device.all_reduce(device.rank))


def threads(device, token, count):
    """Two threads call collectives, each on its own axis."""
    sums = {}

    def work(axis):
        sums[axis] = [int(device.all_reduce(i * 100 + device.rank, axis)) for i in range(count)]

    started = [threading.Thread(target=work, args=(axis,)) for axis in device.mesh.axes]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return token, sums


def from_host(device, token, count):
    """What the host sends while the run is under way."""
    received = [float(device.channel(HOST).recv().sum()) for _ in range(count)]
    return token, received, float(device.all_reduce(sum(received)))


def nested(device, token, steps, rank):
    """Each device has a cluster of threads inside; one device fails meanwhile."""
    with VirtualCluster(2, backend="thread") as inner:
        inside = inner.run(lambda mine: int(mine.all_reduce(mine.rank + 1))).outputs
        if device.rank == rank:
            raise ValueError(token)
        inner.run(lambda mine: [mine.barrier() for _ in range(20)])
    device.barrier()
    return token, inside


def child_uses_cluster(cluster):
    """In a fork of the host: the error says what to do, and a new cluster works."""
    try:
        cluster.run(lambda device: device.rank)
    except ClusterError as error:
        if "make a new cluster here" not in str(error):
            return 2
    else:
        return 3
    with VirtualCluster(2) as mine:
        return 0 if mine.run(lambda device: int(device.all_reduce(1))).outputs == [2, 2] else 4


def counts(device):
    return int(device.all_reduce(1))


# -- what a device holds -----------------------------------------------------------------------------------------------


def settle():
    """Gives back what Python and the C library keep for later, so that only what is in use is counted.

    They are free lists, cycles, and two that fill up over thousands of runs: the cache of attributes of classes, 4096
    entries that hold the names which C code made up for a look-up; and free parts of the heaps of malloc, of which
    threads have one each.
    """
    gc.collect()
    sys._clear_type_cache()
    with suppress(OSError, AttributeError):     # another C library
        ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def bytes_in_use():
    """The bytes that this process has asked malloc and Python's own allocator for and not given back; None if unknown.

    What a process has resident goes by whole arenas of Python's allocator, 1 MiB each, and by how objects happen to lie
    in them.
    """
    with suppress(OSError, AttributeError, StopIteration), tempfile.TemporaryFile() as told:
        mallinfo = ctypes.CDLL(None).mallinfo2
        mallinfo.restype = _Mallinfo
        found = mallinfo()
        before = os.dup(2)
        os.dup2(told.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(before, 2)
            os.close(before)
        told.seek(0)
        line = next(line for line in told if line.startswith(b"# bytes in allocated blocks"))
        return found.uordblks + found.hblkhd + int(line.split(b"=")[1].replace(b",", b""))
    return None


def collect(device):
    """Settles; returns the bytes of this device's blocks in shared memory, and what its process has in use."""
    settle()
    return device.endpoint.heap.used_bytes(), bytes_in_use()


def start_tracing(device):
    tracemalloc.start(1)


def traced_lines(device):
    """The bytes and objects of each line, without those of the tracing itself."""
    return lines_here()


def lines_here():
    settle()
    snapshot = tracemalloc.take_snapshot().filter_traces([
        tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)])
    return {f"{each.traceback[0].filename}:{each.traceback[0].lineno}": [each.size]
            for each in snapshot.statistics("lineno")}
