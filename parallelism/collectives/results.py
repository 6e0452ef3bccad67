"""A collective as one member computes it: the fields of its call, from its value, and its result, from all arrays."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from operator import index
from typing import Any, NamedTuple

import numpy as np

from parallelism.algorithms import kind_of
from parallelism.arrays import Array
from parallelism.collectives.buffers import normal_dim, pieces
from parallelism.collectives.call import MemberCall
from parallelism.dtypes import is_integer, is_numeric
from parallelism.operation import ReduceOp
from parallelism.spelling import did_you_mean


def call_fields(
    kind: str,
    x: Any,
    op: ReduceOp | None,
    dim: int,
    concat_dim: int,
    sizes: Sequence[int] | None,
    factors: Sequence[int],
    root: int,
    position: int,
    size: int,
    to_array: Callable[[str, Any], tuple[Array, bytes]],
) -> "tuple[dict[str, Any], Array | None, Reduction | None]":
    """The fields of a member's call that depend on its value, the value as an array, and its reduction.

    The array is None if this member gives nothing.  ``to_array`` makes an array, and its form, of ``x``; the array is
    converted to the dtype of the reduction.
    """
    of_kind = kind_of(kind)
    dim, concat_dim = integer("dim", dim), integer("dim", concat_dim)
    if not of_kind.is_given_by(position, root):
        return {"dim": dim}, None, None
    array, form = to_array(kind, x)
    reducing = None
    if of_kind.reduces:
        reducing = reduction("sum" if op is None else op, array.dtype)
    if reducing is not None:
        array = array.astype(reducing.dtype, copy=False)
    fields: dict[str, Any] = {
        "op": None if reducing is None else reducing.name,
        "form": form,
        "dtype": array.dtype,
        "shape": array.shape,
    }
    if of_kind.cuts:
        checked = None if sizes is None else integers("split_sizes", sizes, "a split size")
        fields["dim"] = normal_dim(kind, dim, array.ndim)
        fields["sizes"] = pieces(kind, array.shape[dim], dim, checked, factors, size)
        if of_kind.joins:
            fields["concat_dim"] = normal_dim(kind, concat_dim, array.ndim)
    elif of_kind.joins:
        fields["dim"] = normal_dim(kind, dim, array.ndim) if array.ndim else 0
    return fields, array, reducing


def checked_root(kind: str, root: Any, size: int) -> int:
    """A position in a group of ``size``, for a kind that has a root."""
    position = integer("root", root)
    if kind_of(kind).rooted and not 0 <= position < size:
        raise ValueError(f"root is a position in the group, 0 to {size - 1}, got {position}")
    return position


_ARRAYS = {
    "dst": "; the array comes first: send(x, dst)",
    "src": "; the message is the result: x = recv(src)",
}
"""What to write in place of an array that is given as a rank."""


def integer(name: str, value: Any) -> int:
    """``value`` as Python's integer; ``TypeError``, with its name, if it is none.

    NumPy's and bools count, and become Python's own: with ``np.uint8(1)`` as a rank, a place in memory overflows.
    Other numbers and texts do not count.
    """
    try:
        return index(bool(value) if isinstance(value, np.bool_) else value)
    except TypeError:
        got = repr(value)
        if isinstance(value, np.ndarray):
            got = f"{value.dtype}[{', '.join(map(str, value.shape))}]"
            got += _ARRAYS.get(name, "")
        raise TypeError(f"{name} is an integer, got {got}") from None


def integers(name: str, values: Any, of: str, example: str = "") -> tuple[int, ...]:
    """Several integers, each called ``of`` in errors, which end with the ``example``."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is a list of integers, got {values!r}{example}")
    return tuple(integer(of, value) for value in values)


def plain_pairs(pairs: Sequence[tuple[int, int]] | None) -> tuple[tuple[int, int], ...] | None:
    """Pairs of positions."""
    if pairs is None:
        return None
    found = []
    for pair in pairs:
        positions = integers(
            "each pair in pairs=", pair, "a position in a pair", "; as in [(0, 1), (1, 0)], source and target"
        )
        if len(positions) != 2:
            raise ValueError(f"a pair is (source, target), two positions in the group; got {pair!r}")
        found.append((positions[0], positions[1]))
    return tuple(found)


