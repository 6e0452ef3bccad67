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

from parallelism.collectives import Algorithm, all_to_all_nbytes, chunk_nbytes
from parallelism.collectives.algorithms import algorithm
from vcluster.code import CollectiveMismatchError
from vcluster.messages import ARRAY, SCALAR

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
        x = "nothing" if self.dtype is None else f"{self.dtype}{list(self.shape or ())}"
        options = [x] if self.kind != "barrier" else []
        if self.kind in ("all_gather", "reduce_scatter", "scatter", "gather"):
            options.append(f"dim={self.dim}")
        if self.kind == "all_to_all":
            options += [f"split_dim={self.dim}", f"concat_dim={self.concat_dim}"]
        if self.kind in ("broadcast", "reduce", "scatter", "gather"):
            options.append(f"root={self.root}")
        if self.op is not None:
            options.append(f"op={self.op!r}")
        if self.pairs is not None:
            options.append(f"pairs={list(self.pairs)}")
        if self.algorithm is not None:
            options.append(f"algorithm={self.algorithm!r}")
        return f"{self.kind}({', '.join(options)})"


def agree(call: Call, descriptions: Sequence[bytes]) -> list[Call]:
    """Everybody's call, in group order; `CollectiveMismatchError` if what must agree does not."""
    calls = [call.as_seen_by(position, description) for position, description in enumerate(descriptions)]
    first = next((c for c in calls if c.gives), calls[0])
    for other in calls:
        what = _difference(first, other)
        if what is not None:
            raise _mismatch(call, calls, what)
    return calls


def _mismatch(call: Call, calls: Sequence[Call], what: str) -> CollectiveMismatchError:
    """The error that tells what each called, those in the majority first; its ranks are the others."""
    callers: dict[str, list[int]] = {}
    for rank, seen in zip(call.ranks, calls, strict=True):
        callers.setdefault(str(seen), []).append(rank)
    ordered = sorted(callers.items(), key=lambda item: -len(item[1]))
    tied = len(ordered) > 1 and len(ordered[0][1]) == len(ordered[1][1])
    odd = [rank for _, ranks in ordered[0 if tied else 1 :] for rank in ranks]
    return CollectiveMismatchError(
        f"the members of group {list(call.ranks)} differ in {what}", ranks=sorted(odd), operation=call.kind,
        calls={rank: str(seen) for rank, seen in zip(call.ranks, calls, strict=True)},
    )


def _difference(a: Call, b: Call) -> str | None:
    for name in ("kind", "root", "op", "pairs", "algorithm"):
        if getattr(a, name) != getattr(b, name):
            return "what they call" if name == "kind" else name
    if not (a.gives and b.gives):
        return None
    for name in ("dim", "concat_dim"):
        if getattr(a, name) != getattr(b, name):
            return name
    if a.dtype != b.dtype:
        return "dtype"
    if a.kind == "all_reduce" and a.form != b.form and not {a.form, b.form} <= {ARRAY, SCALAR}:
        return "the structure of what they reduce"
    assert a.shape is not None
    assert b.shape is not None
    if a.kind in ("all_scatter", "permute"):
        return None
    if len(a.shape) != len(b.shape):
        return "the number of dims"
    free = {"all_gather": a.dim, "gather": a.dim, "all_to_all": a.concat_dim}.get(a.kind)
    if any(m != n for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if i != free):
        return "shape" if free is None else f"shape (other than along dim {free})"
    if a.kind == "all_to_all" and a.dim != a.concat_dim and a.sizes != b.sizes:
        return "split_sizes"
    return None


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
