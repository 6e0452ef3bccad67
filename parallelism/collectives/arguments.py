"""Checks the arguments of a device's calls, before anything is sent: for the runtime and for the recorder alike.

Wrong arguments are ``ValueError`` or ``TypeError``, with what was expected and what came.  An argument may be a tree of
arrays, which an all_reduce reduces as one flat buffer for each dtype (`TreeBuffers`).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.algorithms import KINDS, kind_of
from parallelism.arrays import Array, refuse_masked
from parallelism.collectives.call import ARRAY, SCALAR, MemberCall
from parallelism.collectives.results import OPS, integer, integers
from parallelism.dtypes import NUMERIC_KINDS, as_dtype, is_numeric
from parallelism.events import HOST
from parallelism.mesh import Axes, Mesh
from parallelism.operation import Device, Groups
from parallelism.operation.trees import leaves, rebuild
from parallelism.spelling import parameters_of, unexpected_keyword

SCALARS = frozenset({bool, int, float, complex}) | {
    kind for kind in np.sctypeDict.values() if np.dtype(kind).kind in NUMERIC_KINDS
}
"""The types of scalars."""


OPTIONS = ("groups", "out", "algorithm", "async_op")
"""What every collective takes besides its own arguments."""


def members_of(
    mesh: Mesh, rank: int, kind: str, axes: Axes, groups: Groups | None
) -> tuple[tuple[int, ...] | None, tuple[str, ...] | None, tuple[int, ...]]:
    """The group of a rank, the axes along which it lies, and the factors by which an extent is split over it.

    The group is None for a rank in none of the ``groups``, if the kind allows that; the axes are None with ``groups``.
    """
    if groups is None:
        names = _axes_of(mesh, kind, axes)
        return mesh.group(rank, axes), names, tuple(mesh.shape[name] for name in names)
    if axes is not None:
        raise ValueError(f"{kind} takes axes or groups, got both: axes={axes!r}, groups={groups!r}")
    seen: set[int] = set()
    mine: tuple[int, ...] | None = None
    if not isinstance(groups, Iterable):
        raise TypeError(f"groups= is a list of groups, got {groups!r}{_GROUPS}")
    for group in groups:
        members = integers("each group in groups=", group, "a rank of groups", _GROUPS)
        for member in members:
            if not 0 <= member < mesh.size:
                raise ValueError(f"groups of {mesh!r} hold ranks 0 to {mesh.size - 1}, got {member}")
            if member in seen:
                raise ValueError(f"rank {member} is twice in groups={[list(g) for g in groups]}")
            seen.add(member)
        if rank in members:
            mine = members
    copies = kind in KINDS.records and kind_of(kind).copies
    if mine is None and not copies:  # of a copy, a rank in no group gets zeros
        raise ValueError(f"rank {rank} is in none of groups={[list(g) for g in groups]}, but calls {kind}")
    return mine, None, () if mine is None else (len(mine),)


_GROUPS = "; as in groups=[[0, 1], [2, 3]], where each rank is in one group"


def _axes_of(mesh: Mesh, kind: str, axes: Axes) -> tuple[str, ...]:
    """The names of axes. The error of anything else ends with the argument that is meant."""
    try:
        return mesh.axes_of(axes)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}{_meant_by(kind, axes)}") from None


def _meant_by(kind: str, axes: object) -> str:
    """What a value that stands where axes do is likely meant as. Other libraries have other arguments in that place."""
    record = KINDS.records.get("permute" if kind == "shift" else kind)
    if record is None:
        return ""
    number, meant = isinstance(axes, int), ""
    if record.reduces and isinstance(axes, str) and axes.lower() in OPS:
        meant = f"op={axes.lower()!r}"
    elif record.reduces and callable(axes):
        meant = f"op={getattr(axes, '__name__', 'function')}"
    elif record.paired and kind != "shift" and isinstance(axes, list | tuple):
        return f"; the pairs come before the axes: {kind}(x, pairs, axes)"
    elif isinstance(axes, list) and not any(isinstance(axis, str) for axis in axes):
        meant = "groups=[[0, 1], [2, 3]]"
    elif number and kind == "shift":
        meant = f"by={axes}"
    elif number and (record.rooted or record.joins):
        meant = f"{'root' if record.rooted else 'dim'}={axes}"
    return f"; did you mean {kind}(x, {meant})?" if meant else ""


def checked_options(call: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a collective; ``TypeError`` for one that there is not, with the one that is meant."""
    for name in options:
        if name not in OPTIONS:
            known = parameters_of(getattr(Device, call))
            if name not in known:
                raise unexpected_keyword(f"device.{call}", name, [*known, *OPTIONS])
    return options


