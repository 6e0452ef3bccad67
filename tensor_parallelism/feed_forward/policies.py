"""Named policies of sharding a feed-forward block y = act(x W1 + b1) W2 + b2."""

from dataclasses import dataclass
from enum import Enum
from typing import Self

from parallelism.sharding import TensorSharding
from tensor_parallelism.products import Axes, AxisOrAxes, Sharding


class FeedForwardShardingPolicy(Enum):
    """The layouts of x[b, s, m], W1[m, f], b1[f], W2[f, n], b2[n] and y[b, s, n], and their communication.

    >>> from tensor_parallelism import FeedForwardSharding
    >>> FeedForwardSharding.megatron("tp").policy
    <FeedForwardShardingPolicy.MEGATRON: 'megatron'>

    C, D, T, X and Y are mesh axes, or several together, and also their numbers of devices; D splits the batch (D = 1 if
    none does).  The mesh has no other axes.  |x| is the number of bytes of x.  The given bytes are received by all
    devices together, for extents that divide evenly.
    """

    UNSHARDED = "unsharded"
    """Nothing is sharded, every device computes everything.  0 bytes, forward and backward."""

    MEGATRON = "megatron"
    """x[bD, s, m] W1[m, fT] b1[fT] W2[fT, n] b2[n] -> y[bD, s, n]: columns, then rows.

    Forward an all_reduce of y over T, 2 (T-1) |y| bytes.  Backward one of the gradient of x, 2 (T-1) |x|, and over D
    those of the gradients of the weights, 2 (D-1) (|W1| + |b1| + |W2| + T |b2|).  Shoeybi et al., *Megatron-LM*, 2019,
    arXiv:1909.08053, section 3.
    """

    SEQUENCE = "sequence"
    """x[bD, sT, m] W1[m, fT] b1[fT] W2[fT, n] b2[n] -> y[bD, sT, n].

    Forward an all_gather of x over T, (T-1) |x| bytes, and a reduce_scatter of y, (T-1) |y|.  Backward an all_gather of
    the gradient of y, (T-1) |y|, and of x once more, (T-1) |x|, a reduce_scatter of the gradient of x, (T-1) |x|, and
    over D as in MEGATRON.  Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
    arXiv:2205.05198, section 4.2.2.
    """

    ROWS = "rows"
    """x[bD, sC, m] W1[m, fT] b1[fT] W2[fT, n] b2[n] -> y[bD, sC, n]: each row stays on its devices.

    MEGATRON for the rows that the devices of T have in common; T = 1 where the weights are whole.  Forward 2 (T-1) |y|
    bytes, backward 2 (T-1) |x| and over D and C 2 (D C - 1) (|W1| + |b1| + |W2| + T |b2|).
    """

    GSPMD_2D = "gspmd_2d"
    """x[bX, s, mY] W1[mX, fY] b1[fY] W2[fY, nX] b2[nY] -> y[bX, s, nY].

    Forward all_gathers of x over Y, (Y-1) |x| bytes, and of the weights over X, (X-1) (|W1| + |W2|), and a
    reduce_scatter of y over Y, (Y-1) |y|.  Backward all_gathers of the gradient of y and of x over Y,
    (Y-1) (|y| + |x|), and of the weights, (X-1) (|W1| + |W2|); reduce_scatters of the gradients of x over Y,
    (Y-1) |x|, and of the weights over X, (X-1) (|W1| + |W2|); all_reduces over X of those of the biases,
    2 (X-1) (|b1| + |b2|).  Xu et al., *GSPMD*, 2021, arXiv:2105.04663, the "2D finalized" row of its table of dense
    Transformers.
    """

    GENERAL = "general"
    """Any other layouts: both products the cheapest way, the hidden activations where that costs least."""


