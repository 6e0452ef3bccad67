"""`Embedding`: y[b, s, m] = table[tokens[b, s], m], the table split by vocabulary, by model dim, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import lookup, lookup_backward
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.products import Axes, Layer, LayerPlan, Shape, check_gradient, check_layouts, check_tokens
from tensor_parallelism.products.product import moved


@dataclass(frozen=True)
class EmbeddingSharding:
    """The layouts of ``tokens`` [batch, sequence] (any number of dims), ``table`` [vocabulary, model] and ``out``.

    >>> EmbeddingSharding.vocabulary("tp", batch="dp").table
    TensorSharding('tp', None)

    ``TypeError`` for what is no layout; ``ValueError`` for one of too few dims, and for a partial one but of ``out``.
    """

    tokens: TensorSharding
    table: TensorSharding
    out: TensorSharding

    def __post_init__(self) -> None:
        check_layouts(self, {"tokens": 1, "table": 2, "out": 2}, waits=("out",))

    @classmethod
    def vocabulary(cls, axes: str | Axes, batch: str | Axes = (), sequence: str | Axes = ()) -> EmbeddingSharding:
        """The vocabulary over ``axes``; ``sequence`` (``axes``, say) splits that dim of the output."""
        return cls(TensorSharding(batch, None), TensorSharding(axes, None), TensorSharding(batch, sequence, None))


class Saved(NamedTuple):
    """What the backward needs: the tokens that this device looked up, and the shapes of tokens and table."""

    tokens: Array
    shapes: list[Shape]
    dtype: np.dtype[Any]


class Embedding(Layer):
    """``cluster.run(Embedding(sharding), tokens, table).result`` is ``table[tokens]``.

    The table stays in place.  Every device looks up the tokens whose rows it has, and uses zeros for the others.  The
    sum over the axes of the vocabulary is pending until the output is resharded to its layout.  `backward` returns
    ``(None, gradient of the table)``, because tokens have no gradient.

    **Communication**, for a vocabulary over V and a batch over D axes of so many devices, summed over the devices:
    forward an all_reduce of y over V, 2 (V-1) |y| bytes, or, if ``out`` is split over V, a reduce_scatter, (V-1) |y|;
    nothing for a table split by model dim, if the output is as well.  Backward nothing, or an all_gather of the
    gradient, (V-1) |y|; and an all_reduce of the table's over D, 2 (D-1) |table|.
    ``print(operation.plan((tokens.shape, table.shape), mesh))``.  Shoeybi et al., *Megatron-LM*, 2019,
    arXiv:1909.08053, section 3.

    The host raises, before anything is sent, ``TypeError`` for tokens that are not integers, and ``ValueError`` for a
    token outside the vocabulary, and for arrays whose shapes do not fit each other, their layouts or the mesh.
    """

    NAMES = ("tokens", "table")
    sharding: EmbeddingSharding

    def __init__(self, sharding: EmbeddingSharding) -> None:
        super().__init__(sharding, EmbeddingSharding)

    def forward(self, device: Device, *shards: Any) -> tuple[Array, Saved]:
        """This device's shard of y, from those of tokens and table."""
        (tokens, table), shapes, plan = self._arrived(device, *shards)
        check_tokens("tokens", tokens, shapes[1][0])
        tokens = moved(device, plan["tokens"], tokens.astype(np.int64, copy=False))
        dtype = plan["out"].dtype
        with device.compute("embedding", nbytes=2 * tokens.size * table.shape[1] * dtype.itemsize, dtype=dtype):
            found = lookup(table.astype(dtype, copy=False), tokens, self._first(device, shapes))
        return moved(device, plan["out"], found), Saved(tokens, shapes, dtype)

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[None, Array]:
        """The gradient of the table in its layout, from that of y in its layout; that of the tokens is None."""
        tokens, shapes, dtype = saved
        plan = self.plan(shapes, device.mesh, dtype)
        grad = check_gradient(device, grad, self.sharding.out, plan["out"].shape)
        grad = moved(device, plan["grad"], grad)
        rows, _ = self.sharding.table.local_shape(shapes[1], device.mesh, device.rank)
        with device.compute("embedding backward", flops=grad.size, nbytes=2 * grad.nbytes, dtype=grad.dtype):
            found = lookup_backward(grad, tokens, rows, self._first(device, shapes))
        return None, moved(device, plan["table_grad"], found)

    def _first(self, device: Device, shapes: list[Shape]) -> int:
        """The first row of the table that this device holds."""
        found: int = self.sharding.table.slices(shapes[1], device.mesh, device.rank)[0].start
        return found

    def _shapes(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        tokens, table = shapes["tokens"], shapes["table"]
        if not tokens or len(table) != 2:
            raise ValueError(f"tokens are of at least 1 dim and the table of 2, got shapes tokens {tokens} and "
                             f"table {table}")
        return {**shapes, "out": (*tokens, table[1])}

    def _check_values(self, *arrays: Array) -> None:
        tokens, table = arrays
        check_tokens("tokens", tokens, table.shape[0])

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh, dtype: np.dtype[Any]) -> LayerPlan:
        tokens, table = shapes["tokens"], shapes["table"]
        ndim, out_shape = len(tokens), (*tokens, table[1])
        layout, out = self.sharding.table.over(2), self.sharding.out.over(ndim + 1)
        vocabulary, model = (dim.axes for dim in layout.dims)
        lead = [tuple(axis for axis in dim.axes if axis not in layout.axes) for dim in out.dims[:-1]]
        over = tuple(axis for axes in lead for axis in axes)
        found, whole = (TensorSharding(*lead, model, partial=pending) for pending in (vocabulary, ()))
        return LayerPlan(
            f"y[..., m] = table[tokens[...], m], tokens {tokens}, table {table}", mesh,
            (("tokens", plan_resharding(self.sharding.tokens, TensorSharding(*lead), tokens, np.int64, mesh)),
             ("out", plan_resharding(found, out, out_shape, dtype, mesh))),
            (("grad", plan_resharding(out, whole, out_shape, dtype, mesh)),
             ("table_grad", plan_resharding(TensorSharding(vocabulary, model, partial=over), layout, table, dtype,
                                            mesh))),
        )
