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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelism.algorithms import Algorithm, kind_of
from parallelism.collectives import (
    ARRAY,
    NUMERIC_KINDS,
    MemberCall,
    Reduction,
    call_fields,
    check_agreement,
    is_tree,
    text_of,
)
from parallelism.collectives.arguments import integer
from parallelism.operation import ReduceOp
from vcluster.messages import as_array
from vcluster.messages.forms import pack

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
CUTTING = ("reduce_scatter", "scatter", "all_to_all")
JOINING = ("all_gather", "gather", "all_to_all")
FROM_ROOT = ("broadcast", "scatter")
"""Only the array of the root counts."""
TO_ROOT = ("reduce", "gather")
"""Only the root gets a result."""
ROOTED = (*FROM_ROOT, *TO_ROOT)
SENT_AS_GIVEN = ("broadcast", "permute")
"""The result has the form in which its sender gave the value: an array, a scalar, or a tree of them."""
OUTSIDE_ALLOWED = ("broadcast", "permute")
"""With ``groups=``, a rank may be in none of them: it gets zeros."""


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


def givers(call: Call, position: int) -> Sequence[int]:
    """The positions of the members whose arrays make the result of the one at ``position``, in order."""
    if call.pairs is not None:
        return [source for source, target in call.pairs if target == position]
    return [call.root] if call.kind in FROM_ROOT else range(call.size)


def agree(call: Call, descriptions: Sequence[bytes]) -> list[Call]:
    """Everybody's call, in group order; `CollectiveMismatchError` if what must agree does not."""
    calls = [call.as_seen_by(position, description) for position, description in enumerate(descriptions)]
    check_agreement(call.ranks, call.kind, calls)
    return calls


def described(
    kind: str, x: Any, op: ReduceOp | None, dim: int, concat_dim: int, sizes: Sequence[int] | None,
    factors: Sequence[int], base: dict[str, Any],
) -> tuple[Call, NDArray[Any] | None, Reduction | None]:
    """The checked call, its value as a contiguous array (None where it does not count), and how to reduce it.

    ``base`` are the fields of the call that say nothing of the value.
    """
    dim, concat_dim = integer("dim", dim), integer("dim", concat_dim)
    fields, array, reducing = call_fields(
        kind, x, op, dim, concat_dim, sizes, factors, base["root"], base["position"], len(base["ranks"]), _to_array)
    if array is not None:
        if reducing is not None:
            array = array.astype(reducing.dtype, copy=False)
        fields |= {"dtype": array.dtype, "shape": array.shape}
    call = Call(kind, **fields, **base)
    if call.algorithm is not None or call.pairs is not None:
        call.steps()  # refuses an algorithm, or pairs, that do not apply
    return call, array, reducing


def _to_array(kind: str, x: Any) -> tuple[NDArray[Any], bytes]:
    """A value as a contiguous array, and its form."""
    if type(x) is np.ndarray and x.flags.c_contiguous and x.dtype.kind in NUMERIC_KINDS:
        return x, ARRAY
    return pack(x) if kind_of(kind).copies and is_tree(x) else as_array(kind, x)
