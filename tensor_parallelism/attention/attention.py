"""`Attention`: multi-head and grouped-query attention on sharded tensors, forward and backward."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.dtypes import common_dtype, is_floating
from parallelism.kernels import Mask, rotate, rotate_backward
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.resharding import ReshardingPlan
from tensor_parallelism.attention.blocks import ACTIVATIONS, GATHERED
from tensor_parallelism.attention.plan import NAMES, AttentionPlan, AttentionShapes
from tensor_parallelism.attention.policies import AttentionSharding, AttentionShardingPolicy
from tensor_parallelism.attention.ring import RingKept, ring_forward
from tensor_parallelism.attention.shares import zigzag_order
from tensor_parallelism.attention.ulysses import UlyssesKept, ulysses_forward
from tensor_parallelism.products import Contraction, DType, PlannedOperation, Shape, check_shard, moved

INTO, OUT_OF = Contraction("bsm", "mhd", "bshd"), Contraction("bshd", "hdm", "bsm")
"""The product with the joined Wq, Wk and Wv, and the product with Wo."""
OF_WEIGHTS = Contraction("bshd", "bsm", "hdm")
"""The product for the gradients of Wq, Wk and Wv: heads come first, so that each gradient is contiguous."""
JOINED = "joined weights"
RINGS = (AttentionShardingPolicy.RING, AttentionShardingPolicy.MEGATRON_RING)


Saved = tuple[Array, Sequence[Array], RingKept | UlyssesKept, AttentionPlan]
"""What the backward needs of the forward: x, the weights, what the way to attend keeps, and the plan."""


class Attention(PlannedOperation[AttentionSharding, AttentionPlan]):
    """``cluster.run(Attention(sharding), x, wq, wk, wv, wo).result`` is softmax(q k^T / sqrt(d)) v Wo, head by head.

    >>> import numpy as np
    >>> from tensor_parallelism import Attention, AttentionSharding
    >>> from vcluster import VirtualCluster
    >>> x, wq, wo = np.ones((2, 3, 8)), np.ones((8, 4, 2)), np.ones((4, 2, 8))
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     cluster.run(Attention(AttentionSharding.megatron("tp")), x, wq, wq, wq, wo).result.shape
    (2, 3, 8)

    q = x Wq, k = x Wk and v = x Wv; x is (batch, sequence, model), Wq is (model, heads, head_dim), Wk and Wv are
    (model, kv_heads, head_dim), Wo is (heads, head_dim, model).  With fewer key-value heads than query heads, each of
    them serves ``heads / kv_heads`` consecutive query heads (grouped queries).  With ``causal`` a row attends to no
    later row, with a ``window`` only to the last so many rows up to its own.  The default ``policy`` is the first that
    the layouts allow: RING, where ULYSSES is possible, too.
    ``print(operation.plan((x.shape, wq.shape, wk.shape, wv.shape, wo.shape), mesh))`` shows what will run.

    ``zigzag`` balances a causal ring: the rows of x, of the result and of their gradients are in `zigzag_order`, so
    that every device computes equally much.  The host reorders x and the result.  A caller of `forward` passes shards
    of ``x[:, zigzag_order(sequence, devices)]``.  Without it, a ring skips blocks that are masked completely, and its
    first devices wait for its last.

    ``rotary_base`` (10000 in the paper) rotates queries and keys by an angle proportional to their position in the
    sequence (`parallelism.kernels.rotate`), on any device and in any order of rows.  The head_dim must then be even.

    **Communication**: see `AttentionShardingPolicy`.  ``plan(...).bytes_received`` and
    ``plan(...).backward_bytes_received`` are indexed by rank.

    **Memory**, by `Device.hold`.  From the forward to the end of the backward: ``activations`` (the shard of x, the
    queries, and the attention output; under ULYSSES the output twice, by heads and by rows), ``keys and values``, and
    ``softmax statistics``, one number for each row and head.  Temporarily: ``scores``, ``gathered`` x, ``gradients of
    keys and values``, and ``joined weights``, Wq, Wk and Wv in one array.  The first two are five arrays of the size
    of x if all heads together are as wide as the model: 10 of the 11 s b h bytes that Korthikanti et al., 2022,
    arXiv:2205.05198, section 4.1, count for elements of two bytes (the other is a dropout mask).  Their 5 a s^2 b bytes
    of scores are recomputed in the backward.

    ``ValueError`` at construction for a policy that the layouts do not allow, and for a zigzag without a causal ring.
    The host raises it before anything is sent for arrays whose shapes do not fit each other, their layouts or the mesh,
    and for heads that cannot be split.
    """

    KIND = AttentionSharding
    NAMES = NAMES

    def __init__(
        self,
        sharding: AttentionSharding,
        policy: AttentionShardingPolicy | None = None,
        *,
        causal: bool = False,
        window: int | None = None,
        zigzag: bool = False,
        rotary_base: float | None = None,
    ) -> None:
        super().__init__(sharding)
        self.mask = Mask(bool(causal), window)
        self.policy = wanted = self._allowed(policy, AttentionShardingPolicy, sharding.policies)
        if zigzag and not (causal and wanted in RINGS):
            raise ValueError(
                f"zigzag is an order of the rows of causal ring attention, got policy={wanted.name} and "
                f"causal={causal}"
            )
        if rotary_base is not None and not rotary_base > 0:
            raise ValueError(f"rotary_base must be above 0, got {rotary_base!r}")
        self.zigzag = bool(zigzag)
        self.rotary_base = rotary_base

    def __repr__(self) -> str:
        rotary = "" if self.rotary_base is None else f", rotary_base={self.rotary_base}"
        window = "" if self.mask.window is None else f", window={self.mask.window}"
        return (
            f"Attention({self.sharding!r}, {self.policy}, causal={self.causal}{window}, zigzag={self.zigzag}"
            f"{rotary})"
        )

    @property
    def causal(self) -> bool:
        """Whether a row attends to no later row."""
        return self.mask.causal

    def forward(
        self, device: Device, *shards: Any, shapes: Iterable[Shape] | None = None
    ) -> tuple[Array, Saved]:
        """This device's shard of the result, from its shards of x, Wq, Wk, Wv and Wo.

        ``shapes`` are the shapes of the whole arrays; if they are not given, the devices exchange them.
        """
        arrays, plan = self._arrived(device, *shards, shapes=shapes)
        x, *weights = (array.astype(plan.dtype, copy=False) for array in arrays)
        with _gathered(device, plan, x) as rows, _joined(device, plan, *weights[:3]) as joined:
            made = _apart(INTO.run(device, rows, joined), weights[0].shape[1], 2)
        del rows, joined
        if self.rotary_base is not None:
            made[:2] = (rotate(one, plan.rows(device.rank), self.rotary_base) for one in made[:2])
            made[2] = made[2].copy()  # and what it was a part of can go
        device.hold(ACTIVATIONS, x.nbytes)
        kept = ulysses_forward(device, plan, made) if plan.is_ulysses else ring_forward(device, plan, made)
        return _moved_product(device, plan.moves["out"], OUT_OF, kept.mixed, weights[3]), (
            x,
            weights,
            kept,
            plan,
        )

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[Array, ...]:
        """The gradients of x, Wq, Wk, Wv and Wo in their layouts, given that of the result in its layout.

        For a ring, call it only once for each forward.
        """
        x, weights, kept, plan = saved
        grad = check_shard(device, grad, self.sharding.out, plan.shapes.out)
        grad = moved(device, plan.moves["grad"], grad.astype(plan.dtype, copy=False))
        wo_grad = _moved_product(device, plan.moves["wo_grad"], OUT_OF.rhs_gradient, kept.mixed, grad)
        made = kept.backward(device, plan, OUT_OF.lhs_gradient.run(device, grad, weights[3]))
        queries = len(plan.heads[device.rank].queries)
        if self.rotary_base is not None:
            for part in _apart(made, queries, 2)[:2]:
                part[...] = rotate_backward(part, plan.rows(device.rank), self.rotary_base)
        moves = [plan.moves[f"{name}_grad"] for name in NAMES[1:4]]
        with _gathered(device, plan, x) as rows:
            whole = OF_WEIGHTS.run(device, made, rows, shared=any(move.steps for move in moves))
            terms = [term.transpose(2, 0, 1) for term in _apart(whole, queries, 0)]
            if plan.whole_keys:
                mine = plan.kv_slice(device.rank)
                held = moves[1].held[device.rank]
                terms[1:] = (_placed(term, held, mine) for term in terms[1:])
            weight_grads = [
                moved(device, move, term, spent=True) for move, term in zip(moves, terms, strict=True)
            ]
            with _joined(device, plan, *weights[:3]) as joined:
                x_grad = INTO.lhs_gradient.run(device, made, joined, shared=bool(plan.moves["x_grad"].steps))
        device.hold(ACTIVATIONS, -x.nbytes)
        return moved(device, plan.moves["x_grad"], x_grad, spent=True), *weight_grads, wo_grad

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Array:
        """The whole result, with its rows in the original order."""
        found: Array = super().result(mesh, outputs)
        return found[:, np.argsort(self._order(found.shape[1], mesh))] if self.zigzag else found

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: DType) -> AttentionPlan:
        if len(shapes) != len(NAMES):
            raise ValueError(f"a plan is for the shapes of {', '.join(NAMES)}, got {len(shapes)} shapes")
        found = AttentionShapes(*shapes)
        if self.rotary_base is not None and found.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of features, got wq of shape {found.wq} with a head_dim of "
                f"{found.head_dim}"
            )
        self._check_shapes({name: getattr(found, name) for name in (*NAMES, "out")}, mesh)
        return AttentionPlan(self.sharding, self.policy, self.mask, self.zigzag, found, dtype, mesh)

    def _dtype(self, arrays: Sequence[Array]) -> DType:
        """The dtype of the computation: integers become float64."""
        found = common_dtype(*(array.dtype for array in arrays))
        if found.kind not in "biuf" and not is_floating(found):
            raise TypeError(f"attention is of real numbers, got arrays whose common dtype is {found}")
        return found if is_floating(found) else np.dtype(np.float64)

    def _shards(self, mesh: Mesh, arrays: Sequence[Array]) -> list[tuple[Any, ...]]:
        x, *weights = arrays
        return super()._shards(mesh, [self.ordered(x, mesh), *weights])

    def ordered(self, x: Array, mesh: Mesh) -> Array:
        """The whole x with its rows in the order in which they are split."""
        return x[:, self._order(x.shape[1], mesh)] if self.zigzag else x

    def _order(self, sequence: int, mesh: Mesh) -> npt.NDArray[np.intp]:
        return zigzag_order(sequence, [mesh.shape[axis] for axis in self.sharding.split.rows])


def _moved_product(device: Device, plan: ReshardingPlan, product: Contraction, a: Array, b: Array) -> Array:
    return moved(device, plan, product.run(device, a, b, shared=bool(plan.steps)), spent=True)


@contextmanager
def _gathered(device: Device, plan: AttentionPlan, x: Array) -> Iterator[Array]:
    """The rows of x that this device multiplies."""
    rows = moved(device, plan.moves["x"], x)
    move = bool(plan.moves["x"].steps)
    if move:
        device.hold(GATHERED, rows.nbytes)
    yield rows
    if move:
        device.hold(GATHERED, -rows.nbytes)


@contextmanager
def _joined(device: Device, plan: AttentionPlan, wq: Array, wk: Array, wv: Array) -> Iterator[Array]:
    """Wq, Wk and Wv in one array: one product of three times the width is faster than three products."""
    mine = plan.kv_slice(device.rank)
    joined = np.concatenate((wq, wk[:, mine], wv[:, mine]), axis=1)
    device.hold(JOINED, joined.nbytes)
    yield joined
    device.hold(JOINED, -joined.nbytes)


def _apart(joined: Array, queries: int, dim: int) -> list[Array]:
    """The parts for queries, keys and values of an array with all heads along ``dim``."""
    keys = (joined.shape[dim] - queries) // 2
    return np.split(joined, [queries, queries + keys], axis=dim)


def _placed(part: Array, shape: tuple[int, ...], heads: slice) -> Array:
    """The gradient of some heads, extended to all heads with zeros."""
    whole = np.zeros(shape, part.dtype)
    whole[:, heads] = part
    return whole
