"""The direct collectives: every member reads what it needs from the others' memory.

Nothing is sent.  A small payload lies in the slots of the group (`vcluster.agreement`), and each member reads them all.
A large one is read where it lies (`vcluster.stretches`); in a large all_reduce the owner of a slice reduces it, and
stores the result straight into everybody's output, so that all memory is read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism.reductions import Reduction
from vcluster.agreement import INLINE_BYTES, Group
from vcluster.calls import Call, agree
from vcluster.peers import address_of
from vcluster.stretches import Stretch, blocks, is_contiguous, reduce_everywhere, reduce_into
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
    together = call.kind == "all_reduce" and large and group.size > 1
    target: NDArray[Any] | None = None
    if posted is not None:
        sequence = posted
    else:
        place, target_place = None, 0
        if large and payload is not None:
            private = is_contiguous(call) and endpoint.peers.can_be_read(call.ranks)
            if together:
                target = out if out is not None and out.flags.c_contiguous else None
                found = None if target is None else _place(endpoint, target, private)
                if target is None or found is None:
                    target = endpoint.heap.empty(payload.shape, payload.dtype)
                    found = endpoint.arena.offset_of(target)
                target_place = found or 0
            if together or out is None or not np.may_share_memory(out, payload):
                place = _place(endpoint, payload, private)
        sequence = yield from group.post(call, payload, place, target_place)

    told = group.disagreement(sequence, call)
    calls = [call] * group.size if told is None else agree(call, told)
    in_others_memory = any(seen.nbytes > INLINE_BYTES for seen in calls)
    try:
        if target is not None and reduction is not None:
            terms = _stretches(endpoint, group, sequence, calls)
            outs = [
                Stretch(endpoint, rank, buffer.out, target.dtype, target.size)
                for rank, buffer in zip(group.ranks, group.buffers(sequence), strict=True)
            ]
            reduce_everywhere(terms, outs, target.size, group.position, reduction)
            result: Any = target
        elif in_others_memory and is_contiguous(call):
            result = _from_stretches(endpoint, group, sequence, calls, reduction, out)
        else:
            views = group.views_at(sequence, calls)
            if call.kind == "all_scatter":
                result = [new_result(endpoint, call.kind, copy_of(view)) for view in views if view is not None]
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


def _place(endpoint: Endpoint, array: NDArray[Any], private: bool) -> int | None:
    """Where peers find a contiguous array: its offset in the arena, or less than 0, its address; None if nowhere."""
    offset = endpoint.arena.offset_of(array)
    return -address_of(array) if offset is None and private else offset


def _stretches(endpoint: Endpoint, group: Group, sequence: int, calls: Sequence[Call]) -> list[Any]:
    """Everybody's payload; None for who gives none."""
    return [
        None if seen.dtype is None
        else Stretch(endpoint, rank, buffer.payload, seen.dtype, seen.nbytes // max(1, seen.dtype.itemsize))
        for rank, buffer, seen in zip(group.ranks, group.buffers(sequence), calls, strict=True)
    ]


def _from_stretches(
    endpoint: Endpoint, group: Group, sequence: int, calls: Sequence[Call], reduction: Reduction | None,
    out: NDArray[Any] | None,
) -> Any:
    """The result of this member, from the others' memory."""
    call, position = calls[group.position], group.position
    sources = _stretches(endpoint, group, sequence, calls)
    if call.kind == "all_scatter":
        return [
            new_result(endpoint, call.kind, Result(seen.shape or (), source.dtype, partial(_whole, source)))
            for seen, source in zip(calls, sources, strict=True)
        ]
    looks = [
        None if seen.dtype is None or seen.shape is None
        else np.broadcast_to(np.empty((), seen.dtype), seen.shape)
        for seen in calls
    ]
    made = prepare(calls, position, looks, reduction)
    if made is None:
        return None

    def fill(out: NDArray[Any]) -> None:
        flat = out.reshape(-1)
        if reduction is not None:
            first = 0 if call.kind == "reduce" else sum(call.sizes[:position]) * prod(made.shape[1:])
            reduce_into(sources, first, flat, reduction)
            return
        at = 0
        for place, first, count in blocks(calls, position):
            sources[place].copy_to(first, flat[at : at + count])
            at += count
        flat[at:] = 0  # where a permute brings nothing

    return new_result(endpoint, call.kind, Result(made.shape, made.dtype, fill), out)


def _whole(source: Stretch, out: NDArray[Any]) -> None:
    source.copy_to(0, out.reshape(-1))


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
    return Result(terms[0].shape, terms[0].dtype, partial(reduction.reduce, terms))
