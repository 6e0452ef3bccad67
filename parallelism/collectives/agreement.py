"""Checks that the members of a group call the same collective, and raises an error that shows the difference."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from parallelism.algorithms import KINDS
from parallelism.collectives.call import ARRAY, SCALAR, MemberCall
from parallelism.display.quantities import cut
from parallelism.operation import CollectiveMismatchError, ranks_in_words
from parallelism.operation.errors import keys_by_value

MOST_OF_A_TREE = 300
"""Characters of a tree of arrays in an error, about."""


def check_agreement(ranks: Sequence[int], kind: str, calls: Sequence[MemberCall]) -> None:
    """`CollectiveMismatchError` if the calls of a group's members differ in what must agree.

    ``kind`` is the kind of the calling member.
    """
    first = next((call for call in calls if call.gives), calls[0])
    for other in calls:
        what = difference(first, other)
        if what is not None:
            raise mismatch(kind, {rank: text_of(call) for rank, call in zip(ranks, calls, strict=True)}, what)


def text_of(call: MemberCall) -> str:
    """A call as errors show it: ``all_gather(float64[4, 4], dim=1)``."""
    x = "nothing" if call.dtype is None else f"{call.dtype}{list(call.shape or ())}"
    if call.op is not None and call.form not in (
        ARRAY,
        SCALAR,
    ):  # of a tree the call has the leaves as one array
        x = cut(call.form.decode(), MOST_OF_A_TREE)
    kind = KINDS.records.get(call.kind)
    if kind is None:  # an agreement on shapes
        return f"{call.kind}({x})"
    arguments = (
        (kind.moves, x),
        (kind.joins != kind.cuts, f"dim={call.dim}"),
        (kind.blocks_of_all, f"split_dim={call.dim}, concat_dim={call.concat_dim}"),
        (kind.rooted, f"root={call.root}"),
        (call.op is not None, f"op={call.op!r}"),
        (call.pairs is not None, f"pairs={list(call.pairs or ())}"),
        (call.algorithm is not None, f"algorithm={call.algorithm!r}"),
    )
    return f"{call.kind}({', '.join(text for is_given, text in arguments if is_given)})"


def check_declared(
    rank: int, peer: int, value: Any, shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None
) -> None:
    """`CollectiveMismatchError` if a message is not what its irecv declared; None declares nothing."""
    array = np.asarray(value)
    wrong = []
    if shape is not None and list(shape) != list(array.shape):
        wrong.append(f"shape {list(shape)} was declared, {list(array.shape)} came")
    if dtype is not None and dtype != array.dtype:
        wrong.append(f"dtype {dtype} was declared, {array.dtype} came")
    if wrong:
        raise CollectiveMismatchError(
            f"irecv of {ranks_in_words([rank])} from {ranks_in_words([peer])}: {'; '.join(wrong)}",
            ranks=(rank, peer),
            operation="irecv",
        )


def mismatch(kind: str, texts: Mapping[int, str], what: str) -> CollectiveMismatchError:
    """The error of a group whose members differ in ``what``; ``texts`` is what each called, in group order."""
    by_frequency = sorted(keys_by_value(texts).values(), key=len, reverse=True)
    is_tied = len(by_frequency) > 1 and len(by_frequency[0]) == len(by_frequency[1])
    odd = chain(*(by_frequency if is_tied else by_frequency[1:]))
    return CollectiveMismatchError(
        f"the members of group {list(texts)} differ in {what}", ranks=sorted(odd), operation=kind, calls=texts
    )


def difference(a: MemberCall, b: MemberCall) -> str | None:
    """What differs between two calls that must agree in it; None if nothing does."""
    for name in ("kind", "root", "op", "pairs", "algorithm"):
        if getattr(a, name) != getattr(b, name):
            return "what they call" if name == "kind" else name
    if a.dtype is None or b.dtype is None:
        return None
    for name in ("dim", "concat_dim", "dtype"):
        if getattr(a, name) != getattr(b, name):
            return name
    kind = a.of_kind
    if kind.elementwise and a.form != b.form and not {a.form, b.form} <= {ARRAY, SCALAR}:
        return "the structure of what they reduce"
    if not kind.alike:
        return None
    assert a.shape is not None and b.shape is not None
    if len(a.shape) != len(b.shape):
        return "the number of dims"
    free = _free_dim(a)
    if any(m != n for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if i != free):
        return "shape" if free is None else f"shape (other than along dim {free})"
    return "split_sizes" if kind.blocks_of_all and a.dim != a.concat_dim and a.sizes != b.sizes else None


def _free_dim(call: MemberCall) -> int | None:
    """The dim along which the arrays of members may have different extents; None if all dims must be equal."""
    if not call.of_kind.joins:
        return None
    return call.concat_dim if call.of_kind.cuts else call.dim
