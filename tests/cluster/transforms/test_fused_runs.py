"""Fused steps on real devices: the same bits as op by op, and the events and times of their simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulated_runs import assert_simulated
from trained_runs import B, in_turn, simulated, trained_on
from transformed import model_step

from parallelism import Hardware
from parallelism.hardware import Products, Reached
from parallelism.transforms import Adam, Strategy

H100 = Hardware.preset("dgx-h100")
STACK = replace(
    H100, fused=True, stack="ours", issue_seconds=3e-6, message_overhead_seconds=2e-6,
    products=Products(132, half_depth=64, half_intensity=3),
    links=(replace(H100.links[0], reached=Reached(400e9, 300e9, 9e-6, 3e-6, {"all_reduce": 350e9}, 3)), H100.links[1]))
ON = {"hardware": STACK, "priced_dtype": "bfloat16"}
CASES = [("mlp", 6, "dp=2 overlap=1KB"),
         ("dropout", 4, "dp=2 recompute=block.*.attention overlap=1KB"), ("gpt", 5, "dp=2 tp=2 sp zero=1"),
         ("dropout", 3, "tp=3 sp"), ("llama", 4, "dp=2 tp=2 zero=3"), ("gpt", 4, "dp=2 tp=2 sp zero=3 overlap=1KB"),
         ("dropout", 6, "pp=2 1f1b:2 tp=2 recompute=block.*.attention"),
         ("gpt", 7, "pp=2 1f1b:3 dp=2 zero=1"), ("mlp", 8, "pp=2 interleaved_1f1b:4x2")]


@pytest.mark.takes_seconds
@pytest.mark.slow_for("mlp-pp=2")
@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("model", "rows", "text", "backend"), in_turn(CASES), ids=[f"{m}-{t}" for m, _, t in CASES])
def test_a_fused_step_gives_the_same_bits_and_is_simulated_as_it_runs(cluster_of, model, rows, text, backend):
    strategy, mesh = Strategy.parse_on_mesh(text)
    step = strategy(model_step(model, B if "pp=" in text else rows, Adam(0.01)))
    like = model_step(model, rows, Adam(0.01))
    found = {}
    for name, options in (("fused", ON), ("plain", {**ON, "hardware": replace(STACK, fused=False)})):
        results, trace = trained_on(cluster_of(mesh, backend, compute="modelled", **options), step, like, steps=1)
        assert_simulated(simulated(step, mesh, rows, options), trace)
        folded = simulated(step, mesh, rows, options, fold=True)
        assert folded.makespan_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
        found[name] = results, trace
    (losses, state), (wanted, expected) = found["fused"][0], found["plain"][0]
    np.testing.assert_array_equal(losses, wanted)
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name], array)
    traces = [found[name][1] for name in ("fused", "plain")]
    assert traces[0].makespan_seconds < traces[1].makespan_seconds
    assert traces[0].flops() == traces[1].flops()
