"""The layers of a small GPT: embedding, block and head, from the operations of `tensor_parallelism`.

A layer has the shapes, the layouts and the initial values of its parameters, by name.  `forward` returns the output and
the values that `backward` needs; `backward` returns the gradients of the input and of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.operation import Device
from parallelism.sharding import TensorSharding
from pipeline_parallelism.trained_stage import Layer
from tensor_parallelism.layers import Embedding, EmbeddingSharding, LayerNorm, VocabularyLoss, VocabularyLossSharding
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
            sharding, causal=True, rotary_base=model.rotary_base, activation=model.activation)
        self.shapes = self.operation.shapes(
            (1, 1, model.width), model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim, hidden=model.hidden)
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


class _OfHead(NamedTuple):
    norm: Any
    loss: Any


class HeadLayer:
    """The head: a norm, and the loss of the logits ``x @ table.T``."""

    def __init__(self, model: Transformer, axes: Axes) -> None:
        sharding = VocabularyLossSharding.vocabulary(axes, sequence=model.rows_over(axes))
        self.norm, self.loss = LayerNorm(sharding.x), VocabularyLoss(sharding)
        self.shapes = {"norm": (model.width,), "norm_bias": (model.width,), "table": (model.vocabulary, model.width)}
        self.layouts = {"norm": TensorSharding(None), "norm_bias": TensorSharding(None), "table": sharding.table}
        self.rows = model.rows_over(axes)

    def drawn(self, rng: np.random.Generator) -> dict[str, Array]:
        """The initial parameters: the table is normal with deviation `TABLE_SPREAD`, the norm 1, its bias 0."""
        norm, bias, table = self.shapes.values()
        return {"norm": np.ones(norm), "norm_bias": np.zeros(bias),
                "table": TABLE_SPREAD * rng.standard_normal(table)}

    def forward(self, device: Device, x: Array, targets: Array, parameters: Layer) -> tuple[float, _OfHead]:
        """The mean loss of these tokens."""
        *norm, table = parameters
        y, of_norm = self.norm.forward(device, x, *norm)
        loss, of_loss = self.loss.forward(device, y, table, targets)
        return float(loss), _OfHead(of_norm, of_loss)

    def backward(self, device: Device, saved: _OfHead, scale: float) -> tuple[Array, Layer]:
        """The gradients of ``scale`` times the loss, with respect to x and the parameters."""
        y_grad, table_grad, _ = self.loss.backward(device, saved.loss, scale)
        x_grad, *norm_grads = self.norm.backward(device, saved.norm, y_grad)
        return x_grad, (*norm_grads, table_grad)

    def logits(self, device: Device, x: Array, parameters: Layer) -> Array:
        """This device's slice of the logits, by vocabulary.  **Communication**: an all_gather of split rows."""
        *norm, table = parameters
        y, _ = self.norm.forward(device, x, *norm)
        if self.rows:
            y = device.all_gather(y, self.rows, dim=1)
        return np.asarray(device.matmul(y, table.T))
