"""A small collective that a group has run before, run again by the short way.

The first time, a call is checked, described and compared (`vcluster.direct`).  After that everything about it is
known: what token each member will show, where its payload will lie, what the result looks like, what it moves.  What is
left is to write one's payload and token, to wait for the others' tokens and to combine what lies in their slots.

If a member shows another token than the last time, it has called something else, or something of another shape: then
the operation goes on by the long way, from where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallelism.reductions import Reduction
from vcluster.agreement import DESCRIPTION_BYTES, INLINE_BYTES, Group
from vcluster.calls import Call
from vcluster.direct import Result, new_array, prepare
from vcluster.status import Lane
from vcluster.values import ARRAY
from vcluster.waiting import STORES_IN_ORDER, give_way

if TYPE_CHECKING:
    from vcluster.endpoint import Endpoint


class Unlike(Exception):
    """Somebody calls something else than the last time."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        """The number of the operation, which everybody has posted."""


class Repeated:
    """One call of one member, prepared."""

    __slots__ = ("_buffers", "_call", "_endpoint", "_group", "_lane", "_members", "_mine", "_results", "_signature")

    def __init__(
        self, endpoint: Endpoint, group: Group, calls: Sequence[Call], reduction: Reduction | None, lane: Lane
    ) -> None:
        """``calls`` is what the members called the last time, in group order."""
        self._endpoint = endpoint
        self._group = group
        self._lane = lane
        self._call = calls[group.position]
        self._signature = self._call.signature
        self._buffers = group.own.buffers
        self._mine: list[NDArray[Any] | None] = []
        self._results: list[Result | None] = []
        self._members: list[list[tuple[memoryview, int]]] = []
        """The token of each other member, and what it is less the number of the operation."""
        for parity in (0, 1):
            views = group.views(parity, calls)
            self._mine.append(views[group.position])
            self._results.append(prepare(calls, group.position, views, reduction))
            self._members.append([
                (slot.tokens[parity], call.signature)
                for place, (slot, call) in enumerate(zip(group.slots, calls, strict=True)) if place != group.position
            ])

    @staticmethod
    def serves(calls: Sequence[Call]) -> bool:
        """Whether a call goes the short way when it is repeated."""
        return len(calls) > 1 and calls[0].kind != "all_scatter" and all(
            call.form == ARRAY and call.nbytes <= INLINE_BYTES and len(call.description) <= DESCRIPTION_BYTES
            for call in calls
        )

    def takes(self, x: Any, out: Any) -> bool:
        """Whether the result can be written to ``out`` as it is."""
        made = self._results[0]
        return (
            made is not None and type(out) is np.ndarray and out.dtype == made.dtype and out.shape == made.shape
            and out.flags.c_contiguous and out.flags.writeable
            and (out is x or x is None or not np.may_share_memory(out, x))
        )

    def run(self, x: Any, out: NDArray[Any] | None) -> NDArray[Any] | None:
        """The result of the call with ``x``.  Raises `Unlike` if somebody calls something else."""
        group = self._group
        sequence = group.sequence
        group.sequence = sequence + 1
        parity = sequence & 1
        mine = self._mine[parity]
        if mine is not None:
            mine[...] = x
        buffer = self._buffers[parity]
        if buffer.shows is not self:  # the description is for those who call something else
            buffer.write(self._call, buffer.inline, 0, 0)
            buffer.shows = self
        group.announce(self._signature + sequence, sequence)
        for token, signature in self._members[parity]:
            if token[0] != signature + sequence:
                self._wait(token, signature + sequence, sequence)
        if not STORES_IN_ORDER:
            self._endpoint.signals.fence()
        made = self._results[parity]
        if made is None:
            return None
        if out is None:
            out = new_array(self._endpoint, made.shape, made.dtype)
        made.fill(out)
        return out

    def _wait(self, token: memoryview, expected: int, sequence: int) -> None:
        signals = self._endpoint.signals
        for _ in range(signals.spins):
            give_way()
            if token[0] == expected:
                return
            if signals.cancelled:
                break
        self._endpoint.tasks.run(self._lane, self._group.all_come(sequence), self._call)
        if token[0] != expected:
            raise Unlike(sequence)
