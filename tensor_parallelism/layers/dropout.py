"""`Dropout`: the same elements are kept on every mesh and in every layout."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array, Bools
from parallelism.dtypes import is_floating
from parallelism.kernels import dropout, dropout_mask
from parallelism.mesh import Mesh
from parallelism.operation import Device, ShardedOperation
from parallelism.sharding import TensorSharding

LARGEST = 2**64


Saved = Bools | None
"""A mask of the elements of this device's shard that are kept; None if all are."""


class Dropout(ShardedOperation):
    """``cluster.run(Dropout(layout, rate, seed), x, step).result``: x / (1 - rate) for kept elements, 0 elsewhere.

    >>> import numpy as np
    >>> from parallelism import TensorSharding
    >>> from tensor_parallelism import Dropout
    >>> from vcluster import VirtualCluster
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     cluster.run(Dropout(TensorSharding("tp"), 0.5, seed=1), np.ones(8)).result
    array([0., 2., 0., 2., 0., 2., 2., 0.])

    Whether an element is kept depends only on ``seed``, ``step`` (default 0) and its position in the whole x: see
    `parallelism.kernels.dropout_mask`.  Give the layers of a network different seeds.  The layout may have a pending
    sum: its terms lose the same elements.  `backward` returns ``(gradient of x,)``.

    **Communication**: none.

    **Memory**: ``activations`` hold the mask, a byte an element, until the backward, as Korthikanti et al., 2022,
    arXiv:2205.05198, section 4.1, count it.

    ``ValueError`` for a rate outside [0, 1), for a seed or a step that is no integer from 0 to 2**64 - 1, and for x
    that does not fit the layout; ``TypeError`` for x that holds no floating point numbers.
    """

    sharding: TensorSharding

    def __init__(self, sharding: TensorSharding, rate: float, seed: int = 0) -> None:
        if not isinstance(sharding, TensorSharding):
            raise TypeError(f"Dropout takes a TensorSharding, got {sharding!r}")
        if sharding.op != "sum":
            raise ValueError(
                f"the layout of Dropout may have a pending sum, but no other pending reduction; got {sharding!r}"
            )
        if not 0 <= rate < 1:
            raise ValueError(f"the rate of Dropout must be at least 0 and below 1, got {rate!r}")
        super().__init__(sharding)
        self.rate = rate
        self.seed = counted("seed", seed)

    def __repr__(self) -> str:
        return f"Dropout({self.sharding!r}, rate={self.rate}, seed={self.seed})"

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The shard of x and the step, by rank."""
        x, step = _arguments(*args)
        try:
            return [(shard, step) for shard in self.sharding.shard(x, mesh)]
        except ValueError as error:
            raise ValueError(f"x of shape {x.shape} and {self.sharding!r}: {error}") from None

    def forward(
        self,
        device: Device,
        *shards: Any,
        shape: tuple[int, ...] | None = None,
        rows: npt.NDArray[np.intp] | None = None,
    ) -> tuple[Array, Saved]:
        """This device's shard of the output, given its shard of x, and the step.

        ``shape`` is the shape of the whole x; if it is not given, the devices agree on it.  ``rows`` are the places along
        dim 1 of what this device holds; they are given where rows are dealt in another order than the layout's.
        """
        x, step = _arguments(*shards)
        if not self.rate:
            return x.copy(), None
        if shape is None:
            shape = device.global_shape(x, self.sharding)
        with device.compute("dropout", flops=x.size, nbytes=2 * x.nbytes, dtype=x.dtype):
            block: list[Any] = list(self.sharding.slices(shape, device.mesh, device.rank))
            if rows is not None:
                block[1] = rows
            mask = dropout_mask(self.rate, self.seed, step, shape, block)
            y = dropout(x, mask, self.rate)
        device.hold("activations", mask.nbytes)
        return y, mask

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[Array]:
        """The gradient of x, from that of the output, both in the layout."""
        grad = np.asarray(grad)
        if saved is None:
            return (grad.copy(),)
        if grad.shape != saved.shape:
            raise ValueError(
                f"the gradient of y is of the shape of its shard, {saved.shape} on rank "
                f"{device.rank}, got {grad.shape}"
            )
        with device.compute("dropout backward", flops=grad.size, nbytes=2 * grad.nbytes, dtype=grad.dtype):
            found = dropout(grad, saved, self.rate)
        device.hold("activations", -saved.nbytes)
        return (found,)

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Array:
        """The whole of the output."""
        return self.sharding.unshard(outputs, mesh)


def _arguments(x: Any = None, step: Any = 0, *more: Any) -> tuple[Array, int]:
    if x is None or more:
        raise TypeError(
            f"Dropout takes x and, if it likes, a step, got {2 + len(more) if more else 'nothing'}"
        )
    array = np.asarray(x)
    if not is_floating(array.dtype):
        raise TypeError(f"Dropout takes floating point numbers, got {array.dtype}")
    return array, counted("step", step)


def counted(name: str, number: Any) -> int:
    """A seed or a step; ``ValueError`` for what is none."""
    if isinstance(number, bool) or not hasattr(number, "__index__") or not 0 <= number.__index__() < LARGEST:
        raise ValueError(f"the {name} of Dropout is an integer from 0 to 2**64 - 1, got {number!r}")
    return int(number.__index__())
