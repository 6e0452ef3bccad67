"""Dual prices: the seconds that more memory on each device, or the same devices in another mesh, would save.

    print(dual(solution))

More memory saves time only where memory limits the solution.  There the integer program is solved again with more of
it.  And it is solved on the meshes in which one axis has fewer devices and another one more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parallelism.auto_sharding.integer_program import NoLayoutFits
from parallelism.auto_sharding.solution import AutoSharding, auto_shard, laid_within
from parallelism.display import quantities
from parallelism.display.quantities import decimal_bytes
from parallelism.mesh import Mesh


@dataclass(frozen=True)
class OtherMesh:
    """The same devices in another mesh."""

    mesh: Mesh
    saved_seconds: float
    """By how many seconds the program is faster there; negative if it is slower, minus infinity if it does not fit."""
    is_proved: bool
    """Whether the seconds of both meshes are proved to be the least."""

    def __str__(self) -> str:
        shape = " ".join(f"{axis}={n}" for axis, n in self.mesh.shape.items())
        if self.saved_seconds == -float("inf"):
            return f"The mesh {shape} does not fit"
        return f"The mesh {shape} {_bought(self.saved_seconds)}{'' if self.is_proved else ' (not proved)'}"


@dataclass(frozen=True)
class Dual:
    """What more memory, or another mesh of the same devices, would buy."""

    seconds: float
    """The seconds of the program as the solution has it."""
    limit_bytes: int | None
    """What a device may hold now; None: anything."""
    more_bytes: int
    """How much more it might hold."""
    saved_seconds: float
    """By how many seconds the program is faster then."""
    is_limited: bool
    """Whether memory limits the solution: without a limit another one might be faster."""
    is_proved: bool
    """Whether the seconds with and without the additional memory are proved to be the least."""
    meshes: tuple[OtherMesh, ...]
    """The best first."""

    def __str__(self) -> str:
        more = f"{decimal_bytes(self.more_bytes)} more memory a device"
        if not self.is_limited:
            lines = [f"{more} saves nothing: memory does not limit."]
        else:
            lines = [f"{more} {_bought(self.saved_seconds)}{'' if self.is_proved else ' (not proved)'}."]
        return "\n".join([*lines, *(f"{each}." for each in self.meshes)])


def dual(
    solution: AutoSharding,
    *,
    more_bytes: int = 1_000_000_000,
    meshes: Iterable[Mesh] | None = None,
    time_limit: float | None = None,
) -> Dual:
    """What ``more_bytes`` on each device, and other meshes of the same devices, would buy.

    None: the meshes of `other_splits`.  Each integer program may take ``time_limit`` seconds.  ``ValueError`` if
    ``more_bytes`` is less than 1, or a mesh has another number of devices.
    """
    if more_bytes < 1:
        raise ValueError(f"more_bytes must be at least 1, got {more_bytes!r}")
    limit, mesh = solution.limit_bytes, solution.mesh
    saved, proved = 0.0, not solution.choice.gap
    is_limited = limit is not None and solution.is_limited
    if limit is not None and is_limited:
        richer = laid_within(
            solution.problem, solution.hardware, solution.priced_dtype, limit + more_bytes, time_limit
        )
        saved = max(0.0, solution.seconds - richer.seconds)
        proved = proved and not richer.choice.gap
    others = []
    for other in other_splits(mesh) if meshes is None else meshes:
        if other.size != mesh.size:
            raise ValueError(f"{other!r} has {other.size} devices, the solution is for {mesh.size}")
        others.append(_on(other, solution, time_limit))
    return Dual(
        solution.seconds,
        limit,
        more_bytes,
        saved,
        is_limited,
        proved,
        tuple(sorted(others, key=lambda each: -each.saved_seconds)),
    )


def _on(mesh: Mesh, solution: AutoSharding, time_limit: float | None) -> OtherMesh:
    """What another mesh would save."""
    try:
        found = auto_shard(
            solution.problem.function,
            mesh,
            solution.hardware,
            priced_dtype=solution.priced_dtype,
            blocks=solution.blocks,
            ties=solution.ties,
            limit_bytes=solution.limit_bytes,
            time_limit=time_limit,
        )
    except NoLayoutFits:
        return OtherMesh(mesh, -float("inf"), True)
    return OtherMesh(mesh, solution.seconds - found.seconds, not (solution.choice.gap or found.choice.gap))


def other_splits(mesh: Mesh) -> tuple[Mesh, ...]:
    """The meshes in which one axis has fewer devices and another more, by the least factor that the first one has.

    Each axis keeps at least two devices.
    """
    found = []
    for giver, n in mesh.shape.items():
        factor = next((factor for factor in range(2, n) if n % factor == 0), None)
        if factor is not None:
            found += [
                Mesh(**(dict(mesh.shape) | {giver: n // factor, taker: m * factor}))
                for taker, m in mesh.shape.items()
                if taker != giver and m > 1
            ]
    return tuple(
        each for each in dict.fromkeys(found) if tuple(each.shape.values()) != tuple(mesh.shape.values())
    )


def _bought(saved: float) -> str:
    if abs(saved) < 1e-12:
        return "saves nothing"
    return f"{'saves' if saved > 0 else 'costs'} {quantities.seconds(abs(saved))} a run"
