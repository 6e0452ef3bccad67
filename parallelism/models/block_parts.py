"""What attention and feed-forward of a recorded Transformer have in common: products, norms, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from parallelism.ir.tracing.tracing import apply
from parallelism.models.figures import has_bias
from parallelism.models.layers import dropout

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
    losses: list[Any] = field(default_factory=list)
    """What blocks add to the loss, such as what balances their experts."""

    def product(self, x: Any, block: str, name: str) -> Any:
        """``x`` times a weight of a block, plus the bias if it has one."""
        y = x @ self.p[f"{block}{name}"]
        return y + self.p[f"{block}{name}_bias"] if has_bias(self.spec, name) else y

    def activated(self, *inputs: Any) -> Any:
        """The activation function of the feed-forward, of a gate if it has one and of what is between the products."""
        return apply(self.spec.activation, *inputs)

    def norm(self, x: Any, name: str) -> Any:
        """The norm whose weight has this name."""
        if self.spec.norm == "rms":
            return apply("rms_norm", x, self.p[name], epsilon=self.spec.epsilon)
        return apply("layer_norm", x, self.p[name], self.p[f"{name}_bias"], epsilon=self.spec.epsilon)

    def dropped(self, x: Any) -> Any:
        """``x`` behind the dropout of hidden values."""
        return dropout(x, self.step, self.spec.rates[1], next(self.seeds))
