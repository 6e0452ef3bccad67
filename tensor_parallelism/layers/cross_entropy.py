"""`CrossEntropy`: the mean over all tokens of -log softmax(logits)[target], the vocabulary split over devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import cross_entropy_backward, exponentials, largest_logits, target_logits
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.products import Axes, Layer, LayerPlan, Shape, check_layouts, check_tokens
from tensor_parallelism.products.product import moved


@dataclass(frozen=True)
class CrossEntropySharding:
    """The layouts of ``logits`` [batch, sequence, vocabulary] and ``targets`` [batch, sequence], or of other lead dims.

    >>> CrossEntropySharding.vocabulary("tp", batch="dp").logits
    TensorSharding('dp', None, 'tp')

    ``TypeError`` if one is not a layout; ``ValueError`` for a layout with too few dims or a partial one.
    """

    logits: TensorSharding
    targets: TensorSharding

    def __post_init__(self) -> None:
        check_layouts(self, {"logits": 2, "targets": 1}, waits=())

    @classmethod
    def vocabulary(cls, axes: str | Axes, batch: str | Axes = (), sequence: str | Axes = ()) -> CrossEntropySharding:
        """The vocabulary over ``axes``, the tokens over ``batch`` and ``sequence``."""
        return cls(TensorSharding(batch, sequence, axes), TensorSharding(batch, sequence))

    @property
    def out(self) -> TensorSharding:
        """The layout of the loss, a scalar on every device."""
        return TensorSharding()


class Saved(NamedTuple):
    """The values that the backward needs: exp(logit - m) of each local logit, and s and the target of each token."""

    exponentials: Array
    sums: Array
    targets: Array
    shapes: list[Shape]
    dtype: np.dtype[Any]


class CrossEntropy(Layer):
    """``cluster.run(CrossEntropy(sharding), logits, targets).result`` is the mean loss, of all tokens on all devices.

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

    NAMES = ("logits", "targets")
    sharding: CrossEntropySharding

    def __init__(self, sharding: CrossEntropySharding) -> None:
        super().__init__(sharding, CrossEntropySharding)

    def forward(self, device: Device, *shards: Any) -> tuple[Array, Saved]:
        """The loss, from this device's shards of logits and targets."""
        (logits, targets), shapes, plan = self._arrived(device, *shards)
        check_tokens("targets", targets, shapes[0][-1])
        first, dtype = self._first(device, shapes), plan["largest"].dtype
        logits = logits.astype(dtype, copy=False)
        targets = moved(device, plan["targets"], targets.astype(np.int64, copy=False))
        largest = moved(device, plan["largest"], largest_logits(logits))
        with device.compute("cross-entropy", flops=3 * logits.size, nbytes=2 * logits.nbytes, dtype=dtype):
            exps = exponentials(logits, largest)
            local = exps.sum(axis=-1, dtype=dtype)
        sums = np.maximum(moved(device, plan["sums"], local), 1)      # as they are; 0 where a recorder moves nothing
        found = moved(device, plan["target_logits"], target_logits(logits, targets, first))
        losses = np.asarray((np.log(sums) + largest - found).sum(dtype=dtype))
        device.hold("activations", exps.nbytes)
        loss = moved(device, plan["loss"], losses) / dtype.type(targets_of(shapes))
        return np.asarray(loss), Saved(exps, sums, targets, shapes, dtype)

    def backward(self, device: Device, saved: Saved, grad: Any = 1.0) -> tuple[Array, None]:
        """The gradient of the logits in their layout, from that of the loss; that of the targets is None."""
        exps, sums, targets, shapes, _ = saved
        scale = np.asarray(grad)
        if scale.ndim:
            raise ValueError(f"the gradient of the loss is a number, got shape {scale.shape}")
        with device.compute("cross-entropy backward", flops=2 * exps.size, nbytes=2 * exps.nbytes, dtype=exps.dtype):
            found = cross_entropy_backward(
                exps, sums, targets, float(scale) / targets_of(shapes), self._first(device, shapes)
            )
        device.hold("activations", -exps.nbytes)
        return found, None

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> float:
        """The loss as a number."""
        return float(outputs[0])

    def _first(self, device: Device, shapes: list[Shape]) -> int:
        """The first entry of the vocabulary that this device has the logits of."""
        found: int = self.sharding.logits.slices(shapes[0], device.mesh, device.rank)[-1].start
        return found

    def _shapes(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        logits, targets = shapes["logits"], shapes["targets"]
        if len(logits) < 2 or logits[:-1] != targets:
            raise ValueError(f"targets are of the shape of the logits without the last dim, got logits of shape "
                             f"{logits} and targets of {targets}")
        if not prod(logits):
            raise ValueError(f"the mean over no tokens, or of no vocabulary, is not defined: logits of shape {logits}")
        return shapes

    def _check_values(self, *arrays: Array) -> None:
        logits, targets = arrays
        check_tokens("targets", targets, logits.shape[-1])

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh, dtype: np.dtype[Any]) -> LayerPlan:
        logits, tokens = shapes["logits"], shapes["targets"]
        *lead, last = self.sharding.logits.over(len(logits)).dims
        whole, over = TensorSharding(*lead), tuple(axis for dim in lead for axis in dim.axes)
        pending = {op: TensorSharding(*lead, partial=last.axes, op=op) for op in ("max", "sum")}
        number = TensorSharding(partial=over)
        return LayerPlan(
            f"loss = mean(-log softmax(logits)[target]), logits {logits}", mesh,
            (("targets", plan_resharding(self.sharding.targets, whole, tokens, np.int64, mesh)),
             ("largest", plan_resharding(pending["max"], whole, tokens, dtype, mesh)),
             ("sums", plan_resharding(pending["sum"], whole, tokens, dtype, mesh)),
             ("target_logits", plan_resharding(pending["sum"], whole, tokens, dtype, mesh)),
             ("loss", plan_resharding(number, TensorSharding(), (), dtype, mesh))),
            (),
        )


def targets_of(shapes: Sequence[Shape]) -> int:
    """How many tokens there are."""
    return prod(shapes[1])
