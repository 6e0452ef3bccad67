"""Layers with linear attention: their figures, their program, and how strategies split them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from localized_runs import run_everywhere
from numpy.testing import assert_allclose
from served_models import logits_of, parameters_of

from parallelism import ir
from parallelism.layouts import localize
from parallelism.models import TransformerSpec
from parallelism.models.linear_attention import LinearAttention
from parallelism.transforms import SGD, ContextParallel, Strategy, train_step

MAMBA = LinearAttention(heads=8, head_width=3, state_width=5, groups=2, chunk=4, layers=(True, False, True, False))
DELTA = replace(MAMBA, kind="gated_delta")
SMALL = TransformerSpec(
    layers=3, width=24, heads=4, key_value_heads=2, vocabulary=12, sequence=6, norm="rms", tied=False, activation="swiglu",
    feed_forward=20, positions="rotary", biases=("convolution",), head_width=8, dtype="f64", linear_attention=MAMBA,
    layer_parts=("both", "both", "attention"))


def spec_of(kind, **more):
    return replace(SMALL, linear_attention=MAMBA if kind == "mamba2" else DELTA, **more)


def test_parameters_are_those_of_the_papers_layers():
    """arXiv:2405.21060, figure 6: one product makes z, x, B, C and dt.  arXiv:2412.06464, figure 1: q, k, v, both gates."""
    inner, keys, heads, h = 24, 10, 8, 24
    mamba = h * (2 * inner + 2 * keys + heads) + 5 * (inner + 2 * keys) + 3 * heads + inner + inner * h
    delta = h * (2 * inner + 2 * keys + 2 * heads) + 5 * (inner + 2 * keys) + 2 * heads + 3 + inner * h
    attention, hidden, ends = h * (4 + 2 * 2) * 8 + 32 * h, 3 * h * 20, 2 * 12 * h + h
    for spec, own in ((spec_of("mamba2"), mamba), (spec_of("gated_delta"), delta)):
        assert spec.parameters == 2 * own + attention + 2 * hidden + 5 * h + ends
        assert {v.name[2:]: v.type.shape for v in spec.function(2).inputs if v.name.startswith("p.")} == spec.weights
        assert "2.norm2" not in spec.weights and "2.up" not in spec.weights
    gated = spec_of("mamba2", attention_gate=True).parameters - SMALL.parameters
    assert gated == h * 4 * 8


def test_flops_are_those_of_products_convolutions_and_states():
    """Of a state, 2 n p operations to read, to write, and by the delta rule to lose."""
    for spec, products in ((spec_of("mamba2"), 2), (spec_of("gated_delta"), 3)):
        without = replace(spec, linear_attention=None)
        tokens, states = 12, 2 * products * 24 * 5
        matrices = sum(2 * a * b for name, (a, b) in ((n, s) for n, s in spec.weights.items() if len(s) == 2)
                       if name.startswith(("0.state", "0.conv")))
        attention = 2 * (24 * 64 + 32 * 24) + 4 * 4 * 8 * spec.sequence
        assert spec.forward_flops(tokens) - without.forward_flops(tokens) == 2 * tokens * (states + matrices - attention)


@pytest.mark.parametrize("kind", ["mamba2", "gated_delta"])
def test_a_layer_is_few_operations(kind):
    """As many kernels as software runs, but for views: a product, a convolution, the state, the norm, a product."""
    layer = spec_of(kind).function(2).region("block.2.attention")
    kinds = [op.kind for op in layer.ops if not op.operator.view and op.kind != "split"]
    numbers = {"add", "logaddexp", "exp", "negative", "multiply", "sigmoid", "constant"}
    assert [each for each in kinds if each not in numbers] == [
        "rms_norm", "matmul", "short_convolution", "linear_attention", "gated_rms_norm", "matmul"]
    assert {"block.2.attention.state", "block.2.attention.convolution"} <= {*spec_of(kind).function(2).regions}


OTHERS = {
    "beside": replace(SMALL, linear_attention=replace(MAMBA, beside=True, gate="alone", layers=(True, False, True))),
    "convolution": replace(SMALL, linear_attention=LinearAttention(
        kind="convolution", heads=4, groups=4, head_width=3, taps=3, layers=(True, False, True))),
    "kimi": replace(SMALL, linear_attention=LinearAttention(
        kind="kimi_delta", heads=4, groups=4, head_width=3, state_width=5, chunk=4, layers=(True, False, True))),
    "norm last": replace(SMALL, norm_places="after", linear_attention=replace(
        MAMBA, gate="last", epsilon=0.1, norm_places="before", norm_groups=1)),
}


def test_parameters_of_layers_that_differ():
    inner, h = 12, 24
    own, others = (sum(map(prod, layer.weights(h).values())) for layer in (OTHERS["convolution"].linear_attention, MAMBA))
    biases = inner - (24 + 2 * 2 * 5)
    assert OTHERS["convolution"].parameters - SMALL.parameters == 2 * (own - others + biases)
    assert OTHERS["convolution"].linear_attention.weights(h) == {
        "state_in": (h, 3 * inner), "convolution": (inner, 3), "state_out": (inner, h)}
    kimi = OTHERS["kimi"].linear_attention.weights(h)
    assert kimi["state_in"] == (h, 4 * (3 + 5 + 5 + 1)) and kimi["convolution"] == (4 * 13, 4)
    assert (kimi["decay_up"], kimi["gate_up"], kimi["rate_bias"]) == ((3, 20), (3, 12), (20,))
    attention = h * (4 + 2 * 2) * 8 + 32 * h
    assert OTHERS["beside"].parameters - SMALL.parameters == 2 * (attention - 24)      # and no norm behind the state
    names = {name.rpartition(".")[2] for name in OTHERS["norm last"].weights if name.startswith("0.norm")}
    assert names == {"norm1", "norm2"} and "1.norm1_after" in OTHERS["norm last"].weights


def test_flops_of_layers_beside_attention_are_those_of_both():
    alone = replace(OTHERS["beside"], linear_attention=replace(OTHERS["beside"].linear_attention, beside=False))
    attention = 2 * (24 * 64 + 32 * 24) + 4 * 4 * 8 * SMALL.sequence
    assert OTHERS["beside"].forward_flops(12) - alone.forward_flops(12) == 2 * 12 * attention
    convolved = OTHERS["convolution"]
    attending = replace(convolved, linear_attention=None)
    own = 2 * (24 * 36 + 12 * 3 + 12 * 24)
    assert attending.forward_flops(12) - convolved.forward_flops(12) == 2 * 12 * (attention - own)


def test_a_layer_beside_attention_adds_what_both_give():
    spec = OTHERS["beside"]
    parameters, tokens = parameters_of(spec), np.random.default_rng(2).integers(0, 12, (2, 6))

    def without(end):
        return {name: array * (not name.endswith(f".{end}")) for name, array in parameters.items()}

    attending = replace(spec, linear_attention=None)
    own = {name: array for name, array in parameters.items() if name in attending.weights}
    assert_allclose(logits_of(spec, without("state_out"), tokens), logits_of(attending, own, tokens), atol=1e-12)
    alone = replace(spec, linear_attention=replace(spec.linear_attention, beside=False))
    own = {name: array for name, array in parameters.items() if name in alone.weights}
    own["1.out"] = own["1.out"] * 0
    assert_allclose(logits_of(spec, without("out"), tokens), logits_of(alone, own, tokens), atol=1e-12)


@pytest.mark.parametrize("name", OTHERS)
def test_devices_together_compute_other_layers(name):
    strategy, mesh = Strategy.parse_on_mesh("tp=2")
    step = strategy(train_step(OTHERS[name].function(2), SGD(0.5)))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=v.type.shape) * 0.6 if v.type.dtype.kind == "f" else rng.integers(0, 12, v.type.shape)
              for v in step.inputs]
    for found, expected in zip(run_everywhere(localize(step, mesh), arrays), ir.interpret(step, arrays).outputs, strict=True):
        assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["mamba2", "gated_delta", *OTHERS])
def test_gradients_by_central_differences(kind):
    spec = OTHERS[kind] if kind in OTHERS else spec_of(kind, attention_gate=True)
    loss, rng = spec.function(2), np.random.default_rng(0)
    arrays = [rng.normal(size=v.type.shape) * 0.6 if v.type.dtype.kind == "f" else rng.integers(0, 12, v.type.shape)
              for v in loss.inputs]
    along = [rng.normal(size=x.shape) if x.dtype.kind == "f" else np.zeros_like(x) for x in arrays]
    sides = [ir.interpret(loss, [x + (sign * 1e-6 * d).astype(x.dtype) for x, d in zip(arrays, along, strict=True)])
             .outputs[0] for sign in (1, -1)]
    slope = sum(float((g * d).sum())
                for g, d in zip(ir.interpret(ir.gradient(loss), arrays).outputs, along, strict=False))
    assert_allclose(slope, (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "text"), [
    ("mamba2", "tp=2 sp"), ("gated_delta", "dp=2 tp=2 zero=3"), pytest.param("mamba2", "tp=3", marks=pytest.mark.slow),
    pytest.param("gated_delta", "tp=2", marks=pytest.mark.slow),
    pytest.param("mamba2", "dp=3 zero=1", marks=pytest.mark.slow),
])
def test_devices_together_compute_what_one_does(kind, text):
    """The groups of heads are split over tp: columns of the first product, rows of the last, and nothing is gathered."""
    strategy, mesh = Strategy.parse_on_mesh(text)
    step = strategy(train_step(spec_of(kind).function(6), SGD(0.5)))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=v.type.shape) * 0.6 if v.type.dtype.kind == "f" else rng.integers(0, 12, v.type.shape)
              for v in step.inputs]
    localized = localize(step, mesh)
    for found, expected in zip(run_everywhere(localized, arrays), ir.interpret(step, arrays).outputs, strict=True):
        assert_allclose(found, expected, rtol=1e-8, atol=1e-10)
    if text != "tp=3":
        layouts = {v.name: localized.inputs[i].short() for i, v in enumerate(step.inputs)}
        split = {name: layouts[f"p.2.{name}"] for name in ("state_in", "state_out", "convolution")}
        assert all("tp" in text for text in split.values()) or "tp" not in text, split
        state = localized.program(0).region("block.2.attention.state")
        moved = [op for op in state.ops if "axes" in dict(op.attributes) and op.kind != "all_slice"]
        assert not [op for op in moved if op.inputs[0].type.ndim > 1]      # but vectors with a number for each head


def test_a_sequence_is_not_split():
    with pytest.raises(ValueError, match=r"cp: short_convolution of @transformer\.step, in block"):
        ContextParallel("cp")(train_step(SMALL.function(2), SGD(0.5)))


@pytest.mark.parametrize(("figures", "message"), [
    ({"kind": "mamba"}, "kind of linear attention must be one of mamba2, gated_delta, kimi_delta, convolution, got 'mamba'"),
    ({"groups": 3}, "groups of linear attention must divide its heads, got groups=3 and heads=8"),
    ({"chunk": 0}, "chunk of linear attention must be an integer of at least 1, got 0"),
    ({"gate": "none"}, "gate of linear attention must be one of first, last, alone, or None; got 'none'"),
    ({"taps": True}, "taps of linear attention must be an integer of at least 1, got True"),
])
def test_figures_that_do_not_fit_are_refused(figures, message):
    with pytest.raises(ValueError, match=message):
        replace(MAMBA, **figures)


@pytest.mark.parametrize(("figures", "message"), [
    ({"linear_attention": replace(MAMBA, layers=(True,))}, "layers of linear attention must have an entry for each of the 3"),
    ({"linear_attention": replace(MAMBA, norm_places="behind")}, "norm_places of linear attention must be one of before, "),
    ({"layer_parts": ("both", "none", "both")}, "layer_parts must be of attention, feed_forward, both, got 'none'"),
    ({"layer_parts": ("both",)}, "layer_parts must have an entry for each of the 3 layers, got 1"),
    ({"parallel": True}, "parallel=True needs layers with both parts: layer_parts=None"),
    ({"documents": 3}, "linear attention needs documents=None"),
])
def test_figures_of_the_model_that_do_not_fit_are_refused(figures, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **figures)
