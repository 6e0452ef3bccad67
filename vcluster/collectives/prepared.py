"""The fast path: a collective whose checks and results are cached from an earlier run of the same call.

After the general path (`vcluster.collectives.general`) everything about a call is known: the token that each member
will show, the place of a small payload, the shape of the result. What remains is to write the payload (or its address)
and the token, to wait for the tokens of the others, and to compute the result.

If a member shows another token, it calls another collective, or one with another shape. Then `run` returns False, and
the general path continues the operation, which every member has posted.
"""

from functools import partial
from itertools import product
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.collectives import Reduction, Result
from parallelism.operation import Lane
from vcluster.collectives.general import deliver, empty_result, gets_scalar, maker_of, own_result, write
from vcluster.collectives.group import Calls, Group
from vcluster.collectives.zero_copy import NOTHING, ZeroCopy, show
from vcluster.memory import LINE, STORES_IN_ORDER
from vcluster.messages import Endpoint


class PreparedCall:
    """A call of one member whose checks are done, and whose result is made of arrays that lie in one place."""

    __slots__ = (
        "_call",
        "_endpoint",
        "_fills",
        "_gets_scalar",
        "_group",
        "_lane",
        "_new_result",
        "_results",
        "_text",
        "sequence",
        "shown",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        group: Group,
        calls: Calls,
        reduction: Reduction | None,
        lane: Lane,
        text: object,
    ) -> None:
        """``calls`` are the members' calls the last time, in group order; ``str(text)`` describes the call."""
        self._endpoint = endpoint
        self._group = group
        self._lane = lane
        self._text = text
        self._call = calls[group.position]
        self.sequence = 0
        """The number of the operation that `run` posted last."""
        self.shown = NOTHING
        """What it showed of this member's memory."""
        self._results: list[Result | None] = [None, None]
        """The result of an operation with an even number, and that of one with an odd number."""
        self._prepare_results(calls, reduction)
        result = self._results[0]
        self._gets_scalar = result is not None and result.shape == () and gets_scalar(calls, group.position)
        self._fills = [each if each is None else each.fill for each in self._results]
        self._new_result = None if result is None else maker_of(endpoint, result.shape, result.dtype)

    def _prepare_results(self, calls: Calls, reduction: Reduction | None) -> None:
        raise NotImplementedError

    def prepare(self, x: Array | None, out: Any) -> bool:
        """Show ``x``; False, and nothing done, if the call cannot go this way with these arrays."""
        raise NotImplementedError

    def run(self) -> bool:
        """Meet the other members; False if one of them calls something else than the last time."""
        raise NotImplementedError

    def _takes(self, x: Array | None, out: Any) -> bool:
        """Whether the result can be written into ``out`` as it is."""
        result = self._results[0]
        if (
            result is None
            or type(out) is not np.ndarray
            or out.dtype != result.dtype
            or out.shape != result.shape
        ):
            return False
        flags = out.flags
        return bool(flags.c_contiguous and flags.writeable) and (
            out is x
            or type(x) is not np.ndarray
            or (out.base is None and x.base is None)  # both own their memory
            or not np.may_share_memory(out, x)
        )

    def finish(self, out: Array | None) -> Any:
        """The result, in ``out`` if it is given."""
        fill = self._fills[self.sequence & 1]
        if fill is None or self._new_result is None:
            return None
        if out is not None:
            fill(out)
            return out
        new = self._new_result()
        fill(new)
        return new[()] if self._gets_scalar else new


