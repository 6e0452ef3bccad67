"""The plan of a layer: the reshardings of its forward and of its backward, each with a name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from parallelism.mesh import Mesh
from parallelism.resharding import ReshardingPlan

Moves = tuple[tuple[str, ReshardingPlan], ...]


@dataclass(frozen=True)
class LayerPlan:
    """The moves of a layer; ``print`` it.

    `bytes_received` has the bytes that each rank receives in the forward, `backward_bytes_received` those of the
    backward.  A sum or a maximum over devices is a move, too: it goes from a partial layout to one without a pending
    reduction.  ``plan["x"]`` is the move of that name.
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
        return bytes_by_rank((move for _, move in self.forward), self.mesh)

    @property
    def backward_bytes_received(self) -> tuple[int, ...]:
        return bytes_by_rank((move for _, move in self.backward), self.mesh)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The collectives of the forward, in order."""
        return tuple(step.kind for _, move in self.forward for step in move.steps if step.kind != "slice")

    @property
    def backward_kinds(self) -> tuple[str, ...]:
        """The collectives of the backward, in order."""
        return tuple(step.kind for _, move in self.backward for step in move.steps if step.kind != "slice")

    def __str__(self) -> str:
        lines = [f"{self.title} on {self.mesh!r}", *_lines("forward", self.forward), *_lines("backward", self.backward)]
        return "\n".join([*lines, f"{sum(self.bytes_received)} bytes forward, {sum(self.backward_bytes_received)} "
                                  f"backward"])


class Receiving(Protocol):
    """A communication, or several of them."""

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """The bytes that each rank receives."""


def bytes_by_rank(moves: Iterable[Receiving], mesh: Mesh) -> tuple[int, ...]:
    """The bytes that each rank receives in all of these communications."""
    return tuple(map(sum, zip(*(move.bytes_received for move in moves), strict=True))) or (0,) * mesh.size


def _lines(when: str, moves: Sequence[tuple[str, ReshardingPlan]]) -> list[str]:
    lines = []
    for name, move in moves:
        if move.communications:
            _, *rows = str(move).splitlines()
            lines += [f"  {when}: {name} {move.source.short()} -> {move.target.short()}", *(f"  {row}" for row in rows)]
    return lines or [f"  {when}: nothing moves"]
