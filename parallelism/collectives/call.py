"""Descriptions of a collective call: by one member (`MemberCall`), and of a whole group (`CollectiveCall`).

The runtime, the recorder and the simulator describe their calls by these values.  An event carries the
`CollectiveCall`, from which prices and bus bandwidths are computed.  ``S``, the bytes of the whole buffer, is that of
`parallelism.algorithms.closed_forms`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parallelism.algorithms import BLOCKS_OF_ALL, KINDS, Algorithm, CollectiveKind, Pairs, kind_of, kind_of_event
from parallelism.algorithms.algorithms import algorithm
from parallelism.collectives.buffers import all_to_all_nbytes, chunk_nbytes

if TYPE_CHECKING:
    from parallelism.events import Event

Shape = tuple[int, ...]

ARRAY = b""
SCALAR = b"scalar"
"""Forms: what the value of an array was.  A tree of arrays has another form."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective of one group, with all that its price and its bus bandwidth depend on."""

    kind: str
    group: tuple[int, ...]
    """The ranks, in group order."""
    nbytes: float
    """S, the bytes of the whole buffer.

    Of a permute the largest array that moves; of an all_to_all with uneven blocks g times the mean of the blocks that
    leave their member, so it may be no whole number.
    """
    algorithm: str | None = None
    """The algorithm that ran; for None or "direct" the price is that of the cheapest."""
    root: int | None = None
    """A position in the group; None for a kind without a root."""
    pairs: Pairs = ()
    """(source, target), positions, of what moves in a permute."""

    @classmethod
    def of_event(cls, event: Event) -> CollectiveCall | None:
        """The call that an event carries; None for an event that is no single collective, or carries none."""
        kind = kind_of_event(event.name) if event.kind == "collective" else None
        if kind is None or event.group is None or event.payload_bytes is None:
            return None
        return cls(kind.name, event.group, event.payload_bytes, event.algorithm, event.root, event.pairs)

    def on_event(self) -> Mapping[str, Any]:
        """The fields of its event that are not there anyway: name, group and algorithm."""
        return {"payload_bytes": self.nbytes, "root": self.root, "pairs": self.pairs}


@dataclass(frozen=True, slots=True)
class MemberCall:
    """A collective as one member of a group calls it."""

    kind: str
    dtype: np.dtype[Any] | None = None
    """Of the array that this member gives; None if it gives none, as for ``shape``."""
    shape: Shape | None = None
    dim: int = 0
    """Along which arrays are cut; of a kind that does not cut, along which they are joined."""
    concat_dim: int = 0
    """Along which blocks are joined that were cut along ``dim``."""
    sizes: Shape = ()
    """Extents of the blocks along ``dim``; empty: as `numpy.array_split` cuts."""
    root: int = 0
    pairs: Pairs | None = None
    algorithm: str | None = None
    op: str | None = None
    """The name of the reduction; None for a kind that does not reduce."""
    form: bytes = ARRAY
    """The form of the value, which the receiver restores: an array, a scalar or a tree."""

    @property
    def gives(self) -> bool:
        """Whether this member's array takes part."""
        return self.dtype is not None

    @property
    def nbytes(self) -> int:
        """Bytes of this member's array; 0 if it takes no part."""
        return 0 if self.dtype is None or self.shape is None else self.dtype.itemsize * prod(self.shape)

    @property
    def of_kind(self) -> CollectiveKind:
        """The record of its kind."""
        return KINDS.records[self.kind]

    def over(self, size: int) -> Algorithm:
        """The algorithm over so many members; ``ValueError``, with the names that apply, if there is none."""
        return algorithm(self.kind, self.algorithm, size, root=self.root, pairs=self.pairs)

    def block(self, position: int) -> tuple[slice, ...]:
        """The block along ``dim`` that is meant for a member."""
        start = sum(self.sizes[:position])
        return (slice(None),) * self.dim + (slice(start, start + self.sizes[position]),)


