"""What the members of a group move in a collective of their programs, in closed form, however many they are.

The same that `parallelism.communication`'s steps of the direct algorithms come to, and the processes record, without a
list of the messages: of those a group of thousands has millions.  Pieces may be uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelism.collective_call import MemberCall, even_buffer
from parallelism.splitting import split_sizes

Ints = NDArray[np.int64]


class Moved:
    """Bytes and messages by position: ``sent``, ``received``, ``messages``; ``sources`` of one position."""

    def __init__(self, calls: Sequence[MemberCall]) -> None:
        """``calls`` by position."""
        first, g = calls[0], len(calls)
        self.kind, self._size = first.kind, g
        self._own: Ints = np.array([call.nbytes for call in calls], np.int64)
        self.payload_bytes: float = int(self._own[0])
        """S of the call; see `parallelism.collective_call.CollectiveCall`."""
        self.messages: Ints = np.full(g, g - 1, np.int64)
        self.pairs: tuple[tuple[int, int], ...] = ()
        """Of a permute: who sends to whom, as far as there is anything to send."""
        match first.kind:
            case "all_reduce":
                self._pieces = _pieces(first, g)
                self.received = self.sent = (g - 2) * self._pieces + self._own
                self.messages = 2 * self.messages
            case "all_gather":
                self.payload_bytes = int(self._own.sum())
                self.received = self._own.sum() - self._own
                self.sent = (g - 1) * self._own
            case "reduce_scatter":
                self._pieces = _pieces(first, g)
                self.received = (g - 1) * self._pieces
                self.sent = self._own - self._pieces
            case "all_to_all":
                self._cut = _cut(calls)
                kept = np.diagonal(self._cut)
                self.received, self.sent = self._cut.sum(0) - kept, self._cut.sum(1) - kept
                if g > 1:
                    self.payload_bytes = even_buffer(int(self.received.sum()), g)
            case _:
                moved = [(s, t) for s, t in first.pairs or () if s != t]
                self.payload_bytes = max((int(self._own[s]) for s, _ in moved), default=0)
                self.pairs = tuple(sorted((s, t) for s, t in moved if self._own[s]))
                self._source = {t: s for s, t in moved}
                self.received, self.sent = np.zeros(g, np.int64), np.zeros(g, np.int64)
                self.messages = np.zeros(g, np.int64)
                for s, t in moved:
                    self.received[t] = self.sent[s] = self._own[s]
                    self.messages[s] = 1

    @property
    def even(self) -> bool:
        """Whether all positions move the same."""
        return all((of == of[0]).all() for of in (self.sent, self.received, self.messages))

    def sources(self, position: int) -> tuple[tuple[int, int], ...]:
        """(position, bytes) of everybody who gives it anything."""
        match self.kind:
            case "all_reduce":
                given = self._pieces + self._pieces[position]
            case "all_gather":
                given = self._own
            case "reduce_scatter":
                given = np.full(self._size, self._pieces[position])
            case "all_to_all":
                given = self._cut[:, position]
            case _:
                source = self._source.get(position)
                return () if source is None or not self._own[source] else ((source, int(self._own[source])),)
        return tuple((i, nbytes) for i, nbytes in enumerate(given.tolist()) if nbytes and i != position)


@lru_cache(maxsize=4096)
def moved(calls: tuple[MemberCall, ...]) -> Moved:
    """What everybody moves, remembered."""
    return Moved(calls)


@lru_cache(maxsize=4096)
def moved_alike(call: MemberCall, size: int) -> Moved:
    """What everybody moves where all ``size`` members call the same."""
    return Moved((call,) * size)


def _pieces(call: MemberCall, size: int) -> Ints:
    """Bytes of the pieces that the array of a member is cut into, one for each of the group."""
    assert call.dtype is not None
    assert call.shape is not None
    if not call.of_kind.cuts:
        return np.array(split_sizes(prod(call.shape), (size,)), np.int64) * call.dtype.itemsize
    rest = call.dtype.itemsize * prod(n for d, n in enumerate(call.shape) if d != call.dim)
    return np.array(call.sizes or split_sizes(call.shape[call.dim], (size,)), np.int64) * rest


def _cut(calls: Sequence[MemberCall]) -> Any:
    """Bytes from position to position."""
    size = len(calls)
    if all(call is calls[0] for call in calls):
        return np.broadcast_to(_pieces(calls[0], size), (size, size))
    return np.stack([_pieces(call, size) for call in calls])
