"""One stage of a small GPT: it runs its layers one after the other on the axes inside the stage."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.operation import Device
from pipeline_parallelism.microbatches import Microbatches
from pipeline_parallelism.trained_stage import Kept, Layer, TrainedStage
from pipeline_parallelism.transformer_layers import BlockLayer, EmbeddingLayer, HeadLayer

AnyLayer = EmbeddingLayer | BlockLayer | HeadLayer


class TransformerStage(TrainedStage):
    """The layers of one stage on one device, during one step; ``work`` has the tokens and the targets.

    The operations record their own products and the memory that they hold.  Their backward is not split: the backward
    for the input also computes the gradients of the parameters, and that for the weights only sums them.  A microbatch
    without rows passes unchanged, without communication inside the stage.
    """

    def __init__(
        self, device: Device, parts: Sequence[AnyLayer], layers: list[Layer], work: Microbatches
    ) -> None:
        super().__init__(layers, accumulate=work.accumulate)
        self.device, self.parts, self.work = device, parts, work

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The stage's output, from its input or, on the first stage, its tokens.  The last returns x or the logits."""
        if x is None:
            assert self.work.inputs is not None
            x = self.work.inputs[microbatch]
        kept = Kept(self.layers, [])
        if self.work.training:
            self._kept[microbatch] = kept
        if not self.work.rows[microbatch]:
            if self.work.training and isinstance(self.parts[-1], HeadLayer):
                self.work.add_loss(microbatch, 0.0)
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
        """The gradient of the input.  The gradients of the parameters are kept for `backward_weights`."""
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
        """Add the gradients of the parameters to ``gradients``, and free the values kept for the microbatch."""
        self.add(microbatch, self._kept.pop(microbatch).gradients[::-1])

    def _loss(self, head: HeadLayer, microbatch: int, x: Array, parameters: Layer) -> Any:
        """Note the loss of a microbatch, and return the values that the backward of the head needs."""
        assert self.work.targets is not None
        mean, saved = head.forward(self.device, x, self.work.targets[microbatch], parameters)
        self.work.add_loss(microbatch, mean * self.work.rows[microbatch] / self.work.divisor(microbatch))
        return saved
