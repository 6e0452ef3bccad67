"""The attention of a block, recorded: heads of queries, keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.ir.tracing.current import region
from parallelism.models.block_parts import Parts
from parallelism.models.latent_layers import latent_attention
from parallelism.models.layers import attention, rotary


def self_attention(parts: Parts, x: Any, layer: int, block: str) -> Any:
    """Attention of block ``layer`` to ``x``, of shape ``(batch, sequence, width)``, without the residual sum.

    The names of its parameters begin with ``block``.
    """
    spec = parts.spec
    batch, rows, _ = x.shape
    with region("norm"):
        x = parts.norm(x, f"{block}norm1")
    if spec.attention is not None:
        return latent_attention(parts, x, block)
    with region("qkv"):
        q, k, v = _heads(parts, x, block)
        if spec.is_rotated(layer):
            q, k = (rotary(part, spec.rotary_base) for part in (q, k))
    with region("core"):
        rate, seed = spec.rates[0], next(parts.seeds)
        x = attention(q, k, v, step=parts.step, rate=rate, seed=seed, fused=spec.fused_attention)
    with region("out"):
        return parts.product(x.reshape((batch, rows, spec.heads * spec.head_width)), block, "out")


def _heads(parts: Parts, x: Any, block: str) -> tuple[Any, Any, Any]:
    """Queries ``(batch, rows, heads, head_width)``, and keys and values ``(batch, rows, groups, head_width)``."""
    spec = parts.spec
    batch, rows, _ = x.shape
    groups, each, width = spec.groups, spec.heads // spec.groups, int(spec.head_width)
    joined = parts.product(x, block, "qkv").reshape((batch, rows, groups, each + 2, width))
    q, k, v = np.split(joined, [each, each + 1], axis=3)
    q = q.reshape((batch, rows, spec.heads, width))
    k, v = (part.reshape((batch, rows, groups, width)) for part in (k, v))
    return q, k, v
