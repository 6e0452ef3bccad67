"""Regions that learn from losses of their own, on real devices, in one program and in pipelines."""

from __future__ import annotations

import pytest
from simulated_runs import assert_simulated
from transformed import MODELS, assert_trained, interpreted, trained, transformer

from parallelism import ir
from parallelism.simulation import simulate
from parallelism.transforms import SGD, LocalLayers, Step, Strategy, train_step

B, = ir.symbols("B")
ON = {"hardware": "dgx-h100", "priced_dtype": "bfloat16"}
DEEP = {"mlp": (MODELS["mlp"], "layer.*"), "gpt": (lambda batch: transformer(layers=3).function(batch), "block.*")}
CASES = [
    ("gpt", 5, "dp=2 tp=2 sp zero=2"), ("mlp", 7, "pp@layer.1,layer.2=3 local:2 dp=2 zero=1"),
    ("gpt", 6, "pp@block.1=2 local:2 dp=2 tp=2 sp zero=1"), ("gpt", 5, "pp@block.2=2 zero_bubble_h1:3 tp=2"),
    ("gpt", 4, "pp=2 1f1b:2 recompute=block.*"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize(("model", "rows", "text"), CASES, ids=[f"{m}-{t}" for m, _, t in CASES])
def test_local_layers_train_and_are_simulated_as_they_run(cluster_of, model, rows, text, backend):
    (make, regions), rule = DEEP[model], SGD(0.1, 0.5)
    strategy, mesh = Strategy.parse_on_mesh(f"{text} local={regions}")
    pipelined = strategy.pipeline is not None
    step = strategy(train_step(make(B if pipelined else rows), rule))
    alone = LocalLayers(regions)(train_step(make(rows), rule))
    cluster = cluster_of(mesh, backend, compute="modelled", **ON)
    runs = []

    def run(inputs):
        runs.append(cluster.run(step, inputs))
        return runs[-1].result

    function = step.function if isinstance(step, Step) else step
    assert_trained(trained(function, run, like=alone), interpreted(alone))
    batch = {"batch": rows} if pipelined else {}
    assert_simulated(simulate(step, mesh=mesh, **batch, **ON), runs[-1].trace)
    if "local:" in text:        # only forwards send, and once a step the two stages that share the table of a GPT
        ranks = mesh.shape["pp"]
        shared = mesh.size if model == "gpt" else 0
        assert len(runs[-1].trace.filter(kind="send")) == 2 * (ranks - 1) * mesh.size // ranks + shared
