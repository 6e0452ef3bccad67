"""Models for tests of transforms, their inputs, and two steps of training."""

from __future__ import annotations

from functools import cache

import numpy as np

from parallelism import ir, models
from parallelism.dtypes import is_floating
from parallelism.models import cross_entropy
from parallelism.transforms import Parts, first_state, following, train_step

VOCABULARY = 10


def transformer(**figures):
    defaults = {"layers": 1, "width": 16, "heads": 4, "vocabulary": VOCABULARY, "sequence": 6, "dtype": np.float64}
    return models.TransformerSpec(**defaults | figures)


def recurrent(batch):
    """A recurrent network, unrolled: one weight is used in every step."""
    def loss(p, x, targets):
        state = np.tanh(x[:, 0] @ p["enter"])
        for i in range(1, 4):
            with ir.region(f"step.{i}"):
                state = np.tanh(x[:, i] @ p["enter"] + state @ p["again"] + p["bias"])
        return np.mean((state @ p["leave"] - targets) ** 2)

    types = {"enter": (5, 8), "again": (8, 8), "bias": (8,), "leave": (8, 3)}
    return ir.record(loss, {k: ir.TensorType("f64", s) for k, s in types.items()},
                     ir.TensorType("f64", (batch, 4, 5)), ir.TensorType("f64", (batch, 3)), name="recurrent")


def residual(batch):
    """Residual layers behind norms, no regions, a gate, and an odd width."""
    def loss(p, x, targets):
        for i in range(2):
            y = ir.apply("rms_norm", x, p[f"norm{i}"], epsilon=1e-5)
            x = x + (np.tanh(y @ p[f"up{i}"]) * (y @ p[f"gate{i}"])) @ p[f"down{i}"] * 0.5
        return cross_entropy(x, targets)

    types = {}
    for i in range(2):
        types |= {f"norm{i}": (7,), f"up{i}": (7, 9), f"gate{i}": (7, 9), f"down{i}": (9, 7)}
    return ir.record(loss, {k: ir.TensorType("f64", s) for k, s in types.items()},
                     ir.TensorType("f64", (batch, 7)), ir.TensorType("i64", (batch,)), name="residual")


def viewed(batch):
    """Residual layers that read their weights through views: transposed, of stacks, reshaped, and converted.

    They are smooth: gradients in bfloat16 jump where rounding crosses a kink.
    """
    def loss(p, x, targets):
        for i in range(2):
            with ir.region(f"block.{i}"):
                y = ir.apply("rms_norm", x, p[f"norm{i}"], epsilon=1e-5)
                y = np.tanh(y @ p[f"up{i}"].T + p["bias"][i]) @ p["down"][i] * 0.5
                y = x + y.reshape(batch, 6)
                x = y + np.tanh(y @ p[f"more{i}"].reshape(6, 8)) @ p[f"less{i}"].astype("f8").reshape(6, 8).T
        return np.mean((x - targets) ** 2)

    types = {"bias": (2, 12), "down": (2, 12, 6)}
    for i in range(2):
        types |= {f"norm{i}": (6,), f"up{i}": (12, 6), f"more{i}": (6, 4, 2), f"less{i}": (3, 2, 8)}
    return ir.record(loss, {k: ir.TensorType("f64", s) for k, s in types.items()},
                     ir.TensorType("f64", (batch, 6)), ir.TensorType("f64", (batch, 6)), name="viewed")


def fused(batch):
    """Queries, keys and values from one weight, with one bias; a gate beside what it opens; parts of one weight."""
    def loss(p, x, targets):
        with ir.region("block.0"):
            queries, keys, values = np.split(0.5 * (x @ p["qkv"].T + p["bias"]), 3, axis=1)
            x = x + (np.tanh(queries * keys) * values) @ p["out"]
        with ir.region("block.1"):
            both = x @ p["both"]
            x = x + (np.tanh(both[:, :9]) * both[:, 9:]) @ p["down"]
            x = x + np.maximum(x @ p["more"][:7].T, 0) @ p["more"][7:]
        return np.mean((x - targets) ** 2)

    types = {"qkv": (24, 6), "bias": (24,), "out": (8, 6), "both": (6, 18), "down": (9, 6), "more": (14, 6)}
    return ir.record(loss, {k: ir.TensorType("f64", s) for k, s in types.items()},
                     ir.TensorType("f64", (batch, 6)), ir.TensorType("f64", (batch, 6)), name="fused")