class Result(NamedTuple):
    """The result of a member: its shape and dtype, and a function that writes it into such an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Callable[[Array], object]
    """Writes the result into a contiguous array of that shape and dtype."""
    target: Array | None = None
    """The array into which other members write the result; None if only this one does."""


def result_of(
    calls: Sequence[MemberCall], position: int, arrays: Sequence[Any], reduction: "Reduction | None" = None
) -> Result | None:
    """The result at ``position``; None for a member that gets none, and for a kind whose result is a list.

    ``arrays`` are those that the members give, by position.  Without a ``reduction`` the result of a reduction has its
    shape and dtype, and cannot be filled.
    """
    mine, g = calls[position], len(calls)
    kind = mine.of_kind
    if kind.lists or not kind.is_got_by(position, mine.root):
        return None
    sources = kind.sources_of(position, g, mine.root, mine.pairs)
    if not sources:  # of a copy
        own = arrays[position]
        return Result(own.shape, own.dtype, lambda out: out.fill(0))
    if kind.reduces and reduction is None:
        sources = sources[:1]  # all have the shape and the dtype of the first
    parts = [arrays[source] for source in sources]
    if kind.cuts:
        parts = [part[calls[source].block(position)] for source, part in zip(sources, parts, strict=True)]
    if kind.reduces:
        return reduced(parts, reduction)
    if kind.joins:
        return joined(parts, mine.concat_dim if kind.cuts else calls[sources[0]].dim)
    return copy_of(parts[0]) if kind.function is None else _computed(kind.name, kind.function, parts)


def copy_of(array: Array) -> Result:
    """The array of one member, unchanged."""

    def fill(out: Array) -> None:
        out[...] = array  # a third of the time of `numpy.copyto`

    return Result(array.shape, array.dtype, fill)


def joined(parts: Sequence[Array], dim: int) -> Result:
    """Arrays joined along a dim; 0-d ones stacked."""
    first = parts[0]
    if first.ndim == 0:
        return Result((len(parts),), first.dtype, lambda out: np.stack(parts, out=out))
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    if len(parts) != 2:
        return Result(tuple(shape), first.dtype, lambda out: np.concatenate(parts, dim, out))
    second = parts[1]
    before = (slice(None),) * (dim % first.ndim)
    places = (*before, slice(first.shape[dim])), (*before, slice(first.shape[dim], None))

    def fill(out: Array) -> None:
        out[places[0]] = first  # half the time of `numpy.concatenate`
        out[places[1]] = second

    return Result(tuple(shape), first.dtype, fill)


def reduced(parts: Sequence[Array], reduction: "Reduction | None") -> Result:
    """All parts, combined in their order."""
    fill: Callable[[Array], object] = _cannot
    if reduction is not None:
        fill = partial(reduction.reduce, parts)
        if len(parts) == 2 and reduction.ufunc in (np.add, np.multiply) and reduction.name != "mean":
            # What `reduce` does, without a Python function, and in two thirds of the time that a ufunc takes with
            # ``out=``.  Maxima and minima refuse it by position.
            fill = partial(reduction.ufunc, *parts)
    return Result(parts[0].shape, parts[0].dtype, fill)


def _computed(name: str, function: Callable[[list[Any]], Any], parts: Sequence[Array]) -> Result:
    value = np.asarray(function([_read_only(part) for part in parts]))
    if not is_numeric(value.dtype):
        raise TypeError(f"the result of {name} must hold numbers or bools, got dtype {value.dtype}")
    return copy_of(value)


def _cannot(out: Array) -> None:
    raise TypeError("a reduction is needed to fill the result of one")


_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_OTHER_NAMES = {"avg": "mean", "product": "prod"}
OPS = (*_UFUNCS, *_OTHER_NAMES)
_OF_ONE_ARRAY = (
    *((function, "sum") for function in (sum, np.sum)),
    *((function, "prod") for function in (math.prod, np.prod)),
    *((function, "max") for function in (max, np.max)),
    *((function, "min") for function in (min, np.min)),
    *((function, "and") for function in (all, np.all)),
    *((function, "or") for function in (any, np.any)),
    (np.mean, "mean"),
)
"""Functions that reduce one array, and the operation that is meant; the built-in sum of two arrays adds up the first."""


class Reduction(NamedTuple):
    """One operation on one dtype: a ufunc of NumPy, or a function of the user's."""

    name: str
    dtype: np.dtype[Any]
    """The terms are converted to it before they are combined; the result has it."""
    ufunc: np.ufunc | None = None
    function: Callable[[Any, Any], Any] | None = None

    def combine(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """``a op b``, elementwise."""
        if self.ufunc is not None:
            return np.asarray(self.ufunc(a, b, out=out))
        assert self.function is not None
        value = np.asarray(self.function(_read_only(a), _read_only(b)))
        if value.shape != a.shape or value.dtype.newbyteorder("=") != a.dtype.newbyteorder("="):
            raise ValueError(
                f"op {self.name} must be elementwise and keep the dtype: of two arrays {a.dtype}{list(a.shape)} "
                f"it returned {value.dtype}{list(value.shape)}"
            )
        if out is None:
            return value
        out[...] = value
        return out

    def finish(self, total: Array, terms: int) -> None:
        """Divides the sum of a mean by the number of terms, in place.  Other reductions need nothing at the end."""
        if self.name == "mean" and self.ufunc is not None:  # a user's function may be called mean
            np.divide(total, terms, out=total)

    def reduce(self, terms: Sequence[Array], out: Array) -> None:
        """All terms into ``out``, which may be one of them only if there are at most two or it is the first."""
        combine: Any = self.ufunc or self.combine
        if len(terms) == 1:
            out[...] = terms[0]
        else:
            combine(terms[0], terms[1], out=out)
            for term in terms[2:]:
                combine(out, term, out=out)
        if self.name == "mean":
            self.finish(out, len(terms))


def _read_only(array: Array) -> Array:
    """A view of an array for a user's function, which must not write: it may be the input of another member."""
    view = array.view()
    view.flags.writeable = False
    return view


def reduction(op: ReduceOp, dtype: np.dtype[Any]) -> Reduction:
    """The reduction that ``op`` means for arrays of ``dtype``; ``ValueError`` or ``TypeError`` if there is none."""
    if callable(op):
        if meant := [name for function, name in _OF_ONE_ARRAY if function is op]:
            raise ValueError(
                f"op must be a function of two arrays, and {op.__name__} reduces one; write op={meant[0]!r}"
            )
        name = getattr(op, "__qualname__", None) or getattr(op, "__name__", None) or type(op).__qualname__
        return Reduction(name, dtype, function=op)
    return _named(op, dtype)


@lru_cache(maxsize=256)
def _named(op: str, dtype: np.dtype[Any]) -> Reduction:
    name = _OTHER_NAMES.get(op, op) if isinstance(op, str) else op
    if name not in _UFUNCS:
        hint = did_you_mean(str(op).rpartition(".")[2], _UFUNCS)  # ReduceOp.SUM of torch, MPI.SUM
        raise ValueError(f"op must be one of {', '.join(OPS)} or a function of two arrays, got {op!r}{hint}")
    kind, whole = dtype.kind, is_integer(dtype) or dtype.kind == "b"
    if name in ("and", "or", "xor") and not whole:
        raise TypeError(f"op {name!r} is for integers and bools, got {dtype}")
    if name in ("max", "min") and kind == "c":
        raise TypeError(f"op {name!r} needs an order, and {dtype} has none")
    if name in ("sum", "prod") and kind == "b":
        dtype = np.dtype(np.int64)
    if name == "mean" and whole:
        dtype = np.dtype(np.float64)
    return Reduction(name, dtype, _UFUNCS[name])
