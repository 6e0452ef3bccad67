"""Planted mistakes, right programs beside a busy machine, and killed ranks, on the ranks of jobs.

The numbers are small; ``VCLUSTER_MPI_PROGRAMS=300 python -m pytest -m slow -s`` does so many, and a third of it are
kills, and prints how long they took.
"""

import os
import re
import time
from statistics import median

import mpi_mistakes
import pytest
from mpi_jobs import each_mpi, finish, needs_mpi, start

MANY = int(os.environ.get("VCLUSTER_MPI_PROGRAMS", "12"))
pytestmark = [needs_mpi, pytest.mark.slow]


nodes = pytest.mark.parametrize("per_node", ["", 1, 2])
"""Ranks on a node, if not all are: those of one node meet in shared memory."""


def programs(mpi, what, count, per_node):
    job = start(5, "-m", "vcluster.mpi", mpi_mistakes.__file__, what, count, 0, mpi=mpi,
                VCLUSTER_MPI_RANKS_PER_NODE=str(per_node))
    said = finish(job, 1500)
    assert job.returncode == 0, said
    assert re.search(rf"^{count} {what}, the slowest took", said, re.MULTILINE), said
    print(mpi.name, said.splitlines()[-1])


@pytest.mark.timeout(1600)
@each_mpi
@nodes
def test_planted_mistakes_are_told_and_the_next_program_runs(mpi, per_node):
    programs(mpi, "mistakes", MANY, per_node)


@pytest.mark.timeout(1600)
@each_mpi
@nodes
def test_right_programs_beside_a_busy_machine_give_no_alarm(mpi, per_node, hogs):
    programs(mpi, "right", 10 * MANY // 3, per_node)


@pytest.mark.timeout(1600)
@each_mpi
def test_a_rank_that_is_killed_at_any_moment_is_named(mpi, tmp_path):
    seconds = []
    for seed in range(max(2, MANY // 3)):
        job = start(5, "-m", "vcluster.mpi", mpi_mistakes.__file__, "kill", seed, tmp_path / "kill", mpi=mpi)
        said = finish(job)
        end = time.monotonic()
        rank, name, moment = (tmp_path / "kill").read_text().split()
        assert job.returncode, said
        assert re.search(rf"the process of rank {rank} \(rank {int(rank) + 1} of the job, pid \d+ on .*\) was ended by "
                         rf"{name}; the job ends", said), said
        seconds.append(end - float(moment))
    print(f"{mpi.name}: of {len(seconds)} killed jobs half ended within {median(seconds):.3f} s, the slowest after "
          f"{max(seconds):.3f} s")


@pytest.mark.timeout(60)
def test_a_wrong_number_of_ranks_on_a_node_is_told_and_no_guard_adds_to_it():
    job = start(3, "-m", "vcluster.mpi", mpi_mistakes.__file__, mpi=None, VCLUSTER_MPI_RANKS_PER_NODE="x")
    said = finish(job)
    assert job.returncode == 2 and "is a number of ranks, at least 1; got 'x'" in said and "os._exit" not in said, said
