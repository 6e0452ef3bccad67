"""Large arrays of a collective are read and written where they lie; nothing is copied in order to be read.

A payload stays in its place, in shared memory or in private memory that the other members can reach
(`vcluster.memory.process_memory`), until every member has read it. In an all_reduce each member also shows the place of
its result: the owner of a slice reduces it and stores it into every member's result, so all memory is read once and
written once. A reduction goes through its terms in pieces that stay in cache.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.collectives import Reduction
from parallelism.mesh import split_sizes
from parallelism.mesh.uneven import starts
from vcluster.collectives import thresholds
from vcluster.collectives.group import OUT, PAYLOAD, Buffer, Call, Calls, Group
from vcluster.memory import address_of
from vcluster.messages import Endpoint

MOST_ROOM = 1 << 22
"""The most bytes of a copy that lies in the room of its group; a larger one is freed when it has been read."""

MOST_STRETCHES = 64
"""The number of stretches of other members' memory that a prepared call of a small group keeps."""


def is_contiguous(call: Call) -> bool:
    """Whether each member reads contiguous parts of the payloads, and its result is made of them end to end."""
    kind = call.of_kind
    if kind.function is not None:
        return False
    if not (kind.cuts or kind.joins):
        return True
    if call.dim == 0 and call.concat_dim == 0:
        return call.shape != ()
    return kind.cuts != kind.joins and kind.gives == kind.gets and prod((call.shape or ())[: call.dim]) == 1


def _parts(calls: Calls, position: int) -> list[tuple[int, int, int]]:
    """The parts that make the result of a member, end to end: (position of the giver, first element, elements)."""
    call = calls[position]
    parts = []
    for giver in call.of_kind.sources_of(position, len(calls), call.root, call.pairs):
        shape, sizes = calls[giver].shape or (), calls[giver].sizes
        if not call.of_kind.cuts:
            parts.append((giver, 0, prod(shape)))
        else:
            elements_of_row = prod(shape[1:])
            first_row = sum(sizes[:position])
            parts.append((giver, first_row * elements_of_row, sizes[position] * elements_of_row))
    return parts


class Shown(NamedTuple):
    """What a member shows of its memory.  A place is an offset in the arena; or, negative, an address."""

    place: int = 0
    """Place of the payload; 0: it lies in the slot, or there is none."""
    target_place: int = 0
    """Place of the result, where the other members write it."""
    target: Array | None = None
    """The array at that place."""
    copied: Array | None = None
    """The copy of the payload that the others read; it must live until they have read it."""
    lasts: bool = False
    """Whether nothing of it changes before the operation after the next one, so that no member needs to wait."""


NOTHING = Shown()
"""A small payload in its slot, or none."""


def show(
    endpoint: Endpoint, call: Call, payload: Array, out: Array | None, group: Group | None = None
) -> Shown:
    """What a member shows of a payload that is too large for its slot: a copy, if it is not contiguous as it lies.

    With a ``group``, the copy lies in the room that the group keeps for every second operation.

    The others read and write arrays of the shape and dtype of ``call``.  The payload may have another dtype: that of a
    mean of integers is float64.
    """
    kind, dtype = call.of_kind, call.dtype
    assert dtype is not None
    smallest = thresholds.PRIVATE_BYTES * (thresholds.SCATTERED_FACTOR if kind.reduces and kind.cuts else 1)
    private = (
        call.nbytes >= smallest
        and (call.size == 2 or not kind.read_by_all)
        and is_contiguous(call)
        and endpoint.peers.can_be_read(call.ranks)
    )
    target = target_place = None
    if _is_stored_by_owners(call):
        if out is not None and out.flags.c_contiguous:
            target, target_place = out, _place(endpoint, out, private)
        if target_place is None and out is not None and _reduces_alone(call):
            target = None
        elif target_place is None:
            target = endpoint.heap.empty(payload.shape, dtype)
            target_place = endpoint.arena.offset_of(target)
    place = copied = None
    lasts = False
    is_whole = payload.flags.c_contiguous and payload.dtype == dtype
    if is_whole and (
        target is not None or out is None or not np.may_share_memory(out, payload)
    ):  # else overwritten
        place = _place(endpoint, payload, private)
    if place is None:
        if group is not None and call.nbytes <= MOST_ROOM:
            copied = group.room(payload.shape, dtype)
            lasts = target is None
        else:
            copied = endpoint.heap.empty(payload.shape, dtype)
        copied[...] = payload
        place = endpoint.arena.offset_of(copied)
    return Shown(place or 0, target_place or 0, target, copied, lasts)


