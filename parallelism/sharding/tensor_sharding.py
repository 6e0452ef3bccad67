"""The layout of a tensor on a mesh: the axes that split each dim, and the axes over which a reduction is pending.

    An array (5, 4) on Mesh(x=2, y=2)
    as TensorSharding("x", None)                      as TensorSharding(("x", "y"), None):
    is split over x                                   it is split over x, then each part over y

        rank 0, 1    rows 0:3                             rank 0    rows 0:2      rank 2    rows 3:4
        rank 2, 3    rows 3:5                             rank 1    rows 2:3      rank 3    rows 4:5

A dim is split axis by axis, outermost first.  Each part of n elements is split into k pieces as by
`numpy.array_split`: the first ``n % k`` pieces have one more element.  So adding an innermost axis is always a local
slice, and removing it is a gather.  A shard may be empty.  The tensor is replicated over an axis that is not named.
Over a *partial* axis each member of a group holds one term of the pending reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.arrays import Array, plain_array
from parallelism.display import shortened
from parallelism.mesh import Mesh, split_sizes
from parallelism.mesh.uneven import starts
from parallelism.sharding import notation
from parallelism.sharding.partial import check_op, combine, identity
from parallelism.spelling import explains_keywords

if TYPE_CHECKING:
    from parallelism.display import Drawing

Shape = tuple[int, ...]


@dataclass(frozen=True, init=False, repr=False)
class DimSharding:
    """The mesh axes that split one dim, outermost first.  Without axes the dim is whole.

    >>> DimSharding("x").axes, DimSharding("x", "y").axes, DimSharding().axes
    (('x',), ('x', 'y'), ())
    """

    axes: tuple[str, ...]

    def __init__(self, *axes: str | Sequence[str] | None) -> None:
        if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], list | tuple)):
            axes = tuple(axes[0] or ())
        for axis in axes:
            if not isinstance(axis, str):
                raise TypeError(f"a dim must be split over names of mesh axes, got {axis!r} in {axes!r}")
            if "," in axis or "[" in axis:  # the text of a layout, or of several axes
                raise ValueError(
                    f"{shortened(axis)} is no name of a mesh axis: several axes of a dim are a tuple, as ('x', 'y'), and "
                    f"TensorSharding.parse reads the text of a layout, as '[x, None]'"
                )
        object.__setattr__(self, "axes", axes)

    def __repr__(self) -> str:
        return f"DimSharding({', '.join(map(repr, self.axes))})"


@dataclass(frozen=True, init=False, repr=False, eq=False)
class TensorSharding:
    """The layout of a tensor: a `DimSharding` for each dim, and the pending reduction.

    Each of ``dims`` is None (whole), an axis, a tuple of axes (outermost first) or a `DimSharding`.  One ``...`` stands
    for any number of whole dims.  ``partial`` names one or several axes over which a reduction by ``op`` (``sum, prod,
    max, min``) is pending: the value is the reduction of the terms of each group along them, in the order of the mesh.

    >>> layout = TensorSharding("dp", None, ("tp", "pp"))
    >>> layout.dims[2].axes, layout.partial
    (('tp', 'pp'), ())
    >>> layout.local_shape((5, 7, 8), Mesh(dp=2, tp=3, pp=2), rank=0)
    (3, 7, 2)

    A layout is immutable and hashable, and its repr can be evaluated.  The order of the partial axes does not matter.
    A layout knows no mesh: methods that take a mesh and a shape check that the axes exist and the dims fit.
    ``ValueError`` for an axis named twice and an unknown ``op``; ``TypeError`` for an axis that is not a string.
    """

    dims: tuple[DimSharding, ...]
    """The given dims, without the ``...``."""
    ellipsis: int | None
    """The index in `dims` before which the ``...`` stands; None if there is none."""
    partial: tuple[str, ...]
    """The axes over which a reduction is pending."""
    op: str
    """The pending reduction; ``sum`` if nothing is pending."""
    _compared: tuple[Any, ...]
    """All that equal layouts have in common, in tuples: thousands are compared, and tuples compare quickly."""

    @explains_keywords("TensorSharding")
    def __init__(
        self,
        *dims: str | Sequence[str] | DimSharding | EllipsisType | None,
        partial: str | Sequence[str] | None = (),
        op: str = "sum",
    ) -> None:
        places = [i for i, dim in enumerate(dims) if dim is Ellipsis]
        if len(places) > 1:
            raise ValueError(f"a layout has at most one ..., got {len(places)} in {dims!r}")
        named = []
        for dim in dims:
            if not isinstance(dim, EllipsisType):
                named.append(dim if isinstance(dim, DimSharding) else DimSharding(dim))
        pending = DimSharding(partial).axes
        check_op(op)
        used: dict[str, str] = {}
        for where, axes in [*((f"dim {i}", dim.axes) for i, dim in enumerate(named)), ("partial", pending)]:
            for axis in axes:
                if axis in used:
                    raise ValueError(
                        f"axis {axis!r} is used twice, by {used[axis]} and by {where}: an axis splits one "
                        f"dim of a tensor once, or is partial"
                    )
                used[axis] = where
        ellipsis = places[0] if places else None
        op = op if pending else "sum"
        vars(self).update(
            dims=tuple(named),
            ellipsis=ellipsis,
            partial=pending,
            op=op,
            _compared=(tuple([dim.axes for dim in named]), ellipsis, op, frozenset(pending)),
        )

    def __eq__(self, other: object) -> bool:
        return self._compared == other._compared if isinstance(other, TensorSharding) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._compared)

    @classmethod
    def replicated(cls, ndim: int) -> TensorSharding:
        """The layout in which every device holds the whole tensor."""
        return cls(*[None] * ndim)

    @classmethod
    def parse(cls, text: str, mesh: Mesh | None = None) -> TensorSharding:
        """Read a layout in one of three notations.

        ``[x, None, (y, z)]``, ``TensorSharding('x', ..., partial='y')``
            the axes of each dim in brackets; ``partial=`` and ``op=`` may follow
        ``I_x, J`` and ``A[I_x, J_{y,z}] {U_w}``
            dims by name with axes as subscripts, and in braces the axes of the pending reduction
        ``[S(0), R, P(sum)]``
            the placement of each axis of the mesh, as torch prints it; needs ``mesh``

        In brackets without a name in front, words are axes, unless one of them has the form ``I_x`` (one capital letter
        before the underscore) or ``J_{...}``.  ``ValueError`` names the position at which the text is wrong, or an axis
        that ``mesh`` does not have.

        >>> TensorSharding.parse("A[I_x, J_{y,z}] {U_w}")
        TensorSharding('x', ('y', 'z'), partial='w')
        >>> TensorSharding.parse("[S(0), R, P(sum)]", Mesh(x=2, y=3, z=2))
        TensorSharding('x', ..., partial='z')
        """
        layout = (_parsed if isinstance(text, str) else _parsed.__wrapped__)(
            text, None if mesh is None else mesh.axes
        )
        try:
            if mesh is not None:
                layout.check_axes(mesh)
        except ValueError as error:
            raise ValueError(f"{shortened(text)}: {error}") from None
        return layout

    @classmethod
    def of(
        cls, layout: TensorSharding | str, mesh: Mesh | None = None, name: str = "the layout"
    ) -> TensorSharding:
        """``layout`` as it is, or read from its text.  ``TypeError`` for anything else, which it calls ``name``.

        >>> TensorSharding.of("[x, None]") == TensorSharding.of(TensorSharding("x", None))
        True
        """
        if isinstance(layout, str):
            return cls.parse(layout, mesh)
        if not isinstance(layout, cls):
            raise TypeError(
                f"{name} must be a TensorSharding or its text, as '[x, None]', got {shortened(layout)}"
            )
        return layout

    # -- shards of a tensor --------------------------------------------------------------------------------------------

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split dims, dim by dim, without the partial ones."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    def over(self, ndim: int) -> TensorSharding:
        """The layout for a tensor with ``ndim`` dims: ``...`` is expanded.  ``ValueError`` if it does not fit."""
        given = len(self.dims)
        if given == ndim and self.ellipsis is None:
            return self
        if given > ndim or self.ellipsis is None:
            least = "at least " if self.ellipsis is not None else ""
            raise ValueError(f"{self!r} has {least}{given} dim{'s' * (given != 1)}, the tensor has {ndim}")
        whole = [DimSharding()] * (ndim - given)
        return TensorSharding(
            *self.dims[: self.ellipsis], *whole, *self.dims[self.ellipsis :], partial=self.partial, op=self.op
        )

    def local_shape(self, shape: Sequence[int], mesh: Mesh, rank: int) -> Shape:
        """The shape of the shard of ``rank``, for a tensor of ``shape``."""
        return tuple(piece.stop - piece.start for piece in self.slices(shape, mesh, rank))

    def slices(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[slice, ...]:
        """The slices of the tensor that ``rank`` holds: its shard is ``x[sharding.slices(x.shape, mesh, rank)]``."""
        return _slices(*self._checked(shape, mesh), mesh, rank)

    def groups(self, mesh: Mesh, dim: int) -> tuple[Shape, ...]:
        """The groups of ranks over which ``dim`` is split, each in the order of the pieces."""
        self.check_axes(mesh)
        if not -len(self.dims) <= dim < len(self.dims):
            raise ValueError(f"{self!r} names dims {-len(self.dims)} to {len(self.dims) - 1}, got {dim}")
        return mesh.groups(self.dims[dim].axes)

    def replica_groups(self, mesh: Mesh) -> tuple[Shape, ...]:
        """The groups of ranks that hold equal shards."""
        self.check_axes(mesh)
        return mesh.groups(tuple(axis for axis in mesh.axes if axis not in (*self.axes, *self.partial)))

    def partial_groups(self, mesh: Mesh) -> tuple[Shape, ...]:
        """The groups of ranks that hold the terms of one block, in the order in which they are combined."""
        self.check_axes(mesh)
        return mesh.groups(self._partial_in_order(mesh))

    # -- shard and unshard ---------------------------------------------------------------------------------------------

    def shard(self, x: Any, mesh: Mesh) -> list[Array]:
        """The shards of ``x``, indexed by rank, as views.

        In a partial layout the first rank of each group gets the value.  The others get new arrays with the identity of
        the operation (zeros for a sum).
        """
        x = plain_array("shard", x)
        extents, dims = self._checked(x.shape, mesh)
        shards: list[Array] = [x[_slices(extents, dims, mesh, rank)] for rank in range(mesh.size)]
        if self.partial:
            empty = identity(self.op, x.dtype)
            for group in self.partial_groups(mesh):
                for rank in group[1:]:
                    shards[rank] = np.full(shards[rank].shape, empty, x.dtype)
        return shards

    def unshard(self, shards: Sequence[Any], mesh: Mesh) -> Array:
        """The whole tensor as a new array, from its shards indexed by rank.  A pending reduction is carried out.

        Of several replicas the one of the lowest rank is used.  ``ValueError`` if the number, shapes or dtypes of the
        shards are not those of one tensor in this layout.
        """
        if len(shards) != mesh.size:
            raise ValueError(f"{mesh!r} has {mesh.size} devices, got {len(shards)} shards")
        arrays = [plain_array("unshard", shard) for shard in shards]
        shape = self.global_shape({rank: array.shape for rank, array in enumerate(arrays)}, mesh)
        dtype = arrays[0].dtype
        for rank, array in enumerate(arrays):
            if array.dtype != dtype:
                raise ValueError(
                    f"the shards of one tensor must have one dtype; rank 0 has {dtype}, rank {rank} has "
                    f"{array.dtype}"
                )
        whole = np.empty(shape, dtype)
        dims, pending = self.over(len(shape)).dims, self._partial_in_order(mesh)
        for first in (group[0] for group in self.replica_groups(mesh)):
            group = mesh.group(first, pending)
            if group[0] == first:
                terms = [arrays[rank] for rank in group]
                whole[_slices(shape, dims, mesh, first)] = (
                    combine(self.op, terms) if len(terms) > 1 else terms[0]
                )
        return whole

    def global_shape(self, shapes: Mapping[int, Sequence[int]], mesh: Mesh) -> Shape:
        """The shape of the whole tensor, from the shapes of its shards by rank.

        ``shapes`` has all ranks, or those of a group along `axes`.  ``ValueError`` if no tensor has these shards.
        """
        first = min(shapes)
        ndim = len(shapes[first])
        for rank, local in shapes.items():
            if len(local) != ndim:
                raise ValueError(
                    f"the shards of one tensor must have equally many dims; rank {first} has shape "
                    f"{tuple(shapes[first])}, rank {rank} has {tuple(local)}"
                )
        self.check_axes(mesh)
        dims = self.over(ndim).dims
        extents = []
        for d, dim in enumerate(dims):
            extents.append(sum(shapes[rank][d] for rank in mesh.group(first, dim.axes)))
        shape = tuple(extents)
        for rank, local in shapes.items():
            expected = tuple(piece.stop - piece.start for piece in _slices(shape, dims, mesh, rank))
            if tuple(local) != expected:
                raise ValueError(
                    f"these are not the shards of one tensor in layout {self!r} on {mesh!r}: for shape "
                    f"{shape} rank {rank} must hold {expected}, got {tuple(local)}"
                )
        return shape

    def draw(self, shape: Sequence[int], mesh: Mesh, dims: Sequence[int] | None = None) -> Drawing:
        """A picture of the blocks and the ranks that hold them, in 80 columns.  ``print`` it, or show it in a notebook.

        At most two dims are drawn: those in ``dims``, or the first that are split.  If other dims are split, too, a
        cell lists all ranks that hold a part of it.
        """
        from parallelism.sharding import picture as drawing

        extents, checked = self._checked(shape, mesh)
        places = [_slices(extents, checked, mesh, rank) for rank in range(mesh.size)]
        terms = [mesh.group(rank, self._partial_in_order(mesh)).index(rank) for rank in range(mesh.size)]
        return drawing.drawing(self.over(len(extents)), extents, mesh, places, terms, dims)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _checked(self, shape: Sequence[int], mesh: Mesh) -> tuple[Shape, tuple[DimSharding, ...]]:
        extents = tuple(int(n) for n in shape)
        if any(n < 0 for n in extents):
            raise ValueError(f"an extent cannot be negative, got shape {extents}")
        try:
            dims = self.over(len(extents)).dims
        except ValueError as error:
            raise ValueError(f"{error}: shape {extents}") from None
        self.check_axes(mesh)
        return extents, dims

    def check_axes(self, mesh: Mesh) -> None:
        """``ValueError`` for an axis that the mesh does not have."""
        for axis in (*self.axes, *self.partial):
            if axis not in mesh.shape:
                raise ValueError(
                    f"{self!r} names axis {axis!r}, but the axes of {mesh!r} are "
                    f"{', '.join(map(repr, mesh.axes))}"
                )

    def _partial_in_order(self, mesh: Mesh) -> tuple[str, ...]:
        return tuple(axis for axis in mesh.axes if axis in self.partial)

    # -- text ----------------------------------------------------------------------------------------------------------

    def _entries(self, word: Callable[[str], str]) -> list[str]:
        entries = [_written(dim.axes, word) for dim in self.dims]
        return (
            entries
            if self.ellipsis is None
            else [*entries[: self.ellipsis], "...", *entries[self.ellipsis :]]
        )

    def __repr__(self) -> str:
        words = self._entries(repr)
        if self.partial:
            words.append(f"partial={_written(self.partial, repr)}")
            if self.op != "sum":
                words.append(f"op={self.op!r}")
        return f"TensorSharding({', '.join(words)})"

    def _repr_html_(self) -> str:
        from parallelism.sharding import picture as drawing

        return drawing.table_of_dims(self)

    def short(self) -> str:
        """The layout in brackets, ``[x, None] partial=y``; `parse` reads it, too."""
        pending = f" partial={_written(self.partial, str)}" if self.partial else ""
        op = f", op={self.op}" if self.op != "sum" else ""
        return f"[{', '.join(self._entries(str))}]{pending}{op}"


@lru_cache(maxsize=4096)
def _parsed(text: str, axes: tuple[str, ...] | None) -> TensorSharding:
    """The layout of a text; programs have few different ones, and are read often."""
    dims, pending, op = notation.parse(text, axes)
    try:
        return TensorSharding(*dims, partial=pending, op=op)
    except ValueError as error:
        raise ValueError(f"{shortened(text)}: {error}") from None


@lru_cache(maxsize=4096)
def _slices(shape: Shape, dims: tuple[DimSharding, ...], mesh: Mesh, rank: int) -> tuple[slice, ...]:
    here = mesh.index(rank)
    pieces = []
    for extent, dim in zip(shape, dims, strict=True):
        factors = tuple(mesh.shape[axis] for axis in dim.axes)
        piece = 0
        for axis, factor in zip(dim.axes, factors, strict=True):
            piece = piece * factor + here[axis]
        places = starts(split_sizes(extent, factors))
        pieces.append(slice(places[piece], places[piece + 1]))
    return tuple(pieces)


def _written(axes: tuple[str, ...], word: Callable[[str], str]) -> str:
    words = ", ".join(map(word, axes)) or "None"
    return f"({words})" if len(axes) > 1 else words
