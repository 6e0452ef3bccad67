"""A collective that a group has run before, run again by the short way.

The first time, a call is checked, described and compared (`vcluster.collectives.general`).  After that everything about
it is known: what token each member will show, where a small payload will lie, what the result looks like, what it
moves.  What is left is to write one's payload (or where it is) and token, to wait for the others' tokens and to combine
what they gave.

If a member shows another token than the last time, it has called something else, or something of another shape: then
the operation goes on by the long way, from where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import Reduction
from vcluster.collectives.call import Call
from vcluster.collectives.group import DESCRIPTION_BYTES, INLINE_BYTES, Group
from vcluster.collectives.last_arriver import Together
from vcluster.collectives.results import Result, new_array, prepare
from vcluster.collectives.zero_copy import Large, Shown, is_shown, show
from vcluster.memory import STORES_IN_ORDER, Lane
from vcluster.messages import ARRAY

if TYPE_CHECKING:
    from vcluster.messages import Endpoint


class Unlike(Exception):
    """Somebody calls something else than the last time."""

    def __init__(self, sequence: int, shown: Shown) -> None:
        self.posted = sequence, shown
        """The number of the operation, which everybody has posted, and what this member showed."""


class Repeated:
    """One call of one member, prepared."""

    __slots__ = (
        "_buffers", "_call", "_endpoint", "_group", "_lane", "_large", "_members", "_mine", "_others_done", "_results",
        "_signature", "_together", "_what",
    )

    def __init__(
        self, endpoint: Endpoint, group: Group, calls: Sequence[Call], reduction: Reduction | None, lane: Lane,
        what: object,
    ) -> None:
        """``calls`` is what the members called the last time, in group order; ``what`` says so to people."""
        self._what = what
        self._endpoint = endpoint
        self._group = group
        self._lane = lane
        self._call = calls[group.position]
        self._signature = self._call.signature
        self._buffers = group.own.buffers
        self._large = Large(endpoint, group, calls, reduction) if is_shown(calls) else None
        self._mine: list[NDArray[Any] | None] = []
        self._results: list[Result | None] = []
        self._members: list[list[tuple[memoryview, int]]] = []
        """The token of each other member, and what it is less the number of the operation."""
        others = [*range(group.position + 1, group.size), *range(group.position)]  # all begin to look elsewhere
        self._others_done = [group.slots[place].done for place in others]
        for parity in (0, 1):
            if self._large is None:
                views = group.views(parity, calls)
                self._mine.append(views[group.position])
                self._results.append(prepare(calls, group.position, views, reduction))
            else:
                self._mine.append(None)
                self._results.append(self._large.made)
            self._members.append(
                [(group.slots[place].tokens[parity], calls[place].signature) for place in others]
            )
        self._together: Together | None = None
        if self._large is None and Together.serves(calls):
            self._together = Together(endpoint, group, calls, reduction, self._members, self._results)

    @staticmethod
    def serves(calls: Sequence[Call]) -> bool:
        """Whether a call goes the short way when it is repeated."""
        sizes = [call.nbytes for call in calls if call.gives]
        return (
            not calls[0].of_kind.lists and calls[0].of_kind.function is None
            and all(call.form == ARRAY and len(call.description) <= DESCRIPTION_BYTES for call in calls)
            and (max(sizes, default=0) <= INLINE_BYTES or (min(sizes) > INLINE_BYTES and is_shown(calls)))
        )

    def ready(self, x: Any, out: Any) -> Shown | None:
        """What the others are shown of a large ``x``; None if the call must go the long way."""
        if out is not None:
            made = self._results[0]
            if not (
                made is not None and type(out) is np.ndarray and out.dtype == made.dtype and out.shape == made.shape
                and out.flags.c_contiguous and out.flags.writeable
                and (out is x or x is None or not np.may_share_memory(out, x))
            ):
                return None
        if self._large is None or not self._call.gives:
            return _IN_THE_SLOT
        if not x.flags.c_contiguous or x.dtype != self._call.dtype:
            return None
        return show(self._endpoint, self._call, x, out)

    def run(self, x: Any, out: NDArray[Any] | None, shown: Shown) -> NDArray[Any] | None:
        """The result of the call with ``x``.  Raises `Unlike` if somebody calls something else."""
        group = self._group
        sequence = group.sequence
        group.sequence = sequence + 1
        parity = sequence & 1
        buffer = self._buffers[parity]
        if shown is not _IN_THE_SLOT:
            buffer.write(self._call, shown.place, shown.target_place, 0)
        else:
            mine = self._mine[parity]
            if mine is not None:
                mine[...] = x
            if buffer.shows is not self:  # the description is for those who call something else
                buffer.write(self._call, buffer.inline, 0, 0)
                buffer.shows = self
        together = self._together
        if together is not None:
            if together.come(self._signature + sequence, sequence) or not self._is_released(together, sequence, shown):
                together.release(sequence)
            return together.result(sequence, self._results[parity], out)
        group.announce(self._signature + sequence, sequence)
        for token, signature in self._members[parity]:
            if token[0] != signature + sequence:
                self._wait(token, signature + sequence, sequence, shown)
        if not STORES_IN_ORDER:
            self._endpoint.signals.fence()
        if self._large is not None:
            try:
                result = self._large.conclude(sequence, shown.target, out)
            finally:
                self._finish(sequence, together=shown is not _IN_THE_SLOT)
            if out is not None and result is not out and result is not None:
                np.copyto(out, result)
                result = out
            return cast("NDArray[Any] | None", result)
        made = self._results[parity]
        if made is None:
            return None
        if out is None:
            out = new_array(self._endpoint, made.shape, made.dtype)
        made.fill(out)
        return out

    def _wait(self, token: memoryview, expected: int, sequence: int, shown: Shown) -> None:
        for _ in self._endpoint.signals.turns():
            if token[0] == expected:
                return
        self._endpoint.tasks.run(self._lane, self._group.all_come(sequence), self._what)
        if token[0] != expected:
            raise Unlike(sequence, shown)

    def _is_released(self, together: Together, sequence: int, shown: Shown) -> bool:
        """Wait until everybody has come: whether the last one has said so, or this member has to."""
        found = together.wait(sequence)
        if found is None:
            self._endpoint.signals.wake(self._group.others)  # perhaps the last one is this, and another calls otherwise
            self._endpoint.tasks.run(self._lane, self._group.all_come(sequence), self._what)
            if any(token[0] != signature + sequence for token, signature in self._members[sequence & 1]):
                raise Unlike(sequence, shown)
            found = together.is_released(sequence)
        return found

    def _finish(self, sequence: int, *, together: bool) -> None:
        """This member has read all it needs; with ``together``, return when everybody has."""
        self._group.own.done[0] = sequence + 1
        self._endpoint.signals.wake(self._group.others)
        if together:
            for done in self._others_done:
                if done[0] <= sequence:
                    self._wait_until_done(done, sequence)

    def _wait_until_done(self, done: memoryview, sequence: int) -> None:
        for _ in self._endpoint.signals.turns():
            if done[0] > sequence:
                return
        self._endpoint.tasks.run(self._lane, self._group.finish(sequence, together=True), self._what)


_IN_THE_SLOT = Shown()
