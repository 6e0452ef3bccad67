"""Named policies of sharding attention."""

from dataclasses import dataclass, fields
from enum import Enum
from typing import NamedTuple, Self

from parallelism.sharding import TensorSharding
from tensor_parallelism.products import Axes, AxisOrAxes, Sharding


class AttentionShardingPolicy(Enum):
    """The layouts of x[b, s, m], Wq[m, h, d], Wk[m, k, d], Wv[m, k, d], Wo[h, d, n] and y[b, s, n], and their moves.

    >>> from tensor_parallelism import AttentionSharding
    >>> AttentionSharding.megatron("tp").policy
    <AttentionShardingPolicy.MEGATRON: 'megatron'>

    h are the query heads, k the key-value heads.  T, C and D are mesh axes, or several together, and also their numbers
    of devices; D splits the batch (D = 1 if none does).  The mesh has no other axes.  |x| is the number of bytes of x,
    |q| that of all queries, |k| that of all keys (and of all values), |W| that of all weights.  The given bytes are
    received by all devices together, for extents that divide evenly; `AttentionPlan` has them by rank for any extents.
    Every policy sums the gradients of the weights over the axes of the rows, by all_reduces over D and C: 2 (D C - 1)
    |W| bytes, with C = 1 if there is none.
    """

    UNSHARDED = "unsharded"
    """x[bD, s, m] Wq[m, h, d] -> y[bD, s, n]: nothing but the batch is sharded.  0 bytes forward."""

    MEGATRON = "megatron"
    """x[bD, s, m] Wq[m, hT, d] Wk[m, kT, d] Wv[m, kT, d] Wo[hT, d, n] -> y[bD, s, n]: each device has some heads.

    Forward an all_reduce of y over T, 2 (T-1) |y| bytes.  Backward one of the gradient of x, 2 (T-1) |x|.  Shoeybi et
    al., *Megatron-LM*, 2019, arXiv:1909.08053, section 3.

    Wk and Wv may also be whole, Wk[m, k, d], if the query heads of a device need key-value heads of another.  Each
    device then computes the keys that it needs, and the gradients of Wk and Wv are summed over T, too.
    """

    SEQUENCE = "sequence"
    """x[bD, sT, m] Wq[m, hT, d] Wk[m, kT, d] Wv[m, kT, d] Wo[hT, d, n] -> y[bD, sT, n].

    Forward an all_gather of x over T, (T-1) |x| bytes, and a reduce_scatter of y, (T-1) |y|.  Backward an all_gather of
    the gradient of y, (T-1) |y|, and of x once more, (T-1) |x|, and a reduce_scatter of the gradient of x, (T-1) |x|.
    Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022, arXiv:2205.05198, section
    4.2.2.
    """

    RING = "ring"
    """x[bD, sC, m] Wq[m, h, d] -> y[bD, sC, n]: rows stay in place, keys and values move around a ring.

    Forward: C-1 shifts of a block of keys and values over C.  Each device receives (C-1)/C of them; together these are
    (C-1) 2 |k| bytes.  Backward: the blocks move back in C-1 shifts, and their gradients in C-1 more: (C-1) 4 |k|
    bytes.  A device holds two blocks at a time: the current one and the next one.  Liu et al., *Ring Attention with
    Blockwise Transformers*, 2023, arXiv:2310.01889.
    """

    ULYSSES = "ulysses"
    """x[bD, sC, m] Wq[m, h, d] -> y[bD, sC, n]: the layouts of RING; split rows become split heads and back.

    Forward: all_to_alls over C of queries, keys, values and the result, (C-1)/C (2 |q| + 2 |k|) bytes.  Backward: as
    many bytes, for their gradients.  Heads are split as by `numpy.array_split`.  A key-value head that several devices
    need is sent to each of them, so there may be fewer of these heads than devices.  Jacobs et al., *DeepSpeed
    Ulysses*, 2023, arXiv:2309.14509, section 3.
    """

    MEGATRON_RING = "megatron_ring"
    """x[bD, sC, m] Wq[m, hT, d] Wk[m, kT, d] Wv[m, kT, d] Wo[hT, d, n] -> y[bD, sC, n].

    MEGATRON splits the heads over T, and RING runs over C.  Forward: C-1 shifts, (C-1) 2 |k| bytes, and an all_reduce
    of y over T, 2 (T-1) |y|.  Backward: (C-1) 4 |k| and 2 (T-1) |x|.
    """


class AttentionSplit(NamedTuple):
    """The axes of the batch, the rows, the query heads and the key-value heads while the rows attend."""

    batch: Axes
    rows: Axes
    heads: Axes
    kv_heads: Axes


