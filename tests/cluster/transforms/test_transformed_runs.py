"""Transformed steps on real devices: they train as the step alone, and a simulation says what they do."""

from __future__ import annotations

import pytest
from simulated_runs import assert_simulated
from transformed import MODELS, assert_trained, interpreted, trained

from parallelism import Executable, ir
from parallelism.simulation import simulate
from parallelism.transforms import SGD, AdamW, Strategy, carried, categories, train_step

ON = {"hardware": "dgx-h100", "priced_dtype": "bfloat16"}
CASES = [
    ("gpt", 5, "dp=2 tp=2 sp zero=1"), ("mlp", 7, "dp=3 tp=2 zero=2"), ("llama", 4, "dp=2 tp=4 zero=3"),
    ("convolutional", 5, "dp=2 tp=3"), ("mixture", 6, "dp=4 tp=2 zero=2"), ("residual", 5, "dp=2 tp=2 sp zero=3"),
    ("recurrent", 6, "dp:outer=2 dp=2 tp=2 zero=1"), ("factored", 5, "dp=5 zero=2"), ("dropout", 3, "tp=3 sp"),
    ("plain_gpt", 8, "dp=8 zero=3"), ("gpt", 2, "dp=1 tp=1 sp zero=1"),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize(("model", "rows", "text"), CASES, ids=[f"{m}-{t}" for m, _, t in CASES])
def test_a_transformed_step_trains_and_is_simulated_as_it_runs(cluster_of, model, rows, text, backend):
    alone = train_step(MODELS[model](rows), AdamW(0.01), clip=1.0)
    strategy, mesh = Strategy.parse_on_mesh(text)
    step = strategy(alone)
    executable = Executable(step, mesh, categories=categories(step), donate=carried(step))
    cluster = cluster_of(mesh, backend, compute="modelled", **ON)
    runs = []

    def run(inputs):
        runs.append(cluster.run(executable, inputs))
        return runs[-1].result

    assert_trained(trained(step, run), interpreted(alone))
    assert_simulated(simulate(executable, **ON), runs[-1].trace)


def test_the_text_of_a_transformed_step_runs_as_the_step_does(cluster_of):
    strategy, mesh = Strategy.parse_on_mesh("dp=2 tp=2 zero=1")
    alone = train_step(MODELS["mlp"](6), SGD(0.1, 0.5))
    step = ir.parse(str(strategy(alone)))
    assert step == strategy(alone)
    cluster = cluster_of(mesh, "thread")
    assert_trained(trained(step, lambda inputs: cluster.run(Executable(step, mesh), inputs).result), interpreted(alone))
