"""The losses of a language model: `CrossEntropy` of logits, and `VocabularyLoss`, which computes the logits, too.

The vocabulary is split over devices, and the logits are never whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self, TypeVar

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import cross_entropy_backward, exponentials, largest_logits, target_logits
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.sharding import TensorSharding
from tensor_parallelism.products import (
    Axes,
    AxisOrAxes,
    Changes,
    Layer,
    LayerPlan,
    Moving,
    Shape,
    Sharding,
    check_tokens,
    moved,
)
from tensor_parallelism.products.product import without

Layouts = TypeVar("Layouts", bound=Any)
OfLoss = tuple[Array, Array, Array, int]
"""What the backward of a loss needs: exp(logit - m) of each local logit, the sum of these and the target of each token,
and the first entry of the vocabulary here."""


class _Loss(Layer[Layouts]):
    """The mean over all tokens of -log softmax(logits)[target]."""

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> float:
        """The loss as a number."""
        return float(outputs[0])

    def _loss_forward(
        self, device: Device, plan: LayerPlan, logits: Array, targets: Array, vocabulary: slice, size: int
    ) -> tuple[Array, OfLoss]:
        """The loss, from the local logits, which are those of this part of the vocabulary, and the local targets."""
        check_tokens("targets", targets, size)
        targets = moved(device, plan["targets"], targets.astype(np.int64, copy=False))
        logits, dtype = logits.astype(plan.dtype, copy=False), plan.dtype
        largest = moved(device, plan["largest"], largest_logits(logits))
        with device.compute("cross-entropy", flops=3 * logits.size, nbytes=2 * logits.nbytes, dtype=dtype):
            exps = exponentials(logits, largest)
            local = exps.sum(axis=-1, dtype=dtype)
        sums = np.maximum(
            moved(device, plan["sums"], local), 1
        )  # as they are; 0 where a recorder moves nothing
        found = moved(device, plan["target_logits"], target_logits(logits, targets, vocabulary.start))
        losses = np.asarray((np.log(sums) + largest - found).sum(dtype=dtype))
        device.hold("activations", exps.nbytes)
        loss = moved(device, plan["loss"], losses) / dtype.type(prod(plan["sums"].shape))
        return np.asarray(loss), (exps, sums, targets, vocabulary.start)

    def _loss_backward(self, device: Device, plan: LayerPlan, saved: OfLoss, grad: Any) -> Array:
        """The gradient of the local logits."""
        exps, sums, targets, first = saved
        scale = np.asarray(grad)
        if scale.ndim:
            raise ValueError(f"the gradient of the loss is a number, got shape {scale.shape}")
        with device.compute(
            "cross-entropy backward", flops=2 * exps.size, nbytes=2 * exps.nbytes, dtype=exps.dtype
        ):
            found = cross_entropy_backward(
                exps, sums, targets, float(scale) / prod(plan["sums"].shape), first
            )
        device.hold("activations", -exps.nbytes)
        return found

    def _loss_moves(self, lead: Sequence[Axes], vocabulary: Axes, logits: Shape) -> Changes:
        """The moves of a loss; the dims of tokens lie over the axes ``lead``, the vocabulary over ``vocabulary``."""
        if not prod(logits):
            raise ValueError(
                f"the mean over no tokens, or of no vocabulary, is not defined: logits of shape {logits}"
            )
        tokens, whole = logits[:-1], TensorSharding(*lead)
        largest, terms = (TensorSharding(*lead, partial=vocabulary, op=op) for op in ("max", "sum"))
        return {
            "targets": (self.sharding.targets, whole, tokens, np.int64),
            "largest": (largest, whole, tokens),
            "sums": (terms, whole, tokens),
            "target_logits": (terms, whole, tokens),
            "loss": (TensorSharding(partial=whole.axes), TensorSharding(), ()),
        }


@dataclass(frozen=True)
class CrossEntropySharding(Sharding, ndims=(2, 1), waits=()):
    """The layouts of ``logits`` [batch, sequence, vocabulary] and ``targets`` [batch, sequence], or of other lead dims.

    >>> CrossEntropySharding.vocabulary("tp", batch="dp").logits
    TensorSharding('dp', None, 'tp')

    ``TypeError`` if one is not a layout; ``ValueError`` for a layout with too few dims or a partial one.
    """

    logits: TensorSharding
    targets: TensorSharding

    @classmethod
    def vocabulary(cls, axes: AxisOrAxes, batch: AxisOrAxes = (), sequence: AxisOrAxes = ()) -> Self:
        """The vocabulary over ``axes``, the tokens over ``batch`` and ``sequence``."""
        return cls(TensorSharding(batch, sequence, axes), TensorSharding(batch, sequence))

    @property
    def out(self) -> TensorSharding:
        """The layout of the loss, a scalar on every device."""
        return TensorSharding()


class CrossEntropy(_Loss[CrossEntropySharding]):
    """``cluster.run(CrossEntropy(sharding), logits, targets).result`` is the mean loss, of all tokens on all devices.

    >>> import numpy as np
    >>> from tensor_parallelism import CrossEntropy, CrossEntropySharding
    >>> from vcluster import VirtualCluster
    >>> logits, targets = np.zeros((2, 3, 8)), np.zeros((2, 3), int)
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     float(cluster.run(CrossEntropy(CrossEntropySharding.vocabulary("tp")), logits, targets).result)
    2.0794415416798357

    No device ever holds more of the logits than its shard.  `backward` returns ``(gradient of the logits in their
    layout, None)``; its ``grad`` is that of the loss, a number: 1.0.

    **Communication**: three all_reduces over the axes V of the vocabulary, each of one number per token: the largest
    logit, the sum of exponentials, the target's logit.  These are 3 x 2 (V-1) n itemsize bytes for n tokens, received
    by all devices together.  One more all_reduce, of a single number, runs over the axes that split the tokens.  The
    backward does not communicate.
    ``print(operation.plan((logits.shape, targets.shape), mesh))``.  Shoeybi et al., *Megatron-LM*, 2019,
    arXiv:1909.08053, section 3.

    **Memory**: ``activations`` hold the exponentials, as large as the shard of the logits, until the backward.

    The host raises, before anything is sent, ``TypeError`` for targets that are not integers, and ``ValueError`` for a
    target outside the vocabulary, for no tokens, and for arrays whose shapes do not fit each other, their layouts or
    the mesh.
    """

    KIND = CrossEntropySharding
    NAMES = ("logits", "targets")

    def forward(self, device: Device, *shards: Any) -> tuple[Array, tuple[LayerPlan, OfLoss]]:
        """The loss, from this device's shards of logits and targets."""
        (logits, targets), plan = self._arrived(device, *shards)
        *_, vocabulary = self.sharding.logits.slices(plan.shapes[0], device.mesh, device.rank)
        loss, saved = self._loss_forward(device, plan, logits, targets, vocabulary, plan.shapes[0][-1])
        return loss, (plan, saved)

    def backward(
        self, device: Device, saved: tuple[LayerPlan, OfLoss], grad: Any = 1.0
    ) -> tuple[Array, None]:
        """The gradient of the logits in their layout, from that of the loss; that of the targets is None."""
        return self._loss_backward(device, *saved, grad), None

    def _shapes(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        logits, targets = shapes["logits"], shapes["targets"]
        if len(logits) < 2 or logits[:-1] != targets:
            raise ValueError(
                f"targets are of the shape of the logits without the last dim, got logits of shape "
                f"{logits} and targets of {targets}"
            )
        return shapes

    def _check_values(self, *arrays: Array) -> None:
        logits, targets = arrays
        check_tokens("targets", targets, logits.shape[-1])

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh) -> Moving:
        logits = shapes["logits"]
        *lead, vocabulary = (dim.axes for dim in self.sharding.logits.over(len(logits)).dims)
        title = f"loss = mean(-log softmax(logits)[target]), logits {logits}"
        return title, self._loss_moves(lead, vocabulary, logits), {}


