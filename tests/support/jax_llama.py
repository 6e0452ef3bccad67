"""A stack of blocks of Llama in JAX: root mean square norms, rotary positions, groups of heads that share keys, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def rotated(x):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def block(p, x, heads, groups):
    rows, time, width = x.shape
    y = rms_norm(x, p["n1"])
    q = rotated((y @ p["q"]).reshape(rows, time, heads, -1))
    k = rotated((y @ p["k"]).reshape(rows, time, groups, -1))
    v = (y @ p["v"]).reshape(rows, time, groups, -1)
    k, v = (jnp.repeat(each, heads // groups, 2) for each in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // heads)
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e30)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(rows, time, width) @ p["o"]
    y = rms_norm(x, p["n2"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def loss_of(heads: int, groups: int) -> Callable[..., Any]:
    """The mean cross-entropy of the next token; the embedding is the head, too."""
    def loss(p, ids, targets):
        x = p["words"][ids]
        for layer in p["layers"]:
            x = block(layer, x, heads, groups)
        logits = rms_norm(x, p["norm"]) @ p["words"].T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()

    return loss


def shapes(width: int, inner: int, layers: int, vocabulary: int, heads: int, groups: int) -> dict[str, Any]:
    """The shapes of the weights."""
    keys = width // heads * groups
    layer = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width), "n1": (width,), "n2": (width,),
             "gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    return {"words": (vocabulary, width), "norm": (width,), "layers": [layer] * layers}
