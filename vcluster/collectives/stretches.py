"""The large collectives: each member reads what it needs from where it lies, and writes each element once.

A *stretch* is the contiguous memory of one member's array: in shared memory, or in the private memory of its process
(`vcluster.memory.process_memory`).  A reduction goes through its terms in pieces that stay in cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import Reduction
from parallelism.mesh import split_sizes
from parallelism.mesh.uneven import starts
from vcluster.collectives.call import Call

if TYPE_CHECKING:
    from vcluster.messages import Endpoint

PIECE_BYTES = 1 << 17
PRIVATE_PIECE_BYTES = 1 << 19
"""Where the system moves a piece: each time it first has to find the pages."""


class Stretch:
    """A contiguous array of one member, flat."""

    __slots__ = ("_address", "_peers", "_rank", "dtype", "view")

    def __init__(self, endpoint: Endpoint, rank: int, place: int, dtype: np.dtype[Any], count: int) -> None:
        """``place`` is an offset in the arena; or, negative, an address in the process of ``rank``."""
        self.dtype = dtype
        self._peers = endpoint.peers
        self._rank = rank
        self._address = -place
        self.view: NDArray[Any] | None = (
            endpoint.arena.array(place, (count,), dtype) if place >= 0
            else endpoint.peers.view(rank, -place, dtype, count)
        )
        """The array itself, if this process can see it."""

    def piece(self, start: int, end: int, scratch: NDArray[Any]) -> NDArray[Any]:
        """Elements to read, perhaps as a copy in ``scratch``."""
        if self.view is not None:
            return self.view[start:end]
        into = scratch[: end - start]
        self.copy_to(start, into)
        return into

    def copy_to(self, start: int, out: NDArray[Any]) -> None:
        """Copy elements from ``start`` on into the flat array ``out``."""
        if self.view is not None:
            np.copyto(out, self.view[start : start + out.size])
        else:
            self._peers.read(self._rank, self._address + start * self.dtype.itemsize, out)

    def copy_whole(self, out: NDArray[Any]) -> None:
        self.copy_to(0, out.reshape(-1))

    def store(self, start: int, array: NDArray[Any]) -> None:
        """Overwrite elements from ``start`` on."""
        if self.view is not None:
            self.view[start : start + array.size] = array
        else:
            self._peers.write(self._rank, self._address + start * self.dtype.itemsize, array)


def reduce_into(terms: Sequence[Stretch], start: int, out: NDArray[Any], reduction: Reduction) -> None:
    """Combine a part of the terms, from ``start`` on, into the flat array ``out``."""
    step = _step(terms, out.itemsize)
    scratch = np.empty(min(step, out.size), out.dtype)
    for place in range(0, out.size, step):
        piece = out[place : place + step]
        _combine(terms, start + place, piece, scratch, reduction)


def reduce_everywhere(
    terms: Sequence[Stretch], outs: Sequence[Stretch], count: int, position: int, owners: int, reduction: Reduction
) -> None:
    """Combine this member's slice of the terms and store it in everybody's result; the first ``owners`` have one."""
    if position >= owners:
        return
    places = starts(split_sizes(count, (owners,)))
    stop = places[position + 1]
    step = _step((*terms, *outs), terms[0].dtype.itemsize)
    total, scratch = np.empty((2, min(step, stop - places[position])), terms[0].dtype)
    for start in range(places[position], stop, step):
        piece = total[: min(step, stop - start)]
        _combine(terms, start, piece, scratch, reduction)
        for out in outs:
            out.store(start, piece)


def _step(stretches: Sequence[Stretch], itemsize: int) -> int:
    """Elements of a piece."""
    nbytes = PIECE_BYTES
    for stretch in stretches:
        if stretch.view is None:
            nbytes = PRIVATE_PIECE_BYTES
    return max(1, nbytes // itemsize)


def _combine(
    terms: Sequence[Stretch], start: int, out: NDArray[Any], scratch: NDArray[Any], reduction: Reduction
) -> None:
    end = start + out.size
    total = terms[0].piece(start, end, out)
    if len(terms) == 1:
        np.copyto(out, total)
    for term in terms[1:]:
        total = reduction.combine(total, term.piece(start, end, scratch), out)
    reduction.finish(out, len(terms))


def is_contiguous(call: Call) -> bool:
    """Whether each member needs whole stretches of the others' arrays, and its result is made of them end to end."""
    kind = call.of_kind
    if kind.function is not None:
        return False
    if not (kind.cuts or kind.joins):
        return True
    if call.dim == 0 and call.concat_dim == 0:
        return call.shape != ()
    return kind.cuts != kind.joins and kind.gives == kind.gets and prod((call.shape or ())[: call.dim]) == 1


def blocks(calls: Sequence[Call], position: int) -> list[tuple[int, int, int]]:
    """Where the result of a member comes from: (position, first element, elements), end to end."""
    call = calls[position]
    whole = [(place, 0, prod(seen.shape or ())) for place, seen in enumerate(calls)]
    kind = call.of_kind
    sources = kind.sources_of(position, len(calls), call.root, call.pairs)
    return [_part(calls, place, position) if kind.cuts else whole[place] for place in sources]


def _part(calls: Sequence[Call], place: int, position: int) -> tuple[int, int, int]:
    """The piece of one member's array that is meant for another."""
    seen = calls[place]
    row = prod((seen.shape or ())[1:])
    return place, sum(seen.sizes[:position]) * row, seen.sizes[position] * row
