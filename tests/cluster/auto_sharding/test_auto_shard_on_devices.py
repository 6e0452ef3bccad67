"""Solutions run on devices with the numbers of the program."""

from __future__ import annotations

import numpy as np
import pytest
from auto_programs import random_program

from parallelism import Mesh, ir
from parallelism.auto_sharding import auto_shard

SMALL, MESH = Mesh(x=2, y=2), Mesh(x=2, y=4)


def check(cluster, seed):
    rng = np.random.default_rng(seed)
    function = random_program(rng, most=4 + seed % 5)
    arrays = [rng.normal(size=value.type.shape) for value in function.inputs]
    solution = auto_shard(function, cluster.mesh, "dgx-h100")
    run = cluster.run(solution.executable, arrays)
    for found, wanted in zip(run.result, ir.interpret(function, arrays).outputs, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10 * max(1.0, np.abs(wanted).max(initial=0)))


@pytest.mark.takes_seconds
@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("seed", range(2))
def test_on_threads(cluster_of, seed):
    check(cluster_of(MESH, "thread"), seed)


@pytest.mark.slow
def test_on_processes(cluster_of):
    check(cluster_of(SMALL, "process"), 7)


@pytest.mark.slow
@pytest.mark.timeout(600)     # a crowded machine is slow, not wrong
@pytest.mark.parametrize("first", [100, 125, 150, 175])
def test_many_programs(cluster_of, first):
    for seed in range(first, first + 25):
        check(cluster_of(MESH, "process"), seed)