def _place(endpoint: Endpoint, array: Array, private: bool) -> int | None:
    offset = endpoint.arena.offset_of(array)
    return -address_of(array) if offset is None and private else offset


def _is_stored_by_owners(call: Call) -> bool:
    """Whether the owners of slices store them into every member's result."""
    return call.of_kind.sums_all and call.size > 1


def _reduces_alone(call: Call) -> bool:
    """Whether a member of an all_reduce computes its whole result, if the owners cannot store into it.

    Else they store into shared memory, and the result is copied from there.  The members of a small group read no more
    bytes if each reads all terms.
    """
    return call.size <= 4 and call.size * call.nbytes <= thresholds.ALONE_BYTES


def owners_of(nbytes: int, members: int, cores: int) -> int:
    """How many members of an all_reduce own a slice of it."""
    return min(members, max(cores, nbytes // thresholds.OWNED_BYTES))


class Stretch:
    """A contiguous array of one member, flat: in shared memory, or in the private memory of its process."""

    __slots__ = ("_address", "_peers", "_rank", "dtype", "view")

    def __init__(self, endpoint: Endpoint, rank: int, place: int, dtype: np.dtype[Any], count: int) -> None:
        """``place`` is an offset in the arena; or, negative, an address in the process of ``rank``."""
        self.dtype = dtype
        self._peers = endpoint.peers
        self._rank = rank
        self._address = -place
        self.view: Array | None = (
            endpoint.arena.array(place, (count,), dtype)
            if place >= 0
            else endpoint.peers.view(rank, -place, dtype, count)
        )
        """The array itself, if this process can see it."""

    def piece(self, start: int, end: int, scratch: Array) -> Array:
        """The elements ``start`` to ``end``, to be read: a view, or a copy in ``scratch`` if this process cannot see them."""
        if self.view is not None:
            return self.view[start:end]
        into = scratch[: end - start]
        self.copy_to(start, into)
        return into

    def copy_to(self, start: int, out: Array) -> None:
        """Copy elements from ``start`` on into the flat array ``out``."""
        if self.view is not None:
            np.copyto(out, self.view[start : start + out.size])
        else:
            self._peers.read(self._rank, self._address + start * self.dtype.itemsize, out)

    def store(self, start: int, array: Array) -> None:
        """Overwrite elements from ``start`` on."""
        if self.view is not None:
            self.view[start : start + array.size] = array
        else:
            self._peers.write(self._rank, self._address + start * self.dtype.itemsize, array)


class ZeroCopy:
    """The memory of the members of a group, for calls of one kind and size."""

    __slots__ = ("_call", "_calls", "_endpoint", "_group", "_owners_store", "_reduction", "_stretches")

    def __init__(self, endpoint: Endpoint, group: Group, calls: Calls, reduction: Reduction | None) -> None:
        """``calls`` are the members' calls, in group order."""
        self._endpoint = endpoint
        self._group = group
        self._calls = calls
        self._call = calls[group.position]
        self._reduction = reduction
        self._owners_store = _is_stored_by_owners(self._call)
        self._stretches: dict[tuple[int, int], Stretch] = {}

    def fill(self, sequence: int, out: Array) -> None:
        """Write this member's result of an operation that all members have posted into a contiguous array.

        Where owners store slices, the slice of this member is written into every result that is shown; if this
        member's own is not, all of it is written, too.
        """
        position, flat = self._group.position, out.reshape(-1)
        owners = self._owners_store and owners_of(out.nbytes, len(self._calls), self._endpoint.layout.cores)
        own = self._group.own.buffers[sequence & 1].words
        if owners and position >= owners and own[OUT] and own[OUT] != own[PAYLOAD]:
            return  # the owners write all of it
        buffers = self._group.buffers(sequence)
        sources: list[Any] = [None] * len(self._calls)
        for i, call in enumerate(self._calls):
            if call.dtype is not None:
                sources[i] = self._stretch(i, buffers[i].words[PAYLOAD])
        if self._reduction is None:
            at = 0
            for place, first, count in _parts(self._calls, position):
                sources[place].copy_to(first, flat[at : at + count])
                at += count
            flat[at:] = 0  # where a permute brings nothing
        elif self._owners_store:
            shown = _stored_places(buffers)
            targets = [self._stretch(i, place) for i, place in enumerate(shown) if place]
            if targets and position < owners:
                places = starts(split_sizes(out.size, (owners,)))
                _reduce_everywhere(sources, targets, places[position], places[position + 1], self._reduction)
            if not shown[position]:
                _reduce_into(sources, 0, flat, self._reduction)
        else:
            call = self._call
            first = sum(call.sizes[:position]) * prod(out.shape[call.dim + 1 :]) if call.of_kind.cuts else 0
            terms = [sources[place] for place in call.of_kind.sources_of(position, len(sources), call.root)]
            _reduce_into(terms, first, flat, self._reduction)

    def target(self, sequence: int, shown: Shown) -> Array | None:
        """The array in which this member's result is made; None: in any."""
        target = shown.target
        if target is None or shown.place != shown.target_place:
            return target
        places = _stored_places(self._group.buffers(sequence))
        return target if places[self._group.position] else np.empty_like(target)

    def copy_payload(self, place: int, sequence: int, out: Array) -> None:
        """Copy the whole payload of the member at position ``place``."""
        self._stretch(place, self._group.buffers(sequence)[place].words[PAYLOAD]).copy_to(0, out.reshape(-1))

    def _stretch(self, position: int, place: int) -> Stretch:
        stretch = self._stretches.get((position, place))
        if stretch is None:
            call = self._calls[position]
            assert call.dtype is not None
            if len(self._stretches) >= max(MOST_STRETCHES, 4 * len(self._calls)):
                self._stretches.clear()
            stretch = Stretch(self._endpoint, call.ranks[position], place, call.dtype, prod(call.shape or ()))
            self._stretches[position, place] = stretch
        return stretch


def _stored_places(buffers: Sequence[Buffer]) -> list[int]:
    """The places of the results into which the owners store; 0 for a member that makes its whole result itself.

    If one does, it reads all terms at any time.  So a result in the place of a term is made elsewhere by its member,
    and copied there when all have read.
    """
    places = [buffer.words[OUT] for buffer in buffers]
    if 0 in places:
        for position, buffer in enumerate(buffers):
            if places[position] == buffer.words[PAYLOAD]:
                places[position] = 0
    return places


def _reduce_into(terms: Sequence[Stretch], start: int, out: Array, reduction: Reduction) -> None:
    """Combine a part of the terms, from element ``start`` on, into the flat array ``out``."""
    step = _step(terms)
    scratch = np.empty(min(step, out.size), out.dtype)
    for place in range(0, out.size, step):
        _combine(terms, start + place, out[place : place + step], scratch, reduction)


def _reduce_everywhere(
    terms: Sequence[Stretch], targets: Sequence[Stretch], start: int, stop: int, reduction: Reduction
) -> None:
    """Combine elements ``start`` to ``stop`` of the terms and store them in every member's result."""
    step = _step((*terms, *targets))
    total, scratch = np.empty((2, min(step, stop - start)), terms[0].dtype)
    for place in range(start, stop, step):
        piece = total[: min(step, stop - place)]
        _combine(terms, place, piece, scratch, reduction)
        for target in targets:
            target.store(place, piece)


def _step(stretches: Sequence[Stretch]) -> int:
    """Elements of a piece."""
    nbytes = thresholds.PIECE_BYTES
    for stretch in stretches:
        if stretch.view is None:
            nbytes = thresholds.PRIVATE_PIECE_BYTES
    return max(1, nbytes // stretches[0].dtype.itemsize)


def _combine(terms: Sequence[Stretch], start: int, out: Array, scratch: Array, reduction: Reduction) -> None:
    end = start + out.size
    total = terms[0].piece(start, end, out)
    if len(terms) == 1:
        np.copyto(out, total)
    for term in terms[1:]:
        total = reduction.combine(total, term.piece(start, end, scratch), out)
    reduction.finish(out, len(terms))
