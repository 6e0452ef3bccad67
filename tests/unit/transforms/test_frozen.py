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


@pytest.mark.parametrize(("transform", "error"), [
    (LocalLayers("block.*"), "is frozen; local losses train all weights"),
    (MixedPrecision("bfloat16", products="float8"), "is frozen; frozen weights stay in 16 bits, so leave out float8")])
def test_what_cannot_be_combined_with_frozen_weights_is_refused(transform, error):
    spec = models.TransformerSpec(layers=2, width=16, heads=2, vocabulary=10, sequence=4, lora=models.LoRA(2))
    with pytest.raises(ValueError, match=error):
        Strategy(transform)(train_step(spec.function(4), SGD(0.1)))
