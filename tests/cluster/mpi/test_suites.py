"""The tests of collectives, messages, layouts, pipelines and programs, on the ranks of a job, under each MPI.

Programs are one program five ways there: NumPy, interpreted, simulated, on the ranks, and on processes beside these.
"""

import re

import pytest
from mpi_jobs import each_mpi, finish, needs_mpi, start

SUITES = {
    "collectives and messages": ["collectives"],
    "layouts and programs": ["auto_sharding", "execution", "simulation", "tensor_parallelism", "transforms"],
    "pipelines": ["pipelining", "pipeline_parallelism"],
    "records": ["tracing", "runs/test_groups_over_runs.py"],
}
WIDE = {
    8: ["collectives/test_algorithms.py", "collectives/test_together.py", "pipeline_parallelism/test_transformer.py",
        "auto_sharding"],
    16: ["collectives/test_algorithms.py", "collectives/test_together.py"],
}
"""By number of ranks, tests that need so many."""


PROGRAMS = "simulation/test_three_ways.py"
SOME_PROGRAMS = [f"{PROGRAMS}::test_{test}" for test in (
    "a_strategy_is_one_program_three_ways[mlp zero 2 2]",
    "a_pipeline_is_one_program_three_ways[mlp interleaved_1f1b 2pp 1]",
)]
"""Small ones, on two devices: every rank is a process that loads everything."""
PARTS = 12
DTYPE_PARTS = 4


def passes(mpi, ranks, tests, *options, part="", per_node=""):
    """Run tests on so many devices, those of ``part`` alone; none may fail. Returns how many have passed.

    ``per_node``: the ranks that share memory, if not all do.
    """
    job = start(ranks + 1, "-m", "pytest", "--vcluster-backend=mpi", "-n", "0", "-q", "-p", "no:cacheprovider",
                *options, *(f"tests/cluster/{test}" for test in tests), mpi=mpi, VCLUSTER_SLOW_PART=part,
                VCLUSTER_MPI_RANKS_PER_NODE=str(per_node))
    said = finish(job, 500)
    assert job.returncode == 0, said
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and "failed" not in said, said
    return int(passed[1])


@pytest.mark.slow       # by day a program runs in the job of test_mpi
@pytest.mark.timeout(240)
@needs_mpi
def test_some_programs_are_one_program_five_ways():
    assert passes(None, 2, SOME_PROGRAMS, "-m", "") == len(SOME_PROGRAMS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@each_mpi
@pytest.mark.parametrize("part", range(PARTS))
def test_every_program_is_one_program_five_ways(mpi, part):
    passes(mpi, 8, [PROGRAMS], "-m", "", part=f"{part}/{PARTS}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@each_mpi
@pytest.mark.parametrize("per_node", ["", 1, 2])
@pytest.mark.parametrize("suite", SUITES)
def test_the_tests_of_clusters_run_on_four_ranks(mpi, suite, per_node):
    passes(mpi, 4, SUITES[suite], per_node=per_node)


@pytest.mark.slow
@pytest.mark.timeout(600)
@each_mpi
@pytest.mark.parametrize("per_node", ["", 1])
@pytest.mark.parametrize("part", range(DTYPE_PARTS))
def test_each_dtype_on_three_ranks(mpi, per_node, part):
    passes(mpi, 3, ["collectives/test_dtypes.py"], "-m", "slow", part=f"{part}/{DTYPE_PARTS}", per_node=per_node)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_mpi
@pytest.mark.parametrize("ranks", WIDE)
def test_wider_tests_run_on_more_ranks(ranks):
    passes(None, ranks, WIDE[ranks])
