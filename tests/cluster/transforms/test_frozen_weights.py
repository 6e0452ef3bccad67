"""Steps that train some of their weights, on devices: the numbers of one device, and the events of their simulation."""

from __future__ import annotations

import numpy as np
import pytest
from trained_runs import ON, B, assert_model_trains, assert_simulated, assert_trains, simulated, trained_on
from transformed import GATED, interpreted, model_step, transformer

from parallelism import Mesh, ir, models
from parallelism.transforms import SGD, Adam, MixedPrecision, Parts, Strategy, train_step

CASES = [
    ("lora", 4, "dp=2"), ("lora", 4, "tp=2"), ("lora", 4, "tp=2 sp dp=2 zero=1"), ("lora of all", 6, "dp=3 zero=3"),
    ("lora of all", 3, "tp=4 sp"), ("lora of all", 4, "pp=2 1f1b:2 tp=2 dp=2 zero=2"), ("lora", 4, "cp=2"),
    ("lora", 4, "ring=2 tp=2"), ("lora of the last", 4, "pp=2 1f1b:3"), ("lora of the last", 5, "pp=2 zb_h1:2 dp=2"),
    ("lora of the last", 4, "dp=2 recompute=block.*"), ("lora of all", 4, "dp=2 zero=2 overlap=1KB"),
    ("lora of all", 8, "pp=2 interleaved_1f1b:4 dp=2 zero=3 overlap"), ("lora of latent attention", 4, "dp=2 ep=2 zero=1"),
    ("lora of latent attention", 3, "tp=2 sp"), ("lora of all", 4, "tp=8"), ("lora of all", 7, "pp=1 1f1b:3 fused"),
]


@pytest.mark.takes_seconds
@pytest.mark.sampled(17, 2)
@pytest.mark.parametrize(("model", "rows", "text"), CASES, ids=[f"{m}-{t}" for m, _, t in CASES])
def test_adapters_are_trained_as_on_one_device_and_the_rest_stays(cluster_of, model, rows, text):
    assert_model_trains(cluster_of, model, rows, text, Adam(0.01), clip=0.3 if "zero" in text else None)


@pytest.mark.slow
def test_adapters_are_trained_on_processes(cluster_of):
    assert_model_trains(cluster_of, "lora", 4, "pp=1 1f1b:2 dp=2 tp=2 sp zero=1", Adam(0.01), "process")


@pytest.mark.slow
def test_a_step_in_mixed_precision_has_no_main_copies_of_frozen_weights(cluster_of):
    strategy, mesh = Strategy.parse_on_mesh("precision=bf16 dp=2 tp=2 sp zero=1")
    alone = model_step("lora", 4, SGD(0.1, 0.5))
    step = strategy(alone)
    (losses, after), trace = trained_on(cluster_of(mesh, "thread", compute="modelled", **ON), step, alone)
    assert_simulated(simulated(step, mesh, 4), trace)
    np.testing.assert_allclose(losses, interpreted(Strategy.parse("precision=bf16")(alone), like=alone)[0], rtol=2e-2)
    parts = Parts.of(step)
    assert {value.name.removeprefix("main.") for value in parts.state if value.name.startswith("main.")} == {
        value.name for value in parts.parameters}
    assert {str(after[value.name].dtype) for value in parts.weights} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("text", [
    "tensor dp=2 tp=2 sp", "block pp=2 1f1b:2 dp=2 zero=1 recompute=block.*", "mx dp=2 zero=3", "tensor ring=2 tp=2",
    "block dp=2 zero=3 overlap pp=1 1f1b:2", "tensor,history:4 dp=2 tp=2 sp", "tensor,history:4 pp=2 1f1b:2 dp=2 zero=1"])
def test_frozen_weights_in_float8_run_as_they_are_simulated_and_near_the_step_alone(cluster_of, text):
    recipe, _, rest = text.partition(" ")
    strategy, mesh = Strategy.parse_on_mesh(f"precision=bf16,products:f8,recipe:{recipe} {rest}")
    figures = GATED | {"feed_forward": 96, "width": 64, "layers": 2, "sequence": 8, "dtype": "float32"}
    spec = transformer(**figures, lora=models.LoRA(4, 4.0))
    alone = train_step(spec.function(4), SGD(0.01))
    step = strategy(train_step(spec.function(B), SGD(0.01)) if strategy.pipeline else alone)
    (losses, after), trace = trained_on(cluster_of(mesh, "thread", compute="modelled", **ON), step, alone)
    assert_simulated(simulated(step, mesh, 4), trace)
    narrow = next(each for each in strategy.transforms if isinstance(each, MixedPrecision))
    np.testing.assert_allclose(losses, interpreted(narrow(alone), like=alone)[0], rtol=2e-2)
    assert str(after["p.0.qkv"].dtype) == "float8_e4m3fn"


def partly(rows, names):
    """A perceptron of three layers of which some weights are trained."""
    def loss(p, x, targets):
        for layer in range(3):
            with ir.region(f"block.{layer}"):
                x = np.tanh(x @ p[f"w{layer}"] + p[f"b{layer}"])
        return np.mean((x - targets) ** 2)

    types = {f"w{i}": ir.TensorType("f64", shape) for i, shape in enumerate(((6, 8), (8, 4), (4, 6)))}
    types |= {f"b{i}": ir.TensorType("f64", (n,)) for i, n in enumerate((8, 4, 6))}
    batch = ir.TensorType("f64", (rows, 6))
    return train_step(ir.record(loss, types, batch, batch, name="partly"), SGD(0.1, 0.9), parameters=names)


@pytest.mark.takes_seconds
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("names", "rows", "text"), [
    (["p.w2"], 4, "dp=2 zero=3"), (["p.w0", "p.b1"], 6, "tp=2"), (["p.b1"], 5, "pp=3 1f1b:3"),
    (["p.w1"], 6, "pp=2 1f1b:2 dp=2 zero=1"), (["p.b0", "p.w2"], 4, "dp=2 tp=2 zero=2")])
def test_any_weights_may_be_frozen(cluster_of, names, rows, text):
    strategy, mesh = Strategy.parse_on_mesh(text)
    alone = partly(rows, names)
    step = strategy(partly(B, names) if strategy.pipeline else alone)
    assert_trains(cluster_of(mesh, "thread", compute="modelled", **ON), step, alone, rows, steps=3)


@pytest.mark.takes_seconds
def test_gradients_of_frozen_weights_are_not_summed(cluster_of):
    """Of an adapted product data parallelism sums the gradients of the adapters: 2 (n - 1) / n of their bytes."""
    alone = model_step("lora of all", 4, SGD(0.1))
    trace = assert_trains(cluster_of(Mesh(dp=2), "thread", compute="modelled", **ON), Strategy.parse("dp")(alone), alone, 4)
    adapters = sum(value.type.nbytes for value in Parts.of(alone).parameters)
    assert adapters == 8 * 2 * 3 * ((16 + 48) + (16 + 16) + (16 + 64) + (64 + 16))
    sums = trace.filter(kind="collective", name="all_reduce", rank=0)
    assert sums.bytes_received() == adapters + 8 and trace.count("all_reduce") == 17     # the loss is one more