def factored(batch):
    """A bilinear form of two inputs with low-rank weights and a learned scale: tokens stand first, rows second."""
    def loss(p, left, right):
        a = np.einsum("tbi,ir,rj->tbj", left, p["left.down"], p["left.up"])
        b = np.einsum("tbi,ij->tbj", right, p["right"])
        return np.sum(np.log1p(np.exp(-p["scale"] * np.sum(a * b, axis=2)))) / 10

    types = {"left.down": (5, 2), "left.up": (2, 6), "right": (4, 6), "scale": ()}
    return ir.record(loss, {k: ir.TensorType("f64", s) for k, s in types.items()},
                     ir.TensorType("f64", (3, batch, 5)), ir.TensorType("f64", (3, batch, 4)), name="factored")


def balanced(batch):
    """Two blocks of experts that every token reaches through gates, each with a loss that balances them."""
    def loss(p, x, targets):
        total = 0.0
        for i in range(2):
            with ir.region(f"block.{i}"):
                gates = ir.apply("softmax", x @ p[f"router{i}"], axis=2)
                rows = np.einsum("btd,edf->btef", x, p[f"up{i}"])
                x = x + np.einsum("bte,btef,efd->btd", gates, np.maximum(rows, 0), p[f"down{i}"])
                shares = np.mean(gates, axis=1)
            total = total + 0.3 * np.mean(np.sum(shares * shares, axis=1))
        return np.mean((x @ p["out"] - targets) ** 2) + total

    types = {"out": (6, 4)}
    for i in range(2):
        types |= {f"router{i}": (6, 3), f"up{i}": (3, 6, 5), f"down{i}": (3, 5, 6)}
    return ir.record(loss, {k: ir.TensorType("f64", s) for k, s in types.items()},
                     ir.TensorType("f64", (batch, 2, 6)), ir.TensorType("f64", (batch, 2, 4)), name="balanced")


def named_like_scales(batch):
    """Two layers whose weights have, inside their names, the word with which those of delayed scales begin."""
    def loss(p, x, targets):
        with ir.region("block.0"):
            h = np.tanh(x @ p["delayed.up"])
        with ir.region("block.1"):
            return np.mean((h @ p["delayed.down"] - targets) ** 2)

    types = {"delayed.up": (4, 8), "delayed.down": (8, 3)}
    return ir.record(loss, {k: ir.TensorType("f64", s) for k, s in types.items()},
                     *[ir.TensorType("f64", (batch, s)) for s in (4, 3)], name="named_like_scales")


def _likelihoods(logits, targets):
    """Minus the logarithms of the probabilities of the targets, one for each."""
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    logarithms = shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
    return -np.take_along_axis(logarithms, targets[..., None], axis=-1)[..., 0]


def padded(batch):
    """A language model whose loss is the mean over the targets that count, and that of the logits' scale over tokens."""
    def loss(p, tokens, targets):
        with ir.region("block.0"):
            x = p["table"][tokens]
            x = x + np.tanh(x @ p["up"]) @ p["down"]
        counts = (targets > 0) & (tokens != 2)
        logits = np.einsum("btd,vd->btv", x, p["table"])
        every = np.where(counts, _likelihoods(logits, targets), 0.0)
        scale = np.log(np.sum(np.exp(logits), axis=2))
        counted = np.maximum(np.sum(counts), 1)
        return np.sum(every) / counted + 0.01 * np.mean(scale * scale * counts) / np.mean(counts.astype(np.float64))

    types = {"table": (VOCABULARY, 6), "up": (6, 8), "down": (8, 6)}
    return ir.record(loss, {k: ir.TensorType("f64", s) for k, s in types.items()},
                     *[ir.TensorType("i64", (batch, 5))] * 2, name="padded")


def weighted(batch):
    """Examples with weights: their mean by weight, a loss of the first layer whose weights are parts of their sum, and
    a decay of the parameters."""
    def loss(p, x, weights, targets):
        weights = np.abs(weights) + 0.25
        with ir.region("block.0"):
            h = np.tanh(x @ p["up"])
            shares = np.square(weights) / np.sum(np.square(weights))
            first = np.sum(shares * np.mean(h * h, axis=1))
        with ir.region("block.1"):
            each = np.sum((h @ p["down"] - targets) ** 2, axis=1)
            return np.average(each, weights=weights) + 0.3 * first + 0.01 * np.sum(p["down"] ** 2)

    types = {"up": (4, 8), "down": (8, 3)}
    return ir.record(loss, {k: ir.TensorType("f64", s) for k, s in types.items()},
                     *[ir.TensorType("f64", (batch, *s)) for s in ((4,), (), (3,))], name="weighted")


