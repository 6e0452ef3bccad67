"""Solutions run on devices with the numbers of the program."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from auto_programs import random_program

from parallelism import Mesh, ir
from parallelism.auto_sharding import auto_shard
from parallelism.layouts import annotate

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


def experts(x, chosen, w):
    """Three experts, each with slots for a mean load; here the first one is chosen by all."""
    slots = {"each": 1, "first": 0, "drops": False}
    rows = ir.apply("dispatch", x, chosen, shape=(3, 4, 2, 5), **slots)
    return ir.apply("combine", np.einsum("ebch,ehf->ebcf", rows, w), chosen, **slots)


@pytest.mark.takes_seconds
def test_experts_have_room_for_all_tokens_in_a_run_and_a_mean_load_in_a_simulation(cluster_of):
    f64 = partial(ir.TensorType, "f64")
    function = ir.record(experts, f64((4, 6, 5)), ir.TensorType("i64", (4, 6, 1)), f64((3, 5, 7)))
    rng = np.random.default_rng(0)
    x, w = rng.integers(-4, 5, (4, 6, 5)).astype(float), rng.integers(-4, 5, (3, 5, 7)).astype(float)
    solution = auto_shard(annotate(function, {"x": "[x, None, None]"}), SMALL, "dgx-h100")
    run = cluster_of(SMALL, "thread").run(solution.executable, [x, np.zeros((4, 6, 1), int), w])
    np.testing.assert_array_equal(run.result[0], x @ w[0])
    assert solution.simulate(link_sharing=False).makespan_seconds == pytest.approx(solution.seconds)


@pytest.mark.slow
def test_on_processes(cluster_of):
    check(cluster_of(SMALL, "process"), 7)


@pytest.mark.slow
@pytest.mark.timeout(600)     # a crowded machine is slow, not wrong
@pytest.mark.parametrize("first", [100, 125, 150, 175])
def test_many_programs(cluster_of, first):
    for seed in range(first, first + 25):
        check(cluster_of(MESH, "process"), seed)
