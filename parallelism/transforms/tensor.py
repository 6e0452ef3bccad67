"""Tensor parallelism: the products of a model, each with its weight split over an axis."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from parallelism.ir.core import Function
from parallelism.ir.core.region_patterns import matching, patterns
from parallelism.ir.passes.product_parts import in_parts
from parallelism.transforms.dims import split_at
from parallelism.transforms.parts import Parts
from parallelism.transforms.splits import Splits
from parallelism.transforms.whole_weights import told_whole
from parallelism.transforms.words import checked_axis, word


@dataclass(frozen=True)
class TensorParallel:
    """The weights of products are split over ``axis``, by columns or by rows, as the rule of the operators allows.

    The ops are visited in order.  A product whose activation is split where it is contracted takes its weight by
    *rows*: its result is a pending sum.  Another product takes its weight by *columns*, if the split of its result
    lasts until a sum takes it up: the next product, or the loss.  Otherwise the weight stays whole.  A table in which
    rows are looked up is split by rows.  Whatever is added to a split result, such as a bias, is split alike.  On a
    Transformer this is Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053, section 3): two all_reduces of the
    activations of a layer forward, and two backward.

    A product may read a view of its weight: ``w.T``, ``w[0]``, ``w.reshape(4, 8)``, ``w.astype(...)``.  The weight is
    split in the dim that the rules of the views give.  Of a reshape the outermost of the dims that are merged is split;
    on numbers of devices that do not divide it, the weight is gathered before its product.  If a view needs the dim
    whole, as a slice along it does, the weight is split at rest in another dim of the product, and the view is moved.
    A product whose result is cut into parts becomes one for each part, of slices of the weight.

    **Communication**: what is moved of a weight, P bytes in all, is an all_to_all, of which a device of n receives
    P (n - 1) / n^2 bytes in the forward, and as much for the gradient in the backward.

    ``regions`` are patterns; only products in regions that match are split.  A weight that has a layout keeps it, so
    the transform of an inner region comes before that of a region around it, as it does in a `Strategy`.

    ``ValueError`` for a pattern that no region matches, and if no weight is left to be split.  A `WholeWeights` warning
    names the products, and the reasons, if fewer than one in four of the products in its regions has its weight split.
    """

    axis: str = "tp"
    regions: str | Sequence[str] | None = ()
    phase: ClassVar[int] = 20

    def __post_init__(self) -> None:
        checked_axis(self)
        object.__setattr__(self, "regions", patterns(self.regions, type(self).__name__))

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        found = self._splits(parts)
        if found.fused:
            parts = replace(parts, forward=in_parts(parts.forward, found.fused))
            found = self._splits(parts)
        taken = next((value for value in parts.data if split_at(value, self.axis) is not None), None)
        if not found.layouts and taken is not None:
            raise ValueError(
                f"{self}: %{taken.name} of @{function.name} is split over {self.axis!r} already, "
                f"{taken.layout and taken.layout.short()}, and with it each activation; weights need an "
                "axis of their own"
            )
        left = told_whole(found)
        if not found.layouts:
            why = left or (
                "of no product the split lasts until a sum takes it up, or they have layouts already (Zero "
                f"gives them to all and comes after {self}, as does TensorParallel of a wider region)"
            )
            raise ValueError(
                f"{self}: no weight of @{function.name} is left to be split over {self.axis!r}: {why}"
            )
        if left is not None:
            warnings.warn(f"{self}: {left}", WholeWeights, stacklevel=2)
        return parts.laid(found.layouts).joined()

    def _splits(self, parts: Parts) -> Splits:
        return Splits(parts, self.axis, {*matching(parts.forward, self._regions, f"{self}")})

    def size(self, function: Function) -> int:
        """The number of ops of the forward in its regions."""
        return len(matching(Parts.of(function).forward, self._regions, f"{self}"))

    @property
    def _regions(self) -> Sequence[str]:
        return self.regions or ()

    def __str__(self) -> str:
        return word("tp", self.axis, self._regions)


class WholeWeights(UserWarning):
    """`TensorParallel` leaves nearly all weights whole."""
