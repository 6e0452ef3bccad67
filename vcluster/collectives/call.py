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

from parallelism.collectives import Algorithm, MemberCall, Traffic, check_agreement, text_of
from parallelism.collectives.call import traffic

__all__ = ["Call", "Traffic", "agree", "traffic"]


@dataclass(frozen=True, slots=True)
class Call(MemberCall):
    """A collective as one member calls it, with all that the other members compare."""

    ranks: tuple[int, ...] = field(kw_only=True)
    position: int = field(kw_only=True)
    axes: tuple[str, ...] | None = None
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
        return text_of(self)


def agree(call: Call, descriptions: Sequence[bytes]) -> list[Call]:
    """Everybody's call, in group order; `CollectiveMismatchError` if what must agree does not."""
    calls = [call.as_seen_by(position, description) for position, description in enumerate(descriptions)]
    check_agreement(call.ranks, call.kind, calls)
    return calls
