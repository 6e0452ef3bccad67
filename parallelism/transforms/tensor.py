"""Tensor parallelism: products have their weights split over an axis; sequence parallelism: so are activations between."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from parallelism.ir.core import Function, Value
from parallelism.ir.core.region_patterns import matching, patterns
from parallelism.ir.passes.product_parts import in_parts
from parallelism.layouts.propagation.relations import Letters
from parallelism.transforms.dims import dims_of, layout, relation_of, split_at
from parallelism.transforms.parts import Parts
from parallelism.transforms.products import Product, product_of, split_letter
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


@dataclass(frozen=True)
class SequenceParallel:
    """Activations that tensor parallelism leaves whole are split over its ``axis``, along the sequence.

    What enters a product by columns is gathered before it, and what a product by rows (or a lookup in a split table)
    makes is reduce-scattered: norms, dropouts and residuals between work on a part of the rows (Korthikanti et al.,
    *Reducing Activation Recomputation in Large Transformer Models*, 2022, arXiv:2205.05198, section 4.2.2).  The dim is
    the outermost one of the activation that is not contracted and not the rows of the batch; if there is none, the rows
    of the batch, inside of what splits them already.  An activation that has a layout keeps it.

    **Communication**: an all_gather and a reduce_scatter in place of each all_reduce of `TensorParallel`, and an
    all_gather more in the backward of each product by columns, because only a part of its input is kept.

    ``ValueError`` if no product is split over ``axis``, and if no activation is left to be split.
    """

    axis: str = "tp"
    phase: ClassVar[int] = 30

    def __post_init__(self) -> None:
        checked_axis(self)

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        products = [*self._products(parts)]
        if not products:
            raise ValueError(
                f"{self}: no product of @{function.name} is split over {self.axis!r}; TensorParallel "
                f"comes before {self}, or both in one Strategy"
            )
        classes, rows = parts.classes, parts.rows
        parameters, inputs = {*parts.parameters}, {*parts.forward.inputs}
        given = classes.axes(inputs - parameters)
        # The batch stays whole over the axis: which tokens a device has does not follow from what it does with them.
        layouts = {
            value.name: layout(dims_of(value)) for value in inputs - parameters if value.layout is None
        }
        between = 0
        for value, inside, open_dims, of_weight in products:
            if value.layout is not None or value in inputs or value.name in layouts:
                continue
            dims = [
                tuple(
                    axis for axis in given.get(classes.of(value, dim), ()) if axis not in of_weight.values()
                )
                for dim in range(value.type.ndim)
            ]
            for dim, axis in of_weight.items():
                dims[dim] = (axis,)
            if inside is None:
                inside = next(
                    (dim for dim in open_dims if classes.of(value, dim) != rows), next(iter(open_dims), None)
                )
                between += 1
            if inside is not None:
                dims[inside] = (*dims[inside], self.axis)
                layouts[value.name] = layout(dims)
        if not between:
            raise ValueError(
                f"{self}: no activation of @{function.name} is left to be split over {self.axis!r}: what "
                "enters or leaves its products is input, or has a layout already"
            )
        return parts.laid(layouts).joined()

    def _products(self, parts: Parts) -> Iterator[tuple[Value, int | None, list[int], dict[int, str]]]:
        """The activations of the products that are split.

        Of those inside, between a product by columns and one by rows, the dim that is split; of the others None, and
        the dims that may be split.  Then the dims that number the weight's experts, with the axis that splits these.
        """
        for op in parts.forward.ops:
            product = product_of(op, parts.views)
            split = None if product is None else split_letter(op, product, self.axis)
            if product is None or split is None:
                continue
            of = relation_of(op)
            of_all = set[str | None].intersection(*map(set, (*of.inputs, *of.outputs)))
            for value, letters in zip((*op.inputs, *op.outputs), (*of.inputs, *of.outputs), strict=True):
                if value is product.operand or (split == of.indexed and value in op.inputs):
                    continue
                free = [
                    place
                    for place, letter in enumerate(letters)
                    if letter is not None and letter not in product.letters
                ]
                inside = letters.index(split) if split in letters else None
                yield value, inside, free, self._of_experts(product, letters, of_all)

    def _of_experts(self, product: Product, letters: Letters, of_all: set[str | None]) -> dict[int, str]:
        """The dims of an activation that a weight has, too, and all other values of the product, with the axis over which
        they are split.  (`Zero` may have split other dims of the weight.)"""
        found = {}
        for letter, axes in zip(product.letters, dims_of(product.weight), strict=True):
            if letter is not None and letter in of_all and axes and axes != (self.axis,):
                found[letters.index(letter)] = axes[0]
        return found

    def __str__(self) -> str:
        return word("sp", self.axis)
