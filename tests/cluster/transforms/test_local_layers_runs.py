"""Regions that learn from losses of their own, on real devices, in one program and in pipelines."""

from __future__ import annotations

import pytest
from trained_runs import ON, B, assert_trains, in_turn
from transformed import MODELS, balanced, transformer

from parallelism.transforms import SGD, LocalLayers, Strategy, train_step

DEEP = {"mlp": (MODELS["mlp"], "layer.*"), "gpt": (lambda batch: transformer(layers=3).function(batch), "block.*"),
        "experts": (balanced, "block.*")}
CASES = [
    ("mlp", 7, "pp@layer.1,layer.2=3 local:2 dp=2 zero=1"), ("gpt", 5, "dp=2 tp=2 sp zero=2"),
    ("gpt", 5, "pp@block.2=2 zero_bubble_h1:3 tp=2"), ("gpt", 4, "pp=2 1f1b:2 recompute=block.*"),
    ("gpt", 6, "pp@block.1=2 local:2 dp=2 tp=2 sp zero=1"), ("experts", 6, "pp@block.1=2 local:2 dp=2 overlap"),
]


@pytest.mark.takes_seconds
@pytest.mark.slow_for("gpt-pp=2")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "rows", "text", "backend"), in_turn(CASES), ids=[f"{m}-{t}" for m, _, t in CASES])
def test_local_layers_train_and_are_simulated_as_they_run(cluster_of, model, rows, text, backend):
    (make, regions), rule = DEEP[model], SGD(0.1, 0.5)
    strategy, mesh = Strategy.parse_on_mesh(f"{text} local={regions}")
    step = strategy(train_step(make(rows if strategy.pipeline is None else B), rule))
    alone = LocalLayers(regions)(train_step(make(rows), rule))
    trace = assert_trains(cluster_of(mesh, backend, compute="modelled", **ON), step, alone, rows)
    if "local:" in text:        # only forwards send, and once a step the two stages that share the table of a GPT
        ranks = mesh.shape["pp"]
        shared = mesh.size if model == "gpt" else 0
        assert len(trace.filter(kind="send")) == 2 * (ranks - 1) * mesh.size // ranks + shared
