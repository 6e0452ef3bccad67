"""The forward of a Transformer, recorded: its blocks between the embedding and the loss."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.models.block_parts import Parameters, Parts
from parallelism.models.feed_forward import feed_forward
from parallelism.models.figures import attends, check_countable, has_state, norm_places_of
from parallelism.models.layers import capped, cross_entropy
from parallelism.models.linear_attention import linear_attention
from parallelism.models.next_tokens import next_token_loss
from parallelism.models.self_attention import self_attention

if TYPE_CHECKING:
    from parallelism.models.spec import TransformerSpec


def checked_program(spec: TransformerSpec) -> None:
    """``ValueError`` for figures that have no program, or one whose bytes cannot be counted."""
    check_countable(spec)
    if spec.fused_attention:
        return
    for name, is_used in (("positions='alibi'", spec.positions == "alibi"), ("sinks", spec.attention_sinks)):
        if is_used:
            raise ValueError(f"attention with {name} has a program with fused_attention=True only")


class Forward:
    """One forward: a specification, its parameters, and the step that selects the masks of dropout."""

    def __init__(
        self, spec: TransformerSpec, p: Parameters, step: Any, adapters: Parameters | None = None
    ) -> None:
        seeds: Iterator[int] = count()
        self.spec, self.p = spec, p
        self.parts = Parts(spec, p, step, seeds, adapters or {})

    def loss(self, tokens: Any, targets: Any) -> Any:
        """The mean cross-entropy of the following tokens, with what blocks and further modules add."""
        spec, parts = self.spec, self.parts
        x = self._hidden(tokens)
        with region("head"):
            logits = self._logits(parts.norm(x, "norm"))
        with region("loss"):
            loss = cross_entropy(logits, targets, fused=spec.fused_cross_entropy)
        if spec.next_tokens:
            loss = loss + next_token_loss(parts, x, targets, self._block, self._logits)
        for more in parts.losses:
            loss = loss + more
        return loss

    def logits(self, tokens: Any) -> Any:
        """The logits of all tokens, ``(batch, sequence, vocabulary)``."""
        x = self._hidden(tokens)
        with region("head"):
            return self._logits(self.parts.norm(x, "norm"))

    def _hidden(self, tokens: Any) -> Any:
        """What the last block gives, ``(batch, sequence, width)``."""
        spec, p, parts = self.spec, self.p, self.parts
        with region("embedding"):
            x = apply("take", p["tokens"], tokens, axis=0)
            if spec.embedding_scale != 1:
                x = x * spec.embedding_scale
            if spec.positions == "learned":
                x = x + p["positions"]
            if spec.embedding_norm:
                x = parts.norm(x, "embedding_norm")
            x = parts.dropped(x)
        for layer in range(spec.layers):
            with region(f"block.{layer}"):
                x = self._block(x, layer, f"{layer}.")
        return x

    def _logits(self, x: Any) -> Any:
        """The logits of ``x``, of shape ``(batch, sequence, width)``, behind the last norm."""
        spec = self.spec
        if spec.logit_scale != 1:
            x = x * spec.logit_scale
        logits = np.einsum("bsd,vd->bsv", x, self.p["tokens" if spec.tied else "head"])
        if "head" in spec.biased:
            bias = self.p["head_bias"]
            logits = logits + (bias if spec.logit_scale == 1 else bias * spec.logit_scale)
        return logits if spec.logit_softcap is None else capped(logits, spec.logit_softcap)

    def _block(self, x: Any, layer: int, block: str) -> Any:
        """Block ``layer``; the names of its parameters begin with ``block``."""
        spec = self.spec
        if spec.has("attention", layer):
            with region("attention"):
                normed = self._norm(x, f"{block}norm1", "before", layer)
                attended = self._added(self._attended(normed, layer, block), f"{block}norm1_after", layer)
                if not spec.parallel:
                    x = x + attended
        if not spec.has("feed_forward", layer):
            return x
        with region("feed_forward"):
            if spec.parallel != "one_norm":
                normed = self._norm(x, f"{block}norm2", "before", layer)
            made = self._added(self._fed_forward(normed, layer, block), f"{block}norm2_after", layer)
            return x + (attended + made) if spec.parallel else x + made

    def _attended(self, x: Any, layer: int, block: str) -> Any:
        """The attention of a block to ``x``, behind its norm: linear, to keys and values, or the sum of both."""
        made = []
        if attends(self.spec, layer):
            made.append(self._self_attention(x, layer, block))
        if has_state(self.spec, layer):
            made.append(self._linear_attention(x, layer, block))
        return made[0] if len(made) == 1 else made[0] + made[1]

    def _self_attention(self, x: Any, layer: int, block: str) -> Any:
        return self_attention(self.parts, x, layer, block)

    def _linear_attention(self, x: Any, layer: int, block: str) -> Any:
        return linear_attention(self.parts, x, layer, block)

    def _fed_forward(self, x: Any, layer: int, block: str) -> Any:
        """The feed-forward of a block of ``x``, behind its norm."""
        return feed_forward(self.parts, x, layer, block)

    def _norm(self, x: Any, name: str, place: str, layer: int) -> Any:
        """``x`` behind the norm that stands at this place of a layer, if one does."""
        if norm_places_of(self.spec, layer) not in (place, "both"):
            return x
        with region("norm" if place == "before" else "norm_after"):
            return self.parts.norm(x, name)

    def _added(self, x: Any, norm: str, layer: int) -> Any:
        """What is added to the residual: ``x`` behind its norm, its dropout, and times its scale."""
        x = self.parts.dropped(self._norm(x, norm, "after", layer))
        return x if self.spec.residual_scale == 1 else x * self.spec.residual_scale
