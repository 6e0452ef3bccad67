"""The fast path of a small collective of many members: the last arriver makes the result for all and releases them.

Each member shows its token and polls the others' tokens until one has not come.  Then it polls one word only.  The
member that sees all the others there is the last arriver (between showing and looking stands a fence).  It makes the
result that is the same for all, writes it beside that word, and then the word.  So g members read some 3 g words and
combine g terms once; if each read all and combined for itself, it would be g^2 of both.  Only the last arriver looks
for sleepers.

No lock is needed.  Of two that come at the same moment both may be last: they write the same bits.  A member that is
not released within a bounded number of polls reads the tokens again and performs the release itself, because the last
arriver may be slow or may have taken the general way.  The word is made of all tokens of the operation, so no member
takes it for that of another one.
"""

from typing import Any

import numpy as np

from parallelism.algorithms import CollectiveKind
from parallelism.arrays import Array
from parallelism.collectives import Reduction, copy_of
from parallelism.collectives.results import reduced
from vcluster.collectives.group import Calls
from vcluster.collectives.prepared import Prepared
from vcluster.collectives.thresholds import INLINE_BYTES, SCATTERED_BYTES
from vcluster.memory import STORES_IN_ORDER

TURNS_FOR_THE_LAST = 64
"""The number of polls after which a member that has seen all others come performs the release itself."""


def is_shared(kind: CollectiveKind) -> bool:
    """Whether all members get one array, or parts of one: the reduction of all arrays, or all of them joined."""
    return (
        kind.sources == "all" and kind.gets == "all" and kind.reduces != kind.joins and not kind.blocks_of_all
    )


class LastArriver(Prepared):
    """A small call of one member in a group of at least `FEWEST_MEMBERS`."""

    __slots__ = ("_fill", "_released", "_shared", "_word")

    def _prepare_results(self, calls: Calls, reduction: Reduction | None) -> None:
        super()._prepare_results(calls, reduction)
        group, call = self._group, self._call
        self._word = abs(hash(tuple(other.signature for other in calls))) >> 1
        self._released = group.slots[0].released
        self._fill: list[Any] = [None, None]
        """Writes the result for all."""
        self._shared: list[Array | None] = [None, None]
        """The place of the result for all, in even and odd operations."""
        cuts = call.of_kind.cuts
        if not is_shared(call.of_kind) or (cuts and call.nbytes > SCATTERED_BYTES * call.size):
            return
        for parity, whole in enumerate(self._results):
            assert whole is not None
            if cuts:
                whole = reduced(
                    [view for view in group.inline_views(parity, calls) if view is not None], reduction
                )
            shared = self._endpoint.arena.array(group.slots[0].shared[parity], whole.shape, whole.dtype)
            if shared.nbytes <= INLINE_BYTES:
                self._shared[parity] = shared
                self._fill[parity] = whole.fill
                self._results[parity] = copy_of(shared[call.block(group.position)] if cuts else shared)

    def run(self) -> bool:
        """Meet the other members; False if one of them calls something else than the last time."""
        group, signals = self._group, self._endpoint.signals
        sequence = self.sequence = group.sequence
        group.sequence = sequence + 1
        parity = sequence & 1
        if not STORES_IN_ORDER:
            signals.fence()
        group.own.tokens[parity][0] = self._signature + sequence
        group.own.posted[0] = sequence + 1
        signals.fence()
        is_released: bool | None = False
        for token, signature in self._tokens[parity]:
            if token[0] != signature + sequence:
                is_released = self._wait_for_release(sequence)
                break
        if is_released is None:
            return False
        if not is_released:
            self.release(sequence)
        if not STORES_IN_ORDER:
            signals.fence()
        return True

    def _wait_for_release(self, sequence: int) -> bool | None:
        """Whether this member was released; if not, every member has come, and it must release the others.

        None if one of them calls something else.
        """
        released = self._released[sequence & 1]
        word = self._word + sequence
        others, place, left = self._tokens[sequence & 1], 0, TURNS_FOR_THE_LAST
        for _ in self._endpoint.signals.turns():
            if released[0] == word:
                return True
            if place < len(others) and others[place][0][0] == others[place][1] + sequence:
                place += 1  # one at a time: if every member looked at all, all would look g^2 times
            if place == len(others):
                left -= 1
                if not left:
                    return False
        group = self._group
        group.wake_if_last(
            sequence + 1, 0, place
        )  # this may be the last arriver for one that calls otherwise
        coming = group.all_come_or(sequence, place, lambda: bool(released[0] == word))
        self._endpoint.tasks.drive(self._lane, coming, self._text)
        if released[0] == word:
            return True
        is_same = all(token[0] == signature + sequence for token, signature in others)
        return False if is_same else None

    def release(self, sequence: int) -> None:
        """Every member has come: make the result for all, and let the others continue."""
        parity, signals = sequence & 1, self._endpoint.signals
        shared = self._shared[parity]
        if shared is not None:
            whole = np.empty(shared.shape, shared.dtype)  # two may write there: only the finished result
            self._fill[parity](whole)
            shared[...] = whole
        if not STORES_IN_ORDER:
            signals.fence()
        self._released[parity][0] = self._word + sequence
        signals.rouse(self._group.others)
