"""One call of a collective, as a checked value: what it does, who takes part, and what the members must agree on.

A `Call` is made from the arguments before anything is sent; wrong arguments are ``ValueError`` or ``TypeError`` here.
Its description is what the members compare; what differs among those who need not agree (the extents that an all_gather
joins, say) is read from the others' descriptions.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from parallelism.collectives import Algorithm, MemberCall, Traffic
from parallelism.collectives.call import traffic
from vcluster.code import CollectiveMismatchError
from vcluster.messages import ARRAY, SCALAR

__all__ = ["Call", "Traffic", "agree", "traffic"]


@dataclass(frozen=True, slots=True)
class Call(MemberCall):
    """A collective as one member calls it, with all that the other members compare."""

    ranks: tuple[int, ...] = field(kw_only=True)
    position: int = field(kw_only=True)
    axes: tuple[str, ...] | None = None
    op: str | None = None
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

    def steps(self) -> Algorithm:
        """The algorithm as data; ``ValueError``, with the names that apply, if there is none of that name."""
        return self.over(self.size)

    def as_seen_by(self, position: int, description: bytes) -> Call:
        """The call of another member of the group, from its description."""
        kind, name, dtype, shape, dim, concat_dim, sizes, root, op, pairs, form = marshal.loads(description)
        return replace(
            self, kind=kind, position=position, algorithm=name, dtype=None if dtype is None else np.dtype(dtype),
            shape=shape, dim=dim, concat_dim=concat_dim, sizes=sizes, root=root, op=op, pairs=pairs, form=form,
        )

    def __str__(self) -> str:
        x = "nothing" if self.dtype is None else f"{self.dtype}{list(self.shape or ())}"
        kind = self.of_kind
        options = [x] if kind.moves else []
        if kind.joins != kind.cuts:
            options.append(f"dim={self.dim}")
        elif kind.cuts:
            options += [f"split_dim={self.dim}", f"concat_dim={self.concat_dim}"]
        if kind.rooted:
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
    kind = a.of_kind
    if kind.elementwise and a.form != b.form and not {a.form, b.form} <= {ARRAY, SCALAR}:
        return "the structure of what they reduce"
    assert a.shape is not None
    assert b.shape is not None
    if not kind.alike:
        return None
    if len(a.shape) != len(b.shape):
        return "the number of dims"
    free = None if not kind.joins else a.concat_dim if kind.cuts else a.dim
    if any(m != n for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if i != free):
        return "shape" if free is None else f"shape (other than along dim {free})"
    if kind.blocks_of_all and a.dim != a.concat_dim and a.sizes != b.sizes:
        return "split_sizes"
    return None
