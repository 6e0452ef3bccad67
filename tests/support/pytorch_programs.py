"""Losses that people write in PyTorch, in NumPy: padded, weighted, of several heads, with metrics, of many models."""

from __future__ import annotations

import numpy as np

from parallelism import ir
from parallelism.transforms import train_step

T = ir.TensorType
VOCABULARY, TOKENS, WIDTH, HEADS = 12, 4, 8, 4
PROGRAMS = {}
"""By name, a function of the rows, the optimizer and the norm for clipping, that makes a training step."""


def f64(*shape):
    return lambda rows: T("f64", (rows, *shape))


def i64(*shape):
    return lambda rows: T("i64", (rows, *shape))


TEXT = i64(TOKENS)


def program(*data, **shapes):
    """Adds a loss of parameters of these shapes, and of data."""
    def added(function):
        def step(rows, rule, clip=None):
            types = {name: T("f64", shape) for name, shape in shapes.items()}
            loss = ir.record(function, types, *[of(rows) for of in data], name=function.__name__)
            return train_step(loss, rule, clip=clip)

        PROGRAMS[function.__name__] = step
        return function

    return added


def softmax(x):
    powers = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return powers / np.sum(powers, axis=-1, keepdims=True)


def log_softmax(x):
    shifted = x - np.max(x, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def nll(logits, targets):
    return -np.take_along_axis(log_softmax(logits), targets[..., None], axis=-1)[..., 0]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def rms_norm(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def by_heads(x, heads=HEADS):
    return x.reshape(x.shape[0], x.shape[1], heads, -1).swapaxes(1, 2)


def joined(x):
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], WIDTH)


def numbered(n):
    """``np.arange(n)``, where n may be a symbol."""
    return ir.apply("iota", dim=0, shape=(n,), starts=(0,), dtype=np.dtype("int64"))


CAUSAL = np.triu(np.full((TOKENS, TOKENS), -1e9), 1)


# -- losses of language models -----------------------------------------------------------------------------------------


@program(TEXT, TEXT, table=(VOCABULARY, WIDTH), up=(16, WIDTH), down=(WIDTH, 16), head=(VOCABULARY, WIDTH))
def label_smoothing(p, tokens, targets):
    """With ``ignore_index=0`` and a z-loss; the fraction of hits and the number of targets beside it."""
    with ir.region("block.0"):
        x = p["table"][tokens]
    with ir.region("block.1"):
        x = x + gelu(x @ p["up"].T) @ p["down"].T
        logits = x @ p["head"].T
        mask = targets != 0
        smooth = -log_softmax(logits).sum(axis=-1) / VOCABULARY
        count = np.maximum(mask.sum(), 1)
        scale = np.log(np.exp(logits).sum(-1))
        loss = ((0.9 * nll(logits, np.where(mask, targets, 0)) + 0.1 * smooth) * mask).sum() / count
        hits = (np.argmax(logits, -1) == targets) & mask
        return loss + 1e-2 * (scale * scale * mask).sum() / count, hits.sum() / count, mask.sum()


@program(TEXT, TEXT, TEXT, table=(VOCABULARY, WIDTH), segment=(2, WIDTH), up=(16, WIDTH), up_bias=(16,), down=(WIDTH, 16),
         bias=(VOCABULARY,))
def mean_of_means(p, tokens, segments, targets):
    """The mean over examples of the means over their targets, with a tied table; those without targets do not count."""
    with ir.region("block.0"):
        x = p["table"][tokens] + p["segment"][segments % 2]
    with ir.region("block.1"):
        x = x + gelu(x @ p["up"].T + p["up_bias"]) @ p["down"].T
        mask = (targets != 0).astype(np.float64)
        each = nll(x @ p["table"].T + p["bias"], targets) * mask
        counts = mask.sum(1)
        has = counts > 0
        return (each.sum(1) / np.maximum(counts, 1) * has).sum() / np.maximum(has.sum(), 1), each.sum(), mask.sum()


@program(TEXT, TEXT, table=(VOCABULARY, WIDTH), qkv=(16, WIDTH), out=(WIDTH, WIDTH), norm=(WIDTH,), gate_up=(24, WIDTH),
         down=(WIDTH, 12))
