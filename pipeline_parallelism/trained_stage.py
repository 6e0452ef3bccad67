"""The base class of trained stages: layers, sums of their gradients, and versions of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any

import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.pipelining import Stage

Layer = tuple[Array, ...]
"""The parameters of a layer, or their gradients; a dense layer has weights ``(inputs, outputs)`` and bias
``(outputs,)``."""
Layers = list[Layer]


@dataclass
class Kept:
    """The values that a stage keeps for a microbatch between its forward and its last backward."""

    layers: Layers
    """The parameters of the forward, which the backward uses, too."""
    saved: list[Any]
    """What the backward of each layer needs."""
    output_gradient: Array | None = None
    gradients: list[Any] = field(default_factory=list)
    """What the backward for the input leaves for that of the weights."""


class TrainedStage(Stage):
    """A stage during one step of training.  Subclasses compute, and call `add` with the gradients of a backward."""

    def __init__(self, layers: Layers, *, accumulate: bool = True) -> None:
        self.layers, self.accumulate = layers, accumulate
        self.gradients: Layers = []
        """The sums over the microbatches whose backward is done; without ``accumulate``, those of the last one."""
        self._kept: dict[int, Kept] = {}
        self._early: dict[int, Layers] = {}
        self._summed = 0

    @property
    def dtype(self) -> npt.DTypeLike | None:
        return next((array.dtype for layer in self.layers for array in layer), None)

    def add(self, microbatch: int, gradients: Layers) -> None:
        """Add the gradients of a microbatch to ``gradients``."""
        if not self.accumulate:
            self.gradients = gradients
            return
        # Sum in the order of the microbatches, so that every schedule gives the same bits.
        self._early[microbatch] = gradients
        while (ready := self._early.pop(self._summed, None)) is not None:
            if self._summed < 2:  # the first sum lies in new arrays, the later ones in the same
                self.gradients = add_layers(self.gradients, ready) if self._summed else ready
            else:
                for sums, parts in zip(self.gradients, ready, strict=True):
                    for total, part in zip(sums, parts, strict=True):
                        total += part
            self._summed += 1

    @property
    def stashed(self) -> int:
        """The bytes of weights that are kept for microbatches in flight, without the stage's current weights."""
        versions = {
            id(kept.layers): kept.layers for kept in self._kept.values() if kept.layers is not self.layers
        }
        return sum(array.nbytes for layers in versions.values() for layer in layers for array in layer)


def add_layers(a: Sequence[Layer], b: Sequence[Layer]) -> Layers:
    """The sum of two lists of layers, array by array."""
    return [tuple(map(add, one, other)) for one, other in zip(a, b, strict=True)]