@dataclass(frozen=True)
class VocabularyLossSharding(Sharding, ndims=(2, 2, 1), waits=()):
    """The layouts of ``x`` [..., model], ``table`` [vocabulary, model] and ``targets`` [...].

    >>> VocabularyLossSharding.vocabulary("tp", batch="dp", sequence="tp").x
    TensorSharding('dp', 'tp', None)

    ``TypeError`` for what is no layout; ``ValueError`` for one of too few dims or that is partial.
    """

    x: TensorSharding
    table: TensorSharding
    targets: TensorSharding

    @classmethod
    def vocabulary(cls, axes: AxisOrAxes, batch: AxisOrAxes = (), sequence: AxisOrAxes = ()) -> Self:
        """The vocabulary over ``axes``, the batch over ``batch``; ``sequence`` (``axes``, say) splits that of x."""
        return cls(
            TensorSharding(batch, sequence, None), TensorSharding(axes, None), TensorSharding(batch, None)
        )

    @property
    def out(self) -> TensorSharding:
        """The layout of the loss, a scalar on every device."""
        return TensorSharding()

    def split(self, ndim: int) -> tuple[list[Axes], Axes, Axes]:
        """The axes of each dim of the tokens, the vocabulary and the model in the product; x has ``ndim`` dims."""
        vocabulary, model = (dim.axes for dim in self.table.over(2).dims)
        lead = [without(dim.axes, (*vocabulary, *model)) for dim in self.x.over(ndim).dims[:-1]]
        return lead, vocabulary, model


