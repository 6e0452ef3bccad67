"""One stage of a small GPT, and its layers: embedding, block and head, from the operations of `tensor_parallelism`.

A layer has the shapes, the layouts and the initial values of its parameters, by name.  `forward` returns the output and
the values that `backward` needs; `backward` returns the gradients of the input and of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.arrays import Array
from parallelism.operation import Device
from parallelism.sharding import TensorSharding
from pipeline_parallelism.microbatches import Microbatches
from pipeline_parallelism.trained_stage import Kept, Layer, Layers, TrainedStage
from tensor_parallelism.layers import (
    Embedding,
    EmbeddingSharding,
    LayerNorm,
    VocabularyLoss,
    VocabularyLossSharding,
)
from tensor_parallelism.transformer_block import TransformerBlock, TransformerBlockSharding

if TYPE_CHECKING:
    from pipeline_parallelism.transformer import Transformer

Axes = str | tuple[str, ...]
TABLE_SPREAD = 0.02
"""The initial standard deviation of the head's table; it makes the first loss about log(vocabulary)."""


class _OfOperation:
    """A layer that is one operation on its input and its parameters."""

    operation: Embedding | TransformerBlock

    def forward(self, device: Device, x: Array, parameters: Layer) -> tuple[Array, Any]:
        return self.operation.forward(device, x, *parameters)

    def backward(self, device: Device, saved: Any, grad: Array) -> tuple[Array | None, Layer]:
        x_grad, *gradients = self.operation.backward(device, saved, grad)
        return x_grad, tuple(gradients)


class EmbeddingLayer(_OfOperation):
    """The embedding: tokens ``(rows, sequence)`` to x ``(rows, sequence, width)``, which has no gradient for tokens."""

    def __init__(self, model: Transformer, axes: Axes) -> None:
        sharding = EmbeddingSharding.vocabulary(axes, sequence=model.rows_over(axes))
        self.operation = Embedding(sharding)
        self.shapes = {"table": (model.vocabulary, model.width)}
        self.layouts: Mapping[str, TensorSharding] = {"table": sharding.table}

    def drawn(self, rng: np.random.Generator) -> dict[str, Array]:
        """The initial table: normal, with variance 1 / width."""
        vocabulary, width = self.shapes["table"]
        return {"table": rng.standard_normal((vocabulary, width)) / math.sqrt(width)}


class BlockLayer(_OfOperation):
    """A causal block with rotary positions: x ``(rows, sequence, width)`` to an output of the same shape."""

    def __init__(self, model: Transformer, axes: Axes) -> None:
        split = TransformerBlockSharding
        sharding = split.sequence(axes) if model.rows_over(axes) else split.megatron(axes)
        self.operation = TransformerBlock(
            sharding, causal=True, rotary_base=model.rotary_base, activation=model.activation
        )
        self.shapes = self.operation.shapes(
            (1, 1, model.width),
            model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            hidden=model.hidden,
        )
        del self.shapes["x"]
        self.layouts = {name: getattr(sharding, name) for name in self.shapes}
        self.depth = model.blocks

    def drawn(self, rng: np.random.Generator) -> dict[str, Array]:
        """The initial parameters: weights are normal with variance 1 / inputs, biases 0, norms 1.

        The weights of the two products that are added to x have 1 / (2 blocks) of this variance: Radford et al.,
        *Language Models are Unsupervised Multitask Learners*, 2019, section 2.3.
        """
        initial = {}
        for name, shape in self.shapes.items():
            if len(shape) == 1:
                initial[name] = np.full(shape, float(name in ("norm1", "norm2")))
            else:
                inputs = math.prod(shape[:2]) if name == "wo" else shape[0]
                added = 2 * self.depth if name in ("wo", "w2") else 1
                initial[name] = rng.standard_normal(shape) / math.sqrt(inputs * added)
        return initial


class HeadLayer:
    """The head: a norm, and the loss of the logits ``x @ table.T``."""

    def __init__(self, model: Transformer, axes: Axes) -> None:
        sharding = VocabularyLossSharding.vocabulary(axes, sequence=model.rows_over(axes))
        self.norm, self.loss = LayerNorm(sharding.x), VocabularyLoss(sharding)
        self.shapes = {
            "norm": (model.width,),
            "norm_bias": (model.width,),
            "table": (model.vocabulary, model.width),
        }
        self.layouts = {
            "norm": TensorSharding(None),
            "norm_bias": TensorSharding(None),
            "table": sharding.table,
        }
        self.rows = model.rows_over(axes)

    def drawn(self, rng: np.random.Generator) -> dict[str, Array]:
        """The initial parameters: the table is normal with deviation `TABLE_SPREAD`, the norm 1, its bias 0."""
        norm, bias, table = self.shapes.values()
        return {
            "norm": np.ones(norm),
            "norm_bias": np.zeros(bias),
            "table": TABLE_SPREAD * rng.standard_normal(table),
        }

    def forward(
        self, device: Device, x: Array, targets: Array, parameters: Layer
    ) -> tuple[float, tuple[Any, Any]]:
        """The mean loss of these tokens, and what the backwards of the norm and of the loss need."""
        *norm, table = parameters
        y, of_norm = self.norm.forward(device, x, *norm)
        loss, of_loss = self.loss.forward(device, y, table, targets)
        return float(loss), (of_norm, of_loss)

    def backward(self, device: Device, saved: tuple[Any, Any], scale: float) -> tuple[Array, Layer]:
        """The gradients of ``scale`` times the loss, with respect to x and the parameters."""
        of_norm, of_loss = saved
        y_grad, table_grad, _ = self.loss.backward(device, of_loss, scale)
        x_grad, *norm_grads = self.norm.backward(device, of_norm, y_grad)
        return x_grad, (*norm_grads, table_grad)

    def logits(self, device: Device, x: Array, parameters: Layer) -> Array:
        """This device's slice of the logits, by vocabulary.  **Communication**: an all_gather of split rows."""
        *norm, table = parameters
        y, _ = self.norm.forward(device, x, *norm)
        if self.rows:
            y = device.all_gather(y, self.rows, dim=1)
        return np.asarray(device.matmul(y, table.T))


AnyLayer = EmbeddingLayer | BlockLayer | HeadLayer


class TransformerStage(TrainedStage):
    """The layers of one stage on one device, during one step; ``work`` has the tokens and the targets.

    The operations record their own products and the memory that they hold.  Their backward is not split: the backward
    for the input also computes the gradients of the parameters, and that for the weights only sums them.  A microbatch
    without rows passes unchanged, without communication inside the stage.
    """

    def __init__(self, device: Device, parts: Sequence[AnyLayer], layers: Layers, work: Microbatches) -> None:
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
