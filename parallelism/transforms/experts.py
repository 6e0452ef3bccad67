"""Expert parallelism: weights that have a dim of experts are split along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parallelism.ir.core import Function, Value
from parallelism.sharding import TensorSharding
from parallelism.transforms.data import split_class
from parallelism.transforms.dims import Dims, Place, axes_of, dims_of, layout, without
from parallelism.transforms.parts import Parts
from parallelism.transforms.products import Product, product_of
from parallelism.transforms.words import checked_name, word


@dataclass(frozen=True)
class ExpertParallel:
    """The experts are split over ``axis``, and the rows of the batch inside of what splits them already, unless they are
    split over it.  The experts are split further over the axes ``beside`` it, which split something else already.

    A weight has experts if its product has a dim that weight, activations and result share: each of its places is a
    product of its own.  So has a weight whose dim becomes that dim, as of a product that makes the rows of all experts
    of every token.  Tokens then go from the devices that have their rows to those that have their experts, and
    back, by all_to_all, twice forward and twice backward (Lepikhin et al., *GShard*, 2020, arXiv:2006.16668, section
    3.2).  What a layout splits already stays.  ``ExpertParallel("dp")`` takes the axis of `DataParallel`.

    ``beside`` may name the axis of `TensorParallel`: then an expert is whole on its device, which Megatron-LM calls an
    expert tensor parallel size of 1.  It may name that of `ContextParallel`, whose devices then share the experts, not
    copies of them.  Such axes split sequences, so rows go over them by an all_to_all of its own.

    ``ValueError`` if no weight is left to be split.
    """

    axis: str = "ep"
    beside: tuple[str, ...] = ()
    phase: ClassVar[int] = 25

    def __post_init__(self) -> None:
        object.__setattr__(self, "beside", tuple(self.beside))
        for axis in self.axes:
            checked_name(axis, type(self).__name__)
        if len({*self.axes}) < len(self.axes):
            raise ValueError(f"the axes of ExpertParallel must differ, got {'+'.join(self.axes)}")

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes over which the experts are split, outermost first."""
        return (self.axis, *self.beside)

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        layouts, classes = {}, parts.experts
        for op in parts.forward.ops:
            product = product_of(op, parts.views)
            dim = None if product is None else self._experts(parts, product, classes)
            if product is not None and dim is not None:
                layouts[product.weight.name] = layout(self._split(product.weight, dim))
                layouts |= self._seen(parts, product.weight, dim)
        if layouts:
            layouts |= self._added(parts, classes)
        if not layouts:
            raise ValueError(
                f"{self}: no weight of @{function.name} is left to be split over {self.axis!r}: none has "
                "experts, or they are split already"
            )
        if parts.rows is not None and self.axis not in axes_of(*parts.dealt):
            parts = split_class(self, parts, parts.rows, around=False)
        return parts.laid(layouts).joined()

    def _split(self, value: Value, dim: int) -> Dims:
        """The axes of the dims of a value that is split over the experts, its dim ``dim``."""
        dims = without(dims_of(value), self.beside)
        dims[dim] = self.axes
        return dims

    def _experts(self, parts: Parts, product: Product, classes: set[Place]) -> int | None:
        """The dim of a weight that is to be split: that of experts, if an expert has more of the weight than one row.

        A router has a row for each expert, so it is no weight of theirs.
        """
        dims = dims_of(product.weight)
        found = [dim for dim in range(len(dims)) if parts.classes.of(product.weight, dim) in classes]
        others = [letter for letter in product.free if product.letters.index(letter) not in found]
        others += product.lost_free
        shared = any(product.letters[dim] not in product.free for dim in found)
        if not found or dims[found[0]] or any(self.axis in axes for axes in dims) or not (others or shared):
            return None
        return found[0]

    def _seen(self, parts: Parts, weight: Value, dim: int) -> dict[str, TensorSharding]:
        """By name, the layouts of the views of a weight that have layouts of their own, with their experts split, too.

        ``dim`` is the dim of experts of the weight.
        """
        found = {}
        for value, view in parts.views.items():
            if view.weight is weight and value is not weight and value.layout and dim in view.dims:
                found[value.name] = layout(self._split(value, view.dims.index(dim)))
        return found

    def _added(self, parts: Parts, classes: set[Place]) -> dict[str, TensorSharding]:
        """The layouts of what is added to the rows of each expert, as its biases: it has experts, and is no product's."""
        found = {}
        weights = {
            product.weight for op in parts.forward.ops if (product := product_of(op, parts.views)) is not None
        }
        for value in parts.weights:
            dims = dims_of(value)
            own = [dim for dim in range(len(dims)) if parts.classes.of(value, dim) in classes]
            if value in weights or len(dims) < 2 or not own or dims[own[0]]:
                continue
            found[value.name] = layout(self._split(value, own[0]))
        return found

    def __str__(self) -> str:
        return word("ep", "+".join(self.axes))
