"""A metric does not decide how the weights of a loss are split: what it needs whole is gathered for it."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_runs import assert_simulated
from trained_runs import ON, B, in_turn, simulated

from parallelism import ir
from parallelism.transforms import SGD, Strategy, first_state, train_step

SHAPES = {"fused": (16, 6), "down": (6, 8), "head": (10, 6)}


def stepped(rows, metrics):
    def loss(p, x, weights):
        with ir.region("block.0"):
            both = x @ p["fused"].T
            gate, up = np.split(both, 2, axis=1)
            hidden = np.tanh(gate) * up
        with ir.region("block.1"):
            y = (x + hidden @ p["down"].T) @ p["head"].T
        value = np.mean(np.tanh(y) ** 2)
        if not metrics:
            return value
        of_both = [np.mean(np.abs(both))] if metrics == "all" else []       # keeps the product in one
        picked = np.argmax(y, axis=1)
        return (value, np.mean(picked == 3), np.mean(np.max(y, axis=1)), np.sum(weights * np.sort(y, axis=1)[:, -2]),
                np.mean(np.argmax(hidden, axis=1)), np.mean(hidden > 0), *of_both)

    types = {name: ir.TensorType("f64", shape) for name, shape in SHAPES.items()}
    return train_step(ir.record(loss, types, ir.TensorType("f64", (rows, 6)), ir.TensorType("f64", (rows,)), name="split"),
                      SGD(0.1))


@pytest.mark.parametrize("text", ["tp", "tp sp"])
def test_weights_are_split_as_without_metrics(text):
    with_metrics, without = (Strategy.parse(text)(stepped(4, metrics)) for metrics in ("split", ""))
    found, wanted = ({value.name: value.layout.short() for value in step.inputs if value.name.startswith("p.")}
                     for step in (with_metrics, without))
    assert found["p.head"] == "[tp, None]" and found["p.down"] == wanted["p.down"] == "[None, tp]"
    assert {name for name, layout in found.items() if "tp" in layout} == set(wanted) == {f"p.{name}" for name in SHAPES}


CASES = [(5, "tp=2"), (6, "tp=2 sp dp=2 zero=3"), (5, "pp=2 1f1b:2 tp=2"), (7, "tp=3"), (6, "pp=1 1f1b:2 tp=2 dp=2 zero=1"),
         (5, "tp=2 recompute=block.*")]


@pytest.mark.takes_seconds
@pytest.mark.sampled(12, 2)
@pytest.mark.parametrize("metrics", ["split", "all"])
@pytest.mark.parametrize(("rows", "text", "backend"), in_turn(CASES))
def test_metrics_of_split_values_are_those_of_one_device(cluster_of, rows, text, backend, metrics):
    strategy, mesh = Strategy.parse_on_mesh(text)
    step, alone = strategy(stepped(B if strategy.pipeline else rows, metrics)), stepped(rows, metrics)
    rng = np.random.default_rng(0)
    inputs = first_state(step, {f"p.{name}": rng.normal(size=shape) for name, shape in SHAPES.items()})
    inputs |= {"x": rng.normal(size=(rows, 6)), "weights": rng.normal(size=rows)}
    run = cluster_of(mesh, backend, compute="modelled", **ON).run(step, inputs)
    for found, wanted in zip(run.result, ir.interpret(alone, inputs).outputs, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)
    assert_simulated(simulated(step, mesh, rows), run.trace)
