"""Groups over MPI: those on one node meet in shared memory, others by messages; and a direct collective by messages.

A group on one node runs its calls as a group of processes does. Each member of another group sends its call to all
others, with its array if that is small. So all know what all call before any large array moves, and a small collective
takes one message for each pair. Terms are combined in group order by each member that needs the sum; pieces of large
arrays are summed by their owners and gathered (`vcluster.collectives.by_messages`). So the bits are those of shared
memory. A small call that is repeated is sent and computed with what the first one left.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelism.arrays import Array
from parallelism.collectives import Reduction, check_agreement
from vcluster.collectives import ByMessages, Call, Group, Ways, group_key
from vcluster.collectives.general import Posted, deliver, new_array, own_result, write
from vcluster.collectives.group import Calls, Ranks, Slot, may_be_prepared
from vcluster.collectives.prepared import PreparedCall
from vcluster.memory import LINE, Need
from vcluster.messages import Endpoint, Steps, Wait, encode_message
from vcluster.messages.encoding import HEADER_BYTES, aligned
from vcluster.mpi.endpoint import MpiEndpoint
from vcluster.mpi.library import OfLibrary, check_library
from vcluster.mpi.statuses import place_of_word

POSTED_BYTES = 1 << 13
"""Arrays up to this size travel with the calls."""

_CALL = struct.Struct("<qq")
"""Before the description of a call: its signature, and the length of the description."""
_SIGNATURE = struct.Struct("<q")


def head_of_call(call: Call) -> bytes:
    """The signature and the description of a call, which the other members compare with their own."""
    return _CALL.pack(call.signature, len(call.description)) + call.description


def place_of_array(call: Call) -> int:
    """The offset of a small array in the message that posts a call."""
    return HEADER_BYTES + aligned(_CALL.size + len(call.description))


class MpiGroup(Group):
    """A group as one of its members sees it."""

    def __init__(self, endpoint: Endpoint, ranks: Ranks) -> None:
        assert isinstance(endpoint, MpiEndpoint)
        self.ranks = ranks
        self.size = len(ranks)
        self.position = ranks.index(endpoint.number)
        self.key = group_key(ranks)
        self.sequence = 0
        self.others = tuple(ranks[(self.position + i) % self.size] for i in range(1, self.size))
        self._end = endpoint
        self._payload: Array | None = None

    @property
    def has_met(self) -> bool:
        """A call is never prepared before it is made."""
        return False

    def give_back(self) -> None:
        """Nothing is kept."""

    def post(self, call: Call, payload: Array | None, place: int, out: int) -> Generator[Wait, None, int]:
        """Send a call to the others and return its number when every member has done so."""
        sequence, end = self.sequence, self._end
        self.sequence += 1
        block, room = end.new_post(self.key, head_of_call(call), 0 if payload is None else payload.nbytes)
        if payload is not None:
            np.ndarray(payload.shape, payload.dtype, block, room)[...] = payload
        end.post(self.others, block, sequence)
        yield from self.all_come(sequence)
        return sequence

    def all_come(self, sequence: int) -> Steps:
        """Return when every member has posted an operation."""
        if not self._all_have(sequence, 0):
            yield Wait(lambda: self._all_have(sequence, 0), lambda: self._missing(sequence, 0))

    def calls(self, sequence: int, call: Call) -> list[Call]:
        """The calls that the members posted, in group order; `CollectiveMismatchError` if they do not agree."""
        others = {rank: self._end.posts[self.key, sequence, rank] for rank in self.others}
        heads = {rank: _CALL.unpack_from(block.data, HEADER_BYTES) for rank, block in others.items()}
        if all(signature == call.signature for signature, _ in heads.values()):
            return [call] * self.size
        calls = []
        for position, rank in enumerate(self.ranks):
            description = call.description
            if rank in heads:
                start = HEADER_BYTES + _CALL.size
                description = bytes(others[rank].data[start : start + heads[rank][1]])
            calls.append(call.as_seen_by(position, description))
        check_agreement(call.ranks, call.kind, calls)
        return calls

    def payloads(self, sequence: int, calls: Calls, mine: Array | None) -> list[Array | None]:
        """The arrays of the members, in group order, that came with their calls; None where a call gives none."""
        views: list[Array | None] = []
        for call, rank in zip(calls, self.ranks, strict=True):
            if call.dtype is None or call.shape is None:
                views.append(None)
            elif rank == self._end.number:
                views.append(mine)
            else:
                block = self._end.posts[self.key, sequence, rank]
                views.append(np.ndarray(call.shape, call.dtype, block.data, place_of_array(call)))
        return views

    def settle(self) -> Steps:
        """Wait until the arrays that were sent where they lie may change again."""
        yield from self._end.settle()

    def forget(self, sequence: int) -> None:
        """Drop the calls of an operation."""
        for rank in self.others:
            self._end.posts.pop((self.key, sequence, rank), None)

    def _all_have(self, count: int, word: int) -> bool:
        posts, key = self._end.posts, self.key
        for rank in self.others:
            if (key, count, rank) not in posts:
                self._end.take_in()
                return all((key, count, rank) in posts for rank in self.others)
        return True

    def _missing(self, count: int, word: int) -> list[Need]:
        lane = "group", self.key
        posts = self._end.posts
        missing = [rank for rank in self.others if (self.key, count, rank) not in posts]
        return [self._end.need(rank, lane) for rank in missing]


class NodeGroup(Group):
    """A group on one node, which meets in the memory that its members share, as a group of processes does."""

    def __init__(self, endpoint: Endpoint, ranks: Ranks) -> None:
        assert isinstance(endpoint, MpiEndpoint)
        super().__init__(endpoint, ranks)
        self._end = endpoint
        endpoint.shown[place_of_word(self.key, 0)] = self.own.posted
        endpoint.shown[place_of_word(self.key, LINE)] = self.own.done

    def settle(self) -> Steps:
        """Wait until the arrays that were sent where they lie may change again."""
        yield from self._end.settle()

    def _awaited(self, rank: int, slot: Slot | None, word: int, value: int) -> tuple[int, int]:
        """The host does not see the word: what stands for it, and what it is."""
        return place_of_word(self.key, word), value


@dataclass(slots=True, eq=False)
class Exchanged(ByMessages):
    """One run of a direct call over MPI."""

    sequence: int = -1
    """The number of the operation, once it is posted."""
    views: list[Array | None] | None = None
    """The arrays of all members, if they came with their calls."""
    calls: Calls = ()
    out: Array | None = None
    """Where a large sum is made, if it is given and contiguous."""

    def prepare(self, x: Array | None, out: Array | None) -> None:
        """Keep ``x`` for the messages; a small one that the result overwrites is copied."""
        ByMessages.prepare(self, x, out)
        if x is not None and out is not None and x.nbytes <= POSTED_BYTES and np.may_share_memory(x, out):
            self.x = x.copy()
        self.out = out if out is not None and out.flags.c_contiguous else None

    def go_on(self, posted: Posted, x: Array | None, out: Array | None) -> None:
        """Go on with what this member has posted for a call that another member did not make."""
        self.prepare(x, out)
        self.sequence = posted.sequence

    def run(self) -> Generator[Wait, None, Calls]:
        """Meet the other members, and exchange large arrays.  Every member's call, in group order."""
        group, call = self.group, self.call
        assert isinstance(group, MpiGroup)
        payload = self.x
        if payload is not None and (payload.nbytes > POSTED_BYTES or call.dtype is None):
            payload = None
        elif payload is not None and payload.dtype != call.dtype:
            payload = payload.astype(call.dtype)
        sequence = self.sequence
        if sequence < 0:
            sequence = yield from group.post(call, payload, 0, 0)
        try:
            self.calls = calls = group.calls(sequence, call)
            if all(each.nbytes <= POSTED_BYTES for each in calls):
                self.views = group.payloads(sequence, calls, payload)
        finally:
            group.forget(sequence)
        if self.views is None:
            self.on_message = _unrecorded
            yield from (self._sum if call.of_kind.sums_all else self.exchange)(sequence, calls)
        return calls

    def _sum(self, sequence: int, calls: Calls) -> Steps:
        """An all_reduce as in `exchange`, but each piece of the sum is made, or copied, where the result lies."""
        group, x, reduction = self.group, self.x, self.reduction
        assert x is not None and reduction is not None
        mine, g = group.position, group.size
        total = self.out
        if total is None or total.shape != x.shape or total.dtype != x.dtype:
            total = new_array(self.endpoint, x.shape, x.dtype)
        is_in_place = np.may_share_memory(total, x)
        terms = np.array_split(x.reshape(-1), g)
        sums = np.array_split(total.reshape(-1), g)
        others = [*range(mine + 1, g), *range(mine)]  # each begins elsewhere
        for peer in others:
            yield from self._give(peer, terms[peer], sequence)
        found = list(terms)
        if is_in_place:
            found[mine] = terms[mine].copy()  # the sum is made where it lies
        for peer in others:
            found[peer] = yield from self._take(peer, sequence)
        reduction.reduce(found, sums[mine])
        if is_in_place:
            yield from group.settle()
        for peer in others:
            yield from self._give(peer, sums[mine], sequence)
        for peer in others:
            sums[peer][...] = yield from self._take(peer, sequence)
        yield from group.settle()
        self.result = total

    def _give(self, position: int, array: Array, sequence: int) -> Steps:
        mailbox = self.endpoint.mailbox(self.group.ranks[position])
        return mailbox.sending(encode_message(array), sequence, lane=self.group.key)

    def _take(self, position: int, sequence: int) -> Steps:
        mailbox = self.endpoint.mailbox(self.group.ranks[position])
        envelope = yield from mailbox.receiving(sequence, lane=self.group.key)
        return envelope.open()

    def finish(self, out: Array | None) -> Steps:
        """The result, in ``out`` if it is given."""
        if self.views is None and self.call.of_kind.sums_all:
            return deliver(self.result, out)
        if self.views is None:
            return (yield from ByMessages.finish(self, out))
        result = own_result(self.calls, self.group.position, self.views, self.reduction)
        return deliver(write(self.endpoint, self.call.kind, result, out), out)