class Prepared(PreparedCall):
    """A small call of one member: the payloads lie in the slots, and each member makes its own result."""

    __slots__ = (
        "_buffers",
        "_others",
        "_own_tokens",
        "_payloads",
        "_posted",
        "_signals",
        "_signature",
        "_tokens",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        group: Group,
        calls: Calls,
        reduction: Reduction | None,
        lane: Lane,
        text: object,
    ) -> None:
        self._buffers, self._own_tokens, self._posted = group.own.buffers, group.own.tokens, group.own.posted
        self._signals = endpoint.signals
        self._others = [
            *range(group.position + 1, group.size),
            *range(group.position),
        ]  # each begins elsewhere
        self._payloads: list[Array | None] = [None, None]
        super().__init__(endpoint, group, calls, reduction, lane, text)
        self._signature = self._call.signature
        self._tokens: list[list[tuple[Any, int]]] = [[], []]
        """For even and odd operations, the token of each other member, and what it is less the operation's number."""
        for parity, place in product((0, 1), self._others):
            self._tokens[parity].append((group.slots[place].tokens[parity], calls[place].signature))

    def _prepare_results(self, calls: Calls, reduction: Reduction | None) -> None:
        for parity in (0, 1):
            views = self._group.inline_views(parity, calls)
            self._payloads[parity] = views[self._group.position]
            self._results[parity] = own_result(calls, self._group.position, views, reduction)

    def prepare(self, x: Array | None, out: Any) -> bool:
        """Show ``x`` in the slot; False, and nothing done, if the call cannot go this way with these arrays."""
        if out is not None and not self._takes(x, out):
            return False
        parity = self._group.sequence & 1
        payload, buffer = self._payloads[parity], self._buffers[parity]
        if payload is not None:
            payload[...] = x
        if buffer.shows is not self:  # the description is for members that call something else
            buffer.write(self._call, buffer.inline, 0, 0)
            buffer.shows = self
        return True

    def run(self) -> bool:
        """Meet the other members; False if one of them calls something else than the last time."""
        group = self._group
        sequence = self.sequence = group.sequence
        group.sequence = sequence + 1
        parity = sequence & 1
        if not STORES_IN_ORDER:
            self._signals.fence()
        self._own_tokens[parity][0] = self._signature + sequence
        self._posted[0] = sequence + 1
        if group.size <= 2:
            self._signals.wake(group.others)
        else:
            group.wake_if_last(sequence + 1, 0)
        for token, signature in self._tokens[parity]:
            if token[0] != signature + sequence and not self._wait(token, signature + sequence):
                return False
        if not STORES_IN_ORDER:
            self._signals.fence()
        return True

    def _wait(self, token: memoryview, expected: int) -> bool:
        """Poll, then sleep, until every member has posted; whether the token is the expected one."""
        for _ in self._endpoint.signals.turns():
            if token[0] == expected:
                return True
        self._endpoint.tasks.drive(self._lane, self._group.all_come(self.sequence), self._text)
        return token[0] == expected


class PreparedZeroCopy(Prepared):
    """A large call: the arrays are read and written where they lie."""

    __slots__ = ("_memory", "_others_done")

    def _prepare_results(self, calls: Calls, reduction: Reduction | None) -> None:
        self._memory = ZeroCopy(self._endpoint, self._group, calls, reduction)
        self._others_done = [self._group.slots[place].done for place in self._others]
        self._results = [empty_result(calls, self._group.position, reduction)] * 2

    def prepare(self, x: Array | None, out: Any) -> bool:
        """Show where ``x`` lies and the result shall lie; False, and nothing done, if the arrays do not allow it."""
        if out is not None and not self._takes(x, out):
            return False
        if self._call.dtype is not None:
            if x is None:
                return False
            self.shown = show(self._endpoint, self._call, x, out, self._group)
        self._buffers[self._group.sequence & 1].write(
            self._call, self.shown.place, self.shown.target_place, 0
        )
        return True

    def finish(self, out: Array | None) -> Any:
        """The result, in ``out`` if it is given.  Returns when no member reads or writes this one's memory any more."""
        result, sequence, shown, group = self._results[0], self.sequence, self.shown, self._group
        self.shown = NOTHING
        try:
            if result is not None:
                target = self._memory.target(sequence, shown)
                result = result._replace(fill=partial(self._memory.fill, sequence), target=target)
            array = write(self._endpoint, self._call.kind, result, out)
        finally:
            group.own.done[0] = sequence + 1
            group.wake_if_last(sequence + 1, LINE)
            if shown.place and not shown.lasts:
                for done in self._others_done:
                    if done[0] <= sequence:
                        self._wait_until_done(done, sequence)
        return deliver(array, out)

    def _wait_until_done(self, done: memoryview, sequence: int) -> None:
        for _ in self._endpoint.signals.turns():
            if done[0] > sequence:
                return
        self._endpoint.tasks.drive(self._lane, self._group.finish(sequence, together=True), self._text)
