"""The feed-forward of a block, recorded."""

from __future__ import annotations

from typing import Any

from parallelism.ir.tracing.current import region
from parallelism.models.block_parts import Parts
from parallelism.models.expert_feed_forward import expert_feed_forward
from parallelism.models.figures import GATED


def feed_forward(parts: Parts, x: Any, layer: int, block: str) -> Any:
    """The feed-forward of block ``layer`` of ``x``, of shape ``(batch, sequence, width)``, without the residual sum.

    The names of its parameters begin with ``block``.
    """
    spec = parts.spec
    with region("norm"):
        x = parts.norm(x, f"{block}norm2")
    if spec.experts is not None and spec.experts.at(layer):
        return expert_feed_forward(parts, x, block)
    with region("up"):
        hidden = parts.product(x, block, "up")
        gate = [parts.product(x, block, "gate")] if spec.activation in GATED else []
    with region("activation"):
        hidden = parts.activated(*gate, hidden)
    with region("down"):
        return parts.product(hidden, block, "down")
