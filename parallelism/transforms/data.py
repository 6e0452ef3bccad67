"""Parallelism along dims of the batch: its rows (data parallelism) and its sequences (context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from parallelism.ir.core import Function
from parallelism.transforms.dims import Place, dims_of, layout
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
        if parts.rows is None:
            raise ValueError(
                f"{self}: the inputs of @{function.name} have no rows to split: every dim is that of a "
                "parameter, too"
            )
        return split_class(self, parts, parts.rows).joined()

    def __str__(self) -> str:
        return word("dp", self.axis)


@dataclass(frozen=True)
class ContextParallel:
    """The sequences of the batch are split over ``axis``: each device has some of the tokens of every row.

    The dim is one of the inputs that is not that of the rows, and no dim of a weight or of a table
    (`parallelism.transforms.dims.sequence_class`).  What needs a sequence whole gathers it: attention gathers keys and
    values, forward and backward, and reduce-scatters their gradients (Dubey et al., *The Llama 3 Herd of Models*, 2024,
    arXiv:2407.21783, section 3.3.2).  Gradients of parameters are summed over the axis, as in `DataParallel`.

    ``ValueError`` if the sequences are split over ``axis`` already, and if the program has no such dim.
    """

    axis: str = "cp"
    phase: ClassVar[int] = 12

    def __post_init__(self) -> None:
        checked_axis(self)

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        if parts.sequence is None:
            raise ValueError(
                f"{self}: the inputs of @{function.name} have no sequence to split: besides the rows "
                "every dim is that of a weight, or no op has it"
            )
        return split_class(self, parts, parts.sequence).joined()

    def __str__(self) -> str:
        return word("cp", self.axis)


def split_class(transform: Any, parts: Parts, chosen: Place, *, around: bool = True) -> Parts:
    """The parts with the dims of a class split over the axis of a transform, around what splits them already, or inside.

    Inputs other than parameters are split, and activations that have a layout.
    """
    layouts, parameters, inputs = {}, {*parts.parameters}, {*parts.forward.inputs}
    for value in parts.forward.values:
        if value in parameters or (value.layout is None and value not in inputs):
            continue
        for dim in range(value.type.ndim):
            if parts.classes.of(value, dim) == chosen:
                axes = dims_of(value)
                if any(transform.axis in each for each in axes):
                    raise ValueError(
                        f"{transform}: %{value.name} of @{parts.name} is split over {transform.axis!r} "
                        f"already, {value.layout and value.layout.short()}"
                    )
                axes[dim] = (transform.axis, *axes[dim]) if around else (*axes[dim], transform.axis)
                layouts[value.name] = layout(axes, value.layout)
                break
    return parts.laid(layouts)
