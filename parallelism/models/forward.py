"""The forward of a Transformer, recorded: its blocks between the embedding and the loss."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.display.quantities import shortened
from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.models.block_parts import Parameters, Parts
from parallelism.models.feed_forward import feed_forward
from parallelism.models.layers import cross_entropy
from parallelism.models.next_tokens import next_token_loss
from parallelism.models.self_attention import self_attention

if TYPE_CHECKING:
    from parallelism.models.spec import TransformerSpec

_ONLY = {
    "activation": ("gelu", "relu", "swiglu"),
    "norm_parameters": ("all",),
    "norm_places": ("before",),
    "positions": ("learned", "rotary"),
    "biases": (True, False),
    "rotary_width": (None,),
    "window_rotary_base": (None,),
    "rotary_scaling": (None,),
    "rotary_factor": (1.0,),
    "unrotated_every": (None,),
    "query_key_norm": (False,),
    "window": (None,),
    "attention_scale": (None,),
    "attention_softcap": (None,),
    "attention_sinks": (False,),
    "parallel": (False,),
    "embedding_scale": (1.0,),
    "embedding_norm": (False,),
    "residual_scale": (1.0,),
    "logit_scale": (1.0,),
    "logit_softcap": (None,),
}
"""The values of fields that programs have so far."""


def checked_program(spec: TransformerSpec) -> None:
    """``ValueError`` for the first field whose program does not exist yet."""
    for name, values in _ONLY.items():
        value = getattr(spec, name)
        if value not in values:
            raise ValueError(
                f"{name}={shortened(value, 60)} has parameters and floating-point operations, but no program yet"
            )


class Forward:
    """One forward: a specification, its parameters, and the step that selects the masks of dropout."""

    def __init__(self, spec: TransformerSpec, p: Parameters, step: Any) -> None:
        seeds: Iterator[int] = count()
        self.spec, self.p = spec, p
        self.parts = Parts(spec, p, step, seeds)

    def loss(self, tokens: Any, targets: Any) -> Any:
        spec, p, parts = self.spec, self.p, self.parts
        with region("embedding"):
            x = apply("take", p["tokens"], tokens, axis=0)
            if spec.positions == "learned":
                x = x + p["positions"]
            x = parts.dropped(x)
        for layer in range(spec.layers):
            with region(f"block.{layer}"):
                x = self._block(x, layer, f"{layer}.")
        with region("head"):
            logits = self._logits(parts.norm(x, "norm"))
        with region("loss"):
            loss = cross_entropy(logits, targets)
        if spec.next_tokens:
            loss = loss + next_token_loss(parts, x, targets, self._block, self._logits)
        for more in parts.losses:
            loss = loss + more
        return loss

    def _logits(self, x: Any) -> Any:
        """The logits of ``x``, of shape ``(batch, sequence, width)``, behind the last norm."""
        return np.einsum("bsd,vd->bsv", x, self.p["tokens" if self.spec.tied else "head"])

    def _block(self, x: Any, layer: int, block: str) -> Any:
        """Block ``layer``; the names of its parameters begin with ``block``."""
        with region("attention"):
            x = x + self.parts.dropped(self_attention(self.parts, x, layer, block))
        with region("feed_forward"):
            return x + self.parts.dropped(feed_forward(self.parts, x, layer, block))
