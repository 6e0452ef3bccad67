"""Latent attention, recorded (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import Mask
from parallelism.models.block_parts import Parts
from parallelism.models.layers import attention


def latent_attention(parts: Parts, x: Any, block: str) -> Any:
    """The attention of a block to ``x``, of shape ``(batch, sequence, width)``, behind its norm.

    Keys and values are made for each head, as in training; the narrow vectors are what a cache would keep.  The names of
    the parameters begin with ``block``.
    """
    spec = parts.spec
    latent = spec.attention
    assert latent is not None
    batch, tokens, _ = x.shape
    with region("qkv"):
        q = latent_queries(parts, x, block)
        narrow, key = narrow_parts(parts, x, block)
        q, turned = np.split(q, [latent.head_width], axis=3)
        if spec.positions == "rotary":
            key, turned = parts.rotated(key), parts.rotated(turned)
        k, v = expanded(parts, narrow, key, block)
        q = np.concatenate([q, turned], axis=3)
    with region("core"):
        x = attention(
            q,
            k,
            v,
            mask=Mask(causal=True, documents=spec.document_lengths),
            scale=spec.attention_scale or 1 / sqrt(latent.query_width),
            step=parts.step,
            rate=spec.rates[0],
            seed=next(parts.seeds),
            fused=spec.fused_attention,
        )
    with region("out"):
        return parts.product(x.reshape((batch, tokens, spec.heads * latent.value_width)), block, "out")


def narrow_parts(parts: Parts, x: Any, block: str) -> tuple[Any, Any]:
    """What a token keeps: the narrow vector behind its norm, and the key to be rotated, ``(batch, tokens, 1, width)``."""
    latent = parts.spec.attention
    assert latent is not None
    joined = parts.product(x, block, "key_value_down")
    narrow, key = np.split(joined, [latent.key_value_rank], axis=2)
    narrow = _norm(parts, narrow, f"{block}key_value_norm")
    return narrow, key.reshape((*x.shape[:2], 1, latent.rotary_width))


def expanded(parts: Parts, narrow: Any, key: Any, block: str) -> tuple[Any, Any]:
    """Keys and values of all heads, of the narrow vectors and of the rotated key."""
    latent = parts.spec.attention
    assert latent is not None
    heads = (*narrow.shape[:2], parts.spec.heads)
    made = parts.product(narrow, block, "key_value_up").reshape(
        (*heads, latent.head_width + latent.value_width)
    )
    k, v = np.split(made, [latent.head_width], axis=3)
    return np.concatenate([k, np.broadcast_to(key, (*heads, latent.rotary_width))], axis=3), v


def latent_queries(parts: Parts, x: Any, block: str) -> Any:
    """The queries of all heads, ``(batch, tokens, heads, width)``, of ``x`` at once or of a narrow vector."""
    latent = parts.spec.attention
    assert latent is not None
    return _queries(parts, x, block).reshape((*x.shape[:2], parts.spec.heads, latent.query_width))


def _queries(parts: Parts, x: Any, block: str) -> Any:
    latent = parts.spec.attention
    assert latent is not None
    if latent.query_rank is None:
        return parts.product(x, block, "query")
    narrow = _norm(parts, parts.product(x, block, "query_down"), f"{block}query_norm")
    return parts.product(narrow, block, "query_up")


def _norm(parts: Parts, x: Any, name: str) -> Any:
    return apply("rms_norm", x, parts.p[name], epsilon=parts.spec.epsilon)
