"""Sequence parallelism: between the products of tensor parallelism, activations are split over the same axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from parallelism.ir.core import Function, Value
from parallelism.layouts.propagation.relations import Letters
from parallelism.transforms.dims import dims_of, layout, relation_of, without
from parallelism.transforms.parts import Parts
from parallelism.transforms.products import Product, product_of, split_letter
from parallelism.transforms.words import checked_axis, word


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
        parameters, inputs = {*parts.weights}, {*parts.forward.inputs}
        given = classes.axes(parts.dealt)
        # The batch stays whole over the axis: which tokens a device has does not follow from what it does with them.
        layouts = {
            value.name: layout(dims_of(value)) for value in inputs - parameters if value.layout is None
        }
        between = 0
        for value, inside, open_dims, of_weight in products:
            if value.layout is not None or value in inputs or value.name in layouts:
                continue
            of_experts = {*chain(*of_weight.values())}
            dims = [given.get(classes.of(value, dim), ()) for dim in range(value.type.ndim)]
            dims = without(dims, of_experts)
            for dim, axes in of_weight.items():
                dims[dim] = axes
            if self.axis in of_experts:
                layouts[value.name] = layout(dims)
                continue
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

    def _products(
        self, parts: Parts
    ) -> Iterator[tuple[Value, int | None, list[int], dict[int, tuple[str, ...]]]]:
        """The activations of the products that are split.

        Of those inside, between a product by columns and one by rows, the dim that is split; of the others None, and
        the dims that may be split.  Then the dims that number the weight's experts, with the axes that split these.
        """
        for op in parts.forward.ops:
            product = product_of(op, parts.views)
            split = None if product is None else split_letter(op, product, self.axis)
            if product is None or split is None:
                continue
            relation = relation_of(op)
            of_all = set[str | None].intersection(*map(set, (*relation.inputs, *relation.outputs)))
            for value, letters in zip(
                (*op.inputs, *op.outputs), (*relation.inputs, *relation.outputs), strict=True
            ):
                if value is product.operand or (split == relation.indexed and value in op.inputs):
                    continue
                free = [
                    place
                    for place, letter in enumerate(letters)
                    if letter is not None and letter not in product.letters
                ]
                inside = letters.index(split) if split in letters else None
                yield value, inside, free, self._of_experts(product, letters, of_all)

    def _of_experts(
        self, product: Product, letters: Letters, of_all: set[str | None]
    ) -> dict[int, tuple[str, ...]]:
        """The dims of an activation that a weight has, too, and all other values of the product, with the axes over which
        they are split.  (`Zero` may have split other dims of the weight.)"""
        found = {}
        for letter, axes in zip(product.letters, dims_of(product.weight), strict=True):
            if letter is not None and letter in of_all and axes and axes != (self.axis,):
                found[letters.index(letter)] = axes
        return found

    def __str__(self) -> str:
        return word("sp", self.axis)
