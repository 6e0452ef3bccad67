"""A small collective of many members that is repeated: whoever comes last says so to all, and makes what all get.

Each member shows its token and looks at the others' until it finds one who has not come.  Then it looks at one word
only: who finds everybody there (the last, since between showing and looking stands a fence) makes the result that is
the same for all, writes it beside that word, and then the word.  So g members look at some 3 g words and combine g
terms once, where each looking at all and combining for itself would be g^2 of both; and only the last looks who sleeps.

No lock is needed.  Two that come at the same moment may both be last: they write the same bits.  Who is not told in
good time looks at the tokens again, and does itself what the last one would have done, be that one slow or gone by the
long way.  The word is made of all tokens of the operation, so nobody takes it for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import Reduction
from vcluster.collectives.call import Call
from vcluster.collectives.group import INLINE_BYTES, Group
from vcluster.collectives.results import Result, new_array, reduced
from vcluster.memory import STORES_IN_ORDER

if TYPE_CHECKING:
    from vcluster.messages import Endpoint

FEWEST_MEMBERS = 3
"""For fewer there is nothing to save."""

SCATTERED_BYTES = 1 << 12
"""Up to so many bytes for each member the last one reduces all of a reduce_scatter; from there on each its own part."""

TURNS_FOR_THE_LAST = 64
"""So often who has seen that all are there looks whether the last one is ready."""


class Together:
    """One call of one member, prepared, as `vcluster.collectives.prepared.Repeated` is."""

    __slots__ = ("_endpoint", "_everybody", "_fill", "_group", "_members", "_mine", "_own", "_released", "_shared")

    def __init__(
        self, endpoint: Endpoint, group: Group, calls: Sequence[Call], reduction: Reduction | None,
        members: Sequence[Sequence[tuple[memoryview, int]]], results: Sequence[Result | None],
    ) -> None:
        """``members``: for even and odd operations the token of each other member, and what it is less the number of
        the operation; ``results``: what this member would make for itself."""
        self._endpoint = endpoint
        self._group = group
        self._members = members
        self._own = group.own
        self._everybody = abs(hash(tuple(call.signature for call in calls))) >> 1
        self._released = group.slots[0].released
        self._fill: list[Any] = [None, None]
        """Makes what all get."""
        self._shared: list[NDArray[Any] | None] = [None, None]
        """Where it lies for all."""
        self._mine: list[NDArray[Any] | None] = [None, None]
        """The part of it that is this member's result."""
        call = calls[group.position]
        for parity, made in enumerate(results):
            kind = call.of_kind
            if made is None or kind.sources != "all" or kind.gets != "all" or kind.reduces == kind.joins or (
                kind.joins and kind.cuts
            ):
                continue
            whole = made
            if kind.cuts:
                if call.nbytes > SCATTERED_BYTES * call.size:
                    continue
                whole = reduced([view for view in group.views(parity, calls) if view is not None], reduction)
            shared = endpoint.arena.array(group.slots[0].made[parity], whole.shape, whole.dtype)
            if shared.nbytes <= INLINE_BYTES:
                self._shared[parity] = shared
                self._mine[parity] = shared[call.block(group.position)] if whole is not made else shared
                self._fill[parity] = whole.fill

    @staticmethod
    def serves(calls: Sequence[Call]) -> bool:
        """Whether it is worth it for such calls."""
        return len(calls) >= FEWEST_MEMBERS

    def come(self, token: int, sequence: int) -> bool:
        """Show the token of an operation; True if everybody has come: then this member must `release` the others."""
        signals = self._endpoint.signals
        parity = sequence & 1
        if not STORES_IN_ORDER:
            signals.fence()
        self._own.tokens[parity][0] = token
        self._own.posted[0] = sequence + 1
        signals.fence()
        for shown, signature in self._members[parity]:  # noqa: SIM110  (a generator takes longer)
            if shown[0] != signature + sequence:
                return False
        return True

    def wait(self, sequence: int) -> bool | None:
        """Wait for a moment.  True: released; False: everybody has come, and this member must `release` the others."""
        released, told = self._released[sequence & 1], self._everybody + sequence
        members = self._members[sequence & 1]
        place, left = 0, TURNS_FOR_THE_LAST
        for _ in self._endpoint.signals.turns():
            if released[0] == told:
                return True
            while place < len(members) and members[place][0][0] == members[place][1] + sequence:
                place += 1
            if place == len(members):
                left -= 1
                if not left:
                    return False
        return None

    def is_released(self, sequence: int) -> bool:
        """Whether who has come can go on."""
        return bool(self._released[sequence & 1][0] == self._everybody + sequence)

    def release(self, sequence: int) -> None:
        """Everybody has come: make what all get, and tell them."""
        parity = sequence & 1
        signals = self._endpoint.signals
        shared = self._shared[parity]
        if shared is not None:
            whole = np.empty(shared.shape, shared.dtype)  # two may write there: only what is finished
            self._fill[parity](whole)
            shared[...] = whole
        if not STORES_IN_ORDER:
            signals.fence()
        self._released[parity][0] = self._everybody + sequence
        signals.rouse(self._group.others)

    def result(self, sequence: int, made: Result | None, out: NDArray[Any] | None) -> NDArray[Any] | None:
        """This member's, once it is released."""
        if made is None:
            return None
        if not STORES_IN_ORDER:
            self._endpoint.signals.fence()
        if out is None:
            out = new_array(self._endpoint, made.shape, made.dtype)
        mine = self._mine[sequence & 1]
        if mine is None:
            made.fill(out)
        else:
            out[...] = mine
        return out
