"""`Embedding`: y[b, s, m] = table[tokens[b, s], m], the table split by vocabulary, by model dim, or not at all."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import lookup, lookup_backward
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.sharding import TensorSharding
from tensor_parallelism.products import (
    AxisOrAxes,
    Layer,
    LayerPlan,
    Moving,
    Shape,
    Sharding,
    check_shard,
    check_tokens,
    moved,
)
from tensor_parallelism.products.product import without


@dataclass(frozen=True)
class EmbeddingSharding(Sharding, ndims=(1, 2, 2), waits=("out",)):
    """The layouts of ``tokens`` [batch, sequence] (any number of dims), ``table`` [vocabulary, model] and ``out``.

    >>> EmbeddingSharding.vocabulary("tp", batch="dp").table
    TensorSharding('tp', None)

    ``TypeError`` for what is no layout; ``ValueError`` for one of too few dims, and for a partial one but of ``out``.
    """

    tokens: TensorSharding
    table: TensorSharding
    out: TensorSharding

    @classmethod
    def vocabulary(cls, axes: AxisOrAxes, batch: AxisOrAxes = (), sequence: AxisOrAxes = ()) -> Self:
        """The vocabulary over ``axes``; ``sequence`` (``axes``, say) splits that dim of the output."""
        return cls(
            TensorSharding(batch, None), TensorSharding(axes, None), TensorSharding(batch, sequence, None)
        )


Saved = tuple[Array, LayerPlan]
"""What the backward needs: the tokens that this device looked up, and the plan."""


class Embedding(Layer[EmbeddingSharding]):
    """``cluster.run(Embedding(sharding), tokens, table).result`` is ``table[tokens]``.

    >>> import numpy as np
    >>> from tensor_parallelism import Embedding, EmbeddingSharding
    >>> from vcluster import VirtualCluster
    >>> table = np.arange(12.0).reshape(6, 2)
    >>> with VirtualCluster(tp=3, backend="thread") as cluster:
    ...     cluster.run(Embedding(EmbeddingSharding.vocabulary("tp")), np.array([[5, 0]]), table).result.tolist()
    [[[10.0, 11.0], [0.0, 1.0]]]

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

    KIND = EmbeddingSharding
    NAMES = ("tokens", "table")

    def forward(self, device: Device, *shards: Any) -> tuple[Array, Saved]:
        """This device's shard of y, from those of tokens and table."""
        (tokens, table), plan = self._arrived(device, *shards)
        check_tokens("tokens", tokens, plan.shapes[1][0])
        tokens = moved(device, plan["tokens"], tokens.astype(np.int64, copy=False))
        nbytes = 2 * tokens.size * table.shape[1] * plan.dtype.itemsize
        with device.compute("embedding", nbytes=nbytes, dtype=plan.dtype):
            found = lookup(table.astype(plan.dtype, copy=False), tokens, self._rows(device, plan).start)
        return moved(device, plan["out"], found), (tokens, plan)

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[None, Array]:
        """The gradient of the table in its layout, from that of y in its layout; that of the tokens is None."""
        tokens, plan = saved
        grad = moved(device, plan["grad"], check_shard(device, grad, self.sharding.out, plan["out"].shape))
        rows = self._rows(device, plan)
        with device.compute("embedding backward", flops=grad.size, nbytes=2 * grad.nbytes, dtype=grad.dtype):
            found = lookup_backward(grad, tokens, rows.stop - rows.start, rows.start)
        return None, moved(device, plan["table_grad"], found)

    def _rows(self, device: Device, plan: LayerPlan) -> slice:
        """The rows of the table that this device holds."""
        return self.sharding.table.slices(plan.shapes[1], device.mesh, device.rank)[0]

    def _shapes(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        tokens, table = shapes["tokens"], shapes["table"]
        if not tokens or len(table) != 2:
            raise ValueError(
                f"tokens are of at least 1 dim and the table of 2, got shapes tokens {tokens} and "
                f"table {table}"
            )
        return {**shapes, "out": (*tokens, table[1])}

    def _check_values(self, *arrays: Array) -> None:
        tokens, table = arrays
        check_tokens("tokens", tokens, table.shape[0])

    def _moves(self, shapes: dict[str, Shape], mesh: Mesh) -> Moving:
        tokens, table = shapes["tokens"], shapes["table"]
        layout = self.sharding.table.over(2)
        out = self.sharding.out
        out_shape = (*tokens, table[1])
        vocabulary, model = (dim.axes for dim in layout.dims)
        *dims, _ = out.over(len(out_shape)).dims
        lead = [without(dim.axes, layout.axes) for dim in dims]
        found, whole = (TensorSharding(*lead, model, partial=pending) for pending in (vocabulary, ()))
        forward = {
            "tokens": (self.sharding.tokens, TensorSharding(*lead), tokens, np.int64),
            "out": (found, out, out_shape),
        }
        backward = {
            "grad": (out, whole, out_shape),
            "table_grad": (
                TensorSharding(vocabulary, model, partial=TensorSharding(*lead).axes),
                layout,
                table,
            ),
        }
        return f"y[..., m] = table[tokens[...], m], tokens {tokens}, table {table}", forward, backward
