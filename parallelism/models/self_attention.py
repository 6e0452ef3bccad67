"""The attention of a block, recorded: heads of queries, keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import Mask
from parallelism.models.block_parts import Parts, unit
from parallelism.models.latent_layers import latent_attention
from parallelism.models.layers import attention


def self_attention(parts: Parts, x: Any, layer: int, block: str) -> Any:
    """Attention of block ``layer`` to ``x``, of shape ``(batch, sequence, width)``, behind its norm.

    The names of its parameters begin with ``block``.
    """
    spec = parts.spec
    if spec.attention is not None:
        return latent_attention(parts, x, block)
    batch, rows, _ = x.shape
    window = spec.window_of(layer)
    with region("qkv"):
        q, k, v, *gate = heads_of(parts, x, block)
        k, v = (_copied(each, spec.key_value_copies, axis=2) for each in (k, v))
        q, k = normed_heads(parts, q, k, block)
        if spec.is_rotated(layer):
            base = None if window is None else spec.window_rotary_base
            q, k = (parts.rotated(each, base) for each in (q, k))
            if spec.query_key_norm == "without_weights":
                q, k = (unit(each, spec.epsilon) for each in (q, k))
    with region("core"):
        x = attention(
            q,
            k,
            v,
            mask=Mask(causal=True, window=window, documents=spec.document_lengths),
            scale=spec.attention_scale,
            cap=spec.attention_softcap,
            alibi=spec.alibi_scale if spec.positions == "alibi" else None,
            sinks=parts.p[f"{block}sinks"] if spec.attention_sinks else None,
            step=parts.step,
            rate=spec.rates[0],
            seed=next(parts.seeds),
            fused=spec.fused_attention,
        )
    if gate:
        with region("gate"):
            x = x * apply("sigmoid", *gate)
    with region("out"):
        return parts.product(x.reshape((batch, rows, spec.heads * spec.head_width)), block, "out")


def heads_of(parts: Parts, x: Any, block: str) -> list[Any]:
    """Queries ``(batch, rows, heads, head_width)``, and keys and values ``(batch, rows, groups, head_width)``; and what
    gates the result, of the shape of queries, if it has a gate."""
    spec = parts.spec
    batch, rows, _ = x.shape
    groups, width, gates = spec.groups, int(spec.head_width), int(spec.attention_gate)
    each = spec.heads // spec.copied_groups
    of_queries, of_keys = ((batch, rows, count, width) for count in (spec.heads, groups))
    if spec.key_value_copies > 1:
        q = parts.product(x, block, "query")
        gate: list[Any] = []
        if gates:
            q, *gate = np.split(q.reshape((batch, rows, spec.copied_groups, 2 * each, width)), 2, axis=3)
        q = q.reshape(of_queries)
        joined = parts.product(x, block, "key_value").reshape((batch, rows, groups, 2, width))
        k, v = np.split(joined, [1], axis=3)
    else:
        joined = parts.product(x, block, "qkv").reshape((batch, rows, groups, each * (1 + gates) + 2, width))
        q, k, v, *gate = np.split(joined, [each, each + 1, each + 2][: 2 + gates], axis=3)
        q = q.reshape(of_queries)
    k, v = (part.reshape(of_keys) for part in (k, v))
    return [q, k, v, *(part.reshape(of_queries) for part in gate)]


def _copied(x: Any, copies: int, axis: int) -> Any:
    """Each head of ``x``, whose heads are along ``axis``, so many times.

    It is a lookup of heads.  Where tensor parallelism splits the heads that are made, each device looks up its own in all
    that were there, and the gradients of the copies of a head are summed.
    """
    if copies == 1:
        return x
    return np.take(x, np.repeat(np.arange(x.shape[axis]), copies), axis=axis)


def normed_heads(parts: Parts, q: Any, k: Any, block: str) -> tuple[Any, Any]:
    """Queries and keys behind their norms, if they have any that stand before the rotation."""
    if parts.spec.query_key_norm not in ("head", "all_heads"):
        return q, k
    normed = _normed if parts.spec.query_key_norm == "head" else _normed_together
    return normed(parts, q, f"{block}query_norm"), normed(parts, k, f"{block}key_norm")


def _normed(parts: Parts, x: Any, name: str) -> Any:
    """A norm of each head of ``x``, of shape ``(batch, rows, heads, head_width)``."""
    return parts.norm(x, name)


def _normed_together(parts: Parts, x: Any, name: str) -> Any:
    """A norm of all heads together: heads may be split, then one sum for each row is reduced."""
    heads, width = x.shape[2:]
    wide = x.astype(np.result_type(x.dtype, np.float32))
    if parts.spec.norm == "layer":
        wide = wide - np.mean(wide, axis=(2, 3), keepdims=True)
    scale = (np.mean(wide * wide, axis=(2, 3), keepdims=True) + parts.spec.epsilon) ** -0.5
    normed = (wide * scale).astype(x.dtype)
    if parts.spec.norm_parameters == "none":
        return normed
    normed = normed * _of_heads(parts, name, heads, width)
    has_bias = parts.spec.norm == "layer" and parts.spec.norm_parameters == "all"
    return normed + _of_heads(parts, f"{name}_bias", heads, width) if has_bias else normed


def _of_heads(parts: Parts, name: str, heads: int, width: int) -> Any:
    """A parameter of a norm of all heads together, ``(heads, width)``; heads may be copies of those that it has."""
    each = parts.p[name].reshape((-1, width))
    return _copied(each, heads // int(each.shape[0]), axis=0)
