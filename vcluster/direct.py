"""The direct collectives: every member reads what it needs from the others' memory.

Nothing is sent.  A small payload lies in the slots of the group (`vcluster.agreement`), and each member reads them all.
A large one is read where it lies; in a large all_reduce the owner of a slice reduces it in pieces that stay in cache,
and stores the result straight into everybody's output, so that all memory is read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

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
    reduction: Reduction | None,
) -> Generator[Wait, None, tuple[Any, list[Call]]]:
    """The result and everybody's call.  ``x`` is contiguous; ``out`` has the right shape and dtype."""
    payload = x if call.gives else None
    large = payload is not None and payload.nbytes > INLINE_BYTES
    in_place = out is not None and payload is not None and np.may_share_memory(out, payload)
    together = call.kind == "all_reduce" and large and group.size > 1 and reduction is not None
    place = endpoint.arena.offset_of(payload) if large and payload is not None and (together or not in_place) else None
    target: NDArray[Any] | None = None
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

    def new(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        if out is not None:
            check_shape(call.kind, out, shape, dtype)
            if out.flags.c_contiguous:
                return out
        return new_array(endpoint, tuple(shape), dtype)

    if together:
        assert reduction is not None
        assert target is not None
        outs = [
            endpoint.arena.array(buffer.out, (target.size,), target.dtype) for buffer in group.buffers(sequence)
        ]
        _reduce_own_slice([view.reshape(-1) for view in views], outs, group.position, reduction)
        result: Any = target
    else:
        try:
            result = _RESULTS[call.kind](calls, group.position, views, reduction, new)
        except Exception:  # a wrong out=, an op that raises: the others must not wait for this member
            yield from group.finish(sequence, together=large)
            raise
    yield from group.finish(sequence, together=together or large)
    if out is not None and result is not out and result is not None:
        np.copyto(out, result)
        result = out
    return result, calls


def new_array(endpoint: Endpoint, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An uninitialised array for a result."""
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    return endpoint.heap.empty(shape, dtype) if nbytes >= SHARED_RESULT_BYTES else np.empty(shape, dtype)


New = Callable[[Sequence[int], "np.dtype[Any]"], NDArray[Any]]


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


def _reduce_all(terms: Views, out: NDArray[Any], reduction: Reduction) -> NDArray[Any]:
    if terms[0].nbytes <= INLINE_BYTES or not all(term.flags.c_contiguous for term in (*terms, out)):
        reduction.reduce(terms, out)
        return out
    flat, flat_out = [term.reshape(-1) for term in terms], out.reshape(-1)
    for start in range(0, flat_out.size, PIECE_ELEMENTS):
        piece = slice(start, start + PIECE_ELEMENTS)
        reduction.reduce([term[piece] for term in flat], flat_out[piece])
    return out


def _all_reduce(calls: Sequence[Call], position: int, views: Views, reduction: Reduction, new: New) -> NDArray[Any]:
    return _reduce_all(views, new(views[0].shape, views[0].dtype), reduction)


def _reduce(calls: Sequence[Call], position: int, views: Views, reduction: Reduction, new: New) -> NDArray[Any] | None:
    return _all_reduce(calls, position, views, reduction, new) if position == calls[0].root else None


def _reduce_scatter(calls: Sequence[Call], position: int, views: Views, reduction: Reduction, new: New) -> NDArray[Any]:
    terms = [view[calls[0].block(position)] for view in views]
    return _reduce_all(terms, new(terms[0].shape, terms[0].dtype), reduction)


def _all_gather(calls: Sequence[Call], position: int, views: Views, reduction: None, new: New) -> NDArray[Any]:
    return _join(views, calls[0].dim, new)


def _gather(calls: Sequence[Call], position: int, views: Views, reduction: None, new: New) -> NDArray[Any] | None:
    return _join(views, calls[0].dim, new) if position == calls[0].root else None


def _all_to_all(calls: Sequence[Call], position: int, views: Views, reduction: None, new: New) -> NDArray[Any]:
    blocks = [view[call.block(position)] for call, view in zip(calls, views, strict=True)]
    return _join(blocks, calls[0].concat_dim, new)


def _broadcast(calls: Sequence[Call], position: int, views: Views, reduction: None, new: New) -> NDArray[Any]:
    return _copy(views[calls[0].root], new)


def _scatter(calls: Sequence[Call], position: int, views: Views, reduction: None, new: New) -> NDArray[Any]:
    root = calls[0].root
    return _copy(views[root][calls[root].block(position)], new)


def _all_scatter(calls: Sequence[Call], position: int, views: Views, reduction: None, new: New) -> list[NDArray[Any]]:
    return [_copy(view, new) for view in views]


def _permute(calls: Sequence[Call], position: int, views: Views, reduction: None, new: New) -> NDArray[Any]:
    for source, target in calls[0].pairs or ():
        if target == position:
            return _copy(views[source], new)
    result = new(views[position].shape, views[position].dtype)
    result.fill(0)
    return result


def _barrier(calls: Sequence[Call], position: int, views: Views, reduction: None, new: New) -> None:
    return None


def _join(views: Views, dim: int, new: New) -> NDArray[Any]:
    if views[0].ndim == 0:
        return np.stack(views, out=new((len(views),), views[0].dtype))
    shape = list(views[0].shape)
    shape[dim] = sum(view.shape[dim] for view in views)
    return np.concatenate(views, axis=dim, out=new(shape, views[0].dtype))


def _copy(view: NDArray[Any], new: New) -> NDArray[Any]:
    result = new(view.shape, view.dtype)
    np.copyto(result, view)
    return result


_RESULTS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce, "reduce": _reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather,
    "gather": _gather, "all_to_all": _all_to_all, "broadcast": _broadcast, "scatter": _scatter,
    "all_scatter": _all_scatter, "permute": _permute, "barrier": _barrier,
}