def grouped_queries(p, tokens, targets):
    """Two heads of keys and values for four of queries, one weight for all; logits and targets flattened."""
    rows = tokens.shape[0]
    with ir.region("block.0"):
        x = p["table"][tokens]
        both = rms_norm(x, p["norm"]) @ p["qkv"].T
        q, k, v = by_heads(both[..., :8]), by_heads(both[..., 8:12], 2), by_heads(both[..., 12:], 2)
        k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
        x = x + joined(softmax(q @ k.swapaxes(-1, -2) / np.sqrt(2) + CAUSAL) @ v) @ p["out"].T
    with ir.region("block.1"):
        gate, up = np.split(x @ p["gate_up"].T, 2, axis=-1)
        x = x + (silu(gate) * up) @ p["down"].T
        logits, targets = (x @ p["table"].T).reshape(-1, VOCABULARY), targets.reshape(-1)
        mask = targets != 0
        picked = log_softmax(logits)[numbered(rows * TOKENS), targets]
        return -(picked * mask).sum() / np.maximum(mask.sum(), 1)


@program(TEXT, TEXT, table=(VOCABULARY, WIDTH), q=(WIDTH, WIDTH), k=(4, WIDTH), v=(4, WIDTH), out=(WIDTH, WIDTH),
         gate_up=(24, WIDTH), down=(WIDTH, 12), head=(VOCABULARY, WIDTH))
def rotary(p, tokens, targets):
    """Rotated queries and keys, groups as a dim of their own, and the next token as the target."""
    rows = tokens.shape[0]
    angles = np.arange(TOKENS)[:, None]
    cosines, sines = np.cos(angles), np.sin(angles)

    def rotated(x):
        left, right = x[..., :1], x[..., 1:]
        return np.concatenate([left * cosines - right * sines, left * sines + right * cosines], -1)

    with ir.region("block.0"):
        x = p["table"][tokens]
        q, k, v = by_heads(x @ p["q"].T), by_heads(x @ p["k"].T, 2), by_heads(x @ p["v"].T, 2)
        q, k = rotated(q).reshape(rows, 2, 2, TOKENS, 2), rotated(k)
        y = softmax(q @ k[:, :, None].swapaxes(-1, -2) / np.sqrt(2) + CAUSAL) @ v[:, :, None]
        x = x + joined(y.reshape(rows, HEADS, TOKENS, 2)) @ p["out"].T
    with ir.region("block.1"):
        both = x @ p["gate_up"].T
        x = x + (silu(both[..., :12]) * both[..., 12:]) @ p["down"].T
        return np.mean(nll(x[:, :-1] @ p["head"].T, targets[:, 1:]))


@program(TEXT, TEXT, table=(VOCABULARY, WIDTH), relative=(2 * TOKENS - 1, HEADS), q=(WIDTH, WIDTH), k=(WIDTH, WIDTH),
         v=(WIDTH, WIDTH), out=(WIDTH, WIDTH), up=(16, WIDTH), down=(WIDTH, 16))
def relative_positions(p, tokens, targets):
    """As T5: a table of biases by distance, and a scaled tied head."""
    with ir.region("block.0"):
        x = p["table"][tokens]
        q, k, v = (by_heads(x @ p[name].T) for name in "qkv")
        places = np.arange(TOKENS)
        biases = p["relative"][places[:, None] - places + TOKENS - 1].transpose(2, 0, 1)
        x = x + joined(softmax(q @ k.swapaxes(-1, -2) + biases) @ v) @ p["out"].T
    with ir.region("block.1"):
        x = x + np.maximum(x @ p["up"].T, 0) @ p["down"].T
        mask = targets != 0
        return np.sum(np.where(mask, nll(x @ p["table"].T * WIDTH**-0.5, targets), 0)) / np.maximum(np.sum(mask), 1)


@program(TEXT, TEXT, TEXT, table=(VOCABULARY, WIDTH), qkv=(3 * WIDTH, WIDTH), out=(WIDTH, WIDTH), head=(VOCABULARY, WIDTH))
def packed(p, tokens, segments, targets):
    """Several documents in a row: tokens attend to their own."""
    with ir.region("block.0"):
        x = p["table"][tokens]
        q, k, v = map(by_heads, np.split(x @ p["qkv"].T, 3, -1))
        there = (segments[:, None, :, None] == segments[:, None, None, :]) & (CAUSAL == 0)
        x = x + joined(softmax(np.where(there, q @ k.swapaxes(-1, -2), -1e9)) @ v) @ p["out"].T
    with ir.region("block.1"):
        mask = (targets != 0) & (segments != 2)
        return (nll(x @ p["head"].T, targets) * mask).sum() / np.maximum(mask.sum(), 1), mask.mean()


