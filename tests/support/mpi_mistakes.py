"""A script of MPI jobs: many random programs in one job, right ones and ones with a planted mistake, or until a kill.

    mpiexec -n 5 python -m vcluster.mpi tests/support/mpi_mistakes.py mistakes 300 0
    mpiexec -n 5 python -m vcluster.mpi tests/support/mpi_mistakes.py right 1000 0
    mpiexec -n 5 python -m vcluster.mpi tests/support/mpi_mistakes.py kill 17 /tmp/moment

The last line says how many there were, and what the slowest took in seconds. ``kill`` ends with the job; it writes
to the file what it does, and when, by the clock that all processes of the machine share.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from random_programs import MESHES, Step, program, run_program

from vcluster import (
    CollectiveMismatchError,
    DeadlockError,
    DeviceFailedError,
    UndeliveredMessageError,
    VirtualCluster,
)

WHAT = "dtype", "other", "leave", "receive", "skip", "raise"
SIGNALS = signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM
PER_CLUSTER = 25
"""Programs on one mesh, before the next one is drawn."""


def mistakes(cluster, rng):
    """One rank does another thing at one step: the error has the right type and names it. Returns the seconds."""
    steps = program(rng, cluster.mesh, rng.randint(1, 8))
    what = rng.choice(WHAT)
    steps.append(Step("all_reduce", cluster.mesh.axes, 3, False, None, 0))  # so that everybody has something to miss
    place = rng.randrange(len(steps)) if what == "leave" else len(steps) - 1
    rank = rng.randrange(cluster.size)
    either = DeadlockError, CollectiveMismatchError, UndeliveredMessageError
    expected = {"dtype": CollectiveMismatchError, "other": CollectiveMismatchError, "raise": DeviceFailedError}
    began = time.monotonic()
    try:
        cluster.run(run_program, steps, (rank, place, what))
    except expected.get(what, either) as error:
        took = time.monotonic() - began
        if rank not in error.ranks and not any(f"{word} {rank}" in str(error) for word in (
                "rank", "ranks", "and", "to", ",")):
            raise AssertionError(f"{what} of rank {rank} is not named: {error}") from error
        return took
    raise AssertionError(f"no error of {what} on rank {rank} at step {place}")


def right(cluster, rng):
    """A right program; its devices check their results. Returns the seconds."""
    began = time.monotonic()
    cluster.run(run_program, program(rng, cluster.mesh, rng.randint(1, 12)))
    return time.monotonic() - began


def many(one, count, seed, most):
    """So many on clusters of different meshes; the seconds of the slowest."""
    rng, slowest, done = random.Random(seed), 0.0, 0
    meshes = [mesh for mesh in MESHES if mesh.size <= most]
    while done < count:
        with VirtualCluster(rng.choice(meshes)) as cluster:
            for _ in range(min(PER_CLUSTER, count - done)):
                slowest = max(slowest, one(cluster, rng))
                done += 1
    return slowest


def killed(seed, most, path):
    """Right programs until a rank is killed."""
    rng = random.Random(seed)
    with VirtualCluster(rng.choice([mesh for mesh in MESHES if mesh.size <= most])) as cluster:
        rank, number = rng.randrange(cluster.size), rng.choice(SIGNALS)
        cluster.run(run_program, program(rng, cluster.mesh, 3))

        def kill():
            Path(path).write_text(f"{rank} {number.name} {time.monotonic()}")
            os.kill(cluster.pids()[rank], number)

        threading.Timer(rng.uniform(0, 0.2), kill).start()
        while True:
            cluster.run(run_program, program(rng, cluster.mesh, rng.randint(1, 12)))


if __name__ == "__main__":
    what, *numbers = sys.argv[1:]
    if what == "kill":
        killed(int(numbers[0]), 4, numbers[1])
    else:
        found = many({"mistakes": mistakes, "right": right}[what], int(numbers[0]), int(numbers[1]), 4)
        print(f"{numbers[0]} {what}, the slowest took {found:.3f} s")