def routed(**figures):
    """A Transformer whose feed-forwards are experts.  What runs has the slots that are simulated: one for each token."""
    defaults = {
        "feed_forward": 20, "activation": "swiglu", "norm": "rms", "positions": "rotary", "biases": False, "tied": False,
        "experts": models.Experts(count=4, chosen=2, load=2.0)}
    return transformer(**defaults | figures)


GATED = {"feed_forward": 20, "activation": "swiglu", "norm": "rms", "positions": "rotary", "biases": False, "tied": False}
DENSE = {
    "gemma": GATED | {
        "layers": 2, "key_value_heads": 2, "head_width": 6, "activation": "geglu", "tied": True, "norm_places": "both",
        "embedding_scale": 4.0, "attention_scale": 0.3, "attention_softcap": 2.0, "logit_softcap": 3.0, "window": 3,
        "full_attention_every": 2, "query_key_norm": True, "window_rotary_base": 100.0, "rotary_scaling": "linear:8"},
    "qwen": GATED | {"key_value_heads": 2, "head_width": 6, "query_key_norm": True, "biases": "qkv", "window": 2},
    "sinks": GATED | {
        "layers": 2, "key_value_heads": 2, "activation": "clamped_swiglu", "attention_sinks": True, "window": 3,
        "full_attention_every": 2, "biases": ("qkv", "out"), "rotary_scaling": "yarn:4,32,1,4,0", "rotary_factor": 1.5},
    "copied": GATED | {"heads": 8, "head_width": 6, "key_value_heads": 2, "key_value_copies": 2, "biases": "qkv",
                       "query_key_norm": True, "layers": 2, "window": 3, "full_attention_every": 2},
    "one key": {"heads": 6, "head_width": 6, "key_value_heads": 1, "key_value_copies": 3, "query_key_norm": "all_heads"},
    "olmo": GATED | {"norm_places": "after", "query_key_norm": "all_heads", "key_value_heads": 2},
    "bloom": {"positions": "alibi", "embedding_norm": True, "attention_dropout": 0.2, "alibi_scale": 0.5},
    "mpt": {"positions": "alibi", "norm_parameters": "weights", "biases": False, "activation": "gelu_exact"},
    "phi": {"positions": "rotary", "rotary_width": 2, "parallel": "one_norm", "tied": False,
            "biases": ("qkv", "out", "up", "down", "head")},
    "neox": {"positions": "rotary", "parallel": True, "biases": False, "hidden_dropout": 0.1, "tied": False},
    "granite": GATED | {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 0.25, "attention_scale": 0.3},
    "nemotron": {"positions": "rotary", "activation": "relu2", "biases": False, "query_key_norm": "without_weights",
                 "layers": 2, "unrotated_every": 2, "norm_parameters": "none"},
}
"""Figures of Transformers with the fields of dense models of today."""


def dense(name):
    """The model of these figures, a function of the rows of the batch."""
    return lambda batch: transformer(**DENSE[name]).function(batch)


