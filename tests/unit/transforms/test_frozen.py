"""Frozen weights of a program: what an attribute says of them, and what transforms make of it."""

from __future__ import annotations

import numpy as np
import pytest
from transformed import model_step

from parallelism import ir, models
from parallelism.transforms import (
    SGD,
    Adam,
    LocalLayers,
    MixedPrecision,
    Parts,
    Strategy,
    first_state,
    frozen,
    train_step,
)
from parallelism.transforms.training import given_weights


def loss(rows):
    return models.mlp((6, 8, 5, 3), rows)


def names(values):
    return [value.name for value in values]


def test_what_is_not_trained_beside_trained_weights_is_frozen():
    step = train_step(loss(4), Adam(), parameters=["p.w1", "p.b2"])
    parts = Parts.of(step)
    assert names(parts.parameters) == ["p.w1", "p.b2"]
    assert names(parts.frozen) == ["p.w0", "p.b0", "p.b1", "p.w2"]
    assert names(parts.weights) == ["p.w0", "p.b0", "p.w1", "p.b1", "p.w2", "p.b2"] and names(parts.data) == ["x", "targets"]
    assert parts.rows is not None and parts.rows == parts.classes.of(parts.data[0], 0)
    read = ir.parse(str(step))
    assert read == step and Parts.of(read) == parts and dict(step.attributes)["frozen"] == ("p.w0", "p.b0", "p.b1", "p.w2")
    assert not Parts.of(train_step(loss(4), Adam())).frozen


def test_a_loss_says_which_of_its_weights_are_frozen():
    function = frozen(frozen(loss(4), "p.w0"), ["p.b0"])
    assert dict(function.attributes) == {"frozen": ("p.w0", "p.b0")} and frozen(function, []) == function
    step = train_step(function, SGD(0.1))
    assert names(Parts.of(step).parameters) == ["p.w1", "p.b1", "p.w2", "p.b2"]
    assert names(Parts.of(function).weights) == names(Parts.of(step).weights)
    with pytest.raises(ValueError, match=r"@mlp has no input 'p.w9' to freeze; did you mean 'p.w2'"):
        frozen(loss(4), "p.w9")
    with pytest.raises(ValueError, match=r"no floating-point input 'p\.w0' to train"):
        train_step(function, SGD(0.1), parameters=["p.w0"])


def test_a_frozen_first_layer_has_no_backward():
    """Of layer 0 there is neither a gradient nor one of its input; what is kept of it is its result."""
    whole, half = (train_step(each, SGD(0.1)) for each in (loss(4), frozen(loss(4), ["p.w0", "p.b0"])))
    regions = {op.region for op in whole.ops} - {op.region for op in half.ops}
    assert regions == {"gradient.layer.0"}
    rng = np.random.default_rng(0)
    weights = {value.name: rng.normal(size=value.type.shape) for value in Parts.of(whole).weights}
    batch = {"x": rng.normal(size=(4, 6)), "targets": rng.normal(size=(4, 3))}
    outputs = [ir.interpret(step, first_state(step, weights) | batch).outputs for step in (whole, half)]
    by_name = dict(zip(names(whole.outputs), outputs[0], strict=True))
    for name, array in zip(names(half.outputs), outputs[1], strict=True):
        np.testing.assert_array_equal(array, by_name[name])


def test_the_first_state_has_all_weights():
    step = train_step(loss(4), SGD(0.1, 0.9), parameters=["p.w1"])
    weights = {value.name: np.ones(value.type.shape) for value in Parts.of(step).weights}
    assert first_state(step, weights).keys() == weights.keys() | {"velocity.p.w1"}
    with pytest.raises(ValueError, match=r"@mlp.step has the weights p.b0, .*; got p.w1"):
        first_state(step, {"p.w1": weights["p.w1"]})


def layouts(step):
    return {value.name: value.layout.short() for value in Parts.of(step).weights if value.name.startswith(("p.0", "lora"))
            and value.type.ndim > 1 and value.layout}


