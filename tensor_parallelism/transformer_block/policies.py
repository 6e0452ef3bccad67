"""Named policies of sharding a block of a Transformer."""

from dataclasses import dataclass, fields
from enum import Enum
from typing import Self

from parallelism.sharding import TensorSharding
from tensor_parallelism.attention import AttentionSharding, AttentionShardingPolicy, PolicyLayouts
from tensor_parallelism.feed_forward import FeedForwardSharding
from tensor_parallelism.products import AxisOrAxes, Sharding

WHOLE = TensorSharding(None)
NORMS = ("norm1", "norm1_bias", "norm2", "norm2_bias")


class TransformerBlockPolicy(Enum):
    """The layouts of a block, equal for x[b, s, m] and y[b, s, m], and the communication.

    >>> from tensor_parallelism import TransformerBlockSharding
    >>> TransformerBlockSharding.megatron("tp").policy
    <TransformerBlockPolicy.MEGATRON: 'megatron'>

    T, C and D are mesh axes, or several together, and also their numbers of devices; D splits the batch (D = 1 if none
    does).  The mesh has no other axes.  |x| is the number of bytes of x, |k| that of all keys (and of all values), |q|
    that of all queries, |W| that of all weights.  The given bytes are received by all devices together, for extents
    that divide evenly.  If devices have different rows, all_reduces also sum the gradients of the weights they share.
    """

    UNSHARDED = "unsharded"
    """x[bD, s, m]: nothing but the batch is sharded.  Forward nothing moves, backward 2 (D-1) |W| bytes."""

    MEGATRON = "megatron"
    """x[bD, s, m], heads and hidden dim over T.

    Forward two all_reduces over T of an activation, 4 (T-1) |x| bytes, and two backward, as many.  Norms, dropout and
    residual additions are computed alike on all devices of T.  Shoeybi et al., *Megatron-LM*, 2019, arXiv:1909.08053,
    section 3.
    """

    SEQUENCE = "sequence"
    """x[bD, sT, m], heads and hidden dim over T, and between them the rows.

    Forward two all_gathers and two reduce_scatters, 4 (T-1) |x| bytes, those of MEGATRON.  Backward as many, and two
    all_gathers more, 2 (T-1) |x|, since the inputs of the products are kept as shards and gathered again.  Over T the
    gradients of the norms' parameters are added up, too.  Korthikanti et al., *Reducing Activation Recomputation in
    Large Transformer Models*, 2022, arXiv:2205.05198, section 4.2.2.
    """

    RING = "ring"
    """x[bD, sC, m], the weights whole: keys and values go round a ring of C.

    Forward C-1 shifts, (C-1) 2 |k| bytes; backward twice as many; and over D and C 2 (D C - 1) |W|.  Liu et al., *Ring
    Attention with Blockwise Transformers*, 2023, arXiv:2310.01889.
    """

    ULYSSES = "ulysses"
    """x[bD, sC, m], the weights whole, the layouts of RING: from rows to heads and back.

    Forward four all_to_alls, (C-1)/C (2 |q| + 2 |k|) bytes; backward as many; and the gradients of the weights as in
    RING.  Jacobs et al., *DeepSpeed Ulysses*, 2023, arXiv:2309.14509, section 3.
    """

    MEGATRON_RING = "megatron_ring"
    """x[bD, sC, m], heads and hidden dim over T: MEGATRON over T and RING over C."""


@dataclass(frozen=True)
class TransformerBlockSharding(
    PolicyLayouts, Sharding, ndims=(3, 1, 1, 3, 3, 3, 3, 1, 1, 2, 1, 2, 1, 3), exactly=True
):
    """The layouts of a block: of ``x``, ``out`` (y) and all weights.

    x and y are [batch, sequence, model]; ``norm1``, ``norm1_bias``, ``norm2``, ``norm2_bias`` and ``b2`` are [model]
    and whole; ``wq``, ``wk``, ``wv`` and ``wo`` are those of `AttentionSharding`; ``w1``, ``b1`` and ``w2`` are those
    of `FeedForwardSharding`.  `unsharded`, `megatron`, `sequence`, `ring` and `megatron_ring` return the layouts of the
    policies; `ulysses` has those of `ring`.  ``ValueError`` for layouts that belong to no policy.

    >>> TransformerBlockSharding.megatron("tp").w1, TransformerBlockSharding.ring("cp", batch="dp").policy.name
    (TensorSharding(None, 'tp'), 'RING')
    """

    x: TensorSharding
    norm1: TensorSharding
    norm1_bias: TensorSharding
    wq: TensorSharding
    wk: TensorSharding
    wv: TensorSharding
    wo: TensorSharding
    norm2: TensorSharding
    norm2_bias: TensorSharding
    w1: TensorSharding
    b1: TensorSharding
    w2: TensorSharding
    b2: TensorSharding
    out: TensorSharding

    def __post_init__(self) -> None:
        super().__post_init__()
        attention = self.attention
        expected = _layouts(attention)
        wrong = [field.name for field in fields(self) if getattr(self, field.name) != expected[field.name]]
        if wrong:
            raise ValueError(
                f"these are the layouts of no TransformerBlockPolicy: with attention {attention.policy.name} "
                + ", ".join(f"{name} is {expected[name]!r}, got {getattr(self, name)!r}" for name in wrong)
            )

    @classmethod
    def split_over(cls, batch: AxisOrAxes, rows: AxisOrAxes, heads: AxisOrAxes, kv_heads: AxisOrAxes) -> Self:
        return cls(**_layouts(AttentionSharding.split_over(batch, rows, heads, kv_heads)))

    @classmethod
    def ulysses(cls, axes: AxisOrAxes, batch: AxisOrAxes = ()) -> Self:
        """The layouts of `ring`; give `TransformerBlock` the policy ``ULYSSES``, too."""
        return cls.ring(axes, batch)

    @property
    def attention(self) -> AttentionSharding:
        """The layouts of the attention."""
        return AttentionSharding(self.x, self.wq, self.wk, self.wv, self.wo, self.out)

    @property
    def feed_forward(self) -> FeedForwardSharding:
        """The layouts of the feed-forward block."""
        return FeedForwardSharding(self.x, self.w1, self.b1, self.w2, self.b2, self.out)

    @property
    def policies(self) -> tuple[TransformerBlockPolicy, ...]:
        """The policies that have these layouts."""
        return tuple(TransformerBlockPolicy(policy.value) for policy in self.attention.policies)

    @property
    def policy(self) -> TransformerBlockPolicy:
        """The first of the policies: RING if ULYSSES is possible, too."""
        return self.policies[0]


def _layouts(attention: AttentionSharding) -> dict[str, TensorSharding]:
    """All layouts of a block, given those of its attention; the hidden dim lies as the heads do."""
    batch, rows, _ = (dim.axes for dim in attention.x.dims)
    if attention.policy is AttentionShardingPolicy.SEQUENCE:
        feed_forward = FeedForwardSharding.sequence(attention.split.heads, batch)
    else:
        feed_forward = FeedForwardSharding.rows(rows, attention.split.heads, batch)
    halves = (("x", "wq", "wk", "wv", "wo"), attention), (("w1", "b1", "w2", "b2", "out"), feed_forward)
    return {
        **dict.fromkeys(NORMS, WHOLE),
        **{name: getattr(half, name) for names, half in halves for name in names},
    }