class PolicyLayouts:
    """The layouts of the policies: of attention (`AttentionSharding`) and of a whole block, whose hidden dim lies as
    the heads do."""

    @classmethod
    def split_over(cls, batch: AxisOrAxes, rows: AxisOrAxes, heads: AxisOrAxes, kv_heads: AxisOrAxes) -> Self:
        """The layouts with the batch, the sequence, the query heads and the key-value heads over these axes."""
        raise NotImplementedError

    @classmethod
    def unsharded(cls, batch: AxisOrAxes = ()) -> Self:
        """The layouts of the policy ``UNSHARDED``."""
        return cls.megatron((), batch)

    @classmethod
    def megatron(cls, axes: AxisOrAxes, batch: AxisOrAxes = (), *, whole_keys: bool = False) -> Self:
        """The layouts of the policy ``MEGATRON``: heads over ``axes``; with ``whole_keys`` not wk and wv."""
        return cls.split_over(batch, (), axes, () if whole_keys else axes)

    @classmethod
    def sequence(cls, axes: AxisOrAxes, batch: AxisOrAxes = (), *, whole_keys: bool = False) -> Self:
        """The layouts of the policy ``SEQUENCE``: heads and sequence over ``axes``; with ``whole_keys`` not wk and wv."""
        return cls.split_over(batch, axes, axes, () if whole_keys else axes)

    @classmethod
    def ring(cls, axes: AxisOrAxes, batch: AxisOrAxes = ()) -> Self:
        """The layouts of the policies ``RING`` and ``ULYSSES``: the sequence over ``axes``."""
        return cls.split_over(batch, axes, (), ())

    @classmethod
    def megatron_ring(
        cls, heads: AxisOrAxes, rows: AxisOrAxes, batch: AxisOrAxes = (), *, whole_keys: bool = False
    ) -> Self:
        """The layouts of the policy ``MEGATRON_RING``: heads over ``heads``, sequence over ``rows``; with
        ``whole_keys``, wk and wv are whole."""
        return cls.split_over(batch, rows, heads, () if whole_keys else heads)


@dataclass(frozen=True)
class AttentionSharding(PolicyLayouts, Sharding, ndims=(3,) * 6, exactly=True):
    """The layouts of attention: of ``x``, ``wq``, ``wk``, ``wv``, ``wo`` and ``out`` (y).

    x and y are [batch, sequence, model], wq is [model, heads, head_dim], wk and wv are [model, kv_heads, head_dim], wo
    is [heads, head_dim, model].  `unsharded`, `megatron`, `sequence`, `ring` and `megatron_ring` return the layouts of
    the policies; ULYSSES has those of RING.  ``ValueError`` for layouts that belong to no policy.

    >>> AttentionSharding.megatron("tp").wq, AttentionSharding.megatron_ring("tp", "cp", batch="dp").policy.name
    (TensorSharding(None, 'tp', None), 'MEGATRON_RING')
    """

    x: TensorSharding
    wq: TensorSharding
    wk: TensorSharding
    wv: TensorSharding
    wo: TensorSharding
    out: TensorSharding

    def __post_init__(self) -> None:
        super().__post_init__()
        batch, rows, heads, kv_heads = axes = self._named_axes
        if (
            tuple(getattr(self, field.name) for field in fields(self)) != _layouts(*axes)
            or kv_heads not in (heads, ())
            or {*batch} & {*heads}
            or ({*rows} & {*heads} and rows != heads)
        ):
            raise ValueError(
                f"these are the layouts of no AttentionShardingPolicy: {self!r}; x is split along batch and sequence, "
                f"out as x; wq and wo along their heads, by the same axes, wk and wv so or not at all; the sequence "
                f"and the heads by the same axes or by different ones"
            )

    @classmethod
    def split_over(cls, batch: AxisOrAxes, rows: AxisOrAxes, heads: AxisOrAxes, kv_heads: AxisOrAxes) -> Self:
        return cls(*_layouts(batch, rows, heads, kv_heads))

    @property
    def policies(self) -> tuple[AttentionShardingPolicy, ...]:
        """The policies that have these layouts."""
        _, rows, heads, _ = self._named_axes
        policy = AttentionShardingPolicy
        return {
            (False, False): (policy.UNSHARDED,),
            (False, True): (policy.MEGATRON,),
            (True, False): (policy.RING, policy.ULYSSES),
            (True, True): (policy.SEQUENCE if rows == heads else policy.MEGATRON_RING,),
        }[bool(rows), bool(heads)]

    @property
    def policy(self) -> AttentionShardingPolicy:
        """The first of the policies: RING, where ULYSSES is possible, too."""
        return self.policies[0]

    @property
    def split(self) -> AttentionSplit:
        """The axes of each of them while the rows attend; for ULYSSES, before the exchange."""
        batch, rows, heads, kv_heads = self._named_axes
        return AttentionSplit(batch, () if rows == heads else rows, heads, kv_heads)

    @property
    def _named_axes(self) -> AttentionSplit:
        batch, rows, _ = (dim.axes for dim in self.x.dims)
        return AttentionSplit(batch, rows, self.wq.dims[1].axes, self.wk.dims[1].axes)


def _layouts(
    batch: AxisOrAxes, rows: AxisOrAxes, heads: AxisOrAxes, kv_heads: AxisOrAxes
) -> tuple[TensorSharding, ...]:
    """The layouts of x, wq, wk, wv, wo and y."""
    x = TensorSharding(batch, rows, None)
    keys = TensorSharding(None, kv_heads, None)
    return x, TensorSharding(None, heads, None), keys, keys, TensorSharding(heads, None, None), x
