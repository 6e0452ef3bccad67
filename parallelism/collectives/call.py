"""Descriptions of a collective call: by one member (`MemberCall`), and of a whole group (`CollectiveCall`).

The runtime, the recorder and the simulator describe their calls by these values.  An event carries the
`CollectiveCall`, from which prices and bus bandwidths are computed.  ``S``, the bytes of the whole buffer, is that of
`parallelism.algorithms.closed_forms`.

`traffic` counts the bytes and messages of a member from the steps of the algorithm.  `Moved` has those of all members
under the direct algorithms in closed form, for groups of any size: a group of thousands has millions of messages.  Both
are equal.  Pieces may be uneven.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.algorithms import (
    BLOCKS_OF_ALL,
    KINDS,
    MPI,
    Algorithm,
    CollectiveKind,
    Pairs,
    kind_of,
    kind_of_event,
    runs_directly,
)
from parallelism.algorithms.algorithms import algorithm
from parallelism.algorithms.direct import DIRECT
from parallelism.arrays import Ints
from parallelism.collectives.buffers import all_to_all_nbytes, block_nbytes, chunk_nbytes
from parallelism.events import Event
from parallelism.mesh import split_sizes

Shape = tuple[int, ...]

ARRAY = b""
SCALAR = b"scalar"
"""Forms: what the value of an array was.  A tree of arrays has another form."""


class CollectiveCall(NamedTuple):
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
    """The algorithm that ran; for None, "direct" or "mpi" the price is that of the cheapest."""
    root: int | None = None
    """A position in the group; None for a kind without a root."""
    pairs: Pairs = ()
    """(source, target), positions, of what moves in a permute."""

    @classmethod
    def of_event(cls, event: Event) -> "CollectiveCall | None":
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
        is_direct = self.algorithm == MPI or runs_directly(self.kind, self.algorithm)
        name = None if is_direct else self.algorithm
        return algorithm(self.kind, name, size, root=self.root, pairs=self.pairs)

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
    def of_event(cls, event: Event) -> "Traffic":
        """The traffic that an event counts."""
        call = CollectiveCall.of_event(event)
        return cls(event.bytes_sent, event.bytes_received, event.messages, event.sources, call)

    def plus(self, other: "Traffic") -> "Traffic":
        """The traffic of two calls that count as one."""
        sources = Counter(dict(self.sources)) + Counter(dict(other.sources))
        call = self.call or other.call
        if self.call is not None and other.call is not None:
            call = self.call._replace(nbytes=self.call.nbytes + other.call.nbytes)
        return Traffic(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.messages + other.messages,
            tuple(sorted(sources.items())),
            call,
        )

    def on_event(self) -> dict[str, Any]:
        """The traffic as fields of an event."""
        counted = {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "messages": self.messages,
            "sources": self.sources,
        }
        return counted if self.call is None else {**counted, **self.call.on_event()}


def traffic(calls: Sequence[MemberCall], ranks: tuple[int, ...], position: int) -> Traffic:
    """The traffic of the member at ``position``, from the calls of all members."""
    return _traffic(calls[position].over(len(calls)), ranks, position, chunks_of(calls))


def traffics(calls: Sequence[MemberCall], ranks: tuple[int, ...]) -> list[Traffic]:
    """The traffic of every member, by position: that of `traffic`, in one pass over the messages of the group."""
    plan = calls[0].over(len(calls))
    chunks = chunks_of(calls)
    g = len(calls)
    described = _described(plan, ranks, chunks)
    if plan.record in DIRECT and plan.name == "direct":
        moved = Moved(calls, ranks)
        sent, received, messages = moved.sent, moved.received, moved.messages
        sources = moved.sources
    else:
        sent, received, messages = np.zeros((3, g), np.int64)
        given: list[dict[int, int]] = [{} for _ in calls]
        for (source, target), (count, nbytes) in plan.moved(chunks).items():
            messages[source] += count
            sent[source] += nbytes
            received[target] += nbytes
            if nbytes:
                given[target][source] = nbytes

        def sources(position: int) -> tuple[tuple[int, int], ...]:
            return tuple((ranks[source], nbytes) for source, nbytes in sorted(given[position].items()))

    return [
        Traffic(*totals, sources(position), described)
        for position, totals in enumerate(
            zip(sent.tolist(), received.tolist(), messages.tolist(), strict=True)
        )
    ]


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
    pairs = tuple(
        sorted((source, target) for source, target in plan.pairs if source != target and chunks[source])
    )
    return CollectiveCall(plan.collective, ranks, payload_bytes(plan, chunks), plan.name, root, pairs)


# -- in closed form ----------------------------------------------------------------------------------------------------


class Moved:
    """Bytes and messages by position: ``sent``, ``received``, ``messages``; ``sources`` of one position."""

    def __init__(self, calls: Sequence[MemberCall], ranks: Sequence[int] | None = None) -> None:
        """``calls`` by position; ``ranks`` by position, if sources are to be named by their ranks."""
        self._names = range(len(calls)) if ranks is None else ranks
        first, g = calls[0], len(calls)
        self.kind = kind = first.of_kind
        own: Ints = np.array([call.nbytes for call in calls], np.int64)
        self.payload_bytes: float = int(own[0])
        """S of the call; see `CollectiveCall`."""
        self.messages: Ints = np.full(g, g - 1, np.int64)
        self.pairs: Pairs = ()
        """(source, target) of a permute, as far as anything moves."""
        self._pairs: dict[bytes, tuple[tuple[int, int], ...]] = {}
        """Sources, the member itself included, by what it is given: of as many members the pairs are the same."""
        self._given: Callable[[int], Ints]
        """By position, the bytes that it gets from each other one."""
        parts: Ints | None = None
        if kind.sums_all:
            parts = pieces = _pieces(first, g)
            self.received = self.sent = (g - 2) * pieces + own
            self.messages = 2 * self.messages
            self._given = lambda position: pieces + pieces[position]
        elif kind.paired:
            self._permute(first, own)
        elif kind.rooted:
            self._from_or_to_root(calls, own)
        elif not kind.moves:
            self.payload_bytes = 0
            self.received, self.sent = np.zeros((2, g), np.int64)
            self._given = lambda position: self.received
        elif kind.blocks_of_all:
            cut = _cut(calls)
            kept = np.diagonal(cut)
            self.received, self.sent = cut.sum(0) - kept, cut.sum(1) - kept
            self._given = lambda position: cut[:, position]
            if g > 1:
                self.payload_bytes = even_buffer(int(self.received.sum()), g)
        elif kind.cuts:
            parts = pieces = _pieces(first, g)
            self.received, self.sent = (g - 1) * pieces, own - pieces
            self._given = lambda position: np.full(g, pieces[position])
        else:
            self.payload_bytes = int(own.sum())
            self.received = self.payload_bytes - own
            self.sent = (g - 1) * own
            self._given, parts = lambda position: own, own
        self._is_same_for_all = parts is not None and bool(parts[0]) and bool((parts == parts[0]).all())
        """Whether each member gets as much from every other one."""

    def _from_or_to_root(self, calls: Sequence[MemberCall], own: Ints) -> None:
        kind, root, g = self.kind, calls[0].root, len(own)
        here = np.arange(g) == root
        self.payload_bytes = int(own.sum() if kind.joins else own[root])
        if kind.gives == "root":
            parts = np.where(here, 0, _pieces(calls[root], g) if kind.cuts else own[root])
            self.received, self.sent = parts, np.where(here, parts.sum(), 0)
            self._given = lambda position: np.where(here, parts[position], 0)
        else:
            parts = np.where(here, 0, own)
            self.received, self.sent = np.where(here, parts.sum(), 0), parts
            self._given = lambda position: np.where(here[position], parts, 0)
        self.messages = np.where(here == (kind.gives == "root"), g - 1 if kind.gives == "root" else 1, 0)

    def _permute(self, first: MemberCall, own: Ints) -> None:
        moved = [(source, target) for source, target in first.pairs or () if source != target]
        self.payload_bytes = max((int(own[source]) for source, _ in moved), default=0)
        self.pairs = tuple(sorted((source, target) for source, target in moved if own[source]))
        source_of = {target: source for source, target in moved}
        self.received, self.sent, self.messages = np.zeros((3, len(own)), np.int64)
        for source, target in moved:
            self.received[target] = own[source]
            self.sent[source] = own[source]
            self.messages[source] = 1
        positions = np.arange(len(own))
        self._given = lambda position: np.where(positions == source_of.get(position, -1), own, 0)

    def named(self, ranks: Sequence[int]) -> "Moved":
        """The same, with sources that are named by these ranks, in the order of positions."""
        named = copy(self)
        named._names, named._pairs = ranks, {}
        return named

    @cached_property
    def even(self) -> bool:
        """Whether all positions move the same."""
        return all((amounts == amounts[0]).all() for amounts in (self.sent, self.received, self.messages))

    def sources(self, position: int) -> tuple[tuple[int, int], ...]:
        """(position or rank, bytes) of each other member that gives it any bytes."""
        if self._is_same_for_all:
            if b"" not in self._pairs:
                self._pairs[b""] = tuple(zip(self._names, self._given(0).tolist(), strict=True))
            return self._pairs[b""][:position] + self._pairs[b""][position + 1 :]
        given = self._given(position)
        key = given.tobytes()
        if key not in self._pairs:
            self._pairs[key] = tuple(
                (name, n) for name, n in zip(self._names, given.tolist(), strict=True) if n
            )
        pairs = self._pairs[key]
        before = int(np.count_nonzero(given[:position]))
        return pairs[:before] + pairs[before + int(given[position] > 0) :]


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
