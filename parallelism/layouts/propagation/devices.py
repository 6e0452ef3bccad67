"""The devices that a program is laid out on: a mesh, possibly with symbolic extents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from parallelism.ir.core import Expression, Extent
from parallelism.ir.core.extents import product
from parallelism.mesh import Mesh, split_sizes
from parallelism.mesh.uneven import starts
from parallelism.sharding import TensorSharding

Axes = tuple[str, ...]
STAND_IN = 2
"""The number of devices along a symbolic axis for which resharding plans are made."""


@dataclass(frozen=True)
class Devices:
    """The number of devices along each axis, outermost first.

    If an extent of a tensor or a number of devices is symbolic, splits are assumed to be even.
    """

    extents: tuple[tuple[str, Extent], ...]

    @classmethod
    def of(cls, mesh: Mesh | Mapping[str, Extent] | Devices) -> Devices:
        """The devices of a mesh, or of axes and their extents: ``{"dp": ir.symbol("dp"), "tp": 2}``."""
        if isinstance(mesh, Devices):
            return mesh
        if isinstance(mesh, Mesh):
            return cls(tuple(mesh.shape.items()))
        if not isinstance(mesh, Mapping):
            raise TypeError(f"mesh must be a Mesh, or a mapping of axes to extents, got {mesh!r}")
        extents: dict[str, Extent] = dict(Mesh(**{axis: _number(n, 1) for axis, n in mesh.items()}).shape)
        extents.update((axis, n) for axis, n in mesh.items() if isinstance(n, Expression))
        return cls(tuple(extents.items()))

    @cached_property
    def shape(self) -> Mapping[str, Extent]:
        return dict(self.extents)

    @property
    def symbolic(self) -> bool:
        """Whether the number of devices along an axis is a symbol."""
        return any(isinstance(n, Expression) for _, n in self.extents)

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh.  ``ValueError`` if the number of devices along an axis is a symbol."""
        for axis, n in self.extents:
            if isinstance(n, Expression):
                raise ValueError(
                    f"axis {axis!r} has {n} devices: a mesh needs a number instead of the symbol"
                )
        return self.stand_in

    @cached_property
    def stand_in(self) -> Mesh:
        """A mesh with `STAND_IN` devices along each symbolic axis."""
        return Mesh(**{axis: _number(n, STAND_IN) for axis, n in self.extents})

    def along(self, axes: Axes) -> Extent:
        """The number of devices along these axes: the product of their extents."""
        return product(self.shape[axis] for axis in axes)

    def cut(self, extent: Extent, axes: Axes) -> tuple[int, ...] | None:
        """The extents of the pieces of a dim split over these axes; None if they are equal, or assumed to be."""
        factors = tuple(self.shape[axis] for axis in axes)
        numbers = tuple(n for n in factors if isinstance(n, int))
        if isinstance(extent, Expression) or len(numbers) < len(factors):
            return None
        sizes = split_sizes(extent, numbers)
        return None if sizes[0] == sizes[-1] else sizes

    def part(self, extent: Extent, axes: Axes, place: Mapping[str, int]) -> tuple[Extent, Extent]:
        """The start and the extent of the piece that the device at the coordinates ``place`` holds."""
        if not axes:
            return 0, extent
        piece = 0
        for axis in axes:
            count = self.shape[axis]
            piece = piece * (count if isinstance(count, int) else 1) + place[axis]
        sizes = self.cut(extent, axes)
        if sizes is None:
            size = extent // self.along(axes)
            return size * piece, size
        return starts(sizes)[piece], sizes[piece]

    def check(self, layout: TensorSharding, subject: str) -> None:
        """``ValueError`` if the layout names an axis that does not exist; the message begins with ``subject``."""
        for axis in (*layout.axes, *layout.partial):
            if axis not in self.shape:
                raise ValueError(
                    f"{subject}: {layout!r} names axis {axis!r}, but the axes of {self} are "
                    f"{', '.join(map(repr, self.shape))}"
                )

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={n}' for axis, n in self.extents)})"


def _number(extent: Extent, stand_in: int) -> int:
    return stand_in if isinstance(extent, Expression) else extent