def shift_pairs(
    mesh: Mesh, rank: int, axes: Axes, groups: Groups | None, by: int
) -> tuple[tuple[int, int], ...]:
    """The pairs of the permute that a shift is."""
    members, _, _ = members_of(mesh, rank, "shift", axes, groups)
    return ring_pairs(len(members or ()), integer("by", by))


@lru_cache(maxsize=256)
def ring_pairs(size: int, by: int) -> tuple[tuple[int, int], ...]:
    """From each position of a group to the one that is ``by`` further around the ring."""
    return tuple((position, (position + by) % size) for position in range(size))


_BYTES = "x.view(np.uint8) is an array of its bytes"


def checked_array(what: str, x: Any) -> tuple[Array, bytes]:
    """``x`` as an array, and its form; ``TypeError`` for a value that holds no numbers."""
    refuse_masked(what, x)
    is_scalar = isinstance(x, bool | int | float | complex | np.generic)
    if not is_scalar and not hasattr(x, "__array__"):
        name = "None" if x is None else type(x).__name__
        raise TypeError(f"{what} takes an array or a scalar, got {name}{_hint(what, x)}")
    array = np.asarray(x)
    if not is_numeric(array.dtype):
        bytes_of = "all_gather_object and broadcast_object move objects" if array.dtype.hasobject else _BYTES
        raise TypeError(f"{what} takes numbers or bools, got an array of dtype {array.dtype}; {bytes_of}")
    return array, SCALAR if is_scalar else ARRAY


def _hint(what: str, x: Any) -> str:
    """What is likely meant by a value that is no array."""
    if what == "a message":
        return ""
    if x is None and what in ("broadcast", "scatter"):
        return "; the root passes the array, and the other ranks None"
    if x is None:
        return ", which is what a function without a return gives"
    if isinstance(x, list | tuple):
        return "; np.concatenate and np.stack make one array of several"
    return "; all_gather_object and broadcast_object move other objects"


def is_tree(value: Any) -> bool:
    """Whether a value is a tuple, list or dict of values."""
    return isinstance(value, tuple | list | dict)


def refuse_out_of_tree(kind: str, x: Any, out: Any) -> None:
    """A call with a tree of arrays takes no ``out=``."""
    if out is not None and is_tree(x):
        name = type(x).__name__
        raise TypeError(f"{kind} of a {name} of arrays takes no out=; its result is a new {name}")


def check_out(call: MemberCall, position: int, out: Any, x: Array | None) -> None:
    """``out`` must be able to take the result, as far as that is known before the other members are asked."""
    check_array(call.kind, out)
    kind = call.of_kind
    if kind.lists:
        raise TypeError(f"{call.kind} takes no out=: its result is a list of arrays")
    if x is None or call.shape is None:
        return
    own = kind.is_got_by(position, call.root) and (kind.reduces or (kind.rooted and not kind.joins))
    if own:
        shape = list(call.shape)
        if kind.cuts:
            shape[call.dim] = call.sizes[position]
        check_shape(call.kind, out, shape, x.dtype)
    elif kind.function is None and out.dtype != x.dtype:
        raise ValueError(f"out= of {call.kind} must have dtype {x.dtype}, got {out.dtype}")
    if np.may_share_memory(out, x) and not _same(out, x) and np.shares_memory(out, x):
        raise ValueError(f"out= of {call.kind} overlaps its input; it may be the input itself, or lie apart")