@dataclass(frozen=True)
class FeedForwardSharding(Sharding, ndims=(2, 2, 1, 2, 1, 2)):
    """The layouts of y = act(x W1 + b1) W2 + b2: of ``x``, ``w1``, ``b1``, ``w2``, ``b2`` and ``out`` (y).

    x and y are [batch, sequence, model], or have fewer or more leading dims; the weights are [model, hidden] and
    [hidden, model].  `unsharded`, `megatron`, `sequence`, `rows` and `gspmd_2d` make those of the named policies.

    >>> FeedForwardSharding.megatron("tp").w1, FeedForwardSharding.sequence("tp", batch="dp").policy.name
    (TensorSharding(None, 'tp'), 'SEQUENCE')
    """

    x: TensorSharding
    w1: TensorSharding
    b1: TensorSharding
    w2: TensorSharding
    b2: TensorSharding
    out: TensorSharding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out.op != "sum":
            raise ValueError(
                f"out of a FeedForwardSharding may have a pending sum, but no other pending reduction; got {self.out!r}"
            )

    @classmethod
    def unsharded(cls) -> Self:
        """The layouts of `FeedForwardShardingPolicy.UNSHARDED`, for [batch, sequence, model]."""
        return cls.megatron(())

    @classmethod
    def megatron(cls, axes: AxisOrAxes, batch: AxisOrAxes = ()) -> Self:
        """The layouts of `FeedForwardShardingPolicy.MEGATRON`: the hidden dim over ``axes``."""
        return cls._of(TensorSharding(batch, None, None), axes)

    @classmethod
    def sequence(cls, axes: AxisOrAxes, batch: AxisOrAxes = ()) -> Self:
        """The layouts of `FeedForwardShardingPolicy.SEQUENCE`: hidden dim and sequence over ``axes``."""
        return cls._of(TensorSharding(batch, axes, None), axes)

    @classmethod
    def rows(cls, rows: AxisOrAxes, axes: AxisOrAxes = (), batch: AxisOrAxes = ()) -> Self:
        """The layouts of `FeedForwardShardingPolicy.ROWS`: sequence over ``rows``, hidden dim over ``axes``."""
        return cls._of(TensorSharding(batch, rows, None), axes)

    @classmethod
    def gspmd_2d(cls, x: AxisOrAxes, y: AxisOrAxes) -> Self:
        """The layouts of `FeedForwardShardingPolicy.GSPMD_2D`: batch over ``x``, hidden dim over ``y``."""
        layout, bias = TensorSharding(x, None, y), TensorSharding(y)
        return cls(layout, TensorSharding(x, y), bias, TensorSharding(y, x), bias, layout)

    @classmethod
    def _of(cls, x: TensorSharding, axes: AxisOrAxes) -> Self:
        """With the hidden dim over ``axes``."""
        return cls(
            x,
            TensorSharding(None, axes),
            TensorSharding(axes),
            TensorSharding(axes, None),
            TensorSharding(None),
            x,
        )

    @property
    def policy(self) -> FeedForwardShardingPolicy:
        """The named policy of these layouts; GENERAL if they have none."""
        policies, ndim = FeedForwardShardingPolicy, max(3, len(self.x.dims))
        batch, *between, sequence, model = (dim.axes for dim in _wide(self.x, ndim).dims)
        hidden = self.b1.over(1).dims[0].axes
        if any(between) or {*batch} & {*hidden} or ({*sequence} & {*hidden} and sequence != hidden):
            return policies.GENERAL
        candidates = (
            (policies.UNSHARDED, not (hidden or batch or sequence), self.unsharded()),
            (policies.GSPMD_2D, model, self.gspmd_2d(batch, hidden)),
            (policies.SEQUENCE, sequence and sequence == hidden, self.sequence(hidden, batch)),
            (policies.ROWS, sequence or not hidden, self.rows(sequence, hidden, batch)),
            (policies.MEGATRON, True, self.megatron(hidden, batch)),
        )
        policy, made = next((policy, made) for policy, possible, made in candidates if possible)
        try:
            return policy if self._written_out(ndim) == made._written_out(ndim) else policies.GENERAL
        except ValueError:
            return policies.GENERAL

    def _written_out(self, ndim: int) -> tuple[TensorSharding, ...]:
        """All layouts, x and y with so many dims.  ``ValueError`` if a weight or a bias has other dims."""
        return (
            _wide(self.x, ndim),
            _wide(self.out, ndim),
            self.w1.over(2),
            self.b1.over(1),
            self.w2.over(2),
            self.b2.over(1),
        )

    def split(self) -> dict[str, Axes]:
        """Over what ``batch``, ``sequence`` and ``hidden`` dim lie during the local products, of a named policy."""
        batch, *_, sequence, _ = (dim.axes for dim in _wide(self.x, max(3, len(self.x.dims))).dims)
        hidden = self.b1.over(1).dims[0].axes
        return {"batch": batch, "sequence": () if sequence == hidden else sequence, "hidden": hidden}


def _wide(layout: TensorSharding, ndim: int) -> TensorSharding:
    """A layout over more dims: whole ones after the first."""
    if layout.ellipsis is not None or len(layout.dims) >= ndim:
        return layout.over(ndim)
    first, *rest = layout.dims
    return TensorSharding(
        first, *[None] * (ndim - len(layout.dims)), *rest, partial=layout.partial, op=layout.op
    )
