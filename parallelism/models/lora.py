"""`LoRA`: low-rank adapters beside products whose weights are frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from parallelism.arrays import with_plain_numbers
from parallelism.display.quantities import short_errors
from parallelism.models.figures import Shape, attention_weights, feed_forward_weights, mixer_weights

if TYPE_CHECKING:
    from parallelism.models.spec import TransformerSpec

DOWN, UP = "down", "up"
"""The two products of an adapter: to ``rank`` features, and from these."""
_NEVER = frozenset(("router", "shared_router", "convolution"))
"""Products that decide where tokens go have no adapters, and the weight of a convolution is that of none."""


@dataclass(frozen=True)
class LoRA:
    """Adapters of ``rank`` beside products of the blocks; all other weights are frozen.

    A product ``x @ w`` becomes ``x @ w + (x @ down) @ up * alpha / rank``, where ``down`` has ``rank`` columns and ``up``
    as many rows; only these are trained (Hu et al., *LoRA*, 2021, arXiv:2106.09685, section 4.1; there ``down`` is A and
    ``up`` is B).  ``products`` are the names of the products that have adapters; None: those of attention, ``qkv`` and
    ``out``, as in MLPerf's tuning of Llama 2 70B.  Hu et al. adapt the queries and values alone, which are one weight with
    the keys here.  ``up``, ``gate`` and ``down`` are those of the feed-forward.

    ``ValueError`` for a rank that is no number of at least 1, and an ``alpha`` that is not above 0 and finite.
    """

    rank: int = 16
    alpha: float = 32.0
    products: tuple[str, ...] | None = None

    @short_errors
    def __post_init__(self) -> None:
        with_plain_numbers(self)
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"the rank of LoRA must be an integer of at least 1, got {self.rank!r}")
        if (
            isinstance(self.alpha, bool)
            or not isinstance(self.alpha, int | float)
            or not 0 < self.alpha < inf
        ):
            raise ValueError(f"alpha of LoRA must be a number above 0, got {self.alpha!r}")
        if self.products is not None:
            said: Any = self.products
            given = (said,) if isinstance(said, str) else tuple(said)
            if not given:
                raise ValueError("products of LoRA must name at least one product, such as qkv")
            object.__setattr__(self, "products", tuple(dict.fromkeys(given)))

    def of_parts(self, product: str, parts: Sequence[str]) -> LoRA:
        """The same adapters where a product is several, by name."""
        if self.products is None or product not in self.products:
            return self
        others = [each for each in self.products if each != product]
        return replace(self, products=(*parts, *others))

    @property
    def scale(self) -> float:
        """What the products of adapters are multiplied by."""
        return self.alpha / self.rank


def check_adapters(spec: TransformerSpec) -> None:
    """``ValueError`` for products that the model does not have, and for what cannot be combined with adapters."""
    lora = spec.lora
    if lora is None:
        return
    if not isinstance(lora, LoRA):
        raise TypeError(f"lora must be a LoRA or None, got {lora!r}")
    if spec.next_tokens:
        raise ValueError("modules that predict further tokens have no adapters: lora needs next_tokens=0")
    known = dict.fromkeys(name for layer in range(spec.layers) for name in _adaptable(spec, layer))
    if unknown := [name for name in _adapted(spec) if name not in known]:
        raise ValueError(
            f"LoRA has adapters of {unknown[0]!r}, which is no product of a block with one weight; they are "
            f"{', '.join(known)}"
        )


def adapters_of(spec: TransformerSpec) -> dict[str, Shape]:
    """The shape of each weight of the adapters, by name: ``3.qkv.down`` and ``3.qkv.up`` in block 3."""
    shapes: dict[str, Shape] = {}
    if spec.lora is None:
        return shapes
    chosen, rank = frozenset(_adapted(spec)), spec.lora.rank
    for layer in range(spec.layers):
        for name, (width, made) in _adaptable(spec, layer).items():
            if name in chosen:
                shapes |= {f"{layer}.{name}.{DOWN}": (width, rank), f"{layer}.{name}.{UP}": (rank, made)}
    return shapes


def _adapted(spec: TransformerSpec) -> tuple[str, ...]:
    """The names of the products that have adapters."""
    assert spec.lora is not None
    if spec.lora.products is not None:
        return spec.lora.products
    return tuple(name for name, shape in attention_weights(spec).items() if len(shape) == 2)


def _adaptable(spec: TransformerSpec, layer: int) -> dict[str, tuple[int, int]]:
    """The products of a block that may have adapters, with the features that they take and make."""
    weights = mixer_weights(spec, layer) | feed_forward_weights(spec, layer)
    return {
        name: (shape[0], shape[1])
        for name, shape in weights.items()
        if len(shape) == 2 and name not in _NEVER
    }
