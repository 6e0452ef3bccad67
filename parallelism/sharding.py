"""How a tensor lies on a mesh: for each dim the axes it is split over, and the axes over which a reduction is pending.

    TensorSharding("x", None) of an array (5, 4)      TensorSharding(("x", "y"), None) of the same
    on Mesh(x=2, y=2)                                 split over x, then each part over y

        rank 0, 1    rows 0:3                             rank 0    rows 0:2      rank 2    rows 3:4
        rank 2, 3    rows 3:5                             rank 1    rows 2:3      rank 3    rows 4:5

A dim is split axis by axis, outermost first, each part by the rule of `numpy.array_split`: its first ``n % k`` pieces
get one element more.  So adding an innermost axis is always a local slice, and removing it a gather.  A shard may be
empty.  Over an axis that is not named the tensor is replicated; over a *partial* axis every member of the group holds
a term of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism import notation
from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.partial import check_op, combine, identity
from parallelism.splitting import split_sizes, starts

if TYPE_CHECKING:
    from parallelism.drawing import Drawing

Shape = tuple[int, ...]


@dataclass(frozen=True, init=False, repr=False)
class DimSharding:
    """The mesh axes that one dim is split over, outermost first; none leaves it whole.

    >>> DimSharding("x").axes, DimSharding("x", "y").axes, DimSharding().axes
    (('x',), ('x', 'y'), ())
    """

    axes: tuple[str, ...]

    def __init__(self, *axes: str | Sequence[str] | None) -> None:
        if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], list | tuple)):
            axes = tuple(axes[0] or ())
        for axis in axes:
            if not isinstance(axis, str):
                raise TypeError(f"a dim is split over names of mesh axes, got {axis!r} in {axes!r}")
        object.__setattr__(self, "axes", axes)

    def __repr__(self) -> str:
        return f"DimSharding({', '.join(map(repr, self.axes))})"


@dataclass(frozen=True, init=False, repr=False, eq=False)
class TensorSharding:
    """The layout of a tensor: a `DimSharding` for each dim, and what is pending.

    Each of ``dims`` is None (whole), an axis, a tuple of axes (outermost first) or a `DimSharding`; one ``...`` stands
    for any number of whole dims.  ``partial`` is an axis or several over which a reduction by ``op`` (``sum, prod,
    max, min``) is pending: the value is what the terms of each group along them make, in the order of the mesh.

    >>> layout = TensorSharding("dp", None, ("tp", "pp"))
    >>> layout.dims[2].axes, layout.partial
    (('tp', 'pp'), ())
    >>> layout.local_shape((5, 7, 8), Mesh(dp=2, tp=3, pp=2), rank=0)
    (3, 7, 2)

    A value: immutable, hashable, printed as it is written; the order of the partial axes does not count.  It knows no
    mesh: whether its axes exist and its dims fit is checked where a mesh and a shape are given.  ``ValueError`` for
    an axis named twice and an unknown ``op``, ``TypeError`` for what is no name.
    """

    dims: tuple[DimSharding, ...]
    """The dims that are named, an ``...`` left out."""
    ellipsis: int | None
    """Before which of `dims` the ``...`` stands, if there is one."""
    partial: tuple[str, ...]
    """The axes over which a reduction is pending."""
    op: str
    """By what it reduces: ``sum`` where nothing is pending."""

    def __init__(
        self, *dims: str | Sequence[str] | DimSharding | EllipsisType | None,
        partial: str | Sequence[str] | None = (), op: str = "sum",
    ) -> None:
        places = [i for i, dim in enumerate(dims) if dim is Ellipsis]
        if len(places) > 1:
            raise ValueError(f"a layout has at most one ..., got {len(places)} in {dims!r}")
        named = tuple(
            dim if isinstance(dim, DimSharding) else DimSharding(dim)
            for dim in dims if not isinstance(dim, EllipsisType)
        )
        pending = DimSharding(partial).axes
        check_op(op)
        used: dict[str, str] = {}
        for where, axes in [*((f"dim {i}", dim.axes) for i, dim in enumerate(named)), ("partial", pending)]:
            for axis in axes:
                if axis in used:
                    raise ValueError(f"axis {axis!r} is used twice, by {used[axis]} and by {where}: an axis splits one "
                                     f"dim of a tensor, once, or is partial")
                used[axis] = where
        for name, value in (("dims", named), ("ellipsis", places[0] if places else None), ("partial", pending),
                            ("op", op if pending else "sum")):
            object.__setattr__(self, name, value)

    @classmethod
    def replicated(cls, ndim: int) -> TensorSharding:
        """Every device holds the whole tensor."""
        return cls(*[None] * ndim)

    @classmethod
    def parse(cls, text: str, mesh: Mesh | None = None) -> TensorSharding:
        """Reads a layout as it is written, here and elsewhere.

        ``[x, None, (y, z)]``, ``TensorSharding('x', ..., partial='y')``
            the axes of each dim, in brackets; ``partial=`` and ``op=`` may follow
        ``I_x, J`` and ``A[I_x, J_{y,z}] {U_w}``
            dims by name, axes as their subscripts, in braces what is unreduced
        ``[S(0), R, P(sum)]``
            for each axis of the mesh what it does to the tensor, as torch prints a placement; needs ``mesh``

        In brackets that follow no name, words are axes, unless one of them has the form ``I_x`` (one capital letter
        before the underscore) or ``J_{...}``.  ``ValueError`` with the place where the text stops making sense, and
        for axes that ``mesh`` has not.

        >>> TensorSharding.parse("A[I_x, J_{y,z}] {U_w}")
        TensorSharding('x', ('y', 'z'), partial='w')
        >>> TensorSharding.parse("[S(0), R, P(sum)]", Mesh(x=2, y=3, z=2))
        TensorSharding('x', ..., partial='z')
        """
        dims, pending, op = notation.parse(text, None if mesh is None else mesh.axes)
        try:
            found = cls(*dims, partial=pending, op=op)
            if mesh is not None:
                found.check_axes(mesh)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
        return found

    # -- what it says of a tensor --------------------------------------------------------------------------------------

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes it splits over, dim by dim; the partial ones are not among them."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    def over(self, ndim: int) -> TensorSharding:
        """The layout of a tensor of so many dims: ``...`` spelt out.  ``ValueError`` if the number does not fit."""
        given = len(self.dims)
        if given == ndim and self.ellipsis is None:
            return self
        if given > ndim or self.ellipsis is None:
            least = "at least " if self.ellipsis is not None else ""
            raise ValueError(f"{self!r} is of {least}{given} {_dims(given)}, the tensor has {ndim}")
        whole = [DimSharding()] * (ndim - given)
        dims = [*self.dims[: self.ellipsis], *whole, *self.dims[self.ellipsis :]]
        return TensorSharding(*dims, partial=self.partial, op=self.op)

    def local_shape(self, shape: Sequence[int], mesh: Mesh, rank: int) -> Shape:
        """The shape of the shard of ``rank``, of a tensor of ``shape``."""
        return tuple(piece.stop - piece.start for piece in self.slices(shape, mesh, rank))

    def slices(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[slice, ...]:
        """Where the shard of ``rank`` lies in the tensor: ``x[sharding.slices(x.shape, mesh, rank)]``."""
        extents, dims = self._checked(shape, mesh)
        return _slices(extents, dims, mesh, rank)

    def groups(self, mesh: Mesh, dim: int) -> tuple[Shape, ...]:
        """The groups of ranks over which ``dim`` is split, each in the order of its pieces."""
        self.check_axes(mesh)
        if not -len(self.dims) <= dim < len(self.dims):
            raise ValueError(f"{self!r} names dims {-len(self.dims)} to {len(self.dims) - 1}, got {dim}")
        return mesh.groups(self.dims[dim].axes)

    def replica_groups(self, mesh: Mesh) -> tuple[Shape, ...]:
        """The groups of ranks that hold the same."""
        self.check_axes(mesh)
        return mesh.groups(tuple(axis for axis in mesh.axes if axis not in (*self.axes, *self.partial)))

    def partial_groups(self, mesh: Mesh) -> tuple[Shape, ...]:
        """The groups of ranks that hold the terms of one block, in the order in which they are combined."""
        self.check_axes(mesh)
        return mesh.groups(self._partial_in_order(mesh))

    # -- from the whole to the shards and back -------------------------------------------------------------------------

    def shard(self, x: Any, mesh: Mesh) -> list[Array]:
        """The shards of ``x`` by rank: views of it.

        Of a partial layout the first of each group gets the value, the others the identity of the operation (zeros,
        for a sum), in arrays of their own.
        """
        x = np.asarray(x)
        extents, dims = self._checked(x.shape, mesh)
        shards: list[Array] = [x[_slices(extents, dims, mesh, rank)] for rank in range(mesh.size)]
        if self.partial:
            empty = identity(self.op, x.dtype)
            for group in self.partial_groups(mesh):
                for rank in group[1:]:
                    shards[rank] = np.full(shards[rank].shape, empty, x.dtype)
        return shards

    def unshard(self, shards: Sequence[Any], mesh: Mesh) -> Array:
        """The tensor whose shards these are, by rank, as a new array; what is partial is reduced.

        Of replicas the lowest rank's counts.  ``ValueError`` if their number, shapes or dtypes are not those that the
        layout gives to one tensor.
        """
        if len(shards) != mesh.size:
            raise ValueError(f"{mesh!r} has {mesh.size} devices, got {len(shards)} shards")
        arrays = [np.asarray(shard) for shard in shards]
        shape = self.global_shape({rank: array.shape for rank, array in enumerate(arrays)}, mesh)
        dtype = arrays[0].dtype
        for rank, array in enumerate(arrays):
            if array.dtype != dtype:
                raise ValueError(f"the shards of one tensor have one dtype; rank 0 has {dtype}, rank {rank} "
                                 f"{array.dtype}")
        whole = np.empty(shape, dtype)
        extents, dims = self._checked(shape, mesh)
        pending = self._partial_in_order(mesh)
        for first in (group[0] for group in self.replica_groups(mesh)):
            group = mesh.group(first, pending)
            if group[0] == first:
                block = _slices(extents, dims, mesh, first)
                if len(group) == 1:
                    whole[block] = arrays[first]
                else:
                    whole[block] = combine(self.op, [arrays[rank] for rank in group])
        return whole

    def global_shape(self, shapes: Mapping[int, Sequence[int]], mesh: Mesh) -> Shape:
        """The shape of the tensor whose shards have these shapes, by rank; ``ValueError`` if there is none.

        The ranks are all, or those of a group along `axes`.
        """
        first = min(shapes)
        ndim = len(shapes[first])
        for rank, local in shapes.items():
            if len(local) != ndim:
                raise ValueError(f"the shards of one tensor have as many dims; rank {first} has one of shape "
                                 f"{tuple(shapes[first])}, rank {rank} of {tuple(local)}")
        self.check_axes(mesh)
        dims = self.over(ndim).dims
        shape = tuple(sum(shapes[rank][d] for rank in mesh.group(first, dim.axes)) for d, dim in enumerate(dims))
        for rank, local in shapes.items():
            expected = tuple(piece.stop - piece.start for piece in _slices(shape, dims, mesh, rank))
            if tuple(local) != expected:
                raise ValueError(f"these are no shards of one tensor as {self!r} on {mesh!r}: of one of shape {shape} "
                                 f"rank {rank} holds {expected}, and it has {tuple(local)}")
        return shape

    def draw(self, shape: Sequence[int], mesh: Mesh, dims: Sequence[int] | None = None) -> Drawing:
        """A picture of which device holds which block, within 80 columns; ``print`` it, or show it in a notebook.

        Two dims at most are drawn, those in ``dims`` or the first that are split; of the others a cell lists all who
        hold a part of it.
        """
        from parallelism import drawing

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
        """``ValueError`` for an axis that the mesh has not."""
        for axis in (*self.axes, *self.partial):
            if axis not in mesh.shape:
                known = ", ".join(map(repr, mesh.axes))
                raise ValueError(f"{self!r} names axis {axis!r}, but the axes of {mesh!r} are {known}")

    def _partial_in_order(self, mesh: Mesh) -> tuple[str, ...]:
        return tuple(axis for axis in mesh.axes if axis in self.partial)

    # -- a value -------------------------------------------------------------------------------------------------------

    def _key(self) -> tuple[Any, ...]:
        return self.dims, self.ellipsis, frozenset(self.partial), self.op

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSharding):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        words = [_written(dim.axes) for dim in self.dims]
        if self.ellipsis is not None:
            words.insert(self.ellipsis, "...")
        if self.partial:
            words.append(f"partial={_written(self.partial)}")
            if self.op != "sum":
                words.append(f"op={self.op!r}")
        return f"TensorSharding({', '.join(words)})"

    def short(self) -> str:
        """In brackets, as `parse` reads it, too: ``[x, None] partial=y``."""
        words = [_short(dim.axes) for dim in self.dims]
        if self.ellipsis is not None:
            words.insert(self.ellipsis, "...")
        pending = f" partial={_short(self.partial)}" if self.partial else ""
        op = f", op={self.op}" if self.partial and self.op != "sum" else ""
        return f"[{', '.join(words)}]{pending}{op}"


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


def _dims(count: int) -> str:
    return "dim" if count == 1 else "dims"


def _written(axes: tuple[str, ...]) -> str:
    return repr(axes) if len(axes) > 1 else repr(axes[0]) if axes else "None"


def _short(axes: tuple[str, ...]) -> str:
    return f"({', '.join(axes)})" if len(axes) > 1 else axes[0] if axes else "None"
