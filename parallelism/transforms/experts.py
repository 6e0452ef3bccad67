"""Expert parallelism: weights that have a dim of experts are split along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parallelism.ir.core import Function
from parallelism.transforms.data import split_class
from parallelism.transforms.dims import dims_of, layout, relation_of
from parallelism.transforms.parts import Parts
from parallelism.transforms.tensor import product_of
from parallelism.transforms.words import checked_axis, word


@dataclass(frozen=True)
class ExpertParallel:
    """The experts are split over ``axis``, and the rows of the batch, unless they are split over it already.

    A weight has experts if its product has a dim that weight, activations and result share: each of its places is a
    product of its own.  Tokens then go from the devices that have their rows to those that have their experts, and
    back, by all_to_all, twice forward and twice backward (Lepikhin et al., *GShard*, 2020, arXiv:2006.16668, section
    3.2).  What a layout splits already stays.  ``ExpertParallel("dp")`` takes the axis of `DataParallel`.

    ``ValueError`` if no weight is left to be split.
    """

    axis: str = "ep"
    phase: ClassVar[int] = 25

    def __post_init__(self) -> None:
        checked_axis(self)

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        layouts, parameters = {}, {*parts.parameters}
        for op in parts.forward.ops:
            product = product_of(op, parameters)
            if product is None:
                continue
            others = {letter for value, letters in zip(op.inputs, relation_of(op).inputs, strict=True)
                      if value is not product.weight for letter in letters}
            made = {letter for letters in relation_of(op).outputs for letter in letters}
            experts = [dim for dim, letter in enumerate(product.letters) if letter and letter in others & made]
            dims = dims_of(product.weight)
            if experts and not dims[experts[0]] and not any(self.axis in axes for axes in dims):
                dims[experts[0]] = (self.axis,)
                layouts[product.weight.name] = layout(dims)
        if not layouts:
            raise ValueError(f"{self}: no weight of @{function.name} is left to be split over {self.axis!r}: none has "
                             "experts, or they are split already")
        if parts.rows is not None and not any(self.axis in axes for value in parts.data for axes in dims_of(value)):
            parts = split_class(self, parts, parts.rows)
        return parts.laid(layouts).joined()

    def __str__(self) -> str:
        return word("ep", self.axis)
