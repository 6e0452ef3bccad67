"""The activation of experts and their gates are one op: it equals both of them, and keeps less for the backward."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import ir, models
from parallelism.models import expert_feed_forward

RNG = np.random.default_rng(5)
SIZES = {"layers": 2, "width": 12, "heads": 3, "feed_forward": 20, "vocabulary": 17, "sequence": 6, "norm": "rms",
         "positions": "rotary", "biases": False, "tied": False}
EXPERTS = models.Experts(count=4, chosen=2, width=10)


@pytest.mark.parametrize("name", ["swiglu", "geglu", "clamped_swiglu", "relu2"])
def test_it_is_the_activation_times_the_weight_of_each_row(name):
    given = [RNG.normal(size=(2, 3, 5)) for _ in range(1 if name == "relu2" else 2)]
    weights, grad = RNG.normal(size=(2, 3)), RNG.normal(size=(2, 3, 5))
    activated = ir.apply(name, *given)
    assert_array_equal(ir.apply(f"weighted_{name}", *given, weights), activated * weights[..., None])
    *of_given, of_weights = ir.apply(f"weighted_{name}_gradient", grad, *given, weights)
    expected = ir.apply(f"{name}_gradient", grad * weights[..., None], *given)
    for found, own in zip(of_given, expected if len(given) > 1 else [expected], strict=True):
        assert_array_equal(found, own)
    assert_allclose(of_weights, np.sum(grad * activated, axis=2), rtol=1e-14)


def test_rows_need_features():
    weighted = lambda x, weights: ir.apply("weighted_relu2", x, weights)
    scalar, rows = ir.TensorType("f4", ()), ir.TensorType("f4", (2, 3))
    with pytest.raises(ValueError, match="rows with weights have a dim of features, and a scalar has none"):
        ir.record(weighted, scalar, scalar)
    with pytest.raises(ValueError, match="must have 1 dim"):
        ir.record(weighted, rows, rows)


@pytest.mark.parametrize(("activation", "results"), [
    ("swiglu", 3), ("geglu", 3), ("clamped_swiglu", 3), ("relu2", 2), ("geglu_exact", 4)])
def test_experts_keep_what_the_kernels_of_megatron_core_keep(activation, results):
    """The backward reads what the first products of the experts make, and what the last one reads; nothing between them,
    but where Megatron-Core has no kernel for both."""
    spec = models.TransformerSpec(**SIZES, activation=activation, experts=EXPERTS)
    loss = spec.function(batch=4)
    kinds = [op.kind for op in loss.ops if (op.region or "").endswith("experts.activation")]
    assert kinds == ([f"weighted_{activation}"] if results < 4 else [activation, "einsum"]) * spec.layers
    ops = ir.gradient(loss).ops
    behind = next(i for i, op in enumerate(ops) if op.kind.endswith("_gradient"))
    of_experts = {value for op in ops[:behind] for value in op.outputs if value.type.shape == (4, 4, 3, EXPERTS.width)}
    kept = {value for op in ops[behind:] for value in op.inputs} & of_experts
    assert len(kept) == results * spec.layers


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "clamped_swiglu", "relu2"])
def test_a_model_of_them_is_the_one_of_both_ops(activation, monkeypatch):
    spec = models.TransformerSpec(**SIZES, activation=activation, experts=EXPERTS)
    whole = ir.gradient(spec.function(batch=4))
    monkeypatch.setattr(expert_feed_forward, "WEIGHTED", ())
    apart = ir.gradient(spec.function(batch=4))
    assert [value.name for value in whole.inputs] == [value.name for value in apart.inputs]
    given = []
    for value in whole.inputs:
        numbers = RNG.normal(size=value.type.shape)
        if value.type.dtype.kind == "i":
            numbers = RNG.integers(17, size=value.type.shape)
        given.append(numbers.astype(value.type.dtype))
    found, expected = ir.interpret(whole, given).outputs, ir.interpret(apart, given).outputs
    for own, other in zip(found, expected, strict=True):
        assert_allclose(own, other, rtol=1e-5, atol=5e-6)
