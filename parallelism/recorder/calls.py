"""One collective under the recorder: the calls of its members, and results that are zeros of the right shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.collectives import MemberCall, result_of
from parallelism.operation.trees import leaves, rebuild


@dataclass(frozen=True, slots=True)
class CountedCall(MemberCall):
    """A collective as one member calls it; its array is counted and never read."""

    value: Any = None
    """A tree of arrays or an object, which other members get in place of the array; None: the array itself."""


def result(calls: Sequence[CountedCall], position: int, x: Any, blanks: Sequence[Array | None]) -> Any:
    """The result of the member at ``position``: zeros.  ``blanks`` are the `blank` of the calls."""
    mine, size = calls[position], len(calls)
    kind = mine.of_kind
    if kind.lists:
        return [np.zeros(call.shape or (), call.dtype) for call in calls]
    if kind.copies:
        sources = kind.sources_of(position, size, mine.root, mine.pairs)
        if not sources:
            return zeros(x)
        given = calls[sources[0]].value
        return zeros(blanks[sources[0]] if given is None else given)
    expected = result_of(calls, position, blanks)
    if expected is None:
        return None
    array = np.zeros(expected.shape, expected.dtype)
    return array if isinstance(x, np.ndarray) or array.ndim else array[()]


def blank(call: MemberCall) -> Array | None:
    """Zeros like the array that a member gives, which take no memory; None if it gives none."""
    return None if call.dtype is None else np.broadcast_to(np.zeros((), call.dtype), call.shape or ())


def zeros(value: Any) -> Any:
    """Zeros in the shape of a value: an array, a scalar or a tree of these."""
    return rebuild(value, list(map(_zeros, leaves(value))))


def _zeros(leaf: Any) -> Any:
    array = np.zeros(np.shape(leaf), np.asarray(leaf).dtype)
    return array if isinstance(leaf, np.ndarray) else array[()]
