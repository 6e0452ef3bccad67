"""The ranks of this MPI job: rank 0 is the host, the others serve the devices of its clusters."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vcluster.code import ClusterError
from vcluster.mpi.requirement import find_mpi
from vcluster.mpi.transport import LEAVE, START, Address, Transport, load_mpi

POOL = -1
"""What stands for a cluster in messages to a rank that serves none."""


RANKS_PER_NODE = "VCLUSTER_MPI_RANKS_PER_NODE"
"""The variable that cuts each node of a job into nodes of so many ranks, to try on one machine what runs on many."""


class Place(NamedTuple):
    """Where a rank of the job runs."""

    node: str
    pid: int
    shares_with: int = 0
    """The first of the ranks that it shares memory with."""
    maps: bool = False
    """Whether each of these ranks can map a file of another's."""


class Job:
    """All ranks of the job, as the host knows them."""

    def __init__(self, mpi: Any) -> None:
        """All ranks call this together."""
        self.transport = Transport(mpi)
        self.rank, self.size = self.transport.rank, self.transport.size
        self.library = " ".join(
            re.split(r"[\n,]", mpi.Get_library_version())[0].replace("Version:", "").split()
        )
        place = Place(mpi.Get_processor_name(), os.getpid(), *_neighbours(self.transport))
        self.places: Sequence[Place] = self.transport.gather(place) or ()
        """On the host: where each rank runs."""
        self.transport.world.Barrier()
        _unlink_segments()
        self._free = list(range(1, self.size))
        self._clusters = 0
        self.lost: set[int] = set()
        """Ranks that compute on in a cluster that was closed."""

    def take(self, size: int) -> tuple[int, list[int]]:
        """Ranks for a new cluster, and its number."""
        if size >= self.size:
            raise ClusterError(
                f"a cluster of {size} devices needs {size + 1} ranks, one of them for the host, and this job has "
                f"{self.size}; type: mpiexec -n {size + 1} python -m vcluster.mpi ..."
            )
        if size > len(self._free):
            raise ClusterError(
                f"a cluster of {size} needs as many ranks beside the host, and {len(self._free)} of "
                f"{self.size - 1} are free; close the other clusters, or type: mpiexec -n "
                f"{self.size - len(self._free) + size} python -m vcluster.mpi ..."
            )
        self._clusters += 1
        taken, self._free = self._free[:size], self._free[size:]
        return self._clusters, taken

    def next_ranks(self, size: int) -> list[int]:
        """The ranks that the next cluster of ``size`` devices would have; `ClusterError` if there are not as many."""
        free = self._free
        clusters = self._clusters
        _, taken = self.take(size)
        self._free, self._clusters = free, clusters
        return taken

    @property
    def free(self) -> int:
        """The number of ranks that serve no cluster."""
        return len(self._free)

    def give_back(self, ranks: Sequence[int], lost: Sequence[int] = ()) -> None:
        """The devices of a cluster have been told to end; those that are ``lost`` do not listen."""
        self.lost.update(lost)
        self._free = sorted({*self._free, *ranks} - self.lost)

    def start(self, rank: int, cluster: int, order: Any) -> None:
        """Tell a rank which device to serve."""
        from vcluster.messages import encode_message

        self.transport.send(rank, START, Address(POOL, cluster), 0, 0, encode_message(order))

    def leave(self) -> None:
        """Tell all ranks to end. Ranks that do not listen end with the job."""
        from vcluster.messages import Encoded

        if self.lost:
            sys.stdout.flush()
            sys.stderr.flush()
            self.transport.abort()
        for rank in range(1, self.size):
            self.transport.send(rank, LEAVE, Address(POOL, 0), 0, 0, Encoded(b"", [], 0))
        while self.transport.is_sending:
            self.transport.poll()


def open_file(pid: int, descriptor: int) -> int:
    """A descriptor of an anonymous file that another process of this node has open."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)


def _neighbours(transport: Transport) -> tuple[int, bool]:
    """The first of the ranks on this node, and whether each of them can map its file. All ranks call this together.

    Processes of one node need not see each other: containers may have process numbers of their own, and a system may
    forbid it. So it is tried.
    """
    beside = transport.beside(_ranks_per_node())
    first: int = beside.bcast(transport.rank)
    nonce, probe = secrets.token_bytes(16), -1
    if beside.rank == 0 and hasattr(os, "memfd_create"):
        probe = os.memfd_create("vcluster-probe")
        os.write(probe, nonce)
    pid, descriptor, nonce = beside.bcast((os.getpid(), probe, nonce))
    maps = all(beside.allgather(_holds(pid, descriptor, nonce)))
    if probe >= 0:
        os.close(probe)
    beside.Free()
    return first, maps


def _ranks_per_node() -> int | None:
    given = os.environ.get(RANKS_PER_NODE)
    if given and not (given.isdecimal() and int(given)):
        raise ValueError(f"{RANKS_PER_NODE} is a number of ranks, at least 1; got {given!r}")
    return int(given) if given else None


def _holds(pid: int, descriptor: int, content: bytes) -> bool:
    """Whether this process can open such a file, and it has this content."""
    try:
        file = open_file(pid, descriptor)
    except OSError:
        return False
    try:
        return os.pread(file, len(content), 0) == content
    finally:
        os.close(file)


def _unlink_segments() -> None:
    """Remove the names of MPICH's shared memory, which all ranks have mapped by now.

    MPICH removes them at a normal end alone, so each job that is killed would leave its memory behind.
    """
    with suppress(OSError):  # there is no /proc
        paths = {line.split(maxsplit=5)[-1].strip() for line in _MAPS.read_text().splitlines()}
        for path in paths:
            if path.startswith(_SEGMENTS):
                with suppress(FileNotFoundError):  # another rank of this node was first
                    Path(path).unlink()


_MAPS = Path("/proc/self/maps")
_SEGMENTS = "/dev/shm/mpich_shm_"
_job: Job | None = None


def join() -> Job:
    """This rank's view of the job. All ranks call this together, once."""
    global _job
    if _job is None:
        _job = Job(load_mpi())
    return _job


def is_host() -> bool:
    """Whether this process is the host of an MPI job, which `vcluster.mpi` has started."""
    return _job is not None and _job.rank == 0


def current(size: int) -> Job:
    """The job of this process, for a cluster of ``size`` devices. `ClusterError` says how to start one."""
    if _job is None:
        find_mpi()
        raise ClusterError(
            f"backend='mpi' needs ranks that serve devices; type: mpiexec -n {size + 1} python -m vcluster.mpi "
            f"script.py"
        )
    if _job.rank:
        raise ClusterError(
            "a device has no ranks of its own: only the host opens clusters with backend='mpi'"
        )
    return _job
