"""The plan of a block of a Transformer: the plans of its parts, and all their communications in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingPlan
from parallelism.sharding import TensorSharding
from tensor_parallelism.attention import AttentionPlan, Move, moves_of, table_of
from tensor_parallelism.feed_forward import FeedForwardPlan
from tensor_parallelism.products import LayerPlan, Shape
from tensor_parallelism.products.layer_plan import bytes_by_rank


@dataclass(frozen=True)
class TransformerBlockPlan:
    """The plans of a block's parts; ``print`` it.

    `bytes_received` has the bytes that each rank receives in the forward, `backward_bytes_received` those of the
    backward.
    """

    shapes: tuple[Shape, ...]
    """The shapes of the whole x and weights."""
    layouts: tuple[TensorSharding, ...]
    norm1: LayerPlan
    attention: AttentionPlan
    norm2: LayerPlan
    feed_forward: FeedForwardPlan

    @property
    def mesh(self) -> Mesh:
        return self.attention.mesh

    @cached_property
    def held(self) -> tuple[tuple[Shape, ...], ...]:
        """The shapes of the shards of x and weights, by rank."""
        pairs = list(zip(self.shapes, self.layouts, strict=True))
        return tuple(tuple(layout.local_shape(shape, self.mesh, rank) for shape, layout in pairs)
                     for rank in range(self.mesh.size))

    @cached_property
    def forward_moves(self) -> tuple[Move, ...]:
        """The communications of the forward, in order."""
        return (
            *_named("norm 1", _moves(self.norm1.forward)), *_named("attention", self.attention.forward_moves),
            *_named("norm 2", _moves(self.norm2.forward)), *_named("feed-forward", _moves(self.feed_forward.forward)),
        )

    @cached_property
    def backward_moves(self) -> tuple[Move, ...]:
        """The communications of the backward, in order."""
        return (
            *_named("feed-forward", _moves(self.feed_forward.backward)), *_named("norm 2", _moves(self.norm2.backward)),
            *_named("attention", self.attention.backward_moves), *_named("norm 1", _moves(self.norm1.backward)),
        )

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """The bytes that each rank receives in the forward."""
        return bytes_by_rank(self.forward_moves, self.mesh)

    @property
    def backward_bytes_received(self) -> tuple[int, ...]:
        """The bytes that each rank receives in the backward."""
        return bytes_by_rank(self.backward_moves, self.mesh)

    def __str__(self) -> str:
        forward, backward = sum(self.bytes_received), sum(self.backward_bytes_received)
        of = self.attention.shapes
        title = f"a block of x{list(of.x)}, {of.heads} heads"
        return "\n".join([f"{title} on {self.mesh!r}: {self.attention.policy.value}",
                          *table_of(self.forward_moves, self.backward_moves),
                          f"  in all {forward} bytes forward, {backward} backward"])


def _moves(parts: Iterable[tuple[str, ReshardingPlan]]) -> Iterable[Move]:
    return (move for name, plan in parts for move in moves_of(name.replace("_grad", "'s gradient"), plan))


def _named(part: str, moves: Iterable[Move]) -> Iterable[Move]:
    return (move._replace(what=f"{part}: {move.what}") for move in moves)
