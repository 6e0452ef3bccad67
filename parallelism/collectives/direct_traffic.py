"""The bytes and messages of the members of a group in one collective, in closed form for groups of any size.

They equal the sums over the steps of the direct algorithms, which processes record, without a list of the messages: a
group of thousands has millions of them.  Pieces may be uneven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelism.algorithms import Pairs
from parallelism.collectives.buffers import block_nbytes
from parallelism.collectives.call import MemberCall, even_buffer
from parallelism.mesh import split_sizes

Ints = NDArray[np.int64]


class Moved:
    """Bytes and messages by position: ``sent``, ``received``, ``messages``; ``sources`` of one position."""

    def __init__(self, calls: Sequence[MemberCall]) -> None:
        """``calls`` by position."""
        first, g = calls[0], len(calls)
        self.kind = kind = first.of_kind
        own: Ints = np.array([call.nbytes for call in calls], np.int64)
        self.payload_bytes: float = int(own[0])
        """S of the call; see `parallelism.collectives.call.CollectiveCall`."""
        self.messages: Ints = np.full(g, g - 1, np.int64)
        self.pairs: Pairs = ()
        """(source, target) of a permute, as far as anything moves."""
        self._given: Callable[[int], Ints]
        """By position, the bytes that it gets from each other one."""
        if kind.sums_all:
            pieces = _pieces(first, g)
            self.received = self.sent = (g - 2) * pieces + own
            self.messages = 2 * self.messages
            self._given = lambda position: pieces + pieces[position]
        elif kind.paired:
            self._permute(first, own)
        elif kind.blocks_of_all:
            cut = _cut(calls)
            kept = np.diagonal(cut)
            self.received, self.sent = cut.sum(0) - kept, cut.sum(1) - kept
            self._given = lambda position: cut[:, position]
            if g > 1:
                self.payload_bytes = even_buffer(int(self.received.sum()), g)
        elif kind.cuts:
            pieces = _pieces(first, g)
            self.received, self.sent = (g - 1) * pieces, own - pieces
            self._given = lambda position: np.full(g, pieces[position])
        else:
            self.payload_bytes = int(own.sum())
            self.received, self.sent = self.payload_bytes - own, (g - 1) * own
            self._given = lambda position: own

    def _permute(self, first: MemberCall, own: Ints) -> None:
        moved = [(s, t) for s, t in first.pairs or () if s != t]
        self.payload_bytes = max((int(own[s]) for s, _ in moved), default=0)
        self.pairs = tuple(sorted((s, t) for s, t in moved if own[s]))
        source_of = {t: s for s, t in moved}
        self.received, self.sent, self.messages = np.zeros((3, len(own)), np.int64)
        for s, t in moved:
            self.received[t] = self.sent[s] = own[s]
            self.messages[s] = 1
        self._given = lambda position: np.where(np.arange(len(own)) == source_of.get(position, -1), own, 0)

    @property
    def even(self) -> bool:
        """Whether all positions move the same."""
        return all((of == of[0]).all() for of in (self.sent, self.received, self.messages))

    def sources(self, position: int) -> tuple[tuple[int, int], ...]:
        """(position, bytes) of each other member that gives it any bytes."""
        return tuple((i, n) for i, n in enumerate(self._given(position).tolist()) if n and i != position)


@lru_cache(maxsize=4096)
def moved(calls: tuple[MemberCall, ...]) -> Moved:
    """The traffic of all members; cached."""
    return Moved(calls)


@lru_cache(maxsize=4096)
def moved_alike(call: MemberCall, size: int) -> Moved:
    """The traffic of all members if all ``size`` of them make the same call; cached."""
    return Moved((call,) * size)


def _pieces(call: MemberCall, size: int) -> Ints:
    """Bytes of the pieces that the array of a member is cut into, one for each of the group."""
    assert call.dtype is not None
    assert call.shape is not None
    if not call.of_kind.cuts:
        return np.array(split_sizes(prod(call.shape), (size,)), np.int64) * call.dtype.itemsize
    return np.array(block_nbytes(call.shape, call.dtype.itemsize, size, call.dim, call.sizes), np.int64)


def _cut(calls: Sequence[MemberCall]) -> Any:
    """Bytes from position to position."""
    size = len(calls)
    if all(call is calls[0] for call in calls):
        return np.broadcast_to(_pieces(calls[0], size), (size, size))
    return np.stack([_pieces(call, size) for call in calls])
