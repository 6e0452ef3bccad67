"""Plans of layers: the communications of their forward and of their backward, each with a name."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parallelism.display import in_columns
from parallelism.display.markup import figure, preformatted
from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingPlan
from tensor_parallelism.products.product import Axes, ByRank, DType, Shape, bytes_by_rank


class Move(NamedTuple):
    """Communications of one kind that follow each other."""

    what: str
    """The name of the values that move."""
    kind: str
    times: int
    """The number of these communications."""
    axes: Axes
    bytes_received: ByRank
    """The bytes that each rank receives in all of these communications."""


Moves = tuple[Move, ...]


class Plan:
    """The base of the plans of all layers.  Subclasses have the communications, in order."""

    mesh: Mesh

    @property
    def forward_moves(self) -> Moves:
        """The communications of the forward, in order."""
        raise NotImplementedError

    @property
    def backward_moves(self) -> Moves:
        """The communications of the backward, in order."""
        raise NotImplementedError

    @property
    def bytes_received(self) -> ByRank:
        """The bytes that each rank receives in the forward."""
        return bytes_by_rank((move.bytes_received for move in self.forward_moves), self.mesh)

    @property
    def backward_bytes_received(self) -> ByRank:
        """The bytes that each rank receives in the backward."""
        return bytes_by_rank((move.bytes_received for move in self.backward_moves), self.mesh)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The collectives of the forward, in order."""
        return tuple(kind for _, kind, times, *_ in self.forward_moves for _ in range(times))

    @property
    def backward_kinds(self) -> tuple[str, ...]:
        """The collectives of the backward, in order."""
        return tuple(kind for _, kind, times, *_ in self.backward_moves for _ in range(times))

    def table(self) -> list[str]:
        """One line for each communication, in columns."""
        lines = []
        for name, moves in (("forward", self.forward_moves), ("backward", self.backward_moves)):
            rows = [
                (
                    move.what,
                    f"{move.times} {move.kind}{'s' * (move.times != 1)}",
                    f"over {', '.join(move.axes)}",
                    f"{sum(move.bytes_received)} bytes",
                )
                for move in moves
            ] or [("nothing moves", "", "", "")]
            lines += [f"  {name}", *(f"    {line}" for line in in_columns(rows, len(rows[0])))]
        return lines

    def totals(self) -> str:
        """The bytes of all ranks together."""
        return f"{sum(self.bytes_received)} bytes forward, {sum(self.backward_bytes_received)} backward"

    def _repr_html_(self) -> str:
        title, *lines = str(self).splitlines()
        return figure(preformatted("\n".join(lines)), title=title)


@dataclass(frozen=True)
class LayerPlan(Plan):
    """The moves of a layer; ``print`` it.

    >>> from parallelism import Mesh, TensorSharding
    >>> from tensor_parallelism import LayerNorm
    >>> plan = LayerNorm(TensorSharding(None, "tp")).plan([(4, 4), (4,), (4,)], Mesh(tp=2))
    >>> plan.bytes_received, plan.kinds
    ((64, 64), ('all_reduce', 'all_reduce'))

    `bytes_received` has the bytes that each rank receives in the forward, `backward_bytes_received` those of the
    backward.  A sum or a maximum over devices is a move, too: it goes from a partial layout to one without a pending
    reduction.  ``plan["x"]`` is the move of that name.
    """

    title: str
    shapes: tuple[Shape, ...]
    """The shapes of the whole inputs."""
    dtype: DType
    mesh: Mesh
    forward: dict[str, ReshardingPlan]
    backward: dict[str, ReshardingPlan]

    def __getitem__(self, name: str) -> ReshardingPlan:
        return self.forward[name] if name in self.forward else self.backward[name]

    @cached_property
    def forward_moves(self) -> Moves:
        return tuple(moves_of(self.forward.items()))

    @cached_property
    def backward_moves(self) -> Moves:
        return tuple(moves_of(self.backward.items()))

    def __str__(self) -> str:
        lines = [f"{self.title} on {self.mesh!r}"]
        for when, moves in (("forward", self.forward), ("backward", self.backward)):
            moving = [(name, move) for name, move in moves.items() if move.communications]
            for name, move in moving:
                lines += [
                    f"  {when}: {name} {move.source.short()} -> {move.target.short()}",
                    *(f"  {row}" for row in str(move).splitlines()[1:]),
                ]
            lines += [] if moving else [f"  {when}: nothing moves"]
        return "\n".join([*lines, self.totals()])


def moves_of(named: Iterable[tuple[str, ReshardingPlan]]) -> Iterable[Move]:
    """The communications of some plans, each with a name."""
    return (
        Move(name.replace("_grad", "'s gradient"), step.kind, 1, step.axes, step.bytes_received)
        for name, plan in named
        for step in plan.steps
        if step.kind != "slice"
    )