class PreparedByPosts(PreparedCall):
    """A small call that is repeated: its post, the places of all arrays, and what makes the result are kept."""

    __slots__ = ("_given", "_others", "_post")

    _group: MpiGroup
    _endpoint: MpiEndpoint

    def _prepare_results(self, calls: Calls, reduction: Reduction | None) -> None:
        group, call = self._group, self._call
        self._post, room = self._endpoint.new_post(group.key, head_of_call(call), call.nbytes)
        self._others: list[tuple[int, int, int, NDArray[np.uint8] | None]] = []
        """For each other member: its rank, the signature of its call, where its array begins, and where that goes."""
        arrays: list[Array | None] = []
        for position, (rank, each) in enumerate(zip(group.ranks, calls, strict=True)):
            array: Array | None = None
            if each.dtype is not None and each.shape is not None:
                is_own = position == group.position
                array = np.ndarray(each.shape, each.dtype, *((self._post, room) if is_own else ()))
            arrays.append(array)
            if position != group.position:
                into = None if array is None else array.reshape(-1).view(np.uint8)
                self._others.append((rank, each.signature, place_of_array(each), into))
        self._given = arrays[group.position]
        self._results = [own_result(calls, group.position, arrays, reduction)] * 2

    def prepare(self, x: Array | None, out: Any) -> bool:
        """Put ``x`` into the post; False, and nothing done, if the call cannot go this way with these arrays."""
        if (out is not None and not self._takes(x, out)) or not self._endpoint.transport.has_sent(self._post):
            return False
        if self._given is not None:
            self._given[...] = x
        return True

    def run(self) -> bool:
        """Meet the other members; False if one of them calls something else than the last time."""
        group, end = self._group, self._endpoint
        sequence = self.sequence = group.sequence
        group.sequence = sequence + 1
        end.post(group.others, self._post, sequence)
        key, posts, others = group.key, end.posts, self._others
        place, size = 0, len(others)
        for _ in end.signals.turns():
            while place < size and (key, sequence, others[place][0]) in posts:
                place += 1
            if place == size:
                break
            end.transport.poll(one=True)
        else:
            end.tasks.drive(self._lane, group.all_come(sequence), self._text)
        for rank, signature, _, _ in others:
            if _SIGNATURE.unpack_from(posts[key, sequence, rank].data, HEADER_BYTES)[0] != signature:
                return False
        for rank, _, start, into in others:
            block = posts.pop((key, sequence, rank))
            if into is not None:
                into[...] = block[start : start + into.size]
        return True


def prepared_by_posts(calls: Calls) -> type[PreparedCall] | None:
    """The way of a direct call that is repeated, by the calls of all members; None: as the first time."""
    small = all(call.nbytes <= POSTED_BYTES for call in calls)
    return PreparedByPosts if small and may_be_prepared(calls) else None


def _unrecorded(kind: str, peer: int, nbytes: int) -> None:
    """The messages of a direct collective are no events."""


ON_ONE_NODE = Ways(NodeGroup, library=OfLibrary, check_library=check_library)
OVER_MPI = Ways(MpiGroup, Exchanged, prepared_by_posts, OfLibrary, check_library, ON_ONE_NODE)
