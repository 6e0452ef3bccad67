"""The plan of attention: the rows and heads of each device, and the communications of forward and backward."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from parallelism.kernels import Mask, attend_backward_flops, attend_flops
from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingPlan, plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.attention.policies import AttentionSharding, AttentionShardingPolicy
from tensor_parallelism.attention.shares import Heads, Runs, heads_of, runs_of, tiles
from tensor_parallelism.products import Axes, ByRank, DType, Move, Moves, Plan, Shape, moves_of

NAMES = ("x", "wq", "wk", "wv", "wo")


@dataclass(frozen=True)
class AttentionShapes:
    """The shapes of the whole x, Wq, Wk, Wv and Wo.  ``ValueError`` if they do not fit each other."""

    x: Shape
    wq: Shape
    wk: Shape
    wv: Shape
    wo: Shape

    def __post_init__(self) -> None:
        dims = {
            "x": "(batch, sequence, model)",
            "wq": "(model, heads, head_dim)",
            "wk": "(model, kv_heads, head_dim)",
            "wv": "(model, kv_heads, head_dim)",
            "wo": "(heads, head_dim, model)",
        }
        for field in fields(self):
            if len(getattr(self, field.name)) != 3:
                raise ValueError(f"{field.name} is {dims[field.name]}, got shape {getattr(self, field.name)}")
        for name in ("wq", "wk", "wv"):
            if getattr(self, name)[0] != self.x[2]:
                raise ValueError(
                    f"the last extent of x is the first of {name}, got x of shape {self.x} and {name} of "
                    f"{getattr(self, name)}"
                )
        if self.wv != self.wk:
            raise ValueError(f"wv is of the shape of wk, {self.wk}, got {self.wv}")
        if self.wk[2] != self.wq[2]:
            raise ValueError(
                f"wq and wk must have the same head_dim, got wq of shape {self.wq} and wk of {self.wk}"
            )
        if self.wo[:2] != self.wq[1:]:
            raise ValueError(
                f"wo is (heads, head_dim, model) of the heads of wq, got wq of shape {self.wq} and wo of "
                f"{self.wo}"
            )
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"the query heads are a multiple of the key-value heads, got wq of shape {self.wq} with "
                f"{self.heads} heads and wk of {self.wk} with {self.kv_heads}"
            )

    @property
    def heads(self) -> int:
        return self.wq[1]

    @property
    def kv_heads(self) -> int:
        return self.wk[1]

    @property
    def head_dim(self) -> int:
        return self.wq[2]

    @property
    def out(self) -> Shape:
        return (*self.x[:2], self.wo[2])


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """The plan of one attention; ``print`` it.  `bytes_received` and `backward_bytes_received` are indexed by rank.

    >>> from parallelism import Mesh
    >>> from tensor_parallelism import Attention, AttentionSharding
    >>> operation = Attention(AttentionSharding.megatron("tp"))
    >>> plan = operation.plan([(2, 3, 8), (8, 4, 2), (8, 4, 2), (8, 4, 2), (4, 2, 8)], Mesh(tp=2))
    >>> plan.bytes_received
    (384, 384)

    ``ValueError`` where a device's query heads attend with a key-value head of another.
    """

    sharding: AttentionSharding
    policy: AttentionShardingPolicy
    mask: Mask
    zigzag: bool
    shapes: AttentionShapes
    dtype: DType
    mesh: Mesh

    def __post_init__(self) -> None:
        axes = self.sharding.split.kv_heads
        for rank, (mine, held) in enumerate(zip(self.heads, self.held, strict=True)):
            if axes and mine.keys and not held.start <= mine.keys.start <= mine.keys.stop <= held.stop:
                raise ValueError(
                    f"{self.shapes.heads} query heads and {self.shapes.kv_heads} key-value heads cannot be shared over "
                    f"{', '.join(axes)}: rank {rank} has {_span('query', mine.queries)}, which attend with "
                    f"{_span('key-value', mine.keys)}, and {_span('key-value', held)}; "
                    f"whole_keys=True lays wk and wv whole on every device"
                )

    # -- rows and heads of each rank -----------------------------------------------------------------------------------

    @cached_property
    def heads(self) -> tuple[Heads, ...]:
        """The heads that each rank computes for its rows."""
        axes = self.sharding.split.heads
        shares = heads_of(self.shapes.heads, self.shapes.kv_heads, self._factors(axes))
        return tuple(shares[self._position(rank, axes)] for rank in range(self.mesh.size))

    @cached_property
    def held(self) -> tuple[range, ...]:
        """The key-value heads of each rank's shards of Wk and Wv."""
        heads = (
            self.sharding.wk.slices(self.shapes.wk, self.mesh, rank)[1] for rank in range(self.mesh.size)
        )
        return tuple(range(cut.start, cut.stop) for cut in heads)

    def kv_slice(self, rank: int) -> slice:
        """The heads of a rank's shards of Wk and Wv with which the rank computes keys and values."""
        keys = self.heads[rank].keys
        return slice(None) if self.sharding.split.kv_heads else slice(keys.start, keys.stop)

    @property
    def whole_keys(self) -> Axes:
        """The axes that split the query heads but not Wk and Wv.

        Along these axes a device computes the gradients of only some heads of Wk and Wv.
        """
        split = self.sharding.split
        return () if split.kv_heads else split.heads

    def serves(self, rank: int) -> tuple[int, ...]:
        """The key-value head of each query head of a rank, by its number among the rank's own key-value heads."""
        mine = self.heads[rank]
        first = mine.keys.start - self.held[rank].start if self.sharding.split.kv_heads else 0
        return tuple(first + key for key in mine.serves)

    @cached_property
    def runs(self) -> tuple[Runs, ...]:
        """The rows that each member of a group along the axes of the sequence has, by position."""
        return runs_of(self.shapes.x[1], self._factors(self.sharding.split.rows), zigzag=self.zigzag)

    @cached_property
    def exchanged(self) -> tuple[Heads, ...]:
        """For ULYSSES, the heads that each member of a group has for all rows, by position."""
        return heads_of(self.shapes.heads, self.shapes.kv_heads, self._factors(self.sharding.split.rows))

    @property
    def is_ulysses(self) -> bool:
        return self.policy is AttentionShardingPolicy.ULYSSES

    def rows(self, rank: int) -> np.ndarray[Any, np.dtype[np.intp]]:
        """The places in the sequence of the rows whose queries, keys and values a rank computes."""
        runs = self.runs[self._position(rank, self.sharding.split.rows)]
        return np.array([place for run in runs for place in run], np.intp)

    # -- communication -------------------------------------------------------------------------------------------------

    @cached_property
    def moves(self) -> dict[str, ReshardingPlan]:
        """The reshardings of x and the gradient of y to the layout in which they are multiplied, and of the results."""
        sharding, shapes, split = self.sharding, self.shapes, self.sharding.split
        during, term = (
            TensorSharding(split.batch, split.rows, None, partial=axes) for axes in ((), split.heads)
        )
        changes = {
            "x": (sharding.x, during, shapes.x),
            "out": (term, sharding.out, shapes.out),
            "grad": (sharding.out, during, shapes.out),
            "x_grad": (term, sharding.x, shapes.x),
        }
        for name in NAMES[1:]:
            layout = getattr(sharding, name)
            shared = self.whole_keys if name in ("wk", "wv") else ()
            pending = TensorSharding(*layout.dims, partial=(*split.batch, *split.rows, *shared))
            changes[f"{name}_grad"] = pending, layout, getattr(shapes, name)
        return {name: plan_resharding(*change, self.dtype, self.mesh) for name, change in changes.items()}

    @cached_property
    def forward_moves(self) -> Moves:
        return *self._named("x"), *self._inside(), *self._named("y", "out")

    @cached_property
    def backward_moves(self) -> Moves:
        gradient_of = "gradient of {}".format
        return (
            *self._named(gradient_of("y"), "grad"),
            *self._named(gradient_of("wo"), "wo_grad"),
            *self._inside(backward=True),
            *self._named("x, once more", "x"),
            *self._named(gradient_of("wq"), "wq_grad"),
            *self._named(gradient_of("wk"), "wk_grad"),
            *self._named(gradient_of("wv"), "wv_grad"),
            *self._named(gradient_of("x"), "x_grad"),
        )

    def _named(self, what: str, name: str = "x") -> Iterable[Move]:
        return moves_of([(what, self.moves[name])])

    # -- computation ---------------------------------------------------------------------------------------------------

    @cached_property
    def flops(self) -> ByRank:
        """The flops of attention in the forward, by rank, without the products with the weights."""
        return self._flops(attend_flops)

    @cached_property
    def backward_flops(self) -> ByRank:
        return self._flops(attend_backward_flops)

    def _flops(self, flops: Any) -> ByRank:
        by_rank = []
        for rank in range(self.mesh.size):
            position = self._position(rank, self.sharding.split.rows)
            rows, blocks, heads = self.runs[position], self.runs, self.heads[rank].queries
            if self.is_ulysses:
                rows, heads = (range(self.shapes.x[1]),), self.exchanged[position].queries
                blocks = (rows,)
            total = 0
            for block in blocks:
                for tile in tiles(rows, block, self.mask):
                    m, n = tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start
                    total += flops(self._batch(rank), len(heads), m, n, self.shapes.head_dim)
            by_rank.append(total)
        return tuple(by_rank)

    # -- text ----------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        shapes = self.shapes
        shared = f" by {shapes.kv_heads} key-value heads" if shapes.kv_heads != shapes.heads else ""
        order = (f", {self.mask}" if self.mask.causal else "") + (" in zigzag order" if self.zigzag else "")
        flops = f"{sum(self.flops)} and {sum(self.backward_flops)} flops while they attend"
        return "\n".join(
            [
                f"attention of x{list(shapes.x)}, {shapes.heads} heads of {shapes.head_dim}{shared}{order}, on "
                f"{self.mesh!r}: {self.policy.value}",
                *self.table(),
                f"  in all {self.totals()}; {flops}",
            ]
        )

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _inside(self, *, backward: bool = False) -> list[Move]:
        """The communications while the rows attend."""
        axes = self.sharding.split.rows
        size = len(self.runs)
        ranks = range(self.mesh.size)
        if size == 1:
            return []
        if not self.is_ulysses:
            received = tuple(self._ring_bytes(rank, backward=backward) for rank in ranks)
            names = ("keys and values", "their gradients")[: 1 + backward]
            return [Move(name, "permute", size - 1, axes, received) for name in names]
        exchanges = (("queries", 0, False), ("keys", 1, False), ("values", 1, False), ("the result", 0, True))
        if backward:
            exchanges = (
                ("gradient of the result", 0, False),
                ("gradient of queries", 0, True),
                ("gradient of keys", 1, True),
                ("gradient of values", 1, True),
            )
        moves = []
        for name, kind, back in exchanges:
            received = tuple(self._ulysses_bytes(rank, kind, to_rows=back) for rank in ranks)
            moves.append(Move(name, "all_to_all", 1, axes, received))
        return moves

    def _ring_bytes(self, rank: int, *, backward: bool) -> int:
        """The bytes of the blocks that a rank receives.

        Forward these are all blocks except its own.  Backward they are all except the block that came last in the
        forward, that of the right neighbour.
        """
        sizes = [sum(map(len, runs)) for runs in self.runs]
        kept = sizes[(self._position(rank, self.sharding.split.rows) + backward) % len(sizes)]
        kv_heads = len(self.held[rank] if self.sharding.split.kv_heads else self.heads[rank].keys)
        return 2 * (sum(sizes) - kept) * self._row_bytes(rank) * kv_heads

    def _ulysses_bytes(self, rank: int, kind: int, *, to_rows: bool) -> int:
        """The bytes of one exchange: of queries or the result (``kind`` 0), or of keys or values (1)."""
        position = self._position(rank, self.sharding.split.rows)
        rows = sum(map(len, self.runs[position]))
        heads = [len(share[kind]) for share in self.exchanged]
        others = (
            rows * (sum(heads) - heads[position]) if to_rows else (self.shapes.x[1] - rows) * heads[position]
        )
        return others * self._row_bytes(rank)

    def _row_bytes(self, rank: int) -> int:
        """The bytes of one head of a row, for the part of the batch that a rank has."""
        return self._batch(rank) * self.shapes.head_dim * self.dtype.itemsize

    def _batch(self, rank: int) -> int:
        return self.sharding.x.local_shape(self.shapes.x, self.mesh, rank)[0]

    def _factors(self, axes: Axes) -> tuple[int, ...]:
        """The number of devices along each axis."""
        return tuple(self.mesh.shape[axis] for axis in axes)

    def _position(self, rank: int, axes: Axes) -> int:
        return self.mesh.group(rank, axes).index(rank)


def _span(kind: str, heads: range) -> str:
    """``query heads 2 to 3``."""
    if len(heads) < 2:
        return f"{kind} head {heads[0]}" if heads else f"no {kind} head"
    return f"{kind} heads {heads[0]} to {heads[-1]}"
