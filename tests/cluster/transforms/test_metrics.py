"""Metrics beside a loss are those of the whole batch on every split, in pipelines too."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_runs import assert_simulated
from trained_runs import ON, B, in_turn, simulated

from parallelism import Mesh, Pipeline, PipelinedProgram, ir
from parallelism.layouts import partition
from parallelism.transforms import Adam, Strategy, first_state, train_step

WIDTHS = {"a": (3, 8), "b": (8, 5)}


def loss(p, x, weights, classes):
    """Returns a mean, a part of the loss, a fraction, a count, an int, functions of sums, a vector, and a number alone."""
    with ir.region("one"):
        h = np.tanh(x @ p["a"])
    with ir.region("two"):
        logits = h @ p["b"]
        shifted = logits - np.max(logits, axis=1, keepdims=True)
        each = np.log(np.sum(np.exp(shifted), axis=1)) - np.take_along_axis(shifted, classes[:, None], 1)[:, 0]
        weights = np.abs(weights) + 0.5
        mean = np.sum(weights * each) / np.sum(weights)
        hits = np.argmax(logits, axis=1) == classes
        found = np.sum(hits * weights) / np.sum(weights), np.sum(weights), np.sum(hits)
        made = np.exp(mean), np.sum(hits * each) / np.maximum(np.sum(hits), 1), np.sum(hits) - 2 * np.sum(weights)
        means = np.mean(shifted, axis=0), np.mean(each), np.mean(weights)
        return mean + 0.1 * np.sum(p["a"] ** 2) + np.mean(each), mean, *found, *made, *means


def stepped(rows):
    f64 = {name: ir.TensorType("f64", shape) for name, shape in WIDTHS.items()}
    types = ir.TensorType("f64", (rows, 3)), ir.TensorType("f64", (rows,)), ir.TensorType("i64", (rows,))
    return train_step(ir.record(loss, f64, *types, name="metrics"), Adam(0.1), clip=0.5)


def given(step, rows):
    rng = np.random.default_rng(0)
    state = first_state(step, {f"p.{name}": rng.normal(size=shape) for name, shape in WIDTHS.items()})
    return state | {"x": rng.normal(size=(rows, 3)), "weights": rng.normal(size=rows), "classes": rng.integers(0, 5, rows)}


CASES = [
    (7, "pp=2 1f1b:3"), (9, "pp=1 1f1b:2 dp=2 zero=1"), (8, "pp=2 zero_bubble_v:2x2 dp=2"),
    (7, "pp=2 1f1b:2 tp=2 dp=2 zero=3"),
    (6, "pp@two=2 zero_bubble_h1:3 tp=2"), (7, "dp=3 tp=2"), (8, "pp=2 gpipe:2 dp=2 overlap=1KB"),
    (5, "pp=2 1f1b:2 recompute=one"),
    (8, "pp=4 1f1b:2 dp=2"), (6, "pp=1 1f1b:1 dp=2 zero=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "text", "backend"), in_turn(CASES))
def test_metrics_are_those_of_the_whole_batch(cluster_of, rows, text, backend):
    strategy, mesh = Strategy.parse_on_mesh(text)
    step = strategy(stepped(B if strategy.pipeline else rows))
    inputs = given(step, rows)
    run = cluster_of(mesh, backend, compute="modelled", **ON).run(step, inputs)
    expected = ir.interpret(stepped(rows), inputs).outputs
    assert len(run.result) == len(expected)
    for found, wanted in zip(run.result, expected, strict=True):
        assert np.asarray(found).dtype == np.asarray(wanted).dtype and np.shape(found) == np.shape(wanted)
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)
    assert_simulated(simulated(step, mesh, rows), run.trace)


def recorded(function):
    x = ir.TensorType("f64", (B, 3))
    return train_step(ir.record(function, {"a": ir.TensorType("f64", (3, 8))}, x, name="wrong"), Adam(0.1))


@pytest.mark.parametrize(("function", "match"), [
    (lambda p, x: (np.sum(x @ p["a"]), x @ p["a"]), r"@wrong.step: output .* has rows of the batch B, of which each"),
    (lambda p, x: (np.sum(x @ p["a"]), np.sum(p["a"])), r"a metric is computed from %p.a: .* alone; a pipeline returns"),
    (lambda p, x: (np.sum(x @ p["a"]), np.max(x @ p["a"])), "the max over all rows is not a sum"),
])
def test_what_microbatches_cannot_return_is_refused(function, match):
    with pytest.raises(ValueError, match=match):
        Strategy.parse("pp 1f1b:2")(recorded(function)).stages(1)


def test_the_largest_row_of_data_is_known_before():
    step = recorded(lambda p, x: (np.sum(x @ p["a"]), np.max(x)))
    stages = Strategy.parse("pp 1f1b:2")(step).stages(1)
    assert [op.kind for op in stages.beginning.ops] == ["max"] and stages.ending is None
    assert stages.results[1] == stages.beginning.outputs[0].name


def test_gradients_without_an_update_come_with_the_loss_alone():
    function = ir.record(lambda p, x: (np.sum(x @ p["a"]), np.sum(x)), {"a": ir.TensorType("f64", (3, 8))},
                         ir.TensorType("f64", (B, 3)), name="two")
    with pytest.raises(ValueError, match=r"@two returns .* beside its loss, but .* returns only the loss and the gradients"):
        PipelinedProgram(partition(function, 1), Pipeline(stages=1, microbatches=2), Mesh(tp=1))


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["pp=2 1f1b:2 dp=2", "pp=1 1f1b:3"])
def test_a_loss_and_its_metrics_share_the_denominator(cluster_of, text):
    def shared(p, x, classes):
        with ir.region("one"):
            counts = classes != 0
            number = np.maximum(counts.sum(), 1)        # known before: also as a metric, and in one
        with ir.region("two"):
            y = np.tanh(x @ p["a"]) @ p["b"]
            hits = (np.argmax(y, axis=1) == classes) & counts
            each = np.mean(y * y, axis=1) * counts
            return np.sum(each) / number, hits.sum() / number, counts.sum(), number, np.sqrt(number)

    f64 = {name: ir.TensorType("f64", shape) for name, shape in WIDTHS.items()}
    types = ir.TensorType("f64", (B, 3)), ir.TensorType("i64", (B,))
    step = train_step(ir.record(shared, f64, *types, name="shared"), Adam(0.1))
    inputs = {name: array for name, array in given(stepped(7), 7).items() if name != "weights"}
    strategy, mesh = Strategy.parse_on_mesh(text)
    run = cluster_of(mesh, "thread", compute="modelled", **ON).run(strategy(step), inputs)
    for found, wanted in zip(run.result[:5], ir.interpret(step, inputs).outputs, strict=False):
        assert np.asarray(found).dtype == np.asarray(wanted).dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-11)
    assert_simulated(simulated(strategy(step), mesh, 7), run.trace)


@pytest.mark.slow
def test_a_metric_by_token_is_whole_where_tokens_are_split(cluster_of):
    def by_token(p, x, targets):
        with ir.region("one"):
            h = np.tanh(x @ p["a"])
        with ir.region("two"):
            each = np.mean((h @ p["b"] - targets) ** 2, axis=2)
            return np.mean(each), np.mean(each, axis=0), np.max(targets, axis=(0, 2))

    f64 = {name: ir.TensorType("f64", shape) for name, shape in WIDTHS.items()}
    types = [ir.TensorType("f64", (B, 4, width)) for width in (3, 5)]
    step = train_step(ir.record(by_token, f64, *types, name="tokens"), Adam(0.1))
    rng = np.random.default_rng(0)
    state = first_state(step, {f"p.{name}": rng.normal(size=shape) for name, shape in WIDTHS.items()})
    inputs = state | {"x": rng.normal(size=(5, 4, 3)), "targets": rng.normal(size=(5, 4, 5))}
    strategy, mesh = Strategy.parse_on_mesh("pp=2 1f1b:2 cp=2 dp=2")
    run = cluster_of(mesh, "thread", compute="modelled", **ON).run(strategy(step), inputs)
    for found, wanted in zip(run.result[:3], ir.interpret(step, inputs).outputs, strict=False):
        np.testing.assert_allclose(found, wanted, rtol=1e-11)
    assert_simulated(simulated(strategy(step), mesh, 5), run.trace)
