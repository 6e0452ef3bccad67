"""The direct collectives: every member reads what it needs from the others' memory.

Nothing is sent.  A small payload lies in the slots of the group (`vcluster.collectives.group`), and each member reads
them all; a large one is read where it lies (`vcluster.collectives.zero_copy`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import Reduction
from vcluster.collectives.call import Call, agree
from vcluster.collectives.group import INLINE_BYTES, Group
from vcluster.collectives.results import copy_of, new_result, prepare
from vcluster.collectives.zero_copy import Large, Shown, is_shown, show

if TYPE_CHECKING:
    from vcluster.messages import Endpoint, Wait


Posted = tuple[int, Shown]
"""The number of an operation that everybody has posted, and what this member showed."""


def run_direct(
    endpoint: Endpoint, group: Group, call: Call, x: NDArray[Any] | None, out: NDArray[Any] | None,
    reduction: Reduction | None, posted: Posted | None = None,
) -> Generator[Wait, None, tuple[Any, list[Call]]]:
    """The result and everybody's call.  ``x`` is contiguous; ``out`` has the right shape and dtype.

    ``posted`` if everybody has posted it already.
    """
    payload = x if call.gives else None
    large = payload is not None and payload.nbytes > INLINE_BYTES
    if posted is None:
        shown = show(endpoint, call, payload, out) if payload is not None and large else Shown()
        small = None if large else payload
        posted = (yield from group.post(call, small, shown.place, shown.target_place)), shown
    sequence, shown = posted

    told = group.disagreement(sequence, call)
    calls = [call] * group.size if told is None else agree(call, told)
    in_others_memory = any(seen.nbytes > INLINE_BYTES for seen in calls)
    result: Any
    try:
        if is_shown(calls):
            result = Large(endpoint, group, calls, reduction).conclude(sequence, shown.target, out)
        else:
            views = group.views_at(sequence, calls)
            if call.of_kind.lists:
                result = [new_result(endpoint, call.kind, copy_of(view)) for view in views if view is not None]
            else:
                made = prepare(calls, group.position, views, reduction)
                result = None if made is None else new_result(endpoint, call.kind, made, out)
    finally:  # also after a wrong out=, or an op that raises: the others must not wait for this member
        if in_others_memory:
            yield from group.finish(sequence, together=large)
    if out is not None and result is not out and result is not None:
        np.copyto(out, result)
        result = out
    return result, calls
