"""mpi4py's buffer collectives: ``mpiexec -n RANKS python -m benchmarks.peers.mpi SOCKET``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.cases import Case, Times, Trial, timed_rounds
from benchmarks.peers.link import serve


def main(path: str) -> None:
    """Serve one rank."""
    mpi: Any = importlib.import_module("mpi4py.MPI")
    world: Any = mpi.COMM_WORLD

    def rounds(case: Case, count: int) -> Times:
        trial = Trial(case, world.rank, world.size)
        in_place = case.operation == "broadcast" and world.rank == 0
        return timed_rounds(trial, count, world.Barrier, call_of(world, trial), trial.load if in_place else None)

    serve(path, world.rank, version_of(mpi), rounds)


def version_of(mpi: Any) -> str:
    """``MPICH 5.0.2``, of the module ``mpi4py.MPI``."""
    first: str = mpi.Get_library_version().split("\n")[0].replace("Version:", " ")
    return " ".join(first.strip(" \0").split())


def call_of(world: Any, trial: Trial) -> Callable[[], Any]:
    """What is timed on one rank of a communicator."""
    x, out, rank = trial.x, trial.out, trial.rank

    def round_trip() -> Any:
        if rank == 0:
            world.Send(x, 1)
            world.Recv(out, 1)
        elif rank == 1:
            world.Recv(out, 0)
            world.Send(out, 0)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: world.Allreduce(x, out),
        "all_gather": lambda: world.Allgather(x, out),
        "reduce_scatter": lambda: world.Reduce_scatter_block(x, out),
        "all_to_all": lambda: world.Alltoall(x, out),
        "broadcast": lambda: world.Bcast(out, 0),
        "barrier": world.Barrier,
        "round_trip": round_trip,
    }
    call = calls[trial.case.operation]

    def filled() -> Any:
        call()
        return out

    return filled


if __name__ == "__main__":
    main(sys.argv[1])
