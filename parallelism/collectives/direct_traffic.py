"""What the members of a group move in a collective of their programs, in closed form, however many they are.

The same that `parallelism.collectives.algorithms`'s steps of the direct algorithms come to, and the processes record, without a
list of the messages: of those a group of thousands has millions.  Pieces may be uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism.mesh import split_sizes

Ints = NDArray[np.int64]
Shape = tuple[int, ...]


class Said(NamedTuple):
    """A collective as a member calls it, as far as it is counted."""

    kind: str
    shape: Shape
    itemsize: int
    dim: int = 0
    """Along which it is cut."""
    factors: tuple[int, ...] = ()
    """How an extent is cut over the group: the extents of the axes."""
    pairs: tuple[tuple[int, int], ...] = ()
    sizes: tuple[int, ...] | None = None
    """The elements of each piece of a flat array, where they are told."""

    @property
    def nbytes(self) -> int:
        """Of the array that it gives."""
        return self.itemsize * prod(self.shape)

    def pieces(self, size: int) -> Ints:
        """Bytes of the pieces that the array is cut into, one for each of the group."""
        if self.kind == "all_reduce":
            return np.array(split_sizes(prod(self.shape), (size,)), np.int64) * self.itemsize
        if self.sizes is not None:
            return np.array(self.sizes, np.int64) * self.itemsize
        rest = self.itemsize * prod(n for d, n in enumerate(self.shape) if d != self.dim)
        return np.array(split_sizes(self.shape[self.dim], self.factors), np.int64) * rest


class Moved:
    """Bytes and messages by position: ``sent``, ``received``, ``messages``; ``sources`` of one position."""

    def __init__(self, said: Sequence[Said]) -> None:
        """``said`` by position."""
        first, g = said[0], len(said)
        self.kind, self._size = first.kind, g
        self._own: Ints = np.array([each.nbytes for each in said], np.int64)
        self.messages: Ints = np.full(g, g - 1, np.int64)
        self.pairs: tuple[tuple[int, int], ...] = ()
        """Of a permute: who sends to whom, as far as there is anything to send."""
        match first.kind:
            case "all_reduce":
                self._pieces = first.pieces(g)
                self.received = self.sent = (g - 2) * self._pieces + self._own
                self.messages = 2 * self.messages
            case "all_gather":
                self.received = self._own.sum() - self._own
                self.sent = (g - 1) * self._own
            case "reduce_scatter":
                self._pieces = first.pieces(g)
                self.received = (g - 1) * self._pieces
                self.sent = self._own - self._pieces
            case "all_to_all":
                self._cut = _cut(said)
                kept = np.diagonal(self._cut)
                self.received, self.sent = self._cut.sum(0) - kept, self._cut.sum(1) - kept
            case _:
                moved = [(s, t) for s, t in first.pairs if s != t]
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
def moved(said: tuple[Said, ...]) -> Moved:
    """What everybody moves, remembered."""
    return Moved(said)


@lru_cache(maxsize=4096)
def moved_alike(said: Said, size: int) -> Moved:
    """What everybody moves where all ``size`` call the same."""
    return Moved((said,) * size)


def _cut(said: Sequence[Said]) -> Any:
    """Bytes from position to position."""
    if all(each is said[0] for each in said):
        return np.broadcast_to(said[0].pieces(len(said)), (len(said), len(said)))
    return np.stack([each.pieces(len(said)) for each in said])
