"""What a layer moves, forward and backward: a list of reshardings, each with a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingPlan

Moves = tuple[tuple[str, ReshardingPlan], ...]


@dataclass(frozen=True)
class LayerPlan:
    """``print`` it; `bytes_received` are those of the forward, `backward_bytes_received` of the backward, by rank.

    A sum or a maximum over devices is a move as well: from a partial layout to one where nothing is pending.
    ``plan["x"]`` is the move of that name.
    """

    title: str
    mesh: Mesh
    forward: Moves
    backward: Moves

    def __getitem__(self, name: str) -> ReshardingPlan:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, ReshardingPlan]:
        return dict((*self.forward, *self.backward))

    @property
    def bytes_received(self) -> tuple[int, ...]:
        return _received(self.forward, self.mesh)

    @property
    def backward_bytes_received(self) -> tuple[int, ...]:
        return _received(self.backward, self.mesh)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The collectives of the forward, in order."""
        return tuple(step.kind for _, move in self.forward for step in move.steps if step.kind != "slice")

    @property
    def backward_kinds(self) -> tuple[str, ...]:
        """Those of the backward."""
        return tuple(step.kind for _, move in self.backward for step in move.steps if step.kind != "slice")

    def __str__(self) -> str:
        lines = [f"{self.title} on {self.mesh!r}", *_told("forward", self.forward), *_told("backward", self.backward)]
        return "\n".join([*lines, f"{sum(self.bytes_received)} bytes forward, {sum(self.backward_bytes_received)} "
                                  f"backward"])


def _received(moves: Moves, mesh: Mesh) -> tuple[int, ...]:
    return tuple(sum(move.bytes_received[rank] for _, move in moves) for rank in range(mesh.size))


def _told(when: str, moves: Sequence[tuple[str, ReshardingPlan]]) -> list[str]:
    lines = []
    for name, move in moves:
        if move.communications:
            _, *rows = str(move).splitlines()
            lines += [f"  {when}: {name} {move.source.short()} -> {move.target.short()}", *(f"  {row}" for row in rows)]
    return lines or [f"  {when}: nothing moves"]
