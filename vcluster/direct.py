"""The direct collectives: every member reads what it needs from the others' memory.

Nothing is sent.  A small payload lies in the slots of the group (`vcluster.agreement`), and each member reads them all.
A large one is read where it lies; in a large all_reduce the owner of a slice reduces it in pieces that stay in cache,
and stores the result straight into everybody's output, so that all memory is read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism.reductions import PIECE_ELEMENTS, Reduction
from parallelism.splitting import split_sizes, starts
from vcluster.agreement import INLINE_BYTES, Group
from vcluster.calls import Call, agree
from vcluster.values import check_shape

if TYPE_CHECKING:
    from vcluster.endpoint import Endpoint
    from vcluster.tasks import Wait

SHARED_RESULT_BYTES = 1 << 14
"""A new result from this size on lies in shared memory: its pages are used again, and peers can read it in place."""

Views = Sequence[NDArray[Any]]


def run_direct(
    endpoint: Endpoint, group: Group, call: Call, x: NDArray[Any] | None, out: NDArray[Any] | None,
    reduction: Reduction | None, posted: int | None = None,
) -> Generator[Wait, None, tuple[Any, list[Call]]]:
    """The result and everybody's call.  ``x`` is contiguous; ``out`` has the right shape and dtype.

    ``posted`` is the number of the operation if everybody has posted it already (with a small payload, or none).
    """
    payload = x if call.gives else None
    large = payload is not None and payload.nbytes > INLINE_BYTES
    together = call.kind == "all_reduce" and large and group.size > 1 and reduction is not None
    target: NDArray[Any] | None = None
    if posted is not None:
        sequence = posted
    else:
        in_place = out is not None and payload is not None and np.may_share_memory(out, payload)
        shown = large and payload is not None and (together or not in_place)
        place = endpoint.arena.offset_of(payload) if shown and payload is not None else None
        target_place = 0
        if together:
            assert payload is not None
            found = endpoint.arena.offset_of(out) if out is not None and out.flags.c_contiguous else None
            target = out if found is not None else endpoint.heap.empty(payload.shape, payload.dtype)
            assert target is not None
            target_place = found if found is not None else endpoint.arena.offset_of(target) or 0
        sequence = yield from group.post(call, payload, place, target_place)

    told = group.disagreement(sequence, call)
    if told is None and payload is not None and not large:
        calls = [call] * group.size
        views: Sequence[Any] = group.inline_views(sequence, payload.dtype, payload.shape)
    else:
        calls = [call] * group.size if told is None else agree(call, told)
        views = [
            None if seen.dtype is None or seen.shape is None
            else endpoint.arena.array(buffer.payload, seen.shape, seen.dtype)
            for buffer, seen in zip(group.buffers(sequence), calls, strict=True)
        ]
    in_others_memory = any(view is not None and view.nbytes > INLINE_BYTES for view in views)
    try:
        if target is not None:
            assert reduction is not None
            outs = [
                endpoint.arena.array(buffer.out, (target.size,), target.dtype) for buffer in group.buffers(sequence)
            ]
            _reduce_own_slice([view.reshape(-1) for view in views], outs, group.position, reduction)
            result: Any = target
        elif call.kind == "all_scatter":
            result = [new_result(endpoint, call.kind, copy_of(view)) for view in views]
        else:
            made = prepare(calls, group.position, views, reduction)
            result = None if made is None else new_result(endpoint, call.kind, made, out)
    except Exception:  # a wrong out=, an op that raises: the others must not wait for this member
        if in_others_memory:
            yield from group.finish(sequence, together=large)
        raise
    if in_others_memory:
        yield from group.finish(sequence, together=large)
    if out is not None and result is not out and result is not None:
        np.copyto(out, result)
        result = out
    return result, calls


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
            return _reduced(views, reduction)
        case "reduce_scatter":
            block = calls[0].block(position)
            return _reduced([view[block] for view in views], reduction)
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


def _reduced(terms: Views, reduction: Reduction | None) -> Result:
    assert reduction is not None
    first = terms[0]
    if first.nbytes <= INLINE_BYTES or not all(term.flags.c_contiguous for term in terms):
        return Result(first.shape, first.dtype, partial(reduction.reduce, terms))
    flat = [term.reshape(-1) for term in terms]

    def fill(out: NDArray[Any]) -> None:
        flat_out = out.reshape(-1)
        for start in range(0, flat_out.size, PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            reduction.reduce([term[piece] for term in flat], flat_out[piece])

    return Result(first.shape, first.dtype, fill)


def _reduce_own_slice(terms: Views, outs: Views, position: int, reduction: Reduction) -> None:
    places = starts(split_sizes(terms[0].size, (len(terms),)))
    stop = places[position + 1]
    scratch = np.empty(min(PIECE_ELEMENTS, stop - places[position]), terms[0].dtype)
    for start in range(places[position], stop, PIECE_ELEMENTS):
        end = min(start + PIECE_ELEMENTS, stop)
        piece = scratch[: end - start]
        reduction.reduce([term[start:end] for term in terms], piece)
        for out in outs:
            out[start:end] = piece
