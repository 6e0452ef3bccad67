"""Slicings that were found run: their numbers are those of the step alone, their time that of the simulation."""

import pytest
from simulated_runs import assert_simulated
from sliced import slow, uneven
from trained_runs import trained_on
from transformed import assert_trained, interpreted, transformer

from parallelism.slicing import find_slicing
from parallelism.transforms import SGD, Adam, train_step


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "rows", "microbatches", "sizes", "rule", "backend"), [
    pytest.param(8, 16, 4, (1, 2, 4, 1), SGD(0.1), "process", marks=pytest.mark.slow),
    pytest.param(4, 16, 4, (1, 2, 1), Adam(0.01), "thread", marks=pytest.mark.slow),
    (3, 8, 2, (2, 1), SGD(0.1), "process"),
])
def test_a_slicing_on_submeshes_of_different_sizes_runs_as_it_was_found(
    cluster_of, devices, rows, microbatches, sizes, rule, backend
):
    plan = find_slicing(uneven(), hardware=slow(), devices=devices, batch=rows, microbatches=microbatches,
                        optimizer=rule, simulations=1).best
    assert tuple(mesh.size for mesh in plan.meshes) == sizes
    alone = train_step(uneven(rows), rule)
    cluster = cluster_of(plan.mesh, backend, hardware=plan.hardware, compute="modelled")
    steps = 2 if isinstance(rule, Adam) else 1          # the second reads the state of the first
    results, trace = trained_on(cluster, plan.step, alone, steps)
    assert_trained(results, interpreted(alone, steps=steps), tolerance=1e-10)
    simulated = plan.simulate()
    assert_simulated(simulated, trace)
    assert trace.makespan_seconds == simulated.makespan_seconds == plan.seconds


PLAIN = {"biases": False, "fused_attention": True, "norm": "rms", "positions": "rotary", "activation": "relu"}


@pytest.mark.parametrize(("layers", "devices", "rows", "strategy", "rule", "more"), [
    pytest.param(2, 3, 4, "tp sp", SGD(0.1), PLAIN, marks=pytest.mark.slow),
    pytest.param(2, 3, 4, "tp sp", Adam(0.01), {}, marks=pytest.mark.slow),
    pytest.param(3, 4, 8, "dp tp sp zero=1", Adam(0.01), {}, marks=pytest.mark.slow)])
def test_a_slicing_of_a_transformer_runs_as_it_was_found(cluster_of, layers, devices, rows, strategy, rule, more):
    spec, hardware = transformer(layers=layers, **{"tied": False, "fused_attention": False} | more), slow()
    plans = find_slicing(spec, hardware=hardware, devices=devices, batch=rows, microbatches=2, optimizer=rule,
                         simulations=1, strategy=strategy)
    plan = next(each for each in plans if len({mesh.size for mesh in each.meshes}) > 1)
    cluster = cluster_of(plan.mesh, "thread", hardware=plan.hardware, compute="modelled")
    alone = train_step(spec.function(rows), rule)
    steps = 2 if isinstance(rule, Adam) else 1
    results, trace = trained_on(cluster, plan.step, alone, steps)
    assert_trained(results, interpreted(alone, steps=steps), tolerance=1e-10)
    assert_simulated(plan.simulate(), trace)
