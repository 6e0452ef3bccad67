"""The result of a collective for one member: how it looks, and how it is made of what everybody gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import Reduction, check_shape
from vcluster.collectives.call import Call

if TYPE_CHECKING:
    from vcluster.messages import Endpoint

SHARED_RESULT_BYTES = 1 << 14
"""A new result from this size on lies in shared memory: its pages are used again, and peers can read it in place."""

Views = Sequence[NDArray[Any]]


class Result(NamedTuple):
    """What a member gets: how it looks, and what writes it into an array of that look."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fill: Callable[[NDArray[Any]], object]


def new_result(endpoint: Endpoint, kind: str, made: Result, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """The result in ``out``, or in a new array.  ``ValueError`` if ``out`` looks otherwise."""
    if out is not None:
        check_shape(kind, out, made.shape, made.dtype)
    if out is None or not out.flags.c_contiguous:
        out = new_array(endpoint, made.shape, made.dtype)
    made.fill(out)
    return out


def new_array(endpoint: Endpoint, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An uninitialised array for a result."""
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    return endpoint.heap.empty(shape, dtype) if nbytes >= SHARED_RESULT_BYTES else np.empty(shape, dtype)


def prepare(calls: Sequence[Call], position: int, views: Sequence[Any], reduction: Reduction | None) -> Result | None:
    """The result of the member at ``position``, from everybody's payload; None for who gets nothing."""
    call = calls[position]
    if call.kind in ("reduce", "gather") and position != calls[0].root:
        return None
    match call.kind:
        case "all_reduce" | "reduce":
            return reduced(views, reduction)
        case "reduce_scatter":
            block = calls[0].block(position)
            return reduced([view[block] for view in views], reduction)
        case "all_gather" | "gather":
            return _joined(views, calls[0].dim)
        case "all_to_all":
            blocks = [view[seen.block(position)] for seen, view in zip(calls, views, strict=True)]
            return _joined(blocks, calls[0].concat_dim)
        case "broadcast":
            return copy_of(views[calls[0].root])
        case "scatter":
            root = calls[0].root
            return copy_of(views[root][calls[root].block(position)])
        case "permute":
            for source, target in calls[0].pairs or ():
                if target == position:
                    return copy_of(views[source])
            mine = views[position]
            return Result(mine.shape, mine.dtype, lambda out: out.fill(0))
    return None  # a barrier


def copy_of(view: NDArray[Any]) -> Result:
    """What one member gave, as it is."""
    return Result(view.shape, view.dtype, lambda out: np.copyto(out, view))


def _joined(views: Views, dim: int) -> Result:
    first = views[0]
    if first.ndim == 0:
        return Result((len(views),), first.dtype, lambda out: np.stack(views, out=out))
    shape = list(first.shape)
    shape[dim] = sum(view.shape[dim] for view in views)
    return Result(tuple(shape), first.dtype, lambda out: np.concatenate(views, dim, out))


def reduced(terms: Views, reduction: Reduction | None) -> Result:
    """All terms, combined."""
    assert reduction is not None
    return Result(terms[0].shape, terms[0].dtype, partial(reduction.reduce, terms))


def look_of(call: Call) -> NDArray[Any] | None:
    """An array that looks like what a member gives, and takes no memory; None if it gives none."""
    if call.dtype is None or call.shape is None:
        return None
    return np.broadcast_to(np.empty((), call.dtype), call.shape)
