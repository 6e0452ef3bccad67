"""Transformed steps on real devices: they train as the step alone, and a simulation says what they do."""

from __future__ import annotations

import numpy as np
import pytest
from trained_runs import ON, assert_trains, in_turn, trained_on
from transformed import assert_trained, interpreted, model_step

from parallelism import Mesh, ir, models
from parallelism.execution import Executable, operation_on
from parallelism.simulation import simulate
from parallelism.transforms import SGD, AdamW, Strategy

CASES = [
    ("gpt", 5, "dp=2 tp=2 sp zero=1"), ("mlp", 7, "dp=3 tp=2 zero=2"), ("llama", 4, "dp=2 tp=4 zero=3"),
    ("convolutional", 5, "dp=2 tp=3"), ("mixture", 6, "dp=4 tp=2 zero=2"), ("residual", 5, "dp=2 tp=2 sp zero=3"),
    ("recurrent", 6, "dp:outer=2 dp=2 tp=2 zero=1"), ("factored", 5, "dp=5 zero=2"), ("dropout", 3, "tp=3 sp"),
    ("plain_gpt", 8, "dp=8 zero=3"), ("gpt", 2, "dp=1 tp=1 sp zero=1"), ("mlp", 5, "dp=2 tp=2 zero=3"),
]


@pytest.mark.takes_seconds
@pytest.mark.sampled(12, 11)
@pytest.mark.parametrize(
    ("model", "rows", "text", "backend"), in_turn(CASES, ("process", "thread")), ids=[f"{m}-{t}" for m, _, t in CASES])
def test_a_transformed_step_trains_and_is_simulated_as_it_runs(cluster_of, model, rows, text, backend):
    alone = model_step(model, rows, AdamW(0.01), clip=1.0)
    strategy, mesh = Strategy.parse_on_mesh(text)
    assert_trains(cluster_of(mesh, backend, compute="modelled", **ON), strategy(alone), alone, rows)


def test_the_text_of_a_transformed_step_runs_as_the_step_does(cluster_of):
    strategy, mesh = Strategy.parse_on_mesh("dp=2 tp=2 zero=1")
    alone = model_step("mlp", 6, SGD(0.1, 0.5))
    step = ir.parse(str(strategy(alone)))
    assert step == strategy(alone)
    results, _ = trained_on(cluster_of(mesh, "thread"), step, alone)
    assert_trained(results, interpreted(alone))


@pytest.mark.takes_seconds
def test_a_program_is_placed_on_a_mesh_once_and_runs_without_an_update_too(cluster_of):
    mesh = Mesh(dp=2)
    loss = Strategy.parse("dp")(models.mlp((3, 2), 4))
    assert operation_on(loss, mesh) is operation_on(Strategy.parse("dp")(models.mlp((3, 2), 4)), mesh)
    assert isinstance(operation_on(loss, mesh), Executable) and operation_on(print, mesh) is print
    inputs = [np.ones(value.type.shape) for value in loss.inputs]
    found, = cluster_of(mesh, "thread").run(loss, inputs).result
    assert found == ir.interpret(loss, inputs).outputs[0] == 9
    with pytest.raises(TypeError, match="a Function is simulated on a mesh"):
        simulate(loss, "dgx-h100")
    with pytest.raises(TypeError, match=r"run\(\) takes a function of a device or an Operation, got int"):
        cluster_of(mesh, "thread").run(3)
