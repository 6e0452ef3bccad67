"""Data parallelism: the rows of the batch are split over an axis, and gradients are summed over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parallelism.ir.core import Function
from parallelism.transforms.dims import DimClasses, batch_class, dims_of, layout
from parallelism.transforms.parts import Parts
from parallelism.transforms.words import checked_axis, word


@dataclass(frozen=True)
class DataParallel:
    """The rows of the batch are split over ``axis``.

    The rows are the dims of the inputs that no parameter has (`parallelism.transforms.dims.batch_class`).  If they are
    split already, ``axis`` goes around the other axes.

    **Communication** in a step: each gradient is summed once over the axis, by an all_reduce, and so is the loss.  Of
    P bytes of gradients a device receives 2 P (n - 1) / n by ring (Rajbhandari et al., *ZeRO*, 2020, arXiv:1910.02054,
    section 7.1).

    ``ValueError`` if the batch is split over ``axis`` already, and if the program has no such dim.
    """

    axis: str = "dp"
    phase: ClassVar[int] = 10

    def __post_init__(self) -> None:
        checked_axis(self)

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        classes = DimClasses(parts.forward)
        rows = batch_class(parts.forward, parts.parameters, classes)
        if rows is None:
            raise ValueError(f"{self}: the inputs of @{function.name} have no rows to split: every dim is that of a "
                             "parameter, too")
        layouts = {}
        for value in parts.forward.values:
            if value.layout is None and value not in parts.forward.inputs:
                continue
            for dim in range(value.type.ndim):
                if classes.of(value, dim) == rows:
                    axes = dims_of(value)
                    if any(self.axis in each for each in axes):
                        raise ValueError(f"{self}: %{value.name} of @{function.name} is split over {self.axis!r} "
                                         f"already, {value.layout and value.layout.short()}")
                    axes[dim] = (self.axis, *axes[dim])
                    layouts[value.name] = layout(axes, value.layout)
                    break
        return parts.laid(layouts).joined()

    def __str__(self) -> str:
        return word("dp", self.axis)
