"""One collective as it is counted: what each member says of it, what it would receive, and zeros of the right shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.collectives import MemberCall, result_of

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CountedCall(MemberCall):
    """A collective as one member calls it, whose array is counted and not looked at."""

    value: Any = None
    """What takes the place of the array at the other members: a tree of arrays, an object; None: the array itself."""



def result(everybody: Sequence[CountedCall], position: int, x: Any) -> Any:
    """What the member at ``position`` gets: zeros."""
    mine, size = everybody[position], len(everybody)
    kind = mine.of_kind
    if kind.lists:
        return [np.zeros(call.shape or (), call.dtype) for call in everybody]
    if kind.copies:
        sources = kind.sources_of(position, size, mine.root, mine.pairs)
        given = everybody[sources[0]] if sources else None
        return zeros(x if given is None else given.value if given.value is not None else blank(given))
    made = result_of(everybody, position, [blank(call) for call in everybody])
    if made is None:
        return None
    found = np.zeros(made.shape, made.dtype)
    return found if isinstance(x, np.ndarray) or found.ndim else found[()]


def blank(call: MemberCall) -> Array | None:
    """Zeros like the array that a member gives, which take no memory; None if it gives none."""
    return None if call.dtype is None else np.broadcast_to(np.zeros((), call.dtype), call.shape or ())


def zeros(value: Any) -> Any:
    """Zeros in the shape of a value, a tree of arrays or one."""
    if isinstance(value, dict):
        return {key: zeros(child) for key, child in value.items()}
    if isinstance(value, tuple | list):
        children = [zeros(child) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    array = np.zeros(np.shape(value), np.asarray(value).dtype)
    return array if isinstance(value, np.ndarray) else array[()]
