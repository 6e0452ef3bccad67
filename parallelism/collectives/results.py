"""The result of a collective for one member, from everybody's arrays: by the record of its kind, whatever the kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives.call import MemberCall
from parallelism.collectives.reductions import Reduction


class Result(NamedTuple):
    """What a member gets: its shape and dtype, and what writes it into an array of these."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Callable[[NDArray[Any]], object]
    """Writes the result into a contiguous array of that shape and dtype."""
    target: NDArray[Any] | None = None
    """The array into which other members write the result; None if only this one does."""


def result_of(
    calls: Sequence[MemberCall], position: int, arrays: Sequence[Any], reduction: Reduction | None = None
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
    if not sources:     # of a copy
        own = arrays[position]
        return Result(own.shape, own.dtype, lambda out: out.fill(0))
    parts = [arrays[source] for source in sources]
    if kind.cuts:
        parts = [part[calls[source].block(position)] for source, part in zip(sources, parts, strict=True)]
    if kind.reduces:
        return reduced(parts, reduction)
    if kind.joins:
        return joined(parts, mine.concat_dim if kind.cuts else calls[sources[0]].dim)
    if kind.function is not None:
        return _computed(kind.name, kind.function, parts)
    return copy_of(parts[0])


def copy_of(array: NDArray[Any]) -> Result:
    """What one member gave, as it is."""
    return Result(array.shape, array.dtype, lambda out: np.copyto(out, array))


def joined(parts: Sequence[NDArray[Any]], dim: int) -> Result:
    """Arrays joined along a dim; 0-d ones stacked."""
    first = parts[0]
    if first.ndim == 0:
        return Result((len(parts),), first.dtype, lambda out: np.stack(parts, out=out))
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return Result(tuple(shape), first.dtype, lambda out: np.concatenate(parts, dim, out))


def reduced(parts: Sequence[NDArray[Any]], reduction: Reduction | None) -> Result:
    """All parts, combined in their order."""
    fill = _cannot if reduction is None else partial(reduction.reduce, parts)
    return Result(parts[0].shape, parts[0].dtype, fill)


def _computed(name: str, function: Callable[[list[Any]], Any], parts: Sequence[NDArray[Any]]) -> Result:
    views = [part.view() for part in parts]
    for view in views:
        view.flags.writeable = False        # it may be another member's input
    value = np.asarray(function(views))
    if value.dtype.kind not in "biufc":
        raise TypeError(f"the result of {name} must hold numbers or bools, got dtype {value.dtype}")
    return copy_of(value)


def _cannot(out: NDArray[Any]) -> None:
    raise TypeError("a reduction is needed to fill the result of one")
