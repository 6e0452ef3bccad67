"""Training steps as programs, against steps written out in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose
from transformed import MODELS as TRANSFORMED, arrays, assert_trained, interpreted

from parallelism import ir, models
from parallelism.transforms import (
    SGD,
    Adam,
    AdamW,
    Parts,
    Strategy,
    carried,
    categories,
    first_state,
    following,
    train_step,
)

SIZES, ROWS = (5, 4, 3), 7
B, = ir.symbols("B")


def loss_and_gradients(p, x, targets):
    """Of the perceptron with one hidden layer, by hand."""
    h = x @ p["p.w0"] + p["p.b0"]
    a = np.maximum(h, 0)
    error = a @ p["p.w1"] + p["p.b1"] - targets
    g = 2 * error / error.size
    gh = g @ p["p.w1"].T * (h > 0)
    return np.mean(error**2), {
        "p.w0": x.T @ gh, "p.b0": gh.sum(0), "p.w1": a.T @ g, "p.b1": g.sum(0)}


def by_momentum(p, g, t, state, lr, momentum):
    for name in p:
        state[name] = momentum * state.get(name, 0) + g[name]
        p[name] = p[name] - lr * state[name]


def by_adam(p, g, t, state, lr, a, b, epsilon, decay=0.0):
    for name in p:
        m, v = state.get(name, (0, 0))
        m, v = state[name] = a * m + (1 - a) * g[name], b * v + (1 - b) * g[name] ** 2
        p[name] = p[name] - lr * decay * p[name] - lr * (m / (1 - a**t)) / (np.sqrt(v / (1 - b**t)) + epsilon)


OPTIMIZERS = {
    "sgd": (SGD(0.1), lambda *x: by_momentum(*x, 0.1, 0.0)),
    "momentum": (SGD(0.1, 0.75), lambda *x: by_momentum(*x, 0.1, 0.75)),
    "adam": (Adam(0.01, 0.8, 0.95, 1e-6), lambda *x: by_adam(*x, 0.01, 0.8, 0.95, 1e-6)),
    "adamw": (AdamW(0.01, weight_decay=0.3), lambda *x: by_adam(*x, 0.01, 0.9, 0.999, 1e-8, 0.3)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "tolerance"), [("", 0), ("tp sp", 1e-9), ("precision=f32", 0)])
def test_a_scaled_loss_gives_the_same_step_and_gradients_that_are_larger(text, tolerance):
    """A power of two changes no bit.  The gradients before the update are scaled; the loss that is returned is not."""
    alone, scaled = (train_step(TRANSFORMED["gpt"](4), AdamW(0.1), clip=0.5, loss_scale=scale)
                     for scale in (None, 2.0**12))
    step = Strategy.parse(text)(scaled)
    assert_trained(interpreted(step), interpreted(Strategy.parse(text)(alone)), tolerance)
    inputs = first_state(alone, parameters := arrays(Parts.of(alone).parameters, np.random.default_rng(0)))
    data = arrays([value for value in alone.inputs if value.name not in inputs], np.random.default_rng(1))
    grads = [ir.interpret(replace(each, outputs=tuple(Parts.of(each).gradients)), inputs | data).outputs
             for each in (alone, scaled)]
    assert len(grads[0]) == len(parameters)
    for gradient, large in zip(*grads, strict=True):
        assert np.array_equal(large, gradient * 2.0**12)


def test_a_step_in_a_pipeline_has_the_state_of_the_whole():
    alone = train_step(models.mlp(SIZES, B), Adam(0.1))
    step = Strategy.parse("pp 1f1b:2")(alone)
    parameters = arrays(Parts.of(alone).parameters, np.random.default_rng(0))
    first, expected = first_state(step, parameters), first_state(alone, parameters)
    assert first.keys() == expected.keys() and all(np.array_equal(first[name], expected[name]) for name in first)
    outputs = range(len(alone.outputs))
    assert following(step, outputs) == following(alone, outputs)
    assert (carried(step), categories(step)) == (carried(alone), categories(alone))


@pytest.mark.sampled(10, 1)
@pytest.mark.parametrize("clip", [None, 0.2, 1e9])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("batch", [ROWS, B])
def test_three_steps_are_those_that_numpy_makes(batch, name, clip):
    optimizer, update = OPTIMIZERS[name]
    step = train_step(models.mlp(SIZES, batch), optimizer, clip=clip)
    rng = np.random.default_rng(0)
    p = {value.name: rng.normal(size=value.type.shape) for value in Parts.of(step).parameters}
    inputs, state = first_state(step, p), {}
    for t in (1, 2, 3):
        x, targets = rng.normal(size=(ROWS, 5)), rng.normal(size=(ROWS, 3))
        loss, g = loss_and_gradients(p, x, targets)
        if clip is not None:
            norm = np.sqrt(sum(np.sum(each**2) for each in g.values()))
            assert (norm > clip) == (clip < 1)
            g = {key: each * min(1, clip / (norm + 1e-6)) for key, each in g.items()}
        update(p, g, t, state)
        outputs = ir.interpret(step, inputs | {"x": x, "targets": targets}).outputs
        assert_allclose(outputs[0], loss, rtol=1e-13)
        inputs = following(step, outputs)
        for key, expected in p.items():
            assert_allclose(inputs[key], expected, rtol=1e-12, atol=1e-14)
    assert int(inputs.get("updates", 3)) == 3


MODELS = {
    "mlp": lambda batch: models.mlp(SIZES, batch),
    "convolutional": lambda batch: models.convolutional((6, 7, 2), (3, 4), 5, batch),
    "gpt": lambda batch: models.gpt(11, 8, 2, 1, 5, batch),
    "mixture": lambda batch: models.mixture(6, 10, 4, 2, 3, batch, 5),
    "llama": lambda batch: models.TransformerSpec(
        layers=1, width=8, heads=4, key_value_heads=2, vocabulary=11, sequence=5, activation="swiglu", norm="rms",
        positions="rotary", biases=False, tied=False).function(batch),
}


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("model", MODELS)
def test_a_step_is_read_from_its_text_and_put_together_from_its_parts(model):
    step = train_step(MODELS[model](B), AdamW(), clip=1.0)
    assert ir.parse(str(step)) == step
    assert Parts.of(step).joined() == step
    assert Parts.of(step).forward == ir.Function(
        step.name, *(getattr(MODELS[model](B), part) for part in ("inputs", "ops", "outputs")))
    assert step.specialize(B=3) == train_step(MODELS[model](3), AdamW(), clip=1.0)


def test_a_step_keeps_the_dtype_of_its_parameters():
    for dtype in ("f32", "bf16"):
        step = train_step(models.mlp(SIZES, B, dtype), AdamW(), clip=1.0)
        kinds = {value.name: ir.TensorType(dtype, ()).dtype for value in step.inputs} | {"updates": np.dtype(np.int64)}
        assert {value.name: value.type.dtype for value in step.inputs} == kinds
        assert all(value.type.dtype == kinds[value.name.removeprefix("next.")] for value in step.outputs[1:])


def test_what_memory_is_for_is_read_from_a_step():
    step = train_step(models.mlp((5, 3), ROWS), Adam())
    state = {f"{kind}.p.{name}": "optimizer" for kind in ("mean", "square") for name in ("w0", "b0")}
    assert categories(ir.parse(str(step))) == state | {
        "p.w0": "weights", "p.b0": "weights", "grad.p.w0": "gradients", "grad.p.b0": "gradients",
        "updates": "optimizer", "x": "inputs", "targets": "inputs"}


def test_two_parameters_may_have_the_same_gradient_and_one_may_have_none():
    vector = ir.TensorType("f64", (3,))
    loss = ir.record(lambda a, b, unused, x: np.sum(a + b + x), vector, vector, vector, vector)
    step = train_step(loss, SGD(0.5), parameters=["a", "b", "unused"])
    assert ir.parse(str(step)) == step == Parts.of(step).joined()
    inputs = [np.arange(3.0) + i for i in range(4)]
    _, *found = ir.interpret(step, inputs).outputs
    for array, expected in zip(found, [inputs[0] - 0.5, inputs[1] - 0.5, inputs[2]], strict=True):
        np.testing.assert_array_equal(array, expected)


def test_one_prefix_names_all_parameters_under_it():
    types = {"w": ir.TensorType("f64", (3, 2)), "b": ir.TensorType("f64", (2,))}
    loss = ir.record(lambda x, q: np.sum((x @ q["w"] + q["b"]) ** 2), ir.TensorType("f64", (4, 3)), types)
    assert [value.name for value in Parts.of(train_step(loss, SGD(1), parameters="q")).parameters] == ["q.w", "q.b"]
    assert [value.name for value in Parts.of(train_step(loss, SGD(1), parameters=["q.b"])).parameters] == ["q.b"]


def vector_loss(*names):
    return ir.record(lambda p: np.sum(sum(p.values())), {name: ir.TensorType("f64", (2,)) for name in names})


def in_region(path):
    def loss(p):
        with ir.region(path):
            return np.sum(p)

    return ir.record(loss, ir.TensorType("f64", (2,)))


@pytest.mark.parametrize(("build", "error", "message"), [
    (lambda: train_step(train_step(vector_loss("a"), SGD(1)), SGD(1)), ValueError,
     "names that begin with .* are those of a training step"),
    (lambda: train_step(ir.record(lambda p: p, ir.TensorType("f64", (2,))), SGD(1)), ValueError,
     "must be one floating-point number, a loss; it returns tensor<2xf64>"),
    (lambda: train_step(vector_loss("a"), SGD(1), parameters="w"), ValueError,
     "has no floating-point input 'w' to train; it has p.a"),
    (lambda: train_step(vector_loss("a"), SGD(1), parameters=["p.a", "p.c"]), ValueError, "'p.c'"),
    (lambda: train_step(vector_loss("a"), SGD(1), parameters=[]), ValueError, "'no parameters'"),
    (lambda: train_step(ir.record(lambda w: w, ir.TensorType("f64", ())), SGD(1)), ValueError, "'p.w' to train; .* w$"),
    (lambda: train_step(models.transformer("gpt2"), SGD(1)), TypeError,
     r"takes the Function of a loss, got TransformerSpec; its loss is a Function, as function\(batch=8\)"),
    (lambda: train_step(np.sum, SGD(1)), TypeError, "takes the Function of a loss, got _?[A-Za-z]+$"),
    (lambda: train_step(vector_loss("a"), "adam"), TypeError, "must be an SGD, Adam or AdamW, got 'adam'"),
    (lambda: train_step(models.mlp(SIZES, B), SGD(1), loss_scale=0), ValueError, "loss_scale must be above 0 and"),
    (lambda: train_step(vector_loss("a"), SGD(1), clip=0), ValueError, "clip must be above 0 and finite"),
    (lambda: train_step(in_region("update.a"), SGD(1)), ValueError, "region 'update'"),
    (lambda: train_step(in_region("gradient"), SGD(1)), ValueError, "region 'gradient'"),
    (lambda: first_state(train_step(vector_loss("a"), SGD(1)), {}), ValueError, "trains p.a; got none"),
    (lambda: first_state(SGD(1), {}), TypeError, "a training step must be a Function or a Step, got SGD"),
    (lambda: following(train_step(vector_loss("a"), SGD(1)), [1]), ValueError, "step returns 2 values, got 1"),
    (lambda: AdamW(weight_decay=-1), ValueError, "weight_decay must be at least 0"),
])
def test_what_cannot_be_trained_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()
