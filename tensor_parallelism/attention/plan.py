"""The plan of attention: the rows and heads of each device, and the communications of forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from parallelism.display import in_columns
from parallelism.kernels import attend_backward_flops, attend_flops
from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingPlan, plan_resharding
from parallelism.sharding import TensorSharding
from tensor_parallelism.attention.policies import AttentionSharding, AttentionShardingPolicy
from tensor_parallelism.attention.shapes import AttentionShapes
from tensor_parallelism.attention.shares import Heads, Runs, heads_of, pieces, runs_of
from tensor_parallelism.products import Axes, Shape, check_shape
from tensor_parallelism.products.layer_plan import bytes_by_rank


class Move(NamedTuple):
    """Communications of one kind that follow each other."""

    what: str
    """The name of the values that move."""
    kind: str
    times: int
    """The number of these communications."""
    axes: Axes
    bytes_received: tuple[int, ...]
    """The bytes that each rank receives in all of these communications."""


@dataclass(frozen=True)
class AttentionPlan:
    """The plan of one attention; ``print`` it.  `bytes_received` and `backward_bytes_received` are indexed by rank.

    ``ValueError`` for shapes that do not fit the layouts or the mesh, and where a device's query heads attend with a
    key-value head of another.
    """

    sharding: AttentionSharding
    policy: AttentionShardingPolicy
    causal: bool
    zigzag: bool
    shapes: AttentionShapes
    dtype: np.dtype[Any]
    mesh: Mesh

    def __post_init__(self) -> None:
        for field in fields(self.sharding):
            shape, layout = getattr(self.shapes, field.name), getattr(self.sharding, field.name)
            check_shape(field.name, shape, field.name, layout, self.mesh)
        axes = self.sharding.split.kv_heads
        if not axes:
            return
        for rank, mine in enumerate(self.heads):
            held = self.sharding.wk.slices(self.shapes.wk, self.mesh, rank)[1]
            if mine.keys and not held.start <= mine.keys.start <= mine.keys.stop <= held.stop:
                raise ValueError(
                    f"{self.shapes.heads} query heads and {self.shapes.kv_heads} key-value heads cannot be shared over "
                    f"{', '.join(axes)}: rank {rank} has {_span('query', mine.queries)}, which attend with "
                    f"{_span('key-value', mine.keys)}, and {_span('key-value', range(held.start, held.stop))}; "
                    f"whole_keys=True lays wk and wv whole on every device"
                )

    # -- rows and heads of each rank -----------------------------------------------------------------------------------

    @cached_property
    def heads(self) -> tuple[Heads, ...]:
        """The heads that each rank computes for its rows."""
        axes = self.sharding.split.heads
        shares = heads_of(self.shapes.heads, self.shapes.kv_heads, self.factors(axes))
        return tuple(shares[self._position(rank, axes)] for rank in range(self.mesh.size))

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
        if rank not in self._serves:
            mine, first = self.heads[rank], 0
            if self.sharding.split.kv_heads and mine.keys:
                first = mine.keys.start - self.sharding.wk.slices(self.shapes.wk, self.mesh, rank)[1].start
            self._serves[rank] = tuple(first + key for key in mine.serves)
        return self._serves[rank]

    @cached_property
    def _serves(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def runs(self) -> tuple[Runs, ...]:
        """The rows that each member of a group along the axes of the sequence has, by position."""
        return runs_of(self.shapes.x[1], self.factors(self.sharding.split.rows), zigzag=self.zigzag)

    @cached_property
    def exchanged(self) -> tuple[Heads, ...]:
        """For ULYSSES, the heads that each member of a group has for all rows, by position."""
        return heads_of(self.shapes.heads, self.shapes.kv_heads, self.factors(self.sharding.split.rows))

    @property
    def is_ulysses(self) -> bool:
        return self.policy is AttentionShardingPolicy.ULYSSES

    def rows(self, rank: int) -> np.ndarray[Any, np.dtype[np.intp]]:
        """The places in the sequence of the rows whose queries, keys and values a rank computes."""
        runs = self.runs[self._position(rank, self.sharding.split.rows)]
        return np.array([place for run in runs for place in run], np.intp)

    # -- communication -------------------------------------------------------------------------------------------------

    @cached_property
    def x(self) -> ReshardingPlan:
        """The resharding of x to the layout in which it is multiplied."""
        return self._plan(self.sharding.x, self._during(), self.shapes.x)

    @cached_property
    def out(self) -> ReshardingPlan:
        return self._plan(self._during(self.sharding.split.heads), self.sharding.out, self.shapes.out)

    @cached_property
    def grad(self) -> ReshardingPlan:
        """The resharding of the gradient of y to the layout in which it is multiplied."""
        return self._plan(self.sharding.out, self._during(), self.shapes.out)

    @cached_property
    def x_grad(self) -> ReshardingPlan:
        return self._plan(self._during(self.sharding.split.heads), self.sharding.x, self.shapes.x)

    @cached_property
    def weight_grads(self) -> dict[str, ReshardingPlan]:
        """The resharding of the gradients of Wq, Wk, Wv and Wo, by name."""
        split = self.sharding.split
        over = (*split.batch, *split.rows)
        pending = {"wq": over, "wk": (*over, *self.whole_keys), "wv": (*over, *self.whole_keys), "wo": over}
        return {
            name: self._plan(TensorSharding(*getattr(self.sharding, name).dims, partial=axes),
                             getattr(self.sharding, name), getattr(self.shapes, name))
            for name, axes in pending.items()
        }

    @cached_property
    def forward_moves(self) -> tuple[Move, ...]:
        """The communications of the forward, in order."""
        return (*moves_of("x", self.x), *self._inside(), *moves_of("y", self.out))

    @cached_property
    def backward_moves(self) -> tuple[Move, ...]:
        """The communications of the backward, in order."""
        weights = {name: tuple(moves_of(f"gradient of {name}", plan)) for name, plan in self.weight_grads.items()}
        return (
            *moves_of("gradient of y", self.grad), *weights["wo"], *self._inside(backward=True),
            *moves_of("x, once more", self.x), *weights["wq"], *weights["wk"], *weights["wv"],
            *moves_of("gradient of x", self.x_grad),
        )

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """The bytes that each rank receives in the forward."""
        return bytes_by_rank(self.forward_moves, self.mesh)

    @property
    def backward_bytes_received(self) -> tuple[int, ...]:
        """The bytes that each rank receives in the backward."""
        return bytes_by_rank(self.backward_moves, self.mesh)

    # -- computation ---------------------------------------------------------------------------------------------------

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """The flops of attention in the forward, by rank, without the products with the weights."""
        return self._flops(attend_flops)

    @cached_property
    def backward_flops(self) -> tuple[int, ...]:
        return self._flops(attend_backward_flops)

    def _flops(self, flops: Any) -> tuple[int, ...]:
        by_rank = []
        for rank in range(self.mesh.size):
            position = self._position(rank, self.sharding.split.rows)
            batch = self.sharding.x.local_shape(self.shapes.x, self.mesh, rank)[0]
            whole = (range(self.shapes.x[1]),)
            rows, blocks = (whole, [whole]) if self.is_ulysses else (self.runs[position], self.runs)
            heads = self.exchanged[position].queries if self.is_ulysses else self.heads[rank].queries
            sizes = [
                (piece.rows.stop - piece.rows.start, piece.columns.stop - piece.columns.start)
                for block in blocks for piece in pieces(rows, block, causal=self.causal)
            ]
            by_rank.append(sum(flops(batch, len(heads), m, n, self.shapes.head_dim) for m, n in sizes))
        return tuple(by_rank)

    # -- text ----------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        shapes = self.shapes
        shared = f" by {shapes.kv_heads} key-value heads" if shapes.kv_heads != shapes.heads else ""
        order = (", causal" if self.causal else "") + (" in zigzag order" if self.zigzag else "")
        lines = [
            f"attention of x{list(shapes.x)}, {shapes.heads} heads of {shapes.head_dim}{shared}{order}, on "
            f"{self.mesh!r}: {self.policy.value}", *table_of(self.forward_moves, self.backward_moves)
        ]
        forward, backward = sum(self.bytes_received), sum(self.backward_bytes_received)
        flops = f"{sum(self.flops)} and {sum(self.backward_flops)} flops while they attend"
        return "\n".join([*lines, f"  in all {forward} bytes forward, {backward} backward; {flops}"])

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _inside(self, *, backward: bool = False) -> list[Move]:
        """The communications while the rows attend."""
        axes = self.sharding.split.rows
        size = int(np.prod(self.factors(axes), dtype=np.int64))
        if size == 1:
            return []
        if not self.is_ulysses:
            received = [self._ring_bytes(rank, backward=backward) for rank in range(self.mesh.size)]
            moves = [Move("keys and values", "permute", size - 1, axes, tuple(received))]
            return [*moves, moves[0]._replace(what="their gradients")] if backward else moves
        queries, keys = "queries", ("keys", "values")
        to_heads, to_rows = (
            tuple(self._ulysses_bytes(rank, to_rows=back) for rank in range(self.mesh.size)) for back in (False, True)
        )

        def move(what: str, received: tuple[tuple[int, int], ...], index: int) -> Move:
            return Move(what, "all_to_all", 1, axes, tuple(pair[index] for pair in received))

        if backward:
            return [move("gradient of the result", to_heads, 0), move(f"gradient of {queries}", to_rows, 0),
                    *(move(f"gradient of {name}", to_rows, 1) for name in keys)]
        return [move(queries, to_heads, 0), *(move(name, to_heads, 1) for name in keys),
                move("the result", to_rows, 0)]

    def _ring_bytes(self, rank: int, *, backward: bool) -> int:
        """The bytes of the blocks that a rank receives.

        Forward these are all blocks except its own.  Backward they are all except the block that came last in the
        forward, that of the right neighbour.
        """
        sizes = [sum(map(len, runs)) for runs in self.runs]
        position = self._position(rank, self.sharding.split.rows)
        kept = sizes[(position + 1) % len(sizes)] if backward else sizes[position]
        held = self.sharding.wk.local_shape(self.shapes.wk, self.mesh, rank)[1]
        kv_heads = held if self.sharding.split.kv_heads else len(self.heads[rank].keys)
        return 2 * (sum(sizes) - kept) * self._row_bytes(rank) * kv_heads

    def _ulysses_bytes(self, rank: int, *, to_rows: bool) -> tuple[int, int]:
        """The bytes of one exchange: of queries or the result, and of keys or values."""
        position = self._position(rank, self.sharding.split.rows)
        mine, row = sum(map(len, self.runs[position])), self._row_bytes(rank)
        queries, keys = ([len(heads[i]) for heads in self.exchanged] for i in (0, 1))
        if to_rows:
            return mine * (sum(queries) - queries[position]) * row, mine * (sum(keys) - keys[position]) * row
        others = self.shapes.x[1] - mine
        return others * queries[position] * row, others * keys[position] * row

    def _row_bytes(self, rank: int) -> int:
        """The bytes of one head of a row, for the part of the batch that a rank has."""
        batch = self.sharding.x.local_shape(self.shapes.x, self.mesh, rank)[0]
        return batch * self.shapes.head_dim * self.dtype.itemsize

    def _during(self, partial: Axes = ()) -> TensorSharding:
        """The layout of x, or of a term of y, during the products with the weights."""
        split = self.sharding.split
        return TensorSharding(split.batch, split.rows, None, partial=partial)

    def _plan(self, source: TensorSharding, target: TensorSharding, shape: Shape) -> ReshardingPlan:
        return plan_resharding(source, target, shape, self.dtype, self.mesh)

    def factors(self, axes: Axes) -> tuple[int, ...]:
        """The number of devices along each axis."""
        return tuple(self.mesh.shape[axis] for axis in axes)

    def _position(self, rank: int, axes: Axes) -> int:
        return self.mesh.group(rank, axes).index(rank)


def moves_of(what: str, plan: ReshardingPlan) -> Iterable[Move]:
    """The communications of a plan, under one name."""
    return (Move(what, step.kind, 1, step.axes, step.bytes_received) for step in plan.steps if step.kind != "slice")


def table_of(forward: Sequence[Move], backward: Sequence[Move]) -> list[str]:
    """One line for each communication, in columns."""
    lines = []
    for name, moves in (("forward", forward), ("backward", backward)):
        rows = [(move.what, f"{move.times} {move.kind}{'s' * (move.times != 1)}", f"over {', '.join(move.axes)}",
                 f"{sum(move.bytes_received)} bytes") for move in moves] or [("nothing moves", "", "", "")]
        lines += [f"  {name}", *(f"    {line}" for line in in_columns(rows, len(rows[0])))]
    return lines


def _span(kind: str, heads: range) -> str:
    """``query heads 2 to 3``."""
    if len(heads) < 2:
        return f"{kind} head {heads[0]}" if heads else f"no {kind} head"
    return f"{kind} heads {heads[0]} to {heads[-1]}"
