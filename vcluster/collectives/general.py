"""The general path of a collective in shared memory, and how the result of a member is computed.

Every member posts a description of its call and shows its array: a small one in its slot
(`vcluster.collectives.group`), a large one where it lies (`vcluster.collectives.zero_copy`). When all have arrived,
each member compares the descriptions and computes its own result from the arrays. This path handles any direct call;
`vcluster.collectives.prepared` is the fast path for a call that was run before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol

import numpy as np

from parallelism.arrays import Array
from parallelism.collectives import SCALAR, Reduction, check_shape, copy_of, result_of
from vcluster.collectives.group import Call, Calls, Group
from vcluster.collectives.thresholds import INLINE_BYTES, SHARED_RESULT_BYTES
from vcluster.collectives.zero_copy import NOTHING, Shown, ZeroCopy, is_contiguous, show
from vcluster.messages import Endpoint, Steps, Wait

OnMessage = Callable[[str, int, int], None]
"""Called for every message with "send" or "recv", the peer's rank, and the bytes."""


def write(endpoint: Endpoint, kind: str, result: Any, out: Array | None) -> Any:
    """A `Result` written: into its target, or into ``out`` if that is contiguous, or into a new array.

    Of a list of results, the list of new arrays; of None, None.  ``ValueError`` if ``out`` has another shape or dtype.
    """
    if result is None:
        return None
    if type(result) is list:
        return [write(endpoint, kind, each, None) for each in result]
    shape, dtype, fill, array = result
    if out is not None:
        if out.shape != shape or out.dtype != dtype:
            check_shape(kind, out, shape, dtype)
        if array is None and out.flags.c_contiguous:
            array = out
    if array is None:
        array = new_array(endpoint, shape, dtype)
    fill(array)
    return array


def new_array(endpoint: Endpoint, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array for a result."""
    return maker_of(endpoint, shape, dtype)()


def maker_of(endpoint: Endpoint, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Callable[[], Array]:
    """What makes uninitialised arrays for results of one shape, as `new_array` does."""
    is_large = dtype.itemsize * prod(shape) >= SHARED_RESULT_BYTES
    return partial(endpoint.heap.empty if is_large else np.empty, shape, dtype)


def deliver(array: Any, out: Array | None) -> Any:
    """What `write` returned, in ``out`` if it is given; once every member has written what it writes."""
    if out is None or array is None or array is out:
        return array
    np.copyto(out, array)
    return out


def own_result(calls: Calls, position: int, views: Sequence[Any], reduction: Reduction | None) -> Any:
    """The `Result` of the member at ``position`` from every member's array: a list for a kind that lists, or None."""
    is_list = calls[position].of_kind.lists
    return [copy_of(view) for view in views] if is_list else result_of(calls, position, views, reduction)


def gets_scalar(calls: Calls, position: int) -> bool:
    """Whether the result of a member, if it is 0-d, is a scalar: its value was, or of a copy the one that it gets."""
    call = calls[position]
    sources = (
        call.of_kind.sources_of(position, call.size, call.root, call.pairs) if call.of_kind.copies else ()
    )
    return (calls[sources[0]] if sources else call).form == SCALAR


def empty_result(calls: Calls, position: int, reduction: Reduction | None) -> Any:
    """The `Result` of a member by shape and dtype alone; its ``fill`` must not be used."""
    return own_result(calls, position, list(map(_without_data, calls)), reduction)


def _without_data(call: Call) -> Array | None:
    """An array in the shape and dtype of a call, of one element. None if the call gives none."""
    if call.dtype is None or call.shape is None:
        return None
    return np.broadcast_to(np.empty((), call.dtype), call.shape)


@dataclass(slots=True, eq=False)
class Way:
    """One run of a call by this member, in the general way or by messages."""

    endpoint: Endpoint
    group: Group
    call: Call
    reduction: Reduction | None
    on_message: OnMessage

    def go_on(self, posted: Posted, x: Array | None, out: Array | None) -> None:
        """Go on with what this member has posted for a call that another member did not make."""
        raise NotImplementedError


class Posted(Protocol):
    """What was posted: the number of the operation, and this member's memory that is shown."""

    sequence: int
    shown: Shown


@dataclass(slots=True, eq=False)
class General(Way):
    """One run of a call in shared memory."""

    payload: Array | None = None
    """A small array, for the slot."""
    shown: Shown = NOTHING
    """The place of a large one."""
    sequence: int = -1
    """The number of the operation, once it is posted."""
    calls: Calls = ()

    def prepare(self, x: Array | None, out: Array | None) -> None:
        """Show ``x``; ``out`` has the right shape and dtype."""
        if x is not None and x.nbytes > INLINE_BYTES:
            self.shown = show(self.endpoint, self.call, x, out)
        else:
            self.payload = x

    def go_on(self, posted: Posted, x: Array | None, out: Array | None) -> None:
        """Go on with what this member has posted for a call that another member did not make."""
        self.sequence, self.shown = posted.sequence, posted.shown

    def run(self) -> Generator[Wait, None, Calls]:
        """Meet the other members.  Every member's call, in group order."""
        if self.sequence < 0:
            shown = self.shown
            self.sequence = yield from self.group.post(
                self.call, self.payload, shown.place, shown.target_place
            )
        self.calls = self.group.calls(self.sequence, self.call)
        return self.calls

    def finish(self, out: Array | None) -> Steps:
        """The result, in ``out`` if it is given.  Returns when no member reads or writes this one's memory any more."""
        large = next((call for call in self.calls if call.nbytes > INLINE_BYTES), None)
        try:
            array = write(self.endpoint, self.call.kind, self._result(large), out)
        finally:  # also after a wrong out=, or an op that raises: the others must not wait for this member
            if large is not None:
                yield from self.group.finish(self.sequence, together=self.shown.place != 0)
        return deliver(array, out)

    def _result(self, large: Call | None) -> Any:
        group, calls = self.group, self.calls
        if large is None or not is_contiguous(large):
            return own_result(calls, group.position, group.views(self.sequence, calls), self.reduction)
        memory = ZeroCopy(self.endpoint, group, calls, self.reduction)
        empty = empty_result(calls, group.position, self.reduction)
        if isinstance(empty, list):
            copy = memory.copy_payload
            return [
                each._replace(fill=partial(copy, place, self.sequence)) for place, each in enumerate(empty)
            ]
        if empty is None:
            return None
        return empty._replace(
            fill=partial(memory.fill, self.sequence), target=memory.target(self.sequence, self.shown)
        )
