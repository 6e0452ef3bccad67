"""The attention of a block in inference: it writes into the cache, and attends to it, or to the prompt alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import numpy as np

from parallelism.ir.core import Extent
from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.kernels import Mask, Scores
from parallelism.models.block_parts import Parts, unit
from parallelism.models.inference.caches import STATES, cache_kinds
from parallelism.models.latent_layers import expanded, latent_queries, narrow_parts
from parallelism.models.layers import attention, share_without_sinks
from parallelism.models.linear_attention import linear_attention
from parallelism.models.self_attention import heads_of, normed_heads


@dataclass(frozen=True)
class Places:
    """Where the tokens of a step are, and where the cache has theirs."""

    positions: Any
    """``(replicas, tokens)``; -1: it is no token."""
    ends: Any
    """``(replicas, tokens)``: so many tokens of its sequence are in the cache after the step."""
    tables: Mapping[str, Any]
    """By kind of layer, ``(replicas, tokens, pages)``."""
    read: Mapping[str, Extent]
    """By kind of layer, the places of a replica's cache that the step reads; of states, how many."""
    scored: Mapping[str, Extent]
    """By kind of layer, the scores of a head; of states, the chunks of sequences that have several tokens."""
    is_first: bool = False
    """Whether the cache is empty, and each replica has one sequence, from its beginning."""


