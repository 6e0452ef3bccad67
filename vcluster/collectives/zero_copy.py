"""A large collective: what a member shows of its memory, and what it makes of the others'.

Nothing is copied to be read: a payload stays where it is, in shared memory or in private memory that the others can
reach (`vcluster.memory.process_memory`), until everybody has done with it.  In an all_reduce each member also shows
where its result shall lie: the owner of a slice reduces it, and stores it straight into everybody's result, so that all
memory is read once and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import Reduction
from vcluster.collectives.call import Call
from vcluster.collectives.group import INLINE_BYTES, Group
from vcluster.collectives.results import Result, look_of, new_result, prepare
from vcluster.collectives.stretches import Stretch, blocks, is_contiguous, reduce_everywhere, reduce_into
from vcluster.memory import address_of

if TYPE_CHECKING:
    from vcluster.messages import Endpoint

PRIVATE_BYTES = 1 << 22
"""From this size on a payload in private memory is read there.  What fits the caches, and what many read, is copied
into shared memory first: the system reads another process's memory at half the speed of a copy."""

MOST_STRETCHES = 64
"""Of others' memory that a prepared call remembers."""

SCATTERED_FACTOR = 16
"""What is reduced and not stored elsewhere takes more to be read in place than copied first, up to this many times."""

OWNED_BYTES = 1 << 18
"""What an owner of a slice has at least, unless cores would idle: each piece is a call for each member."""


class Shown(NamedTuple):
    """Where one's payload lies and one's result shall lie: offsets in the arena, or less than 0, addresses."""

    place: int = 0
    target_place: int = 0
    target: NDArray[Any] | None = None
    """The array for the result, where others write it."""
    copied: NDArray[Any] | None = None
    """The copy that the others read, which must not go before they have done."""


def show(endpoint: Endpoint, call: Call, payload: NDArray[Any], out: NDArray[Any] | None) -> Shown:
    """What a member shows of a contiguous payload that is too large for its slot."""
    kind = call.of_kind
    smallest = PRIVATE_BYTES * (SCATTERED_FACTOR if kind.reduces and kind.cuts else 1)
    private = (
        payload.nbytes >= smallest and (call.size == 2 or not kind.read_by_all) and is_contiguous(call)
        and endpoint.peers.can_be_read(call.ranks)
    )
    target, target_place = None, None
    together = kind.sums_all and call.size > 1
    if together:
        if out is not None and out.flags.c_contiguous:
            target, target_place = out, _place(endpoint, out, private)
        if target_place is None:
            target = endpoint.heap.empty(payload.shape, payload.dtype)
            target_place = endpoint.arena.offset_of(target)
    place = copied = None
    if together or out is None or not np.may_share_memory(out, payload):  # it is not overwritten while others read
        place = _place(endpoint, payload, private)
    if place is None:
        copied = endpoint.heap.empty(payload.shape, payload.dtype)
        np.copyto(copied, payload)
        place = endpoint.arena.offset_of(copied)
    return Shown(place or 0, target_place or 0, target, copied)


def _place(endpoint: Endpoint, array: NDArray[Any], private: bool) -> int | None:
    offset = endpoint.arena.offset_of(array)
    return -address_of(array) if offset is None and private else offset


def owners_of(nbytes: int, members: int, cores: int) -> int:
    """How many members of an all_reduce own a slice of it."""
    return min(members, max(cores, nbytes // OWNED_BYTES))


def is_shown(calls: Sequence[Call]) -> bool:
    """Whether members read the memory of others, of whole stretches."""
    return any(call.nbytes > INLINE_BYTES for call in calls) and is_contiguous(calls[0])


class Large:
    """The memory of the members of a group, for calls of one kind and size."""

    def __init__(self, endpoint: Endpoint, group: Group, calls: Sequence[Call], reduction: Reduction | None) -> None:
        """``calls`` is what the members call, in group order."""
        self._endpoint = endpoint
        self._group = group
        self._calls = calls
        self._reduction = reduction
        looks = [look_of(call) for call in calls]
        self.made = prepare(calls, group.position, looks, reduction)
        """The look of this member's result; None if it gets none, or a list."""
        self._known: dict[tuple[int, int], Stretch] = {}

    def conclude(self, sequence: int, target: NDArray[Any] | None, out: NDArray[Any] | None) -> Any:
        """The result, when everybody has come: in ``target``, which was shown, in ``out``, or in a new array."""
        call, calls, endpoint = self._calls[self._group.position], self._calls, self._endpoint
        buffers = self._group.buffers(sequence)
        sources: list[Any] = [
            None if seen.dtype is None else self._stretch(i, buffers[i].payload) for i, seen in enumerate(calls)
        ]
        if target is not None and self._reduction is not None:
            outs = [self._stretch(i, buffer.out) for i, buffer in enumerate(buffers)]
            owners = owners_of(target.nbytes, len(calls), endpoint.layout.cores)
            reduce_everywhere(sources, outs, target.size, self._group.position, owners, self._reduction)
            return target
        if call.of_kind.lists:
            return [
                new_result(endpoint, call.kind, Result(seen.shape or (), source.dtype, source.copy_whole))
                for seen, source in zip(calls, sources, strict=True) if source is not None
            ]
        if self.made is None:
            return None
        fill = self._reduce if self._reduction is not None else self._join
        return new_result(
            endpoint, call.kind, Result(self.made.shape, self.made.dtype, lambda array: fill(sources, array)), out
        )

    def _reduce(self, sources: Sequence[Any], out: NDArray[Any]) -> None:
        assert self._reduction is not None
        call, position = self._calls[self._group.position], self._group.position
        first = sum(call.sizes[:position]) * prod(out.shape[call.dim + 1 :]) if call.of_kind.cuts else 0
        terms = [sources[place] for place in call.of_kind.sources_of(position, len(sources), call.root)]
        reduce_into(terms, first, out.reshape(-1), self._reduction)

    def _join(self, sources: Sequence[Any], out: NDArray[Any]) -> None:
        flat = out.reshape(-1)
        at = 0
        for place, first, count in blocks(self._calls, self._group.position):
            sources[place].copy_to(first, flat[at : at + count])
            at += count
        flat[at:] = 0  # where a permute brings nothing

    def _stretch(self, position: int, place: int) -> Stretch:
        found = self._known.get((position, place))
        if found is None:
            call = self._calls[position]
            assert call.dtype is not None
            if len(self._known) >= MOST_STRETCHES:
                self._known.clear()
            count = prod(call.shape or ())
            found = Stretch(self._endpoint, call.ranks[position], place, call.dtype, count)
            self._known[position, place] = found
        return found
