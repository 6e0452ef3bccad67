"""Second derivatives of softmax, normalizations and activations: the slopes of the slopes are those of the numbers."""

from __future__ import annotations

import numpy as np
import pytest

from parallelism import ir

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(2, 3, 5))
WEIGHT, BIAS = RNG.normal(size=(2, 5))
ROWS = np.array([0.5, -1.25, 2.0])
CASES = {
    **{name: (lambda x, name=name: ir.apply(name, x), X)
       for name in ("gelu", "silu", "relu2", "gelu_exact", "relu", "sigmoid")},
    **{name: (lambda gate, x, name=name: ir.apply(name, gate, x), X, Y)
       for name in ("swiglu", "geglu", "geglu_exact", "reglu")},
    "weighted_swiglu": (lambda gate, x, w: ir.apply("weighted_swiglu", gate, x, w), X, Y, ROWS),
    "weighted_geglu": (lambda gate, x, w: ir.apply("weighted_geglu", gate, x, w), X, Y, ROWS),
    "weighted_relu2": (lambda x, w: ir.apply("weighted_relu2", x, w), X, ROWS),
    "softmax": (lambda x: ir.apply("softmax", x, axis=1), X),
    "softmax of columns": (lambda x: ir.apply("softmax", x, axis=0), X),
    "log_softmax": (lambda x: ir.apply("log_softmax", x, axis=1), X),
    "layer_norm": (lambda x, w, b: ir.apply("layer_norm", x, w, b, epsilon=1e-3), X, WEIGHT, BIAS),
    "rms_norm": (lambda x, w: ir.apply("rms_norm", x, w, epsilon=1e-3), X, WEIGHT),
}


@pytest.mark.parametrize("name", CASES)
def test_the_slope_of_a_slope_is_that_of_the_numbers(name):
    function, *arrays = CASES[name]
    factors = RNG.normal(size=(3, 5))
    types = [ir.TensorType("f8", x.shape) for x in arrays]
    first = ir.gradient(ir.record(lambda *x: np.sum(function(*x) ** 2 * factors), *types))
    ways = [RNG.normal(size=x.shape) for x in arrays]
    second = ir.gradient(first)       # takes the gradients of the gradients
    slopes = ir.interpret(second, [*arrays, *ways]).outputs[:len(arrays)]
    steps = [RNG.normal(size=x.shape) for x in arrays]
    small = 1e-5

    def along(sign):
        moved = [x + sign * small * step for x, step in zip(arrays, steps, strict=True)]
        return sum(np.sum(g * way) for g, way in zip(ir.interpret(first, moved).outputs, ways, strict=True))

    expected = (along(1) - along(-1)) / (2 * small)
    found = sum(np.sum(slope * step) for slope, step in zip(slopes, steps, strict=True))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-8)
