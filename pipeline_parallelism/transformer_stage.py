"""One stage of a small GPT: its layers, run one after the other on the axes inside the stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.operation import Device
from pipeline_parallelism.microbatches import Microbatches
from pipeline_parallelism.trained_stage import Layer, TrainedStage
from pipeline_parallelism.transformer_layers import BlockLayer, EmbeddingLayer, HeadLayer

AnyLayer = EmbeddingLayer | BlockLayer | HeadLayer


@dataclass
class _Kept:
    """What a microbatch has on a stage between its forward and its last backward."""

    layers: list[Layer]
    """The parameters of its forward."""
    saved: list[Any]
    gradients: list[Layer] = field(default_factory=list)


class TransformerStage(TrainedStage):
    """The layers of one stage on one device, during one step; ``work`` has the tokens and the targets.

    The operations that it runs record their own products and what they keep.  Their backward is one: that for the input
    finds the gradients of the parameters too, and that for the weights adds them up.  A microbatch without rows goes
    through as it is, and nothing is communicated inside the stage.
    """

    def __init__(
        self, device: Device, parts: Sequence[AnyLayer], layers: list[Layer], work: Microbatches
    ) -> None:
        super().__init__(layers, accumulate=work.accumulate)
        self.device, self.parts, self.work = device, parts, work
        self._kept: dict[int, _Kept] = {}

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The stage's output for its input, of the first stage for its tokens; the last gives its input or logits."""
        if x is None:
            assert self.work.inputs is not None
            x = self.work.inputs[microbatch]
        kept = _Kept(self.layers, [])
        if self.work.training:
            self._kept[microbatch] = kept
        if not self.work.rows[microbatch]:
            if self.work.training and isinstance(self.parts[-1], HeadLayer):
                self.work.found(microbatch, 0.0)
            return x
        for part, parameters in zip(self.parts, self.layers, strict=True):
            if not isinstance(part, HeadLayer):
                x, saved = part.forward(self.device, x, parameters)
                kept.saved.append(saved)
            elif self.work.training:
                kept.saved.append(self._loss(part, microbatch, x, parameters))
            else:
                x = self.work.outputs[microbatch] = part.logits(self.device, x, parameters)
        return x

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """The gradient of the input; those of the parameters are kept for `backward_weights`."""
        kept = self._kept[microbatch]
        if not self.work.rows[microbatch]:
            kept.gradients = [tuple(map(np.zeros_like, layer)) for layer in reversed(kept.layers)]
            return np.empty(0) if grad is None else grad
        for part, saved in zip(reversed(self.parts), reversed(kept.saved), strict=True):
            if isinstance(part, HeadLayer):
                scale = self.work.rows[microbatch] / self.work.divisor(microbatch)
                grad, gradients = part.backward(self.device, saved, scale)
            else:
                assert grad is not None
                grad, gradients = part.backward(self.device, saved, grad)
            kept.gradients.append(gradients)
        kept.saved = []
        return grad

    def backward_weights(self, microbatch: int) -> None:
        """The gradients of the parameters, added to ``gradients``; nothing is kept of the microbatch."""
        self.add(microbatch, self._kept.pop(microbatch).gradients[::-1])

    def versions(self) -> Iterable[list[Layer]]:
        return [kept.layers for kept in self._kept.values()]

    def _loss(self, head: HeadLayer, microbatch: int, x: Array, parameters: Layer) -> Any:
        """Tells the loss; gives what the backward of the head needs."""
        assert self.work.targets is not None
        mean, saved = head.forward(self.device, x, self.work.targets[microbatch], parameters)
        rows, divisor = self.work.rows[microbatch], self.work.divisor(microbatch)
        self.work.found(microbatch, mean * rows / divisor)
        return saved