def check_array(kind: str, out: Any) -> None:
    """``out`` must be an array that can be written."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out= must be an array, got {type(out).__name__}")
    refuse_masked(f"out= of {kind}", out)
    if not out.flags.writeable:
        raise ValueError(f"out= of {kind} is read-only")
    if overlaps_itself(out):
        raise ValueError(
            f"out= of {kind} has elements that lie in the same memory: shape {list(out.shape)}, strides "
            f"{list(out.strides)}; every element needs memory of its own"
        )


def overlaps_itself(array: Array) -> bool:
    """Whether two elements of an array share memory, as where a stride is 0.

    Sorted by their strides, each dim of an array without overlap steps over all that the dims before it span.  Of other
    arrays the places of all bytes are compared.
    """
    if array.flags.forc or array.size < 2:
        return False
    span = array.itemsize
    for stride, extent in sorted(
        (abs(stride), extent) for stride, extent in zip(array.strides, array.shape, strict=True) if extent > 1
    ):
        if stride < span:
            break
        span += stride * (extent - 1)
    else:
        return False
    if (
        sum(abs(stride) * (extent - 1) for stride, extent in zip(array.strides, array.shape, strict=True))
        < (array.size - 1) * array.itemsize
    ):
        return True  # there are more elements than places
    places = np.zeros(1, np.int64)
    for stride, extent in zip(array.strides, array.shape, strict=True):
        places = np.add.outer(places, np.arange(extent) * stride).reshape(-1)
    places.sort()
    return bool((np.diff(places) < array.itemsize).any())


def check_shape(kind: str, out: Array, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """``out`` must be an array that can be written, with the shape and dtype of the result."""
    check_array(kind, out)
    if out.shape != tuple(shape) or out.dtype != dtype:
        raise ValueError(f"out= of {kind} must be {dtype}{list(shape)}, got {out.dtype}{list(out.shape)}")


def checked_tag(tag: Any) -> int:
    """The tag of a message, an integer of 64 bits."""
    if isinstance(tag, bool) or not hasattr(tag, "__index__"):
        raise TypeError(f"a tag must be an integer, got {tag!r}")
    number = index(tag)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"a tag must be a 64-bit integer, got {tag}")
    return number


def checked_peer(mesh: Mesh, peer: Any, name: str = "a rank") -> int:
    """A rank of the mesh, or the host."""
    rank = integer(name, peer)
    if rank != HOST and not 0 <= rank < mesh.size:
        wrapped = (
            f"; the device after the last is (device.rank + 1) % {mesh.size}" if rank == mesh.size else ""
        )
        raise ValueError(
            f"{name} must be one of 0 to {mesh.size - 1} in {mesh!r}, or HOST (-1); got {rank}{wrapped}"
        )
    return rank


def rank_at(group: Sequence[int], axes: Axes, position: Any) -> int:
    """The rank at a position of a group along ``axes``."""
    place = integer("a position", position)
    if not 0 <= place < len(group):
        raise ValueError(f"the group along {axes!r} has positions 0 to {len(group) - 1}, got {place}")
    return group[place]


def checked_extents(
    shape: int | Sequence[int], dtype: npt.DTypeLike
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and dtype of an array in shared memory."""
    extents = (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
    wanted = as_dtype(dtype)
    if not is_numeric(wanted):
        raise TypeError(f"shared memory holds numbers or bools, got dtype {wanted}")
    if any(n < 0 for n in extents):
        raise ValueError(f"an extent cannot be negative, got shape {extents}")
    return extents, wanted


def _same(a: Array, b: Array) -> bool:
    starts_alike = a.__array_interface__["data"] == b.__array_interface__["data"]
    return starts_alike and a.shape == b.shape and a.strides == b.strides


class _Told:
    """Stands for an array in messages: its ``repr`` is dtype and shape, as ``float64[3]``."""

    def __init__(self, array: Array) -> None:
        self._text = f"{array.dtype}{list(array.shape)}"

    def __repr__(self) -> str:
        return self._text


class TreeBuffers:
    """The leaves of a tree by dtype, and the results that take their places."""

    def __init__(self, tree: Any) -> None:
        """``TypeError`` for a leaf that holds no numbers."""
        self._tree = tree
        self._leaves = [checked_array("all_reduce", leaf) for leaf in leaves(tree)]
        self._results: list[Any] = [None] * len(self._leaves)
        self.form = repr(rebuild(tree, [_Told(array) for array, _ in self._leaves])).encode()
        """The structure of the tree, which must be equal on all members, as errors show it."""
        self.by_dtype: dict[np.dtype[Any], list[int]] = {}
        """The numbers of the leaves of each dtype."""
        for i, (array, _) in enumerate(self._leaves):
            self.by_dtype.setdefault(array.dtype, []).append(i)

    def size(self, numbers: list[int]) -> int:
        """The elements of these leaves together."""
        return sum(self._leaves[i][0].size for i in numbers)

    def buffer(self, numbers: list[int]) -> Array:
        """These leaves one after the other, flat."""
        arrays = [self._leaves[i][0].reshape(-1) for i in numbers]
        return np.concatenate(arrays, dtype=arrays[0].dtype)

    def put(self, numbers: list[int], buffer: Array) -> None:
        """Takes a reduced buffer as the results of these leaves."""
        place = 0
        for i in numbers:
            array, form = self._leaves[i]
            result = buffer[place : place + array.size].reshape(array.shape)
            self._results[i] = result[()] if form == SCALAR else result
            place += array.size

    def tree(self) -> Any:
        """A tree like the one that was given, of the results."""
        return rebuild(self._tree, list(self._results))
