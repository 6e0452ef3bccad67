"""Small models of the families that are served, in float64, and their logits without a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from parallelism import ir
from parallelism.ir.core import TensorType
from parallelism.ir.recording import record
from parallelism.models import Experts, LatentAttention, LinearAttention, TransformerSpec
from parallelism.models.forward import Forward

VOCABULARY = 17
_BASE: dict[str, Any] = {"layers": 3, "width": 12, "heads": 6, "vocabulary": VOCABULARY, "sequence": 40, "dtype": np.float64}
_LLAMA: dict[str, Any] = _BASE | {
    "key_value_heads": 2, "head_width": 4, "activation": "swiglu", "norm": "rms", "positions": "rotary", "biases": False,
    "tied": False, "feed_forward": 20,
}
SERVED: dict[str, TransformerSpec] = {
    "gpt2": TransformerSpec(**_BASE),
    "llama3": TransformerSpec(**_LLAMA),
    "mixtral": TransformerSpec(**_LLAMA | {"experts": Experts(count=4, chosen=2, width=10)}),
    "deepseek-v3": TransformerSpec(**_LLAMA | {
        "key_value_heads": None, "head_width": None,
        "attention": LatentAttention(query_rank=5, key_value_rank=7, head_width=3, rotary_width=4, value_width=6),
        "experts": Experts(count=4, chosen=2, width=5, shared_width=5, dense_layers=1, router="sigmoid", groups=2,
                           groups_chosen=1, group_best=2),
    }),
    "gemma3": TransformerSpec(**_LLAMA | {
        "activation": "geglu", "norm_places": "both", "window": 5, "full_attention_every": 3, "window_rotary_base": 500.0,
        "query_key_norm": True, "embedding_scale": 2.0, "tied": True,
    }),
    "gpt-oss": TransformerSpec(**_LLAMA | {
        "attention_sinks": True, "window": 4, "full_attention_every": 2, "attention_softcap": 20.0,
    }),
    "nemotron-h": TransformerSpec(**_LLAMA | {
        "layers": 5, "positions": "none", "biases": ("convolution",), "activation": "relu2",
        "layer_parts": ("attention", "feed_forward", "attention", "feed_forward", "attention"),
        "linear_attention": LinearAttention(heads=6, head_width=4, state_width=3, groups=2, chunk=3, taps=3,
                                            layers=(True, False, False, False, True)),
        "experts": Experts(count=4, chosen=2, width=5, shared_width=5, latent=7, layers=(False, True, False, False, False)),
    }),
    "qwen3-next": TransformerSpec(**_LLAMA | {
        "attention_gate": True, "query_key_norm": True,
        "linear_attention": LinearAttention(kind="gated_delta", heads=4, head_width=5, state_width=3, groups=2, chunk=4,
                                            layers=(True, False, True)),
    }),
    "falcon-h1": TransformerSpec(**_LLAMA | {
        "layers": 2, "attention_scale": 0.4, "biases": ("state_in", "convolution"),
        "linear_attention": LinearAttention(heads=6, head_width=3, state_width=4, groups=1, chunk=4, taps=2, beside=True,
                                            gate="alone"),
    }),
    "kimi-linear": TransformerSpec(**_LLAMA | {
        "key_value_heads": None, "head_width": None, "positions": "none",
        "attention": LatentAttention(query_rank=None, key_value_rank=7, head_width=3, rotary_width=4, value_width=6),
        "linear_attention": LinearAttention(kind="kimi_delta", heads=4, groups=4, head_width=5, state_width=3, chunk=4,
                                            layers=(True, False, True)),
    }),
    "lfm2": TransformerSpec(**_LLAMA | {
        "query_key_norm": True, "linear_attention": LinearAttention(
            kind="convolution", heads=6, groups=6, head_width=2, taps=3, layers=(True, False, True)),
    }),
    "bloom": TransformerSpec(**_BASE | {"positions": "alibi", "embedding_norm": True}),
}
"""The figures are small, and different where they can be."""


def parameters_of(spec: TransformerSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters, so large that attention is not even."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) * 0.4 for name, shape in spec.weights.items()}


def logits_of(spec: TransformerSpec, parameters: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """The logits of all tokens of sequences of one length, ``(batch, tokens, vocabulary)``: all computed anew, as in
    training."""
    count = tokens.shape[1]
    own = replace(spec, sequence=count)
    given = dict(parameters)
    if "positions" in given:
        given["positions"] = given["positions"][:count]
    types = {name: TensorType(array.dtype, array.shape) for name, array in given.items()}
    program = record(lambda p, tokens: Forward(own, p, None).logits(tokens), types, TensorType(np.int64, tokens.shape))
    return ir.interpret(program, [*given.values(), tokens]).outputs[0]


def greedy(spec: TransformerSpec, parameters: dict[str, np.ndarray], prompt: list[int], count: int) -> list[int]:
    """The tokens that follow a prompt, each the most likely one; computed without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(spec, parameters, np.array([tokens]))[0, -1].argmax()))
    return tokens[len(prompt):]
