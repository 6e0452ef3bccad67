"""A mesh arranges the devices of a cluster in a grid with named axes.

A mesh is a value.  It starts nothing and knows no processes.  It maps ranks to coordinates, and it lists the
groups of ranks that differ only along some axes.

    Mesh(dp=2, tp=4)        tp=0  tp=1  tp=2  tp=3
                     dp=0     0     1     2     3       ranks are row-major:
                     dp=1     4     5     6     7       the last axis is the fastest
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import product
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Never

from parallelism.display.quantities import shortened
from parallelism.spelling import no_attribute

if TYPE_CHECKING:
    from parallelism.display import Drawing

_ELSEWHERE = {
    "axisnames": "mesh.axes",
    "meshdimnames": "mesh.axes",
    "dimnames": "mesh.axes",
    "names": "mesh.axes",
    "axissizes": "mesh.shape",
    "devices": "range(mesh.size)",
    "deviceids": "range(mesh.size)",
    "ndim": "len(mesh.axes)",
    "numdevices": "mesh.size",
    "worldsize": "mesh.size",
    "getgroup": "mesh.groups(axes)",
    "getrank": "mesh.rank(**coordinates)",
    "getcoordinate": "mesh.index(rank)",
    "coordinates": "mesh.index(rank)",
    "getlocalrank": "mesh.index(rank)[axis]",
    "getdimsize": "mesh.shape[axis]",
}
"""Names elsewhere, without case and underscores, and what to write here."""

Axes = str | tuple[str, ...] | None
"""Names of mesh axes: one, several (the first varies slowest), or None for all of them."""


class _NumbersOfAxes:
    """A number for each axis, in order: what a mesh and the coordinates of a rank consist of."""

    __slots__ = ("_numbers",)
    _numbers: dict[str, int]

    def __hash__(self) -> int:
        return hash(tuple(self._numbers.items()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return tuple(self._numbers.items()) == tuple(other._numbers.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{axis}={number}' for axis, number in self._numbers.items())})"


class NoSuchAxisError(ValueError, KeyError):
    """A mesh has no axis of this name.  It is a `KeyError`, too, so that ``in`` and ``get`` of a `MeshIndex` work."""

    __str__ = ValueError.__str__  # that of a KeyError would put the sentence in quotes


class MeshIndex(_NumbersOfAxes, Mapping[str, int]):
    """The coordinates of one rank, one for each axis, in the order of the mesh.

    >>> index = MeshIndex(dp=1, tp=3)
    >>> index["tp"], dict(index)
    (3, {'dp': 1, 'tp': 3})
    """

    __slots__ = ()

    def __init__(self, **coordinates: int) -> None:
        self._numbers = coordinates

    if not TYPE_CHECKING:  # a type checker reports an unknown name itself

        def __getattr__(self, name):
            """Raise ``AttributeError`` for an unknown name; for an axis, with what to write."""
            if not name.startswith("_") and name in self._numbers:
                raise AttributeError(f"coordinates have no {name!r}; that along the axis is index[{name!r}]")
            no_attribute("MeshIndex", self, name, {})

    def __getitem__(self, axis: str) -> int:
        try:
            return self._numbers[axis]
        except KeyError:
            raise NoSuchAxisError(
                f"no axis {axis!r} in {self!r}; the axes are {_names(self._numbers)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class Mesh(_NumbersOfAxes):
    """A grid of devices with named axes, outermost first; ranks are row-major.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.size, mesh.axes, mesh.index(5), mesh.rank(dp=1, tp=1)
    (8, ('dp', 'tp'), MeshIndex(dp=1, tp=1), 5)
    >>> mesh.groups("tp")
    ((0, 1, 2, 3), (4, 5, 6, 7))

    A mesh is frozen, hashable and picklable.  Two meshes are equal if they have the same axes in the same order.
    ``ValueError`` for a size below 1, ``TypeError`` for a size that is not an integer.
    """

    __slots__ = ("__dict__",)

    def __init__(self, *sizes: Never, **extents: int) -> None:
        if sizes:
            raise TypeError(
                f"the axes of a mesh have names, as in Mesh(dp=2, tp=4); got {', '.join(map(repr, sizes))}"
            )
        if not extents:
            raise ValueError("a mesh needs at least one axis, as in Mesh(dp=2, tp=4)")
        numbers = {
            axis: checked_count(f"the size of axis {axis!r}", extent) for axis, extent in extents.items()
        }
        object.__setattr__(self, "_numbers", numbers)
        object.__setattr__(self, "_groups_by_rank", {})

    _groups_by_rank: dict[tuple[int, Axes], tuple[int, ...]]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Mesh is immutable; {name!r} cannot be set")

    if not TYPE_CHECKING:  # a type checker reports an unknown name itself

        def __getattr__(self, name):
            """Raise ``AttributeError`` for an unknown name, with the name that is meant."""
            if not name.startswith("_") and name in self._numbers:
                raise AttributeError(f"a mesh has no {name!r}; the size of the axis is mesh.shape[{name!r}]")
            no_attribute("mesh", self, name, _ELSEWHERE)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(self._numbers)

    @property
    def shape(self) -> Mapping[str, int]:
        """The size of each axis, in order; read-only."""
        return MappingProxyType(self._numbers)

    @cached_property
    def size(self) -> int:
        """The number of devices."""
        return prod(self._numbers.values())

    def rank(self, index: MeshIndex | None = None, /, **coordinates: int) -> int:
        """The rank at these coordinates, given as a `MeshIndex` or by one keyword for every axis."""
        if index is not None:
            coordinates = {**index, **coordinates}
        self.axes_of(tuple(coordinates))
        rank = 0
        for axis, extent in self._numbers.items():
            if axis not in coordinates:
                raise ValueError(
                    f"a rank of {self!r} needs a coordinate for axis {axis!r}; got "
                    f"{_names(coordinates) or 'none'}"
                )
            i = coordinates[axis]
            i = i if type(i) is int else checked_integer(f"the coordinate on axis {axis!r}", i)
            if not 0 <= i < extent:
                raise ValueError(f"axis {axis!r} of {self!r} has coordinates 0 to {extent - 1}, got {i}")
            rank = rank * extent + i
        return rank

    def index(self, rank: int) -> MeshIndex:
        """The coordinates of a rank."""
        rank = rank if type(rank) is int else checked_integer("a rank", rank)
        if not 0 <= rank < self.size:
            raise ValueError(f"{self!r} has ranks 0 to {self.size - 1}, got {rank}")
        coordinates = {}
        for axis, extent in reversed(self._numbers.items()):
            rank, coordinates[axis] = divmod(rank, extent)
        return MeshIndex(**dict(reversed(coordinates.items())))

    def group(self, rank: int, axes: Axes = None) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axes``, itself included.  The first axis varies slowest."""
        try:
            members = self._groups_by_rank.get((rank, axes))
        except TypeError:  # a list, or an array
            raise self._no_axes(axes) from None
        if members is None:
            here = dict(self.index(rank))
            names = self.axes_of(axes)
            coordinates = product(*(range(self._numbers[axis]) for axis in names))
            members = tuple(self.rank(**here | dict(zip(names, each, strict=True))) for each in coordinates)
            self._groups_by_rank.update(
                ((member, axes), members) for member in members
            )  # all have the same group
        return members

    def groups(self, axes: Axes = None) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axes``, ordered by their first ranks."""
        return tuple(dict.fromkeys(self.group(rank, axes) for rank in range(self.size)))

    def axes_of(self, axes: Axes) -> tuple[str, ...]:
        """``axes`` as a checked tuple of names; None means all axes."""
        if axes is None:
            return self.axes
        if not isinstance(axes, Iterable):
            raise self._no_axes(axes)
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for axis in names:
            self._check_axis(axis)
        if len(set(names)) < len(names):
            raise ValueError(f"an axis is named twice in {names!r}")
        return names

    def _no_axes(self, axes: object) -> TypeError:
        kind = type(axes).__name__
        return TypeError(
            f"axes must be one of the names {_names(self._numbers)}, a tuple of names, or None; got "
            f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        )

    def _check_axis(self, axis: object) -> None:
        if not isinstance(axis, str):
            raise TypeError(
                f"an axis of {self!r} must be one of the names {_names(self._numbers)}, got {shortened(axis)}"
            )
        if axis not in self._numbers:
            raise ValueError(f"{self!r} has no axis {shortened(axis)}; its axes are {_names(self._numbers)}")

    def __iter__(self) -> Iterator[MeshIndex]:
        return (self.index(rank) for rank in range(self.size))

    def __len__(self) -> int:
        return self.size

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Mesh, **self._numbers), ()

    def draw(self) -> Drawing:
        """A picture of the ranks in their grid, in 80 columns.  ``print`` it, or display it in a notebook.

        >>> print(Mesh(dp=2, tp=3).draw())
        Mesh(dp=2, tp=3): 6 devices
        <BLANKLINE>
              tp=0  tp=1  tp=2
        dp=0     0     1     2
        dp=1     3     4     5
        """
        from parallelism.mesh import picture as mesh_picture

        return mesh_picture.picture(self)

    def _repr_html_(self) -> str:
        return self.draw().html


def checked_count(name: str, value: int) -> int:
    """A number of at least 1, called ``name`` in errors."""
    number = checked_integer(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def checked_integer(name: str, value: int) -> int:
    """``value``; ``TypeError`` unless it is an integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return value.__index__()


def _names(axes: Mapping[str, int]) -> str:
    return ", ".join(map(repr, axes))