def test_tensor_parallelism_splits_an_adapter_as_its_product():
    """By columns: the second product of the adapter.  By rows: the first, and then its narrow result is summed."""
    step = model_step("lora", 4, SGD(0.1))
    assert layouts(Strategy.parse("tp")(step)) == {
        "p.0.qkv": "[None, tp]", "p.0.out": "[tp, None]", "p.0.gate": "[None, tp]", "p.0.up": "[None, tp]",
        "p.0.down": "[tp, None]", "lora.0.qkv.up": "[None, tp]", "lora.0.out.down": "[tp, None]"}


def test_zero_splits_frozen_weights_in_stage_3_alone():
    step = model_step("lora", 4, SGD(0.1))
    assert all("dp" not in layout for layout in layouts(Strategy.parse("dp zero=2")(step)).values())
    assert all("dp" in layout for layout in layouts(Strategy.parse("dp zero=3")(step)).values())


SMALL = models.TransformerSpec(layers=2, width=32, heads=2, vocabulary=10, sequence=4, biases=False, lora=models.LoRA(2))


def test_local_losses_are_refused():
    with pytest.raises(ValueError, match=r"is frozen; local losses train all weights"):
        LocalLayers("block.*")(train_step(SMALL.function(4), SGD(0.1)))


@pytest.mark.parametrize(("recipe", "of_scales"), [("tensor", 4 * 16 * 16), ("block", 4 * 8 * 8), ("mx", 32 * 8)])
def test_frozen_weights_of_products_in_float8_are_there_in_8_bits_alone(recipe, of_scales):
    step = MixedPrecision("bfloat16", products="float8", recipe=recipe)(train_step(SMALL.function(4), Adam()))
    parts = Parts.of(step)
    assert dict(parts.attributes)["frozen"] == ("p", "scales.p") and not parts.copies
    types = {value.name: value.type for value in parts.weights}
    assert (str(types["p.0.out"].dtype), types["p.0.out"].nbytes, types["scales.p.0.out"].nbytes) == (
        "float8_e4m3fn", 32 * 32, of_scales)
    assert {str(types[name].dtype) for name in ("lora.0.out.down", "p.tokens", "p.0.norm1")} == {"bfloat16"}
    scaled = [op for op in step.ops if op.kind == "scaled_einsum"]
    gradients = [op for op in scaled if op.region.startswith("gradient.")]
    # A forward and a gradient of the input for each product: of block 0 not for that of queries, keys and values.
    assert (len(scaled) - len(gradients), len(gradients)) == (8, 7)
    assert {value.name.removeprefix("main.") for value in parts.state if value.name.startswith("main.")} == {
        value.name for value in parts.parameters}


def test_the_first_state_quantizes_frozen_weights():
    step = MixedPrecision("bfloat16", products="float8", recipe="block")(train_step(SMALL.function(4), SGD(0.1)))
    rng = np.random.default_rng(0)
    weights = {value.name: rng.normal(size=value.type.shape) for value in given_weights(step)}
    assert "p.0.out" in weights and not any(name.startswith("scales.") for name in weights)
    first = first_state(step, weights)
    restored = first["p.0.out"].astype(float) * np.repeat(np.repeat(first["scales.p.0.out"], 4, 0), 4, 1)
    assert np.abs(restored - weights["p.0.out"]).max() <= np.abs(weights["p.0.out"]).max() / 16
    assert first.keys() == {value.name for value in step.inputs} - {"tokens", "targets"}


def test_a_frozen_weight_that_is_read_in_16_bits_too_is_refused():
    def loss(p, x):
        with ir.region("block.0"):
            x = x @ p["w"] + (x @ p["a"]) @ p["b"]
        return np.mean(x * x) + np.mean(p["w"] * p["w"])

    types = {name: ir.TensorType("f4", shape) for name, shape in (("w", (32, 32)), ("a", (32, 2)), ("b", (2, 32)))}
    function = frozen(ir.record(loss, types, ir.TensorType("f4", (4, 32)), name="twice"), "p.w")
    with pytest.raises(ValueError, match=r"%p\.w is frozen, and other products or ops read it in 16 bits; a frozen"):
        MixedPrecision("bfloat16", products="float8")(train_step(function, SGD(0.1)))
