"""One call of a collective, as a checked value: what it does, who takes part, and what the members must agree on.

A `Call` is made from the arguments before anything is sent; wrong arguments are ``ValueError`` or ``TypeError`` here.
Its description is what the members compare; what differs among those who need not agree (the extents that an all_gather
joins, say) is read from the others' descriptions.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import Algorithm, Reduction, all_to_all_nbytes, chunk_nbytes
from parallelism.collectives.algorithms import algorithm
from parallelism.collectives.reductions import reduction
from parallelism.mesh import Mesh, split_sizes
from parallelism.operation import Groups, ReduceOp
from vcluster.code import CollectiveMismatchError
from vcluster.messages import ARRAY, NUMERIC_KINDS, SCALAR, as_array, is_tree
from vcluster.messages.forms import pack

Shape = tuple[int, ...]

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


def givers(call: Call, position: int) -> Sequence[int]:
    """The positions of the members whose arrays make the result of the one at ``position``, in order."""
    if call.pairs is not None:
        return [source for source, target in call.pairs if target == position]
    return [call.root] if call.kind in FROM_ROOT else range(call.size)


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


def total(traffics: Iterable[Traffic]) -> Traffic:
    """The traffic of calls that count as one."""
    sent = received = messages = 0
    by_source: dict[int, int] = {}
    for each in traffics:
        sent, received, messages = sent + each.bytes_sent, received + each.bytes_received, messages + each.messages
        for rank, nbytes in each.sources:
            by_source[rank] = by_source.get(rank, 0) + nbytes
    return Traffic(sent, received, messages, tuple(sorted(by_source.items())))


@lru_cache(maxsize=1024)
def traffic(calls: tuple[Call, ...], position: int) -> Traffic:
    """The traffic of the member at ``position``, given the members' calls, by the steps of its algorithm."""
    ranks, steps, chunks = calls[position].ranks, calls[position].steps(), _chunk_nbytes(calls)
    sources, targets = steps.sources(position, chunks), steps.targets(position, chunks)
    return Traffic(
        sum(nbytes for _, nbytes in targets),
        sum(nbytes for _, nbytes in sources),
        sum(map(len, steps.sends(position))),
        tuple((ranks[source], nbytes) for source, nbytes in sources if nbytes),
    )


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


# -- from the arguments to a call ------------------------------------------------------------------------------------


def group_among(groups: Groups, kind: str, rank: int, mesh: Mesh) -> tuple[int, ...] | None:
    """The group of a rank among the checked ``groups``; None if it is in none, where the kind allows that."""
    seen: set[int] = set()
    mine: tuple[int, ...] | None = None
    for group in groups:
        members = tuple(int(member) for member in group)
        for member in members:
            if not 0 <= member < mesh.size:
                raise ValueError(f"groups of {mesh!r} hold ranks 0 to {mesh.size - 1}, got {member}")
            if member in seen:
                raise ValueError(f"rank {member} is twice in groups={[list(g) for g in groups]}")
            seen.add(member)
        if rank in members:
            mine = members
    if mine is None and kind not in OUTSIDE_ALLOWED:
        raise ValueError(f"rank {rank} is in none of groups={[list(g) for g in groups]}, but calls {kind}")
    return mine


def described(
    kind: str, x: Any, op: ReduceOp | None, dim: int, concat_dim: int, sizes: Sequence[int] | None,
    factors: tuple[int, ...], base: dict[str, Any],
) -> tuple[Call, NDArray[Any] | None, Reduction | None]:
    """The checked call, its value as a contiguous array (None where it does not count), and how to reduce it."""
    dim, concat_dim = _integer("dim", dim), _integer("dim", concat_dim)
    if kind == "barrier" or (kind in FROM_ROOT and base["position"] != base["root"]):
        return _checked(Call(kind, dim=dim, **base)), None, None
    if kind in SENT_AS_GIVEN and is_tree(x):
        array, form = pack(x)
    elif type(x) is np.ndarray and x.flags.c_contiguous and x.dtype.kind in NUMERIC_KINDS:
        array, form = x, ARRAY
    else:
        array, form = as_array(kind, x)
    reducing = None
    if kind in REDUCING:
        reducing = reduction("sum" if op is None else op, array.dtype)
        array = array.astype(reducing.dtype, copy=False)
    fields: dict[str, Any] = {"op": None if reducing is None else reducing.name, "form": form}
    if kind in CUTTING:
        if array.ndim == 0:
            raise ValueError(f"{kind} splits its array along a dim, and a 0-d one has none")
        fields["dim"] = _normal_dim(kind, dim, array.ndim)
        fields["sizes"] = _pieces(kind, array.shape[dim], dim, sizes, factors, len(base["ranks"]))
        if kind == "all_to_all":
            fields["concat_dim"] = _normal_dim(kind, concat_dim, array.ndim)
    elif kind in ("all_gather", "gather"):
        fields["dim"] = _normal_dim(kind, dim, array.ndim) if array.ndim else 0
    return _checked(Call(kind, dtype=array.dtype, shape=array.shape, **fields, **base)), array, reducing


def _checked(call: Call) -> Call:
    if call.algorithm is not None or call.pairs is not None:
        call.steps()  # refuses an algorithm, or pairs, that do not apply
    return call


def _normal_dim(kind: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"{kind} of an array of {ndim} dims has dims {-ndim} to {ndim - 1}, got {dim}")
    return dim % ndim


def _pieces(
    kind: str, extent: int, dim: int, sizes: Sequence[int] | None, factors: tuple[int, ...], size: int
) -> tuple[int, ...]:
    if sizes is None:
        return split_sizes(extent, factors)
    checked = tuple(int(n) for n in sizes)
    if len(checked) != size or min(checked) < 0 or sum(checked) != extent:
        raise ValueError(
            f"{kind} over {size} ranks needs {size} split_sizes that add up to {extent}, the extent of dim {dim}; "
            f"got {list(checked)}"
        )
    return checked


def _integer(name: str, value: Any) -> int:
    """NumPy's integers count as integers."""
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an integer, got {value!r}")
    number: int = value.__index__()
    return number


def checked_root(kind: str, root: Any, size: int) -> int:
    """The position of the root as an integer."""
    position = _integer("root", root)
    if kind in ROOTED and not 0 <= position < size:
        raise ValueError(f"root is a position in the group, 0 to {size - 1}, got {position}")
    return position