class VocabularyLoss(_Loss[VocabularyLossSharding]):
    """``cluster.run(VocabularyLoss(sharding), x, table, targets).result``: the mean loss of logits ``x @ table.T``.

    >>> import numpy as np
    >>> from tensor_parallelism import VocabularyLoss, VocabularyLossSharding
    >>> from vcluster import VirtualCluster
    >>> x, table, targets = np.zeros((2, 3, 4)), np.ones((8, 4)), np.zeros((2, 3), int)
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     float(cluster.run(VocabularyLoss(VocabularyLossSharding.vocabulary("tp")), x, table, targets).result)
    2.0794415416798357

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

    KIND = VocabularyLossSharding
    NAMES = ("x", "table", "targets")

    def forward(self, device: Device, *shards: Any) -> tuple[Array, tuple[Array, Array, LayerPlan, OfLoss]]:
        """The loss, from this device's shards of x, table and targets."""
        (x, table, targets), plan = self._arrived(device, *shards)
        x = moved(device, plan["x"], x)
        table = table.astype(plan.dtype, copy=False)
        logits = moved(device, plan["logits"], device.matmul(x, table.T))
        device.hold("activations", x.nbytes)
        vocabulary, _ = self.sharding.table.slices(plan.shapes[1], device.mesh, device.rank)
        loss, saved = self._loss_forward(device, plan, logits, targets, vocabulary, plan.shapes[1][0])
        return loss, (x, table, plan, saved)

    def backward(
        self, device: Device, saved: tuple[Array, Array, LayerPlan, OfLoss], grad: Any = 1.0
    ) -> tuple[Array, Array, None]:
        """The gradients of x and table in their layouts, from that of the loss; that of the targets is None."""
        x, table, plan, loss = saved
        logits_grad = self._loss_backward(device, plan, loss, grad)
        x_grad = moved(device, plan["x_grad"], device.matmul(logits_grad, table))
        tokens = prod(x.shape[:-1])
        rows = logits_grad.reshape(tokens, logits_grad.shape[-1])
        table_grad = device.matmul(rows.T, x.reshape(tokens, x.shape[-1]))
        device.hold("activations", -x.nbytes)
        return x_grad, moved(device, plan["table_grad"], table_grad), None

    def _shapes(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        x, table, targets = shapes["x"], shapes["table"], shapes["targets"]
        if len(x) < 2 or len(table) != 2 or x[-1] != table[1]:
            raise ValueError(
                f"the last extent of x is that of the table [vocabulary, model], got x of shape {x} and "
                f"table of {table}"
            )
        if targets != x[:-1]:
            raise ValueError(
                f"targets are of the shape of x without the last dim, got x of shape {x} and targets of "
                f"{targets}"
            )
        return shapes

    def _check_values(self, *arrays: Array) -> None:
        _, table, targets = arrays
        check_tokens("targets", targets, table.shape[0])

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh) -> Moving:
        x = shapes["x"]
        table = shapes["table"]
        layouts = self.sharding
        lead, vocabulary, model = layouts.split(len(x))
        logits = *x[:-1], table[0]
        terms, made = (TensorSharding(*lead, vocabulary, partial=pending) for pending in (model, ()))
        forward = {
            "x": (layouts.x, TensorSharding(*lead, model), x),
            "logits": (terms, made, logits),
            **self._loss_moves(lead, vocabulary, logits),
        }
        backward = {
            "x_grad": (TensorSharding(*lead, model, partial=vocabulary), layouts.x, x),
            "table_grad": (
                TensorSharding(vocabulary, model, partial=TensorSharding(*lead).axes),
                layouts.table,
                table,
            ),
        }
        return f"loss = mean(-log softmax(x table^T)[target]), x {x}, table {table}", forward, backward