@program(TEXT, TEXT, f64(TOKENS), f64(TOKENS), f64(TOKENS), table=(VOCABULARY, WIDTH), up=(16, WIDTH), down=(WIDTH, 16),
         head=(VOCABULARY, WIDTH), value=(1, WIDTH))
def clipped_policy(p, tokens, actions, old, advantages, returns):
    """As PPO: advantages are normalized by their mean and deviation over all actions of the batch."""
    with ir.region("block.0"):
        x = p["table"][tokens]
        x = x + gelu(x @ p["up"].T) @ p["down"].T
    with ir.region("block.1"):
        mask = (actions != 0).astype(np.float64)
        count = np.maximum(mask.sum(), 1)
        mean = (advantages * mask).sum() / count
        deviation = np.sqrt((((advantages - mean) ** 2) * mask).sum() / count)
        advantages = (advantages - mean) / (deviation + 1e-6)
        likelihoods = -nll(x @ p["head"].T, actions)
        ratios = np.exp(likelihoods - old * 0.1)
        policy = -np.minimum(ratios * advantages, np.clip(ratios, 0.8, 1.2) * advantages)
        value = ((x @ p["value"].T)[..., 0] - returns) ** 2
        loss = ((policy + 0.5 * value + 0.01 * np.exp(likelihoods) * likelihoods) * mask).sum() / count
        return loss, ((np.abs(ratios - 1) > 0.2) * mask).sum() / count, ((ratios - 1 - np.log(ratios)) * mask).sum() / count


# -- classifiers, and others -------------------------------------------------------------------------------------------


@program(TEXT, i64(), table=(VOCABULARY, WIDTH), places=(TOKENS, WIDTH), in_proj=(3 * WIDTH, WIDTH), in_bias=(3 * WIDTH,),
         out=(WIDTH, WIDTH), out_bias=(WIDTH,), up=(16, WIDTH), down=(WIDTH, 16), head=(3, WIDTH))
