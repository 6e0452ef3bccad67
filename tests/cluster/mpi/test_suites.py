"""The tests of collectives, messages, layouts, pipelines and programs, on the ranks of a job, under each MPI."""

import re

import pytest
from mpi_jobs import each_mpi, finish, needs_mpi, start

SUITES = {
    "collectives and messages": ["collectives"],
    "layouts and programs": ["auto_sharding", "execution", "simulation", "tensor_parallelism", "transforms"],
    "pipelines": ["pipelining", "pipeline_parallelism"],
    "records": ["tracing"],
}
WIDE = {
    8: ["collectives/test_algorithms.py", "collectives/test_together.py", "pipeline_parallelism/test_transformer.py",
        "auto_sharding"],
    16: ["collectives/test_algorithms.py", "collectives/test_together.py"],
}
"""By number of ranks, tests that need so many."""


def passes(mpi, ranks, tests, *options):
    """Run tests on so many devices; none may fail."""
    job = start(ranks + 1, "-m", "pytest", "--vcluster-backend=mpi", "-n", "0", "-q", "-p", "no:cacheprovider",
                *options, *(f"tests/cluster/{test}" for test in tests), mpi=mpi)
    said = finish(job, 500)
    assert job.returncode == 0, said
    assert re.search(r"\d passed", said) and "failed" not in said, said


@pytest.mark.slow
@pytest.mark.timeout(600)
@each_mpi
@pytest.mark.parametrize("suite", SUITES)
def test_the_tests_of_clusters_run_on_four_ranks(mpi, suite):
    passes(mpi, 4, SUITES[suite])


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_mpi
@pytest.mark.parametrize("ranks", WIDE)
def test_wider_tests_run_on_more_ranks(ranks):
    passes(None, ranks, WIDE[ranks])
