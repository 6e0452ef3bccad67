"""`VocabularyLoss`: the end of a language model, logits = x table^T and their cross-entropy, the logits never whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.layers import cross_entropy
from tensor_parallelism.layers.cross_entropy import CrossEntropy, CrossEntropySharding
from tensor_parallelism.products import Axes, Layer, LayerPlan, Shape, check_layouts, check_tokens
from tensor_parallelism.products.product import moved


@dataclass(frozen=True)
class VocabularyLossSharding:
    """The layouts of ``x`` [..., model], ``table`` [vocabulary, model] and ``targets`` [...].

    >>> VocabularyLossSharding.vocabulary("tp", batch="dp", sequence="tp").x
    TensorSharding('dp', 'tp', None)

    ``TypeError`` for what is no layout; ``ValueError`` for one of too few dims or that is partial.
    """

    x: TensorSharding
    table: TensorSharding
    targets: TensorSharding

    def __post_init__(self) -> None:
        check_layouts(self, {"x": 2, "table": 2, "targets": 1}, waits=())

    @classmethod
    def vocabulary(cls, axes: str | Axes, batch: str | Axes = (), sequence: str | Axes = ()) -> VocabularyLossSharding:
        """The vocabulary over ``axes``, the batch over ``batch``; ``sequence`` (``axes``, say) splits that of x."""
        return cls(TensorSharding(batch, sequence, None), TensorSharding(axes, None), TensorSharding(batch, None))

    @property
    def out(self) -> TensorSharding:
        """The layout of the loss, a scalar on every device."""
        return TensorSharding()

    def split(self, ndim: int) -> tuple[list[Axes], Axes, Axes]:
        """The axes of each dim of the tokens, the vocabulary and the model in the product; x has ``ndim`` dims."""
        vocabulary, model = (dim.axes for dim in self.table.over(2).dims)
        lead = [tuple(axis for axis in dim.axes if axis not in (*vocabulary, *model))
                for dim in self.x.over(ndim).dims[:-1]]
        return lead, vocabulary, model


class Saved(NamedTuple):
    """The values that the backward needs: x and table as they were multiplied, those of the loss, and the shapes."""

    x: Array
    table: Array
    loss: cross_entropy.Saved
    shapes: list[Shape]
    dtype: np.dtype[Any]


class VocabularyLoss(Layer):
    """``cluster.run(VocabularyLoss(sharding), x, table, targets).result``: the mean loss of logits ``x @ table.T``.

    The table may be that of the `Embedding`.  It stays in place, so the logits are split by vocabulary as the table is,
    and no device ever holds more than its slice.  `backward` returns the gradients of x and table in their layouts, and
    None.

    **Communication**, for a vocabulary over V and a batch over D axes, summed over the devices: what gathers x over V,
    if its sequence is split over it, (V-1) |x| bytes, and what `CrossEntropy` asks for.  Backward the sum of the
    gradient of x over V, an all_reduce, 2 (V-1) |x|, or a reduce_scatter, (V-1) |x|; and an all_reduce of the table's
    over D, 2 (D-1) |table|.  ``print(operation.plan([x.shape, table.shape, targets.shape], mesh))``.

    **Memory**: ``activations`` hold x as it is multiplied and the exponentials of `CrossEntropy`, until the backward.

    The host raises the errors of `CrossEntropy` before anything is sent.
    """

    NAMES = ("x", "table", "targets")
    sharding: VocabularyLossSharding

    def __init__(self, sharding: VocabularyLossSharding) -> None:
        super().__init__(sharding, VocabularyLossSharding)
        self._losses: dict[int, CrossEntropy] = {}

    def forward(self, device: Device, *shards: Any) -> tuple[Array, Saved]:
        """The loss, from this device's shards of x, table and targets."""
        (x, table, targets), shapes, plan = self._arrived(device, *shards)
        dtype = plan["x"].dtype
        x, table = moved(device, plan["x"], x), table.astype(dtype, copy=False)
        logits = moved(device, plan["logits"], device.matmul(x, table.T))
        check_tokens("targets", targets, shapes[1][0])
        targets = moved(device, plan["targets"], targets.astype(np.int64, copy=False))
        device.hold("activations", x.nbytes)
        loss, saved = self._loss(len(shapes[0])).forward(device, logits, targets)
        return loss, Saved(x, table, saved, shapes, dtype)

    def backward(self, device: Device, saved: Saved, grad: Any = 1.0) -> tuple[Array, Array, None]:
        """The gradients of x and table in their layouts, from that of the loss; that of the targets is None."""
        x, table, loss, shapes, dtype = saved
        plan = self.plan(shapes, device.mesh, dtype)
        logits_grad, _ = self._loss(len(shapes[0])).backward(device, loss, grad)
        x_grad = moved(device, plan["x_grad"], device.matmul(logits_grad, table))
        tokens = prod(x.shape[:-1])
        rows = logits_grad.reshape(tokens, logits_grad.shape[-1])
        table_grad = device.matmul(rows.T, x.reshape(tokens, x.shape[-1]))
        device.hold("activations", -x.nbytes)
        return x_grad, moved(device, plan["table_grad"], table_grad), None

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> float:
        """The loss as a number."""
        return float(outputs[0])

    def _loss(self, ndim: int) -> CrossEntropy:
        """The loss of logits in the layout of the product."""
        if ndim not in self._losses:
            lead, vocabulary, _ = self.sharding.split(ndim)
            sharding = CrossEntropySharding(TensorSharding(*lead, vocabulary), TensorSharding(*lead))
            self._losses[ndim] = CrossEntropy(sharding)
        return self._losses[ndim]

    def _shapes(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        x, table, targets = shapes["x"], shapes["table"], shapes["targets"]
        if len(x) < 2 or len(table) != 2 or x[-1] != table[1]:
            raise ValueError(f"the last extent of x is that of the table [vocabulary, model], got x of shape {x} and "
                             f"table of {table}")
        if targets != x[:-1]:
            raise ValueError(f"targets are of the shape of x without the last dim, got x of shape {x} and targets of "
                             f"{targets}")
        return shapes

    def _check_values(self, *arrays: Array) -> None:
        _, table, targets = arrays
        check_tokens("targets", targets, table.shape[0])

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh, dtype: np.dtype[Any]) -> LayerPlan:
        x, table, tokens = shapes["x"], shapes["table"], shapes["targets"]
        lead, vocabulary, model = self.sharding.split(len(x))
        over, logits = tuple(axis for axes in lead for axis in axes), (*tokens, table[0])
        during, made = TensorSharding(*lead, model), TensorSharding(*lead, vocabulary)
        loss = self._loss(len(x)).plan([logits, tokens], mesh, dtype)
        return LayerPlan(
            f"loss = mean(-log softmax(x table^T)[target]), x {x}, table {table}", mesh,
            (("x", plan_resharding(self.sharding.x, during, x, dtype, mesh)),
             ("logits", plan_resharding(TensorSharding(*lead, vocabulary, partial=model), made, logits, dtype, mesh)),
             ("targets", plan_resharding(self.sharding.targets, TensorSharding(*lead), tokens, np.int64, mesh)),
             *((name, move) for name, move in loss.forward if name != "targets")),
            (("x_grad", plan_resharding(TensorSharding(*lead, model, partial=vocabulary), self.sharding.x, x, dtype,
                                        mesh)),
             ("table_grad", plan_resharding(TensorSharding(vocabulary, model, partial=over), self.sharding.table,
                                            table, dtype, mesh))),
        )
