"""One call of a collective, as a checked value: what it does, who takes part, and what the members must agree on.

A `Call` is made from the arguments before anything is sent; wrong arguments are ``ValueError`` or ``TypeError`` here.
Its description is what the members compare; what differs among those who need not agree (the extents that an all_gather
joins, say) is read from the others' descriptions.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.collectives import Algorithm, all_to_all_nbytes, check_agreement, chunk_nbytes, text_of
from parallelism.collectives.algorithms import algorithm

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A collective as one member calls it."""

    kind: str
    ranks: tuple[int, ...]
    position: int
    axes: tuple[str, ...] | None = None
    algorithm: str | None = None
    dtype: np.dtype[Any] | None = None
    shape: Shape | None = None
    dim: int = 0
    """``split_dim`` of an all_to_all."""
    concat_dim: int = 0
    sizes: Shape = ()
    """Extents of the pieces along ``dim``."""
    root: int = 0
    op: str | None = None
    pairs: tuple[tuple[int, int], ...] | None = None
    form: bytes = b""
    """What to make of the array at the other end: see `vcluster.messages.forms`."""
    description: bytes = field(init=False, compare=False)
    """All that the others need to know, for `agree`."""
    signature: int = field(init=False, compare=False)
    """A number that is the same for the same description, and for no other that anybody will ever meet.  Of 62 bits,
    so that the number of an operation can be added to it."""

    def __post_init__(self) -> None:
        dtype = None if self.dtype is None else self.dtype.str
        fields = (self.kind, self.algorithm, dtype, self.shape, self.dim, self.concat_dim, self.sizes, self.root,
                  self.op, self.pairs, self.form)
        description = marshal.dumps(fields, 2)
        object.__setattr__(self, "description", description)
        digest = blake2b(description, digest_size=8).digest()
        object.__setattr__(self, "signature", int.from_bytes(digest, "little") >> 2)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def gives(self) -> bool:
        """Whether this member's ``x`` takes part."""
        return self.dtype is not None

    @property
    def nbytes(self) -> int:
        """Of this member's ``x``; 0 if it takes no part."""
        return 0 if self.dtype is None or self.shape is None else self.dtype.itemsize * prod(self.shape)

    def steps(self) -> Algorithm:
        """The algorithm as data; ``ValueError``, with the names that apply, if there is none of that name."""
        return algorithm(self.kind, self.algorithm, self.size, root=self.root, pairs=self.pairs)

    def as_seen_by(self, position: int, description: bytes) -> Call:
        """The call of another member of the group, from its description."""
        kind, name, dtype, shape, dim, concat_dim, sizes, root, op, pairs, form = marshal.loads(description)
        return replace(
            self, kind=kind, position=position, algorithm=name, dtype=None if dtype is None else np.dtype(dtype),
            shape=shape, dim=dim, concat_dim=concat_dim, sizes=sizes, root=root, op=op, pairs=pairs, form=form,
        )

    def block(self, position: int) -> tuple[slice, ...]:
        """The piece along ``dim`` that is meant for a member."""
        start = sum(self.sizes[:position])
        return (slice(None),) * self.dim + (slice(start, start + self.sizes[position]),)

    def __str__(self) -> str:
        return text_of(self)


def agree(call: Call, descriptions: Sequence[bytes]) -> list[Call]:
    """Everybody's call, in group order; `CollectiveMismatchError` if what must agree does not."""
    calls = [call.as_seen_by(position, description) for position, description in enumerate(descriptions)]
    check_agreement(call.ranks, call.kind, calls)
    return calls


class Traffic(NamedTuple):
    """What one member sends and receives in one call, by the closed form of its algorithm."""

    bytes_sent: int
    bytes_received: int
    messages: int
    sources: tuple[tuple[int, int], ...]

    def plus(self, other: Traffic) -> Traffic:
        """Of two calls that count as one."""
        sources = dict(self.sources)
        for rank, nbytes in other.sources:
            sources[rank] = sources.get(rank, 0) + nbytes
        return Traffic(
            self.bytes_sent + other.bytes_sent, self.bytes_received + other.bytes_received,
            self.messages + other.messages, tuple(sorted(sources.items())),
        )


def traffic(calls: Sequence[Call], position: int) -> Traffic:
    """The traffic of the member at ``position``, given everybody's call, by the steps of its algorithm."""
    call = calls[position]
    return _traffic(call.steps(), call.ranks, position, _chunk_nbytes(calls))


def _chunk_nbytes(calls: Sequence[Call]) -> tuple[int, ...]:
    giver = next((call for call in calls if call.gives), None)
    if giver is None or giver.dtype is None:
        return ()
    shapes = [call.shape for call in calls]
    if giver.kind == "all_to_all":
        known = [shape for shape in shapes if shape is not None]
        return all_to_all_nbytes(known, giver.dtype.itemsize, giver.dim, [call.sizes for call in calls])
    sizes = giver.sizes or None
    return chunk_nbytes(giver.steps(), shapes, giver.dtype.itemsize, dim=giver.dim, sizes=sizes)


@lru_cache(maxsize=8192)
def _traffic(steps: Algorithm, ranks: tuple[int, ...], position: int, chunks: tuple[int, ...]) -> Traffic:
    sources, targets = steps.sources(position, chunks), steps.targets(position, chunks)
    return Traffic(
        sum(nbytes for _, nbytes in targets),
        sum(nbytes for _, nbytes in sources),
        sum(map(len, steps.sends(position))),
        tuple((ranks[source], nbytes) for source, nbytes in sources if nbytes),
    )
