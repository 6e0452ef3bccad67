"""Regions that learn from losses of their own: no gradient between them, alone and under every other transform."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from localized_runs import run_everywhere
from transformed import MODELS, assert_trained, balanced, interpreted, model_step, trained, transformer

from parallelism import Mesh, ir
from parallelism.execution import TrainedPipeline
from parallelism.layouts import localize
from parallelism.transforms import (
    SGD,
    Adam,
    DataParallel,
    LocalLayers,
    MixedPrecision,
    Pipeline,
    Step,
    Strategy,
    Zero,
    train_step,
)

B, = ir.symbols("B")
DEEP = {
    "mlp": (MODELS["mlp"], "layer.*"), "recurrent": (MODELS["recurrent"], "step.*"),
    "convolutional": (MODELS["convolutional"], "layer.*"),
    "gpt": (lambda batch: transformer(layers=3).function(batch), "block.*"), "experts": (balanced, "block.*"),
}


def small(batch=5, times=1):
    """Two layers with regions, then a head that is in none; the loss is added up from so many equal ones."""
    def loss(p, x, targets):
        for i in range(2):
            with ir.region(f"layer.{i}"):
                x = np.tanh(x @ p[f"w{i}"])
        error = x @ p["out"] - targets
        return sum((np.mean(error**2) for _ in range(times - 1)), np.mean(error**2))

    types = {"w0": (3, 4), "w1": (4, 6), "out": (6, 2)}
    return ir.record(loss, {k: ir.TensorType("f8", s) for k, s in types.items()}, ir.TensorType("f8", (batch, 3)),
                     ir.TensorType("f8", (batch, 2)), name="small")


def test_each_layer_gets_the_gradient_of_its_own_loss_alone():
    step = LocalLayers("layer.*")(train_step(small(), SGD(1.0)))
    rng = np.random.default_rng(0)
    given = {value.name: rng.normal(size=value.type.shape) for value in step.inputs}
    found = dict(zip((value.name for value in step.outputs), ir.interpret(step, given).outputs, strict=True))
    x, w0, w1, out, head, t = (given[name] for name in ("x", "p.w0", "p.w1", "p.out", "p.local.layer.0", "targets"))
    h0 = np.tanh(x @ w0)
    h1 = np.tanh(h0 @ w1)
    error0, error1 = h0 @ head - t, h1 @ out - t
    assert float(found[step.outputs[0].name]) == pytest.approx(np.mean(error0**2) + np.mean(error1**2))
    d0, d1 = 2 * error0 / error0.size, 2 * error1 / error1.size
    gradients = {
        "w0": x.T @ ((d0 @ head.T) * (1 - h0**2)), "local.layer.0": h0.T @ d0,
        "w1": h0.T @ ((d1 @ out.T) * (1 - h1**2)), "out": h1.T @ d1}
    for name, gradient in gradients.items():
        np.testing.assert_allclose(given[f"p.{name}"] - found[f"next.p.{name}"], gradient, rtol=1e-12, atol=1e-14)


def test_the_prediction_of_a_mixture_is_what_its_experts_and_its_gates_make_together():
    loss = MODELS["mixture"](4)
    plain = train_step(loss, SGD(1.0))
    step = LocalLayers(["experts", "combine"])(plain)
    head, = (value for value in step.inputs if value.name == "p.local.experts")
    assert head.type.shape == (3, 5)       # of slots, tokens
    rng = np.random.default_rng(0)
    given = {value.name: rng.normal(size=value.type.shape) for value in step.inputs}
    model = {name: array for name, array in given.items() if name != head.name}
    found, expected = (
        dict(zip((value.name for value in each.outputs), ir.interpret(each, arrays).outputs, strict=True))
        for each, arrays in ((step, given), (plain, model)))
    # The router learns from the loss of the model, and the experts from that of their head, which is the rest.
    np.testing.assert_allclose(found["next.p.router"], expected["next.p.router"], rtol=1e-12)
    direction = rng.normal(size=given["p.down"].shape)

    def own(distance):
        moved = given["p.down"] + distance * direction
        return float(ir.interpret(step, given | {"p.down": moved}).outputs[0]) - float(
            ir.interpret(loss, model | {"p.down": moved}).outputs[0])

    slope = np.sum((given["p.down"] - found["next.p.down"]) * direction)
    assert (own(1e-5) - own(-1e-5)) / 2e-5 == pytest.approx(slope, rel=1e-6)


def test_all_terms_of_a_loss_that_need_the_targets_are_taken_of_each_head():
    once, twice = (LocalLayers("layer.*")(train_step(small(times=times), SGD(rate))) for times, rate in
                   ((1, 1.0), (2, 0.5)))
    rng = np.random.default_rng(0)
    given = {value.name: rng.normal(size=value.type.shape) for value in once.inputs}
    (loss, *after), (both, *same) = (ir.interpret(step, given).outputs for step in (once, twice))
    np.testing.assert_array_equal(both, 2 * loss)
    for one, other in zip(after, same, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loss_that_balances_experts_is_one_of_their_region():
    step = LocalLayers("block.*")(train_step(balanced(5), SGD(1.0)))
    types = {value.name: value.type for value in step.inputs}
    rng = np.random.default_rng(0)
    given = {name: rng.normal(size=type.shape) for name, type in types.items()}
    found = dict(zip((value.name for value in step.outputs), ir.interpret(step, given).outputs, strict=True))

    def block(p, i, x):
        gates = ir.apply("softmax", x @ p[f"router{i}"], axis=2)
        rows = np.einsum("btd,edf->btef", x, p[f"up{i}"])
        shares = np.mean(gates, axis=1)
        return (x + np.einsum("bte,btef,efd->btd", gates, np.maximum(rows, 0), p[f"down{i}"]),
                0.3 * np.mean(np.sum(shares * shares, axis=1)))

    # Each block alone: the second one reads what the first one makes as data.
    total, x = 0.0, given["x"]
    for i, out in ((0, "local.block.0"), (1, "out")):
        names = [f"router{i}", f"up{i}", f"down{i}", out]

        def loss(p, x, targets, i=i, out=out):
            y, balance = block(p, i, x)
            return np.mean((y @ p[out] - targets) ** 2) + balance

        alone = ir.gradient(ir.record(loss, {name: types[f"p.{name}"] for name in names}, types["x"],
                                      types["targets"]), [f"p.{name}" for name in names], keep_outputs=True)
        own = {f"p.{name}": given[f"p.{name}"] for name in names}
        value, *gradients = ir.interpret(alone, own | {"x": x, "targets": given["targets"]}).outputs
        for name, gradient in zip(names, gradients, strict=True):
            np.testing.assert_allclose(given[f"p.{name}"] - found[f"next.p.{name}"], gradient, rtol=1e-10, atol=1e-12)
        total += value
        y = ir.record(lambda p, x, i=i: block(p, i, x)[0], {name: types[f"p.{name}"] for name in names}, types["x"])
        x, = ir.interpret(y, {name: (own | {"x": x})[name] for name in (v.name for v in y.inputs)}).outputs
    assert float(found[step.outputs[0].name]) == pytest.approx(float(total))


def test_a_head_averages_over_dims_that_the_prediction_does_not_have():
    step = LocalLayers("layer.*")(model_step("convolutional", 4, Adam()))
    types = {value.name: str(value.type) for value in step.inputs}
    assert types["p.local.layer.0"] == "tensor<4x5xf64>" and "p.local.layer.1" not in types
    assert types["mean.p.local.layer.0"] == types["square.p.local.layer.0"] == types["p.local.layer.0"]
    assert [op.kind for op in step.ops if op.region == "layer.0.local"][:3] == ["sum", "constant", "divide"]
    assert ir.parse(str(step)) == step


@cache
def alone(model, rows, optimizer):
    make, regions = DEEP[model]
    step = LocalLayers(regions)(train_step(make(rows), optimizer))
    return step, interpreted(step)


@pytest.mark.sampled(7, 2)
@pytest.mark.parametrize(("model", "text"), [
    ("mlp", "dp=2 tp=2 zero=2"), ("gpt", "dp=2 tp=2 sp zero=3"), ("convolutional", "dp=3 zero=1"),
    ("recurrent", "dp=2 tp=2 recompute=step.2"), ("experts", "dp=2 tp=3 zero=1"),
    ("gpt", "tp=2 recompute=block.*"), ("mlp", "dp:a=2 dp=2 tp@layer.1=2"),
])
def test_it_goes_with_the_other_transforms(model, text):
    (make, regions), optimizer = DEEP[model], SGD(0.1, 0.5)
    strategy, mesh = Strategy.parse_on_mesh(f"{text} local={regions}")
    step = strategy(train_step(make(5), optimizer))
    localized = localize(step, mesh)
    assert_trained(trained(step, lambda inputs: run_everywhere(localized, inputs)), alone(model, 5, optimizer)[1])


def test_it_goes_with_mixed_precision():
    strategy, mesh = Strategy.parse_on_mesh("dp=2 precision=f32 local=layer.*")
    step = model_step("mlp", 4, SGD(0.1))
    localized = localize(strategy(step), mesh)
    expected = interpreted(MixedPrecision("float32")(LocalLayers("layer.*")(step)))
    assert_trained(trained(strategy(step), lambda inputs: run_everywhere(localized, inputs)), expected, 1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("model", "begin"), [
    ("mlp", "layer.1,layer.2"), ("gpt", "block.1"), ("recurrent", "step.3"), ("experts", "block.1")])
def test_stages_that_begin_at_regions_send_no_gradients(model, begin):
    make, regions = DEEP[model]
    step = Strategy.parse(f"pp@{begin} local:2 local={regions}")(train_step(make(B), SGD(0.1)))
    assert Step.parse(str(step)) == step
    stages = step.stages(len(begin.split(",")) + 1)
    assert [stage.returned for stage in stages.functions] == [()] * len(stages)
    assert [stage.answered for stage in stages.functions[:-1]] == [()] * (len(stages) - 1)
    assert all(stage.trained for stage in stages.functions)
    assert_trained(interpreted(step.function, like=alone(model, 6, SGD(0.1))[0]), alone(model, 6, SGD(0.1))[1], 0)


STEP = train_step(DEEP["gpt"][0](4), Adam())


def two_results():
    def loss(p, x):
        with ir.region("one"):
            a, b = x @ p["a"], x @ p["b"]
        with ir.region("two"):
            c = a * b
        return np.sum(c @ p["c"])

    types = {name: ir.TensorType("f8", shape) for name, shape in (("a", (3, 4)), ("b", (3, 4)), ("c", (4,)))}
    return train_step(ir.record(loss, types, ir.TensorType("f8", (5, 3))), SGD(1))


def two_predictions():
    def loss(p, x, t):
        with ir.region("one"):
            a = x @ p["a"]
        with ir.region("two"):
            b = x @ p["b"]
        return np.mean((a - t) ** 2) + np.mean((b - t) ** 2)

    types = {name: ir.TensorType("f8", (3, 4)) for name in "ab"}
    return train_step(ir.record(loss, types, ir.TensorType("f8", (5, 3)), ir.TensorType("f8", (5, 4))), SGD(1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("build", "message"), [
    (lambda: LocalLayers(()), r"needs the patterns of regions, such as block\.\*"),
    (lambda: LocalLayers("blok.*")(STEP), r"local=blok\.\*: @transformer\.step has no region 'blok\.\*'; did you mean"),
    (lambda: LocalLayers("block.1")(STEP), "only 'block.1' of @transformer.step matches"),
    (lambda: LocalLayers("block.*")(LocalLayers("block.*")(STEP)), "learns from local losses already"),
    (lambda: LocalLayers("block.*")(DataParallel()(STEP)), "%tokens of .* has a layout; local=.* comes before what"),
    (lambda: LocalLayers("block.*")(Strategy(DataParallel(), Zero(1))(STEP)), "comes before what splits the program"),
    (lambda: LocalLayers("block.*")(MixedPrecision("float32")(STEP)), "comes before MixedPrecision, or both in one"),
    (lambda: LocalLayers("block.*")(train_step(DEEP["gpt"][0](4), Adam(), clip=1.0)), "are not clipped together"),
    (lambda: LocalLayers("*")(two_predictions()), "from one prediction; it is from %0 and %1"),
    (lambda: LocalLayers("*o*")(two_results()), "region 'one' of .* must have one result .* it has %0, %1"),
    (lambda: LocalLayers("*")(model_step("convolutional", 4, SGD(1))), "has no dim that a head could take up"),
    (lambda: TrainedPipeline(Pipeline(schedule="local")(train_step(small(B), SGD(1))), Mesh(pp=2)),
     "schedule 'local' sends no gradients, but stage 0 of @.* needs those of"),
    (lambda: Strategy.parse("local"), "'local' must be followed by = and a value"),
])
def test_what_does_not_fit_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
