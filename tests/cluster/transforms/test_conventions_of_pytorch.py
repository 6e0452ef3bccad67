"""Models written as people write them in PyTorch train on every split as on one device, and are simulated as they run."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from trained_runs import ON, B, assert_trains

from parallelism import ir
from parallelism.transforms import SGD, Adam, AdamW, Strategy, train_step

VOCABULARY, TOKENS, WIDTH, HEADS = 10, 4, 8, 4
EACH = WIDTH // HEADS


def linear(x, weight, bias=None):
    """``torch.nn.functional.linear``: the weight is (outputs, inputs)."""
    y = x @ weight.T
    return y if bias is None else y + bias


def layer_norm(x, scale):
    centered = x - np.mean(x, axis=-1, keepdims=True)
    return centered / np.sqrt(np.mean(centered * centered, axis=-1, keepdims=True) + 1e-5) * scale


def softmax(x):
    shifted = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return shifted / np.sum(shifted, axis=-1, keepdims=True)


def attended(q, k, v):
    """Causal attention of ``(batch, heads, tokens, width)``."""
    hidden = np.triu(np.full((TOKENS, TOKENS), -1e9), 1)
    return softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(EACH) + hidden) @ v


def fused_attention(p, x, name):
    """As nanoGPT: one weight for queries, keys and values, whose product is cut in three."""
    q, k, v = np.split(linear(x, p[f"{name}.qkv"]), 3, axis=-1)
    q, k, v = (np.swapaxes(y.reshape(x.shape[0], TOKENS, HEADS, EACH), 1, 2) for y in (q, k, v))
    y = np.swapaxes(attended(q, k, v), 1, 2).reshape(x.shape[0], TOKENS, WIDTH)
    return linear(y, p[f"{name}.out"])


def separate_attention(p, x, name):
    """As Llama: three weights, and views with the heads behind the tokens."""
    q, k, v = (linear(x, p[f"{name}.{part}"]).reshape(x.shape[0], TOKENS, HEADS, EACH) for part in "qkv")
    q, k, v = (y.transpose(0, 2, 1, 3) for y in (q, k, v))
    return linear(attended(q, k, v).transpose(0, 2, 1, 3).reshape(x.shape[0], TOKENS, WIDTH), p[f"{name}.out"])


def sequence_first_attention(p, x, name):
    """As ``nn.MultiheadAttention``: tokens first, and rows merged with heads, ``(tokens, batch * heads, width)``."""
    rows = x.shape[0]
    x = np.swapaxes(x, 0, 1)
    q, k, v = (linear(x, p[f"{name}.{part}"]).reshape(TOKENS, rows * HEADS, EACH).swapaxes(0, 1) for part in "qkv")
    y = attended(q, k, v).swapaxes(0, 1).reshape(TOKENS * rows, WIDTH)
    return np.swapaxes(linear(y, p[f"{name}.out"]).reshape(TOKENS, rows, WIDTH), 0, 1)


def fused_gate(p, x, name):
    gate, up = np.split(linear(x, p[f"{name}.gate_up"]), 2, axis=-1)
    return linear(gate / (1 + np.exp(-gate)) * up, p[f"{name}.down"])


def plain_feed_forward(p, x, name):
    """Of all tokens of all rows, flattened."""
    y = np.tanh(linear(x.reshape(-1, WIDTH), p[f"{name}.up"], p[f"{name}.up_bias"]))
    return linear(y, p[f"{name}.down"]).reshape(x.shape)


def likelihoods(logits, targets):
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    logarithms = shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
    return -np.take_along_axis(logarithms, targets[..., None], axis=-1)[..., 0]


def mean_of_all(logits, targets, weights):
    return np.mean(likelihoods(logits, targets))


def ignoring(logits, targets, weights):
    """``cross_entropy(..., ignore_index=0)``, flattened as trainers do."""
    logits, targets = logits.reshape(-1, VOCABULARY), targets.reshape(-1)
    counts = targets != 0
    return np.sum(likelihoods(logits, targets) * counts) / np.maximum(np.sum(counts), 1)


def smoothed(logits, targets, weights):
    """Weights of examples, label smoothing, and a z-loss over the tokens that count."""
    counts = (targets != 0) * np.abs(weights)[:, None]
    each = 0.9 * likelihoods(logits, targets) - 0.1 * np.mean(np.log(softmax(logits)), axis=-1)
    scale = np.log(np.sum(np.exp(logits), axis=-1))
    return np.sum(counts * each) / (np.sum(counts) + 0.1) + 0.01 * np.sum(scale**2 * counts) / (np.sum(counts * counts) + 1)


ATTENTIONS = {"fused": fused_attention, "separate": separate_attention, "sequence first": sequence_first_attention}
FEED_FORWARDS = {"gate": fused_gate, "plain": plain_feed_forward}
LOSSES = {"mean": mean_of_all, "ignore": ignoring, "smoothed": smoothed}
SHAPES = {
    "fused": {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH)},
    "separate": dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH)),
    "sequence first": dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH)),
    "gate": {"gate_up": (24, WIDTH), "down": (WIDTH, 12)},
    "plain": {"up": (12, WIDTH), "up_bias": (12,), "down": (WIDTH, 12)},
}


def model(attention, feed_forward, loss, tied, rows):
    """A language model of two blocks; the step also returns the fraction of hits."""
    types = {"table": (VOCABULARY, WIDTH), "places": (TOKENS, WIDTH), **({} if tied else {"head": (VOCABULARY, WIDTH)})}
    for block in range(2):
        types |= {f"{block}.norm": (WIDTH,), f"{block}.norm2": (WIDTH,)}
        types |= {f"{block}.{name}": shape for part in (attention, feed_forward) for name, shape in SHAPES[part].items()}

    def function(p, tokens, targets, weights):
        x = p["table"][tokens] + p["places"]
        for block in range(2):
            with ir.region(f"block.{block}"):
                x = x + ATTENTIONS[attention](p, layer_norm(x, p[f"{block}.norm"]), str(block))
                x = x + FEED_FORWARDS[feed_forward](p, layer_norm(x, p[f"{block}.norm2"]), str(block))
        with ir.region("head"):
            logits = linear(x, p["table" if tied else "head"])
            return LOSSES[loss](logits, targets, weights), np.mean(np.argmax(logits, axis=-1) == targets)

    indices = ir.TensorType("i64", (rows, TOKENS))
    return ir.record(function, {name: ir.TensorType("f64", shape) for name, shape in types.items()}, indices, indices,
                     ir.TensorType("f64", (rows,)), name="model")


MESHES = [
    (1, 1, 1, 1), (1, 1, 2, 1), (1, 2, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1), (2, 2, 2, 1), (2, 1, 2, 1),
    (1, 1, 4, 1), (4, 1, 2, 1), (1, 4, 2, 1), (3, 2, 1, 1), (1, 3, 2, 1), (1, 1, 3, 1), (2, 4, 1, 1), (1, 7, 1, 1),
    (5, 1, 1, 1), (1, 1, 1, 2), (2, 2, 1, 2), (1, 2, 2, 2), (2, 1, 1, 4), (1, 1, 4, 2)]
"""The stages, replicas, and devices along tp and cp."""


def drawn(number):
    """A composition, its strategy, the rows, the optimizer and the norm for clipping."""
    rng = Random(number)
    form = *(rng.choice([*each]) for each in (ATTENTIONS, FEED_FORWARDS, LOSSES)), rng.random() < 0.5
    ranks, replicas, tp, cp = rng.choice(MESHES)
    words = [f"tp={tp}" + rng.choice(["", " sp"])] if tp > 1 else []
    words += [f"cp={cp}"] if cp > 1 else []
    if replicas > 1:
        words.append(f"dp={replicas}" + rng.choice(["", " zero=1", " zero=2", " zero=3"]))
    microbatches = rng.randint(1, 3)
    if ranks > 1 or not words or rng.random() < 0.5:
        schedule = rng.choice(["1f1b", "gpipe"] + ["zero_bubble_h1"] * (ranks > 1))
        words.insert(0, f"pp={ranks} {schedule}:{microbatches}")
    rule = rng.choice([SGD(0.1, 0.5), Adam(0.01), AdamW(0.01)])
    rows = replicas * microbatches + rng.randint(0, 3)
    return form, " ".join(words), rows, rule, rng.choice([None, 0.3])


def check(cluster_of, case, backend):
    form, text, rows, rule, clip = case
    strategy, mesh = Strategy.parse_on_mesh(text)
    alone = train_step(model(*form, rows), rule, clip=clip)
    step = strategy(train_step(model(*form, B), rule, clip=clip) if strategy.pipeline else alone)
    assert_trains(cluster_of(mesh, backend, compute="modelled", **ON), step, alone, rows, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "backend"), [
    ((("fused", "gate", "smoothed", True), "pp=2 1f1b:2 tp=2 dp=2 zero=1", 5, Adam(0.01), 0.3), "thread"),
    ((("sequence first", "plain", "ignore", False), "pp=2 1f1b:3 dp=2", 7, SGD(0.1), 0.3), "process"),
    ((("separate", "plain", "ignore", True), "tp=2 sp dp=2 zero=3", 5, AdamW(0.01), None), "thread"),
])
def test_models_of_pytorch_train_as_on_one_device(cluster_of, case, backend):
    check(cluster_of, case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(300))
def test_random_models_of_pytorch_train_on_processes_as_on_one_device(cluster_of, number):
    check(cluster_of, drawn(number), "process")
