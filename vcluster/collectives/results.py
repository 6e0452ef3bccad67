"""The result of a collective for one member: how it looks, and how it is made of what everybody gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import Reduction, Result, check_shape, copy_of, result_of
from parallelism.collectives.results import reduced
from vcluster.collectives.call import Call

if TYPE_CHECKING:
    from vcluster.messages import Endpoint

__all__ = ["Result", "copy_of", "look_of", "new_array", "new_result", "prepare", "reduced"]

SHARED_RESULT_BYTES = 1 << 14
"""A new result from this size on lies in shared memory: its pages are used again, and peers can read it in place."""

def new_result(endpoint: Endpoint, kind: str, made: Result, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """The result in ``out``, or in a new array.  ``ValueError`` if ``out`` looks otherwise."""
    if out is not None:
        check_shape(kind, out, made.shape, made.dtype)
    if out is None or not out.flags.c_contiguous:
        out = new_array(endpoint, made.shape, made.dtype)
    made.fill(out)
    return out


def new_array(endpoint: Endpoint, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An uninitialised array for a result."""
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    return endpoint.heap.empty(shape, dtype) if nbytes >= SHARED_RESULT_BYTES else np.empty(shape, dtype)


def prepare(calls: Sequence[Call], position: int, views: Sequence[Any], reduction: Reduction | None) -> Result | None:
    """The result of the member at ``position``, from everybody's payload; None for a member that gets none."""
    return result_of(calls, position, views, reduction)


def look_of(call: Call) -> NDArray[Any] | None:
    """An array that looks like what a member gives, and takes no memory; None if it gives none."""
    if call.dtype is None or call.shape is None:
        return None
    return np.broadcast_to(np.empty((), call.dtype), call.shape)
