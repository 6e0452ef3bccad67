"""How the members of a group meet: each posts what it is about to do, and sees what the others posted.

For every group it belongs to, a device has a *slot* in shared memory: a word that counts the operations it has posted,
a token for each of the last two, a word that counts those it has finished with the others, and two buffers used in
turn, each with a description of the call, a place for a small payload and the address of a large one.  In the slot of
the first member there is also room for what the last to come tells and makes for all
(`vcluster.collectives.last_arriver`).

Posting and waiting until the others have posted is the only synchronisation a small collective needs: who posts the
next operation has read all it wanted of the one before, so when everybody has posted number n, nobody reads the buffers
of n-1 any more, which are those of n+1.  The token is made of what is called and of its number, so that one comparison
says both that a member has come and that it calls the same; the description, read if the tokens differ, holds all that
must agree, so that a mismatch is found before any data moves.

Slots are found by a key of the group in a directory that each device keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vcluster.code import ClusterError
from vcluster.memory import DIRECTORY_ENTRIES, LINE, STORES_IN_ORDER, Need
from vcluster.messages import Wait

if TYPE_CHECKING:
    from vcluster.collectives.call import Call
    from vcluster.messages import Endpoint

INLINE_BYTES = 1 << 16
"""Payloads up to this size are copied into the slot; each member then reads them all by itself."""

DESCRIPTION_BYTES = 1024
"""A longer description lies in a block of its own."""

_WORDS = 8
_LENGTH, _PAYLOAD, _OUT, _DESCRIPTION = range(4)
_BUFFER_BYTES = 8 * _WORDS + DESCRIPTION_BYTES + INLINE_BYTES
_WORDS_BYTES = 3 * LINE
_SLOT_BYTES = _WORDS_BYTES + 2 * _BUFFER_BYTES + 2 * INLINE_BYTES


class Buffer:
    """One of the two buffers of a slot, as its owner writes it and the others read it."""

    __slots__ = ("_arena", "_description", "described", "inline", "shows", "words")

    def __init__(self, endpoint: Endpoint, offset: int) -> None:
        self._arena = endpoint.arena
        self.described: int | None = None
        """The signature of what its owner wrote here last: repeated calls need not be described again."""
        self.shows: object = None
        """Who wrote it, if nothing of it changes when they write again."""
        self.words = endpoint.arena.words(offset, _WORDS)
        start = offset + 8 * _WORDS
        self._description = endpoint.arena.view[start : start + DESCRIPTION_BYTES]
        self.inline = start + DESCRIPTION_BYTES

    def read_description(self) -> bytes:
        length, elsewhere = self.words[_LENGTH], self.words[_DESCRIPTION]
        if elsewhere:
            return bytes(self._arena.view[elsewhere : elsewhere + length])
        return bytes(self._description[:length])

    def write(self, call: Call, payload: int, out: int, elsewhere: int) -> None:
        """``elsewhere`` is a block for a description that is too long for its place here, or 0."""
        words, description = self.words, call.description
        self.shows = None
        words[_PAYLOAD], words[_OUT] = payload, out
        if words[_DESCRIPTION] or elsewhere or self.described != call.signature:
            words[_LENGTH], words[_DESCRIPTION] = len(description), elsewhere
            if elsewhere:
                self._arena.view[elsewhere : elsewhere + len(description)] = description
            else:
                self._description[: len(description)] = description
            self.described = call.signature

    @property
    def payload(self) -> int:
        return self.words[_PAYLOAD]

    @property
    def out(self) -> int:
        return self.words[_OUT]


class Slot:
    """What one member of a group shows the others."""

    __slots__ = ("buffers", "done", "made", "offset", "posted", "released", "tokens")

    def __init__(self, endpoint: Endpoint, offset: int) -> None:
        self.offset = offset
        self.posted = endpoint.arena.words(offset)
        self.tokens = (endpoint.arena.words(offset + 8), endpoint.arena.words(offset + 16))
        """Of the last operation with an even number, and of the last with an odd one."""
        self.done = endpoint.arena.words(offset + LINE)
        self.released = (endpoint.arena.words(offset + 2 * LINE), endpoint.arena.words(offset + 2 * LINE + 8))
        first = offset + _WORDS_BYTES
        self.buffers = (Buffer(endpoint, first), Buffer(endpoint, first + _BUFFER_BYTES))
        first += 2 * _BUFFER_BYTES
        self.made = first, first + INLINE_BYTES


class Group:
    """The members of a group as one of them sees it: everybody's slot, and how far it is itself."""

    def __init__(self, endpoint: Endpoint, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.position = ranks.index(endpoint.number)
        self.key = group_key(ranks)
        self.sequence = 0
        self._endpoint = endpoint
        self.others = tuple(rank for rank in ranks if rank != endpoint.number)
        self._slots: list[Slot | None] = [None] * self.size
        self._place = endpoint.heap.allocate(_SLOT_BYTES)
        endpoint.arena.view[self._place : self._place + _WORDS_BYTES] = bytes(_WORDS_BYTES)
        self.own = self._slots[self.position] = Slot(endpoint, self._place)
        self._blocks: tuple[list[int], list[int]] = ([], [])
        self._looked_at = 0
        if self.size > 1:
            self._enter_directory()

    def post(
        self, call: Call, payload: NDArray[Any] | None, place: int, out: int
    ) -> Generator[Wait, None, int]:
        """Show what this rank is about to do; returns when everybody has.  The result is the number of the operation.

        ``payload`` is a small array, for the slot; or None, and ``place`` tells where a large one lies for as long as
        the others may read it (the caller then waits until all have done): its offset in the arena, or less than 0,
        its address.  ``out`` tells likewise where the others write.
        """
        sequence = self.sequence
        self.sequence += 1
        endpoint = self._endpoint
        buffer = self.own.buffers[sequence & 1]
        blocks = self._blocks[sequence & 1]
        while blocks:
            endpoint.heap.free(blocks.pop())
        if payload is not None:
            place = buffer.inline
            if payload.size:
                np.copyto(endpoint.arena.array(place, payload.shape, payload.dtype), payload)
        elsewhere = 0
        if len(call.description) > DESCRIPTION_BYTES:
            elsewhere = endpoint.heap.allocate(len(call.description))
            blocks.append(elsewhere)
        buffer.write(call, place, out, elsewhere)
        self.announce(call.signature + sequence, sequence)
        if self.others and not self._all_posted(sequence + 1):
            yield self._wait_posted(sequence + 1)
        endpoint.signals.fence()
        return sequence

    def announce(self, token: int, sequence: int) -> None:
        """Say that this rank has come to an operation, whose buffer is written."""
        signals = self._endpoint.signals
        if not STORES_IN_ORDER:
            signals.fence()
        self.own.tokens[sequence & 1][0] = token
        self.own.posted[0] = sequence + 1
        if self.others:
            signals.wake(self.others)

    def all_come(self, sequence: int) -> Generator[Wait]:
        """Return when everybody has posted an operation."""
        if not self._all_posted(sequence + 1):
            yield self._wait_posted(sequence + 1)
        self._endpoint.signals.fence()

    def finish(self, sequence: int, *, together: bool) -> Generator[Wait]:
        """This rank has read all it needs of the others' memory; with ``together``, return only when everybody has."""
        self.own.done[0] = sequence + 1
        if self.others:
            self._endpoint.signals.wake(self.others)
            if together and not self._all_done(sequence + 1):
                yield self._wait_done(sequence + 1)

    def buffers(self, sequence: int) -> list[Buffer]:
        """Everybody's buffer of an operation, in group order."""
        return [slot.buffers[sequence & 1] for slot in self._slots]  # type: ignore[union-attr]

    def disagreement(self, sequence: int, call: Call) -> list[bytes] | None:
        """None if everybody posted the same description; else everybody's, in group order."""
        parity, token = sequence & 1, call.signature + sequence
        for slot in self._slots:
            assert slot is not None
            if slot.tokens[parity][0] != token:
                return [buffer.read_description() for buffer in self.buffers(sequence)]
        return None

    @property
    def slots(self) -> list[Slot]:
        """Everybody's slot, in group order, once everybody has posted something."""
        return self._slots  # type: ignore[return-value]

    def views(self, parity: int, calls: Sequence[Call]) -> list[NDArray[Any] | None]:
        """Everybody's small payload in the buffers for even (0) or odd numbers; None for who gives none."""
        array = self._endpoint.arena.array
        return [
            None if call.dtype is None or call.shape is None
            else array(slot.buffers[parity].inline, call.shape, call.dtype)
            for slot, call in zip(self.slots, calls, strict=True)
        ]

    def views_at(self, sequence: int, calls: Sequence[Call]) -> list[NDArray[Any] | None]:
        """Everybody's payload, wherever it lies in the arena."""
        array = self._endpoint.arena.array
        return [
            None if call.dtype is None or call.shape is None else array(buffer.payload, call.shape, call.dtype)
            for buffer, call in zip(self.buffers(sequence), calls, strict=True)
        ]

    def _wait_posted(self, count: int) -> Wait:
        return Wait(lambda: self._all_posted(count), lambda: self._missing(count, 0))

    def _wait_done(self, count: int) -> Wait:
        return Wait(lambda: self._all_done(count), lambda: self._missing(count, LINE))

    def _missing(self, count: int, word: int) -> list[Need]:
        """Who has not posted (``word`` 0) or finished (``word`` LINE) so many operations."""
        needs = []
        for position, rank in enumerate(self.ranks):
            slot = self._slots[position] or self._find(position)
            place = self._entry(rank) if slot is None else slot.offset + word
            value = self._endpoint.arena.words(place)[0]
            if slot is None or value < count:
                needs.append(Need(rank, ("group", self.key), place, value))
        return needs

    def _all_posted(self, count: int) -> bool:
        return self._all(lambda slot: slot.posted[0] >= count)

    def _all_done(self, count: int) -> bool:
        return self._all(lambda slot: slot.done[0] >= count)

    def _all(self, holds: Callable[[Slot], bool]) -> bool:
        slots = self._slots
        for i in range(self._looked_at, self.size):
            slot = slots[i] or self._find(i)
            if slot is None or not holds(slot):
                self._looked_at = i  # look here first the next time
                return False
        self._looked_at = 0
        return True

    def _enter_directory(self) -> None:
        place = self._entry(self._endpoint.number)
        entry = self._endpoint.arena.words(place, 2)
        entry[1] = self._place
        self._endpoint.signals.fence()
        entry[0] = self.key

    def _find(self, position: int) -> Slot | None:
        entry = self._endpoint.arena.words(self._entry(self.ranks[position]), 2)
        if entry[0] != self.key:
            return None
        self._endpoint.signals.fence()
        found = self._slots[position] = Slot(self._endpoint, entry[1])
        return found

    def _entry(self, rank: int) -> int:
        """The place of this group's entry in the directory of a rank: where it is, or where it will be."""
        start = self._endpoint.layout.directory(rank)
        directory = self._endpoint.arena.words(start, 2 * DIRECTORY_ENTRIES)
        for i in range(DIRECTORY_ENTRIES):
            entry = 2 * ((self.key + i) % DIRECTORY_ENTRIES)
            if directory[entry] in (self.key, 0):
                return start + 8 * entry
        raise ClusterError(f"a device can belong to at most {DIRECTORY_ENTRIES} different groups in one run")


def group_key(ranks: tuple[int, ...]) -> int:
    """The number by which a group is known in shared memory: in every process the same, as integers hash alike."""
    return abs(hash(ranks)) or 1

