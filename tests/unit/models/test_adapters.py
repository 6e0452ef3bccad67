"""Low-rank adapters of a Transformer: their weights, what they compute, what is trained, and the flops of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parallelism import Mesh, ir, models
from parallelism.simulation import simulate
from parallelism.transforms import SGD, Adam, MixedPrecision, Parts, categories, train_step

SPEC = models.TransformerSpec(
    layers=2, width=12, heads=3, key_value_heads=1, feed_forward=20, vocabulary=10, sequence=5, activation="swiglu",
    norm="rms", positions="rotary", biases=False, tied=False, dtype=np.float64)
TUNED = replace(SPEC, lora=models.LoRA(2, 6.0, ("qkv", "down")))


def drawn(function: ir.Function) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {value.name: rng.integers(0, 10, value.type.shape) if value.type.dtype.kind == "i"
            else rng.normal(size=value.type.shape) for value in function.inputs}


def test_adapters_have_two_weights_of_a_product_and_are_trained_alone() -> None:
    assert TUNED.adapters == {
        "0.qkv.down": (12, 2), "0.qkv.up": (2, 20), "0.down.down": (20, 2), "0.down.up": (2, 12),
        "1.qkv.down": (12, 2), "1.qkv.up": (2, 20), "1.down.down": (20, 2), "1.down.up": (2, 12)}
    assert TUNED.parameters == SPEC.parameters and TUNED.trained_parameters == 2 * (2 * 32 + 2 * 32)
    assert SPEC.adapters == {} and SPEC.trained_parameters == SPEC.parameters
    parts = Parts.of(train_step(TUNED.function(3), Adam()))
    assert [value.name for value in parts.parameters] == [f"lora.{name}" for name in TUNED.adapters]
    assert [value.name for value in parts.frozen] == [f"p.{name}" for name in TUNED.weights]
    assert len(parts.state) == 2 * len(parts.parameters) + 1 and [value.name for value in parts.data] == ["tokens", "targets"]
    assert replace(SPEC, lora=models.LoRA()).adapters.keys() == {
        f"{layer}.{name}.{side}" for layer in (0, 1) for name in ("qkv", "out") for side in ("down", "up")}


def test_an_adapter_adds_its_product_to_that_of_the_weight() -> None:
    """The loss is that of weights into which the adapters are merged: w + down up alpha / rank."""
    given = drawn(TUNED.function(3))
    merged = {name: array for name, array in given.items() if not name.startswith("lora.")}
    for name in ("0.qkv", "0.down", "1.qkv", "1.down"):
        merged[f"p.{name}"] = given[f"p.{name}"] + given[f"lora.{name}.down"] @ given[f"lora.{name}.up"] * (6.0 / 2)
    found, = ir.interpret(TUNED.function(3), given).outputs
    wanted, = ir.interpret(SPEC.function(3), merged).outputs
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_step_changes_adapters_alone_by_the_gradient_of_merged_weights() -> None:
    step, given = train_step(TUNED.function(3), SGD(0.5)), drawn(TUNED.function(3))
    _, *after = ir.interpret(step, given).outputs
    assert [value.name for value in step.outputs[1:]] == [f"next.lora.{name}" for name in TUNED.adapters]
    merged = {name: array for name, array in given.items() if not name.startswith("lora.")}
    for name in ("0.qkv", "0.down", "1.qkv", "1.down"):
        merged[f"p.{name}"] = given[f"p.{name}"] + given[f"lora.{name}.down"] @ given[f"lora.{name}.up"] * 3
    slopes = ir.gradient(SPEC.function(3), [f"p.{name}" for name in ("0.qkv", "1.down")])
    for name, slope in zip(("0.qkv", "1.down"), ir.interpret(slopes, merged).outputs, strict=True):
        down, up = given[f"lora.{name}.down"], given[f"lora.{name}.up"]
        by_name = dict(zip(step.outputs[1:], after, strict=True))
        moved = {value.name: array for value, array in by_name.items()}
        np.testing.assert_allclose(moved[f"next.lora.{name}.down"], down - 0.5 * 3 * slope @ up.T, atol=1e-10)
        np.testing.assert_allclose(moved[f"next.lora.{name}.up"], up - 0.5 * 3 * down.T @ slope, atol=1e-10)


def test_a_step_computes_no_gradient_of_a_frozen_weight() -> None:
    """Products take twice their forward, adapters and scores three times; the input of block 0 needs no gradient."""
    tuned, rows = replace(TUNED, width=24, head_width=8, layers=3), 4
    tokens = rows * tuned.sequence
    trace = simulate(train_step(tuned.function(rows), Adam()), "dgx-h100:1", mesh=Mesh(devices=1))
    products = {"einsum", "matmul", "attention", "attention_gradient"}
    found = sum(event.flops for event in trace if event.name in products)
    qkv, adapter = 24 * 5 * 8, 24 * 2
    hidden = 3 * 3 * 2 * rows * 3 * 2 * 8 * (5 * 5 - 5 * 6 // 2)               # of scores that the mask hides
    gradients_of_scores = 3 * rows * 3 * 5 * 6 // 2 * 2 * 8                     # the kernel computes scores again
    assert tuned.flops(tokens) - 2 * tokens * (qkv + adapter) - hidden + gradients_of_scores == found
    assert tuned.flops(tokens) == 3 * tuned.forward_flops(tokens) - 2 * tokens * (
        24 * 10 + 3 * (24 * 40 + 24 * 24 + 3 * 24 * 20))


def test_frozen_weights_are_in_16_bits_without_copies_and_state() -> None:
    step = MixedPrecision()(train_step(replace(TUNED, dtype="float32").function(3), Adam()))
    parts, held = Parts.of(step), dict.fromkeys(("weights", "gradients", "optimizer", "inputs"), 0)
    kinds = categories(step)
    for value in (*parts.forward.inputs, *parts.gradients, *parts.state):
        held[kinds[value.name]] += value.type.nbytes
    trained, frozen = TUNED.trained_parameters, TUNED.parameters
    assert held == {"weights": 2 * (frozen + trained), "gradients": 4 * trained, "optimizer": 12 * trained + 8, "inputs": 240}
    assert {value.type.dtype.name for value in parts.weights} == {"bfloat16"}


@pytest.mark.parametrize(("make", "error"), [
    (lambda: models.LoRA(0), "the rank of LoRA must be an integer of at least 1, got 0"),
    (lambda: models.LoRA(True), "the rank of LoRA must be an integer of at least 1, got True"),
    (lambda: models.LoRA(4, 0), "alpha of LoRA must be a number above 0, got 0"),
    (lambda: models.LoRA(4, float("inf")), "alpha of LoRA must be a number above 0, got inf"),
    (lambda: models.LoRA(4, products=()), "products of LoRA must name at least one product, such as qkv"),
    (lambda: replace(SPEC, lora=models.LoRA(4, products="norm1")),
     "LoRA has adapters of 'norm1', which is no product of a block with one weight; they are qkv, out, gate, up, down"),
    (lambda: replace(SPEC, experts=models.Experts(count=4, chosen=2), lora=models.LoRA(4, products="expert_up")),
     "no product of a block with one weight; they are qkv, out$"),
    (lambda: replace(SPEC, next_tokens=1, lora=models.LoRA()), "modules that predict further tokens have no adapters"),
])
def test_adapters_that_cannot_be_are_refused(make: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make()
