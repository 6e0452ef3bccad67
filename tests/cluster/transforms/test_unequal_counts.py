"""The padded loss of a language model, with unequal counts of targets everywhere: loss, gradients and their clipped norm are
those of NumPy on the whole batch, in every split."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_runs import assert_simulated
from trained_runs import ON, B, in_turn, simulated

from parallelism import ir
from parallelism.transforms import SGD, Strategy, train_step

VOCABULARY, TOKENS, WIDTH, HIDDEN = 10, 4, 6, 12
SHAPES = {"table": (VOCABULARY, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN), "head": (VOCABULARY, WIDTH)}
COUNTS = [0, 0, 4, 1, 0, 3, 2, 4, 0, 1, 0, 4]
"""Of each row the number of targets that count: the first replicas and microbatches have none."""


def stepped(rows, clip):
    def loss(p, tokens, targets):
        with ir.region("block.0"):
            x = p["table"][tokens]
        with ir.region("block.1"):
            x = x + np.tanh(x @ p["up"].T) @ p["down"].T
        with ir.region("head"):
            logits, targets = (x @ p["head"].T).reshape(-1, VOCABULARY), targets.reshape(-1)
            shifted = logits - np.max(logits, axis=-1, keepdims=True)
            logarithms = shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
            counts = targets != 0
            each = -np.take_along_axis(logarithms, targets[:, None], axis=-1)[:, 0]
            return np.sum(each * counts) / np.maximum(np.sum(counts), 1)

    types = {name: ir.TensorType("f64", shape) for name, shape in SHAPES.items()}
    indices = ir.TensorType("i64", (rows, TOKENS))
    return train_step(ir.record(loss, types, indices, indices, name="padded"), SGD(1.0), clip=clip)


def given(rows, padded=False):
    rng = np.random.default_rng(rows)
    arrays = {f"p.{name}": rng.normal(size=shape) for name, shape in SHAPES.items()}
    targets = rng.integers(1, VOCABULARY, (rows, TOKENS))
    counts = np.array(COUNTS[:rows])[:, None] * (not padded)
    return arrays | {"tokens": rng.integers(0, VOCABULARY, (rows, TOKENS)),
                     "targets": np.where(rng.permuted(np.arange(TOKENS) < counts, axis=1), targets, 0)}


def by_hand(arrays):
    """The loss, and the gradients by name."""
    table, up, down, head = (arrays[f"p.{name}"] for name in SHAPES)
    tokens, targets = arrays["tokens"].reshape(-1), arrays["targets"].reshape(-1)
    x = table[tokens]
    hidden = np.tanh(x @ up.T)
    y = x + hidden @ down.T
    exponentials = np.exp(y @ head.T)
    probabilities = exponentials / exponentials.sum(1, keepdims=True)
    counts = targets != 0
    share = counts / max(counts.sum(), 1)
    places = np.arange(len(targets))
    d_logits = (probabilities - (np.arange(VOCABULARY) == targets[:, None])) * share[:, None]
    d_y = d_logits @ head
    d_hidden = (d_y @ down) * (1 - hidden**2)
    d_table = np.zeros_like(table)
    np.add.at(d_table, tokens, d_y + d_hidden @ up)
    gradients = {"table": d_table, "up": d_hidden.T @ x, "down": d_y.T @ hidden, "head": d_logits.T @ y}
    return np.sum(-np.log(probabilities[places, targets]) * share), gradients


CASES = [
    (7, "dp=2"), (8, "dp=3 zero=1"), (5, "dp=2 zero=2"), (7, "dp=2 zero=3"), (5, "dp:node=2 dp=2 zero=3"),
    (5, "tp=2"), (7, "tp=3 sp"), (6, "tp=2 sp dp=2 zero=3"), (5, "cp=2"), (5, "cp=4"), (7, "cp=2 dp=2 zero=1"),
    (5, "cp=3 tp=2 sp"), (6, "cp=2 dp=2 zero=3"), (7, "pp=1 1f1b:5"), (9, "pp=1 1f1b:3 dp=2 zero=1"),
    (9, "pp=1 gpipe:2 dp=3 zero=2"), (7, "pp=1 1f1b:3 dp=2 zero=3"), (7, "pp=2 1f1b:3"), (7, "pp=3 1f1b:3"),
    (12, "pp=2 zero_bubble_h1:3 dp=3 zero=2"), (8, "pp=2 1f1b:2 tp=2 dp=2 zero=3"), (7, "pp=2 gpipe:2 tp=2 sp"),
    (7, "pp=2 1f1b:2 cp=2 dp=2"), (9, "pp=1 1f1b:3 cp=2 tp=2 sp"), (7, "pp=2 zero_bubble_v:3x2"),
    (7, "dp=2 overlap=1KB"), (8, "pp=2 1f1b:2 dp=2 zero=1 overlap=1KB"), (7, "pp=2 1f1b:2 recompute=block.*"),
    (7, "dp tp pp 1f1b:3,meshes=dp=2|tp=2"), (8, "dp tp sp pp 1f1b:2,meshes=tp=2|dp=2.tp=2|dp=3"),
]


def placed(text, clip, rows):
    """The step under a strategy, and its mesh."""
    strategy, mesh = (Strategy.parse(text), None) if "meshes" in text else Strategy.parse_on_mesh(text)
    step = strategy(stepped(B if strategy.pipeline else rows, clip))
    return step, mesh or strategy.pipeline.of_all


@pytest.mark.takes_seconds
@pytest.mark.sampled(60, 7)
@pytest.mark.parametrize("clip", [0.05, 1e3])
@pytest.mark.parametrize(("rows", "text", "backend"), in_turn(CASES))
def test_loss_gradients_and_clipped_norm_are_those_of_the_whole_batch(cluster_of, rows, text, backend, clip):
    step, mesh = placed(text, clip, rows)
    arrays = given(rows)
    loss, gradients = by_hand(arrays)
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
    factor = min(clip / (norm + 1e-6), 1)
    assert (factor < 1) == (clip < 1)
    run = cluster_of(mesh, backend, compute="modelled", **ON).run(step, arrays)
    np.testing.assert_allclose(run.result[0], loss, rtol=1e-12)
    moved = {name: arrays[f"p.{name}"] - after for name, after in zip(SHAPES, run.result[1:], strict=True)}
    for name, gradient in gradients.items():
        np.testing.assert_allclose(moved[name], gradient * factor, rtol=1e-10, atol=1e-14)
    found = np.sqrt(sum(np.sum(each**2) for each in moved.values()))
    np.testing.assert_allclose(found, norm * factor, rtol=1e-12)
    assert_simulated(simulated(step, mesh, rows), run.trace)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["dp=2 zero=1", "pp=2 1f1b:2 dp=2 zero=1", "pp=1 1f1b:3", "tp=2 sp"])
def test_a_batch_of_padding_alone_changes_nothing(cluster_of, text):
    step, mesh = placed(text, 0.5, 6)
    arrays = given(6, padded=True)
    loss, *after = cluster_of(mesh, "thread", compute="modelled", **ON).run(step, arrays).result
    assert loss == 0
    for name, found in zip(SHAPES, after, strict=True):
        np.testing.assert_array_equal(found, arrays[f"p.{name}"])