def multihead_attention(p, tokens, labels):
    """As ``nn.MultiheadAttention``: tokens first, rows merged with heads; pooled over tokens."""
    rows = tokens.shape[0]
    with ir.region("block.0"):
        x = (p["table"][tokens] + p["places"]).swapaxes(0, 1)
        q, k, v = np.split(x @ p["in_proj"].T + p["in_bias"], 3, axis=-1)
        q, k, v = (y.reshape(TOKENS, rows * HEADS, WIDTH // HEADS).swapaxes(0, 1) for y in (q, k, v))
        y = (softmax(q @ k.swapaxes(1, 2) / np.sqrt(WIDTH // HEADS)) @ v).swapaxes(0, 1).reshape(TOKENS * rows, WIDTH)
        x = x + (y @ p["out"].T + p["out_bias"]).reshape(TOKENS, rows, WIDTH)
    with ir.region("block.1"):
        x = x + np.maximum(x @ p["up"].T, 0) @ p["down"].T
        logits = x.mean(axis=0) @ p["head"].T
        return np.mean(nll(logits, labels)), np.mean(np.argmax(logits, 1) == labels)


@program(f64(4, 4), i64(), patch=(WIDTH, 4), token=(1, 1, WIDTH), places=(5, WIDTH), qkv=(3 * WIDTH, WIDTH),
         out=(WIDTH, WIDTH), up=(16, WIDTH), down=(WIDTH, 16), head=(5, WIDTH), bias=(5,))
def image_patches(p, images, labels):
    """As ViT: patches of an image, a token in front of them, and a row of logits picked by its label."""
    rows = images.shape[0]
    with ir.region("block.0"):
        x = images.reshape(rows, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(rows, 4, 4) @ p["patch"].T
        x = np.concatenate([np.broadcast_to(p["token"], (rows, 1, WIDTH)), x], axis=1) + p["places"]
        qkv = (x @ p["qkv"].T).reshape(rows, 5, 3, HEADS, 2).transpose(2, 0, 3, 1, 4)
        x = x + joined(softmax(qkv[0] @ qkv[1].swapaxes(-1, -2)) @ qkv[2]) @ p["out"].T
    with ir.region("block.1"):
        x = x + gelu(x @ p["up"].T) @ p["down"].T
        logarithms = log_softmax(x[:, 0] @ p["head"].T + p["bias"])
        return -np.mean(logarithms[numbered(rows), labels]), np.mean(np.argmax(logarithms, 1) == labels)


@program(f64(6), i64(), f64(2), f64(), up=(16, 6), up_bias=(16,), classes=(5, 16), places=(2, 16), places_bias=(2,))
def two_heads(p, x, labels, places, weights):
    """A classifier and a regression, with weights of examples and of the losses, and a decay."""
    with ir.region("block.0"):
        h = np.maximum(x @ p["up"].T + p["up_bias"], 0)
    with ir.region("block.1"):
        weights = np.abs(weights)
        each = np.mean((h @ p["places"].T + p["places_bias"] - places) ** 2, axis=1)
        one = (nll(h @ p["classes"].T, labels) * weights).sum() / weights.sum()
        two = (each * weights).sum() / weights.sum()
        return one + 0.3 * two + 0.001 * np.sum(p["up"] ** 2), one, two


@program(f64(6), i64(), lambda rows: T("f64", (5,)), up=(16, 6), up_bias=(16,), head=(5, 16))
def class_weights(p, x, labels, weights):
    """``cross_entropy(weight=...)``: the denominator is the sum of the weights of the labels."""
    with ir.region("block.0"):
        h = np.tanh(x @ p["up"].T + p["up_bias"])
    with ir.region("block.1"):
        own = (np.abs(weights) + 0.1)[labels]
        return (nll(h @ p["head"].T, labels) * own).sum() / own.sum()


@program(f64(6), f64(), i64(), up=(16, 6), one=(1, 16), two=(3, 16), scales=(2,))
def learned_weights(p, x, y, labels):
    """Two losses weighted by what is learned of their noise."""
    with ir.region("block.0"):
        h = np.tanh(x @ p["up"].T)
    with ir.region("block.1"):
        one = np.mean(((h @ p["one"].T).squeeze(-1) - y) ** 2)
        two = np.mean(nll(h @ p["two"].T, labels % 3))
        scales = p["scales"]
        return np.exp(-scales[0]) * one + scales[0] + np.exp(-scales[1]) * two + scales[1], one, two


@program(f64(6), f64(5), i64(), up=(16, 6), head=(5, 16))
def distilled(p, x, teacher, labels):
    """The divergence from a teacher's logits at a temperature, and a cross-entropy."""
    with ir.region("block.0"):
        h = np.maximum(x @ p["up"].T, 0)
    with ir.region("block.1"):
        logits, soft = h @ p["head"].T, softmax(teacher / 2)
        divergence = (soft * (np.log(soft + 1e-9) - log_softmax(logits / 2))).sum(-1).mean() * 4
        entropy = np.mean(nll(logits, labels))
        same = np.argmax(logits, -1) == np.argmax(teacher, -1)
        return 0.7 * divergence + 0.3 * entropy, divergence, entropy, np.mean(same)


@program(f64(3, 6), up=(16, 6), project=(8, 16))
def triplets(p, x):
    """Normalized embeddings of an anchor, one alike and another one; the fraction that is within the margin."""
    with ir.region("block.0"):
        h = np.tanh(x @ p["up"].T)
    with ir.region("block.1"):
        y = h @ p["project"].T
        y = y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-9)
        apart = ((y[:, 0] - y[:, 1]) ** 2).sum(-1) - ((y[:, 0] - y[:, 2]) ** 2).sum(-1) + 0.2
        return np.maximum(apart, 0).mean(), (apart > 0).mean()


@program(f64(6), f64(4), into=(16, 6), means=(4, 16), logarithms=(4, 16), up=(16, 4), out=(6, 16))
def variational(p, x, noise):
    """An autoencoder with two terms, both of which are told."""
    with ir.region("block.0"):
        h = np.maximum(x @ p["into"].T, 0)
        means, logarithms = h @ p["means"].T, h @ p["logarithms"].T
        z = means + np.exp(0.5 * logarithms) * noise
    with ir.region("block.1"):
        same = ((np.maximum(z @ p["up"].T, 0) @ p["out"].T - x) ** 2).sum(1).mean()
        divergence = (-0.5 * (1 + logarithms - means**2 - np.exp(logarithms)).sum(1)).mean()
        return same + 0.5 * divergence, same, divergence


@program(f64(TOKENS, 6), f64(3), into=(8, 6), router=(4, 8), up=(4, 8, 12), down=(4, 12, 8), out=(3, 8))
def soft_experts(p, x, y):
    """Experts that each token reaches, with a z-loss of the router and a loss that balances."""
    with ir.region("block.0"):
        h = x @ p["into"].T
    with ir.region("block.1"):
        routed = h @ p["router"].T
        gates = softmax(routed)
        each = np.einsum("btef,efd->bted", np.maximum(np.einsum("btd,edf->btef", h, p["up"]), 0), p["down"])
        h = h + (gates[..., None] * each).sum(2)
        scale = (np.log(np.exp(routed).sum(-1)) ** 2).mean()
        balance = (gates.mean(1) ** 2).sum(-1).mean()
        return ((h.mean(1) @ p["out"].T - y) ** 2).mean() + 0.01 * scale + 0.1 * balance, scale, balance


@program(f64(3, 4), f64(), inputs=(2, 16, 4), states=(2, 16, 4), biases=(2, 16), head=(1, 4))
def recurrent(p, x, y):
    """Two layers of an LSTM with stacked weights, and a Huber loss."""
    steps = [x[:, step] for step in range(3)]
    for layer in range(2):
        with ir.region(f"block.{layer}"):
            h = cell = np.zeros_like(steps[0])
            made = []
            for step in steps:
                four = step @ p["inputs"][layer].T + h @ p["states"][layer].T + p["biases"][layer]
                into, forget, new, out = np.split(four, 4, axis=1)
                cell = cell / (1 + np.exp(-forget)) + np.tanh(new) / (1 + np.exp(-into))
                h = np.tanh(cell) / (1 + np.exp(-out))
                made.append(h)
            steps = made
    with ir.region("head"):
        error = np.abs((steps[-1] @ p["head"].T)[:, 0] - y)
        return np.where(error < 1, 0.5 * error * error, error - 0.5).mean(), error.mean()


@program(i64(), i64(), i64(), users=(VOCABULARY, WIDTH), items=(VOCABULARY, WIDTH), user=(16, WIDTH), item=(16, WIDTH),
         bias=())
def two_towers(p, users, items, labels):
    """Binary cross-entropy with a weight of what is true; an F1 score, which is a quotient of counts, beside it."""
    with ir.region("block.0"):
        left = np.tanh(p["users"][users] @ p["user"].T)
    with ir.region("block.1"):
        score = (left * np.tanh(p["items"][items] @ p["item"].T)).sum(-1) + p["bias"]
        true = (labels % 2).astype(np.float64)
        weights = 1 + 2 * true
        each = weights * (np.maximum(score, 0) - score * true + np.log1p(np.exp(-np.abs(score))))
        said = score > 0
        right, wrong = (said & (true > 0)).sum(), (said != (true > 0)).sum()
        return each.sum() / weights.sum() + 0.001 * (left * left).mean(), 2 * right / np.maximum(2 * right + wrong, 1), right


@program(f64(6), f64(4), up=(16, 6), scale=(16,), shift=(16,), head=(4, 16))
def focal(p, x, y):
    """Norms of groups, and a focal loss divided by the number of what is true."""
    with ir.region("block.0"):
        h = (x @ p["up"].T).reshape(x.shape[0], 4, 4)
        h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
        h = h.reshape(x.shape[0], 16) * p["scale"] + p["shift"]
    with ir.region("block.1"):
        true = y > 0
        said = 1 / (1 + np.exp(-(np.maximum(h, 0.1 * h) @ p["head"].T)))
        right = np.where(true, said, 1 - said)
        return -(((1 - right) ** 2) * np.log(right + 1e-9)).sum() / np.maximum(true.sum(), 1), ((said > 0.5) == true).mean()