class Traffic(NamedTuple):
    """The bytes and messages of one member in one call, by the steps of its algorithm."""

    bytes_sent: int
    bytes_received: int
    messages: int
    sources: tuple[tuple[int, int], ...]
    """(rank, bytes received from it)."""
    call: CollectiveCall | None = None
    """None for an operation that is made of several collectives."""

    @classmethod
    def of_event(cls, event: Event) -> Traffic:
        """The traffic that an event counts."""
        call = CollectiveCall.of_event(event)
        return cls(event.bytes_sent, event.bytes_received, event.messages, event.sources, call)

    def plus(self, other: Traffic) -> Traffic:
        """The traffic of two calls that count as one."""
        sources = Counter(dict(self.sources)) + Counter(dict(other.sources))
        call = self.call or other.call
        if self.call is not None and other.call is not None:
            call = replace(self.call, nbytes=self.call.nbytes + other.call.nbytes)
        return Traffic(
            self.bytes_sent + other.bytes_sent, self.bytes_received + other.bytes_received,
            self.messages + other.messages, tuple(sorted(sources.items())), call,
        )

    def on_event(self) -> dict[str, Any]:
        """The traffic as fields of an event."""
        counted = {"bytes_sent": self.bytes_sent, "bytes_received": self.bytes_received, "messages": self.messages,
                   "sources": self.sources}
        return counted if self.call is None else {**counted, **self.call.on_event()}


def traffic(calls: Sequence[MemberCall], ranks: tuple[int, ...], position: int) -> Traffic:
    """The traffic of the member at ``position``, from the calls of all members."""
    return _traffic(calls[position].over(len(calls)), ranks, position, chunks_of(calls))


def chunks_of(calls: Sequence[MemberCall]) -> tuple[int, ...]:
    """The bytes of every chunk, as the algorithm numbers them."""
    giver = next((call for call in calls if call.gives), None)
    if giver is None or giver.dtype is None:
        return ()
    shapes = [call.shape for call in calls]
    if giver.of_kind.unit == BLOCKS_OF_ALL:
        known = [shape for shape in shapes if shape is not None]
        return all_to_all_nbytes(known, giver.dtype.itemsize, giver.dim, [call.sizes for call in calls])
    sizes = giver.sizes or None
    return chunk_nbytes(giver.over(len(calls)), shapes, giver.dtype.itemsize, dim=giver.dim, sizes=sizes)


def payload_bytes(plan: Algorithm, chunks: Sequence[int]) -> float:
    """S, from the bytes of the chunks."""
    kind, g = kind_of(plan.collective), plan.size
    if kind.paired:
        return max((chunks[source] for source, target in plan.pairs if source != target), default=0)
    if kind.unit == BLOCKS_OF_ALL and g > 1:
        return even_buffer(sum(chunks) - sum(chunks[:: g + 1]), g)
    return sum(chunks)


def even_buffer(leaving: int, g: int) -> float:
    """S of an all_to_all of which ``leaving`` bytes leave their member: g times the mean of the g (g-1) blocks."""
    return leaving / (g - 1) if leaving % (g - 1) else leaving // (g - 1)


@lru_cache(maxsize=8192)
def _traffic(plan: Algorithm, ranks: tuple[int, ...], position: int, chunks: tuple[int, ...]) -> Traffic:
    sources, targets = plan.sources(position, chunks), plan.targets(position, chunks)
    return Traffic(
        sum(nbytes for _, nbytes in targets),
        sum(nbytes for _, nbytes in sources),
        sum(map(len, plan.sends(position))),
        tuple((ranks[source], nbytes) for source, nbytes in sources if nbytes),
        _described(plan, ranks, chunks),
    )


@lru_cache(maxsize=8192)
def _described(plan: Algorithm, ranks: tuple[int, ...], chunks: tuple[int, ...]) -> CollectiveCall:
    root = plan.root if kind_of(plan.collective).rooted else None
    pairs = tuple(sorted((source, target) for source, target in plan.pairs if source != target and chunks[source]))
    return CollectiveCall(plan.collective, ranks, payload_bytes(plan, chunks), plan.name, root, pairs)
