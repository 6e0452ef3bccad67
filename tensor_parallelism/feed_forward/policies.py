"""Named policies of sharding a feed-forward block y = act(x W1 + b1) W2 + b2."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from parallelism.sharding import TensorSharding
from tensor_parallelism.products import Axes, check_layouts


class FeedForwardShardingPolicy(Enum):
    """The layouts of x[b, s, m], W1[m, f], b1[f], W2[f, n], b2[n] and y[b, s, n], and their communication.

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
class FeedForwardSharding:
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
        dims = {field.name: n for field, n in zip(fields(self), (2, 2, 1, 2, 1, 2), strict=True)}
        check_layouts(self, dims)
        if self.out.op != "sum":
            raise ValueError(f"out of a FeedForwardSharding may wait for a sum, got {self.out!r}")

    @classmethod
    def unsharded(cls) -> FeedForwardSharding:
        """The layouts of `FeedForwardShardingPolicy.UNSHARDED`, for [batch, sequence, model]."""
        return cls.megatron(())

    @classmethod
    def megatron(cls, axes: str | Axes, batch: str | Axes = ()) -> FeedForwardSharding:
        """The layouts of `FeedForwardShardingPolicy.MEGATRON`: the hidden dim over ``axes``."""
        x = TensorSharding(batch, None, None)
        return cls(x, TensorSharding(None, axes), TensorSharding(axes), TensorSharding(axes, None),
                   TensorSharding(None), x)

    @classmethod
    def sequence(cls, axes: str | Axes, batch: str | Axes = ()) -> FeedForwardSharding:
        """The layouts of `FeedForwardShardingPolicy.SEQUENCE`: hidden dim and sequence over ``axes``."""
        x, like = TensorSharding(batch, axes, None), cls.megatron(axes)
        return cls(x, like.w1, like.b1, like.w2, like.b2, x)

    @classmethod
    def rows(cls, rows: str | Axes, axes: str | Axes = (), batch: str | Axes = ()) -> FeedForwardSharding:
        """The layouts of `FeedForwardShardingPolicy.ROWS`: sequence over ``rows``, hidden dim over ``axes``."""
        x, like = TensorSharding(batch, rows, None), cls.megatron(axes)
        return cls(x, like.w1, like.b1, like.w2, like.b2, x)

    @classmethod
    def gspmd_2d(cls, x: str | Axes, y: str | Axes) -> FeedForwardSharding:
        """The layouts of `FeedForwardShardingPolicy.GSPMD_2D`: batch over ``x``, hidden dim over ``y``."""
        layout = TensorSharding(x, None, y)
        bias = TensorSharding(y)
        return cls(layout, TensorSharding(x, y), bias, TensorSharding(y, x), bias, layout)

    @property
    def policy(self) -> FeedForwardShardingPolicy:
        """The named policy of these layouts; GENERAL if they have none."""
        ndim = max(3, len(self.x.dims))
        batch, *between, sequence, model = (dim.axes for dim in _wide(self.x, ndim).dims)
        hidden = self.b1.over(1).dims[0].axes
        shared = {*batch} & {*hidden} or ({*sequence} & {*hidden} and sequence != hidden)
        if any(between) or shared or not (hidden or batch or sequence):
            policy, made = FeedForwardShardingPolicy.UNSHARDED, FeedForwardSharding.unsharded()
        elif model:
            policy, made = FeedForwardShardingPolicy.GSPMD_2D, FeedForwardSharding.gspmd_2d(batch, hidden)
        elif sequence and sequence == hidden:
            policy, made = FeedForwardShardingPolicy.SEQUENCE, FeedForwardSharding.sequence(hidden, batch)
        elif sequence or not hidden:
            policy, made = FeedForwardShardingPolicy.ROWS, FeedForwardSharding.rows(sequence, hidden, batch)
        else:
            policy, made = FeedForwardShardingPolicy.MEGATRON, FeedForwardSharding.megatron(hidden, batch)
        own = self._as_of(ndim)
        return policy if own is not None and own == made._as_of(ndim) else FeedForwardShardingPolicy.GENERAL

    def _as_of(self, ndim: int) -> tuple[TensorSharding, ...] | None:
        """All layouts written out, x and y with so many dims."""
        try:
            wide = [_wide(layout, ndim) for layout in (self.x, self.out)]
            return *wide, self.w1.over(2), self.b1.over(1), self.w2.over(2), self.b2.over(1)
        except ValueError:
            return None

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
    return TensorSharding(first, *[None] * (ndim - len(layout.dims)), *rest, partial=layout.partial, op=layout.op)
