"""`DevicePart`: a device as a member of a mesh of its own, which has some of the ranks of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from parallelism.mesh import Axes, Mesh, MeshIndex
from parallelism.operation.operation import Device


class Ranks:
    """The ranks of a cluster that a mesh has, and the groups of one of them along its axes.

    ``together`` is an axis that the mesh does not have, with the ranks along it of which one, the first rank of the
    mesh, is a member: such as the axis of the stages of a pipeline, whose first devices stand for them.
    """

    def __init__(
        self, mesh: Mesh, ranks: Sequence[int], rank: int, together: tuple[str, Sequence[int]] | None
    ) -> None:
        self.mesh, self.ranks, self.place = mesh, tuple(ranks), tuple(ranks).index(rank)
        if len(self.ranks) != mesh.size:
            raise ValueError(f"{mesh!r} has {mesh.size} ranks, got those of {len(self.ranks)} devices")
        self.axis = None if together is None else together[0]
        self.first = () if together is None else tuple(together[1])

    def along(self, axes: Axes) -> tuple[int, ...]:
        """The ranks of the cluster in the group along axes of the mesh."""
        return tuple(self.ranks[place] for place in self.mesh.group(self.place, axes))

    def is_together(self, axes: Axes) -> bool:
        """Whether these axes are that of all meshes."""
        return self.axis is not None and axes in (self.axis, (self.axis,))


@dataclass(frozen=True)
class SharedLater:
    """An all_reduce among the first devices of meshes, under way; `wait` shares its result inside the mesh."""

    x: Any
    """The `Work` of a device that ``starts`` it; that of any other device is the array that it has."""
    share: Callable[[Any], Any]
    starts: bool

    def wait(self) -> Any:
        """The result."""
        return self.share(self.x.wait() if self.starts else self.x)

    def done(self) -> bool:
        """Whether the all_reduce is over."""
        return bool(self.x.done()) if self.starts else True


class DevicePart:
    """A device of a cluster on a ``mesh`` that has some of its ``ranks``: a `Device` with another mesh and rank.

    Collectives are over groups of this mesh.  Messages without axes go to ranks of the whole cluster.  Over the axis
    ``together`` (see `Ranks`) there is an all_reduce of a value that all devices of a mesh have: the first devices of
    the meshes reduce it, and broadcast the result in their meshes.

    ``ValueError`` for a reduce_scatter over several axes whose parts are uneven: pieces of groups are cut at once.
    """

    def __init__(
        self,
        device: Device,
        mesh: Mesh,
        ranks: Sequence[int],
        together: tuple[str, Sequence[int]] | None = None,
    ) -> None:
        self.whole, self.of = device, Ranks(mesh, ranks, device.rank, together)
        self.mesh, self.rank, self.size = mesh, self.of.place, mesh.size

    def __getattr__(self, name: str) -> Any:
        """All else is that of the device."""
        return getattr(self.whole, name)

    @property
    def index(self) -> MeshIndex:
        """The place on the axes of the mesh."""
        return self.mesh.index(self.rank)

    def group(self, axes: Axes = None) -> tuple[int, ...]:
        """The ranks, on this mesh, of the group along ``axes``."""
        return self.mesh.group(self.rank, axes)

    def position(self, axes: Axes = None) -> int:
        """The place in this group."""
        return self.group(axes).index(self.rank)

    def all_reduce(self, x: Any, axes: Axes = None, **options: Any) -> Any:
        """An all_reduce over the group along ``axes``."""
        if not self.of.is_together(axes):
            return self.whole.all_reduce(x, groups=self._groups(axes), **options)
        if not self.rank:
            x = self.whole.all_reduce(x, groups=[self.of.first], **options)
        return SharedLater(x, self.share, starts=not self.rank) if options.get("async_op") else self.share(x)

    def share(self, x: Any) -> Any:
        """What the first device of the mesh has, on all of them: a broadcast."""
        return x if self.size == 1 else self.whole.broadcast(x, groups=[self.of.ranks])

    def all_gather(self, x: Any, axes: Axes = None, **options: Any) -> Any:
        """An all_gather over the group along ``axes``."""
        return self.whole.all_gather(x, groups=self._groups(axes), **options)

    def reduce_scatter(self, x: Any, axes: Axes = None, *, dim: int = 0, **options: Any) -> Any:
        """A reduce_scatter over the group along ``axes``."""
        names = self.mesh.axes_of(axes)
        if len(names) > 1 and x.shape[dim] % len(self.group(axes)):
            raise ValueError(
                f"a reduce_scatter over {' and '.join(names)} of {self.mesh!r}, which is a part of the "
                f"cluster, needs a dim that divides by {len(self.group(axes))}, got {x.shape[dim]}"
            )
        return self.whole.reduce_scatter(x, groups=self._groups(axes), dim=dim, **options)

    def all_to_all(self, x: Any, axes: Axes = None, **options: Any) -> Any:
        """An all_to_all over the group along ``axes``."""
        return self.whole.all_to_all(x, groups=self._groups(axes), **options)

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]], axes: Axes = None, **options: Any) -> Any:
        """A permute in the group along ``axes``."""
        return self.whole.permute(x, pairs, groups=self._groups(axes), **options)

    def _groups(self, axes: Axes) -> list[tuple[int, ...]]:
        return [self.of.along(axes)]


@runtime_checkable
class MakesParts(Protocol):
    """A device that makes its parts itself, as one that only records does."""

    def as_part(self, mesh: Mesh, ranks: Sequence[int], together: tuple[str, Sequence[int]] | None) -> Device:
        """What `DevicePart` with these arguments is for other devices."""


def part_of(
    device: Device, mesh: Mesh, ranks: Sequence[int], together: tuple[str, Sequence[int]] | None = None
) -> Device:
    """The device on a mesh of its own; arguments as those of `DevicePart`."""
    if isinstance(device, MakesParts):
        return device.as_part(mesh, ranks, together)
    part: Any = DevicePart(device, mesh, ranks, together)
    return cast(Device, part)