LATENT = models.LatentAttention(query_rank=10, key_value_rank=6, head_width=5, rotary_width=4, value_width=3)
ROUTED = {
    "gpt-oss": DENSE["sinks"] | {
        "biases": ("qkv", "out", "router", "expert_gate", "expert_up", "expert_down"),
        "experts": models.Experts(count=4, chosen=2, load=2.0, width=12)},
    "qwen3-moe": DENSE["qwen"] | {
        "biases": False, "window": None, "experts": models.Experts(
            count=4, chosen=3, load=4 / 3, width=12, balance=0.1, deduplicated=True)},
    "deepseek-v2": {
        "layers": 2, "attention": models.LatentAttention(
            query_rank=None, key_value_rank=6, head_width=5, rotary_width=2, value_width=4),
        "experts": models.Experts(count=4, chosen=1, load=4.0, width=12, shared_width=8, dense_layers=1, groups=2,
                                  normalized=False, scale=1.5, balance=0.1, deduplicated=True)},
    "llama4": {
        "layers": 2, "key_value_heads": 2, "query_key_norm": "without_weights", "unrotated_every": 2,
        "experts": models.Experts(count=4, chosen=1, load=4.0, router="sigmoid", normalized=False, gates_inputs=True,
                                  width=12, shared_width=20, every=2)},
}
"""Figures of Transformers with experts, beside the defaults of `routed`, shaped as those of today."""
MODELS = {
    "mlp": lambda batch: models.mlp((6, 8, 5, 3), batch),
    "convolutional": lambda batch: models.convolutional((6, 7, 2), (4, 6), 5, batch),
    "gpt": lambda batch: transformer().function(batch),
    "plain_gpt": lambda batch: models.gpt(VOCABULARY, 12, 3, 1, 5, batch),
    "llama": lambda batch: transformer(
        key_value_heads=2, feed_forward=20, activation="swiglu", norm="rms", positions="rotary", biases=False,
        tied=False).function(batch),
    "lora": lambda batch: transformer(**GATED, key_value_heads=2, lora=models.LoRA(2)).function(batch),
    "packed": lambda batch: transformer(layers=2, sequence=8, documents=(3, 2, 1)).function(batch),
    "packed llama": lambda batch: transformer(
        **GATED, key_value_heads=2, sequence=12, documents=4, document_variation=0.5, window=3).function(batch),
    "packed weights": lambda batch: transformer(sequence=8, documents=(3, 4), fused_attention=False).function(batch),
    "packed latent": lambda batch: routed(sequence=8, attention=LATENT, documents=(5, 3)).function(batch),
    "lora of all": lambda batch: transformer(
        layers=2, lora=models.LoRA(3, 6.0, ("qkv", "out", "up", "down"))).function(batch),
    "lora of the last": lambda batch: transformer(layers=2, tied=False, lora=models.LoRA(2, products="down")).function(batch),
    "lora of latent attention": lambda batch: routed(attention=LATENT, lora=models.LoRA(2)).function(batch),
    "dropout": lambda batch: transformer(dropout=0.2, fused_attention=False).function(batch),
    "mixtral": lambda batch: routed(key_value_heads=2).function(batch),
    "capacity": lambda batch: routed(
        experts=models.Experts(count=4, chosen=2, capacity=1.0, balance=0.1), activation="gelu", biases=True, norm="layer",
    ).function(batch),
    "deepseek": lambda batch: routed(layers=2, attention=LATENT, next_tokens=1, experts=models.Experts(
        count=8, chosen=3, load=8 / 3, width=12, shared_width=20, dense_layers=1, router="sigmoid", groups=4,
        groups_chosen=2, group_best=2, scale=2.5)).function(batch),
    **{name: lambda batch, figures=figures: routed(**figures).function(batch) for name, figures in ROUTED.items()},
    "mixture": lambda batch: models.mixture(6, 8, 4, 2, 3, batch, 5),
    "recurrent": recurrent, "residual": residual, "viewed": viewed, "fused": fused, "factored": factored, "padded": padded,
    "weighted": weighted,
    "named_like_scales": named_like_scales,
}
"""The models by name, each a function of the rows of the batch; the last six are no transform's own."""


@cache
def model_step(model, rows, rule, **more):
    """The training step of a model by its name in MODELS or DENSE, made once for all tests."""
    made = dense(model) if model in DENSE else MODELS[model]
    return train_step(made(rows), rule, **more)


def arrays(values, rng):
    """Arrays for inputs of these types, without symbols."""
    return {value.name: rng.normal(size=value.type.shape) * 0.5 if is_floating(value.type.dtype)
            else rng.integers(0, 3, value.type.shape) for value in values}


def trained(step, run, like=None, steps=2):
    """The losses and the parameters and state after some steps, each computed by ``run(inputs)`` from all inputs."""
    parts, rng = Parts.of(like or step), np.random.default_rng(0)
    data = [value for value in parts.forward.inputs if value not in parts.weights]
    inputs = first_state(step, arrays(parts.weights, rng))
    losses = []
    for _ in range(steps):
        given = inputs | arrays(data, rng)
        outputs = run([given[value.name] for value in step.inputs])
        losses.append(outputs[0])
        inputs = inputs | following(step, outputs)
    return losses, inputs


def interpreted(step, **options):
    """`trained`, by the interpreter."""
    return trained(step, lambda inputs: ir.interpret(step, inputs).outputs, **options)


def assert_trained(found, expected, tolerance=1e-10):
    for loss, wanted in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(loss, wanted, rtol=tolerance, atol=tolerance)
    for name, wanted in expected[1].items():
        np.testing.assert_allclose(found[1][name], wanted, rtol=tolerance, atol=tolerance, err_msg=name)