@dataclass
class CachedAttention:
    """The attention of all blocks of one program, and the cache as they leave it."""

    parts: Parts
    places: Places
    cache: dict[str, Any]
    """By name, as ``0.keys``; each block puts what it has written in place of what it got."""
    made: dict[str, Any] = field(default_factory=dict)

    def __call__(self, x: Any, layer: int, block: str) -> Any:
        """The attention of block ``layer`` to ``x``, ``(replicas, tokens, width)``, behind its norm."""
        attend = self._heads if self.parts.spec.attention is None else self._latent
        return attend(x, layer, block)

    # -- heads of keys and values --------------------------------------------------------------------------------------

    def _heads(self, x: Any, layer: int, block: str) -> Any:
        parts, spec = self.parts, self.parts.spec
        batch, rows, _ = x.shape
        with region("qkv"):
            q, k, v, *gate = heads_of(parts, x, block)
            q, k = normed_heads(parts, q, k, block)
            if spec.is_rotated(layer):
                base = None if spec.window_of(layer) is None else spec.window_rotary_base
                q, k = (parts.rotated(each, base, self.places.positions) for each in (q, k))
                if spec.query_key_norm == "without_weights":
                    q, k = (unit(each, spec.epsilon) for each in (q, k))
        with region("core"):
            written = [
                self._written(f"{block}{name}", new, layer) for name, new in (("keys", k), ("values", v))
            ]
            mixed = self._mixed(q, k, v, written, layer, block)
        if gate:
            with region("gate"):
                mixed = mixed * apply("sigmoid", *gate)
        with region("out"):
            return parts.product(mixed.reshape((batch, rows, spec.heads * spec.head_width)), block, "out")

    def _mixed(self, q: Any, k: Any, v: Any, written: list[Any], layer: int, block: str) -> Any:
        """The results of the heads, of shape ``(batch, rows, heads, width)``: sums of values, weighted by the scores."""
        spec = self.parts.spec
        mask = Mask(causal=True, window=spec.window_of(layer))
        alibi = spec.alibi_scale if spec.positions == "alibi" else None
        sinks = self.parts.p[f"{block}sinks"] if spec.attention_sinks else None
        if self.places.is_first:
            scale, cap = spec.attention_scale, spec.attention_softcap
            return attention(q, k, v, mask=mask, scale=scale, cap=cap, alibi=alibi, sinks=sinks)
        scores = Scores(mask, spec.attention_softcap)
        if alibi is not None:
            scores = Scores(mask, spec.attention_softcap, spec.heads, alibi)
        mixed, lse = apply(
            "cached_attention",
            q,
            *written,
            *self._given(layer),
            mask=str(scores),
            **self._how(layer, spec.attention_scale or 1 / sqrt(spec.head_width)),
        )
        return mixed if sinks is None else mixed * share_without_sinks(lse, sinks).astype(mixed.dtype)

    # -- latent attention ----------------------------------------------------------------------------------------------

    def _latent(self, x: Any, layer: int, block: str) -> Any:
        """Latent attention: of the prompt alone with keys and values of each head, as in training; and to the cache with
        the products that make them taken into queries and results (arXiv:2405.04434, section 2.1.2)."""
        parts, spec = self.parts, self.parts.spec
        latent = spec.attention
        assert latent is not None
        batch, rows, _ = x.shape
        scale = spec.attention_scale or 1 / sqrt(latent.query_width)
        with region("qkv"):
            q = latent_queries(parts, x, block)
            narrow, key = narrow_parts(parts, x, block)
            q, turned = np.split(q, [latent.head_width], axis=3)
            if spec.positions == "rotary":
                turned = parts.rotated(turned, None, self.places.positions)
                key = parts.rotated(key, None, self.places.positions)
        with region("core"):
            kept = np.concatenate([narrow.reshape((batch, rows, 1, latent.key_value_rank)), key], axis=3)
            written = self._written(f"{block}latent", kept, layer)
            if self.places.is_first:
                q = np.concatenate([q, turned], axis=3)
                mixed = attention(q, *expanded(parts, narrow, key, block), scale=scale)
            else:
                mixed = self._mixed_latent(q, turned, written, layer, block, scale)
        with region("out"):
            return parts.product(mixed.reshape((batch, rows, spec.heads * latent.value_width)), block, "out")

    def _mixed_latent(self, q: Any, turned: Any, cache: Any, layer: int, block: str, scale: float) -> Any:
        spec = self.parts.spec
        latent = spec.attention
        assert latent is not None
        shape = (latent.key_value_rank, spec.heads, latent.head_width + latent.value_width)
        of_keys, of_values = np.split(
            self.parts.p[f"{block}key_value_up"].reshape(shape), [latent.head_width], axis=2
        )
        taken_in = np.einsum("bthn,rhn->bthr", q, of_keys)
        mixed, _ = apply(
            "cached_latent_attention",
            np.concatenate([taken_in, turned], axis=3),
            cache,
            *self._given(layer),
            mask=str(Scores(Mask(causal=True))),
            width=latent.key_value_rank,
            **self._how(layer, scale),
        )
        return np.einsum("bthr,rhv->bthv", mixed, of_values)

    # -- linear attention ----------------------------------------------------------------------------------------------

    def linear(self, x: Any, layer: int, block: str) -> Any:
        """Linear attention, which goes on from the states of sequences and their last tokens before the convolution."""
        places = self.places.positions, self.places.tables[STATES]
        read, scored = self.places.read[STATES], self.places.scored[STATES]

        def kept(name: str, kind: str, *inputs: Any, **how: Any) -> Any:
            own = f"{block}{name}"
            self.made[own], y = apply(kind, self.cache[own], *inputs, *places, read=read, **how)
            return y

        def convolve(*inputs: Any, **how: Any) -> Any:
            return kept("convolution", "cached_short_convolution", *inputs, **how)

        def attend(*inputs: Any, **how: Any) -> Any:
            return kept("state", "cached_linear_attention", *inputs, scored=scored, **how)

        return linear_attention(self.parts, x, layer, block, convolve, attend)

    # -- the cache -----------------------------------------------------------------------------------------------------

    def kind(self, layer: int) -> str:
        """Whether the attention of a layer keeps every token or a window."""
        return cache_kinds(self.parts.spec, layer)[0]

    def _given(self, layer: int) -> tuple[Any, Any, Any]:
        return self.places.positions, self.places.ends, self.places.tables[self.kind(layer)]

    def _how(self, layer: int, scale: float) -> dict[str, Any]:
        kind = self.kind(layer)
        return {
            "scale": scale,
            "starts": (0,) * 4,
            "read": self.places.read[kind],
            "scored": self.places.scored[kind],
        }

    def _written(self, name: str, new: Any, layer: int) -> Any:
        """The cache of this name with what is new."""
        old = self.cache[name]
        self.made[name] = apply("write_cache", old, new.astype(old.dtype), *self._given(layer))
        return self.made[name]
