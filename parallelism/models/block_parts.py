"""What attention and feed-forward of a recorded Transformer have in common: products, norms, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.models.figures import has_bias
from parallelism.models.layers import dropout, rotary
from parallelism.models.lora import DOWN, UP

if TYPE_CHECKING:
    from parallelism.models.spec import TransformerSpec

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """The layers that a specification has, of its parameters ``p``."""

    spec: TransformerSpec
    p: Parameters
    step: Any
    """The number of the training step, which selects the masks of dropout; None without dropout."""
    seeds: Iterator[int]
    """Every dropout has a seed of its own."""
    adapters: Parameters = field(default_factory=dict)
    """The weights of low-rank adapters, by name; empty without them, and where they are merged into the weights."""
    losses: list[Any] = field(default_factory=list)
    """What blocks add to the loss, such as what balances their experts."""

    def product(self, x: Any, block: str, name: str) -> Any:
        """``x`` times a weight of a block, plus the bias and the product of the adapter if it has them."""
        y = x @ self.p[f"{block}{name}"]
        y = y + self.p[f"{block}{name}_bias"] if has_bias(self.spec, name) else y
        down = self.adapters.get(f"{block}{name}.{DOWN}")
        if down is None:
            return y
        assert self.spec.lora is not None
        with region("lora"):
            return y + (x @ down) @ self.adapters[f"{block}{name}.{UP}"] * self.spec.lora.scale

    def activated(self, *inputs: Any) -> Any:
        """The activation of the feed-forward, of the result of its first product; with a gate, of the gate and the result."""
        return apply(self.spec.activation, *inputs)

    def norm(self, x: Any, name: str) -> Any:
        """The norm whose weight has this name."""
        spec = self.spec
        if spec.norm == "layer" and spec.norm_parameters == "all":
            return apply("layer_norm", x, self.p[name], self.p[f"{name}_bias"], epsilon=spec.epsilon)
        if spec.norm == "layer":
            x = x - np.mean(x, axis=-1, keepdims=True)
        if spec.norm_parameters == "none":
            return unit(x, spec.epsilon)
        return apply("rms_norm", x, self.p[name], epsilon=spec.epsilon)

    def rotated(self, x: Any, base: float | None = None, positions: Any = None) -> Any:
        """``x``, of shape ``(batch, sequence, heads, width)``, with rotary positions: `rotary`."""
        spec = self.spec
        width = None if spec.attention is not None else spec.rotated
        scaling = spec.rotary_scaling
        turned = rotary(x, base or spec.rotary_base, scaling=scaling, width=width, positions=positions)
        return turned if spec.rotary_factor == 1 else _scaled(turned, spec.rotary_factor, width)

    def dropped(self, x: Any) -> Any:
        """``x`` behind the dropout of hidden values."""
        return dropout(x, self.step, self.spec.rates[1], next(self.seeds))


def unit(x: Any, epsilon: float) -> Any:
    """An RMS norm without weights, of the last dim."""
    wide = x.astype(np.result_type(x.dtype, np.float32))
    return (wide * (np.mean(wide * wide, axis=-1, keepdims=True) + epsilon) ** -0.5).astype(x.dtype)


def _scaled(x: Any, factor: float, width: int | None) -> Any:
    """``x`` with its first features, so many, times a factor."""
    if width is None or width == x.shape[-1]:
        return x * factor
    turned, kept = np.split(x, [width], axis=3)
    return np.concatenate([turned * factor, kept], axis=3)
