"""The rendezvous of a group: each member posts its call, and reads the calls that the others posted.

For every group it belongs to, a device has a *slot* in shared memory: a word that counts the operations it has posted,
a token for each of the last two, a word that counts those it has finished with the others, and two buffers used in
turn, each with a description of the call, a place for a small payload and the address of a large one.  The slot of the
first member also has room for the release by the last arriver and its result (`vcluster.collectives.last_arriver`).

A small collective needs no other synchronisation than this: to post, and to wait until the others have posted.  A
member that posts the next operation has read all it needs of the one before.  So when every member has posted number
n, none reads the buffers of n-1 any more, which are those of n+1.  A token is made of the signature of the call and its
number: one comparison says both that a member has come and that it calls the same.  The description is read if the
tokens differ.  It holds all that must agree, so a mismatch is raised before any data moves.

Slots are found by a key of the group in a directory that each device keeps.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parallelism.algorithms import KINDS, CollectiveKind
from parallelism.arrays import Array
from parallelism.collectives import ARRAY, SCALAR, MemberCall, Reduction, check_agreement, text_of
from parallelism.dtypes import code_of, of_code
from parallelism.operation import Lane
from vcluster.code import ClusterError
from vcluster.collectives.thresholds import INLINE_BYTES
from vcluster.memory import DIRECTORY_ENTRIES, GROUPS, LINE, STORES_IN_ORDER, Need
from vcluster.messages import Endpoint, Steps, Wait
from vcluster.messages.encoding import blake2b
from vcluster.tracing import Template, dtype_name

if TYPE_CHECKING:
    from vcluster.collectives.prepared import PreparedCall
    from vcluster.collectives.ways import Ways

Ranks = tuple[int, ...]
"""The members of a group, in group order."""

DESCRIPTION_BYTES = 1024
"""A longer description lies in a block of its own."""

_WORDS = 8
_LENGTH, PAYLOAD, OUT, _DESCRIPTION = range(4)
"""The words of a buffer."""
_BUFFER_BYTES = 8 * _WORDS + DESCRIPTION_BYTES + INLINE_BYTES
_WORDS_BYTES = 3 * LINE
_SLOT_BYTES = _WORDS_BYTES + 2 * _BUFFER_BYTES + 2 * INLINE_BYTES


@dataclass(frozen=True, slots=True)
class Call(MemberCall):
    """A checked call of a collective by one member, with all that the other members compare."""

    ranks: Ranks = field(kw_only=True)
    position: int = field(kw_only=True)
    axes: tuple[str, ...] | None = None
    description: bytes = field(init=False, compare=False)
    """Everything that the other members need to know of this call."""
    signature: int = field(init=False, compare=False)
    """A number of 62 bits that equal descriptions share, and no others. The operation's number can be added to it."""
    of_kind: CollectiveKind = field(init=False, compare=False)
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        dtype = None
        if self.dtype is not None:
            dtype = self.dtype.str if self.dtype.isbuiltin == 1 else code_of(self.dtype)
        fields = (
            self.kind,
            self.algorithm,
            dtype,
            self.shape,
            self.dim,
            self.concat_dim,
            self.sizes,
            self.root,
            self.op,
            self.pairs,
            self.form,
        )
        description = marshal.dumps(fields, 2)
        for name, value in (
            ("description", description),
            ("signature", int.from_bytes(blake2b(description, digest_size=8).digest(), "little") >> 2),
            (
                "of_kind",
                KINDS.records.get(self.kind),
            ),  # None only for a kind that another process alone knows
            ("nbytes", 0 if self.dtype is None else self.dtype.itemsize * prod(self.shape or ())),
        ):
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def as_seen_by(self, position: int, description: bytes) -> Call:
        """The call of another member of the group, from its description."""
        kind, name, dtype, shape, dim, concat_dim, sizes, root, op, pairs, form = marshal.loads(description)
        return replace(
            self,
            kind=kind,
            position=position,
            algorithm=name,
            dtype=dtype and of_code(dtype),
            shape=shape,
            dim=dim,
            concat_dim=concat_dim,
            sizes=sizes,
            root=root,
            op=op,
            pairs=pairs,
            form=form,
        )

    def __str__(self) -> str:
        return text_of(self)


Calls = Sequence[Call]
"""The calls of all members, in group order."""


class CheckedCall:
    """A checked call, kept for when it is repeated with another array.  Its ``str`` describes it to people."""

    __slots__ = (
        "_ranks",
        "_text",
        "call",
        "calls",
        "dtype",
        "guessed",
        "lane",
        "name",
        "prepared",
        "reduction",
        "surprised",
        "template",
        "warns",
    )

    def __init__(
        self, call: Call, reduction: Reduction | None, size: int, text: str = "", name: str = ""
    ) -> None:
        """``size`` is that of the mesh, ``name`` of the events; ``text`` describes the call if its ``str`` does not."""
        self._text = text
        self._ranks = "" if call.ranks == tuple(range(size)) else f" of group {list(call.ranks)}"
        self.call = call
        self.dtype = None if call.dtype is None else dtype_name(call.dtype)
        self.reduction = reduction
        kind = call.of_kind
        self.warns = kind.gets == "all" and not (kind.copies and kind.rooted and call.gives)
        """Whether a caller that drops the result is warned: it has most likely forgotten it."""
        self.lane: Lane = ("group", group_key(call.ranks))
        self.name = name
        self.calls: Calls = ()
        """The members' calls when it was last run by the general way: they are prepared for when it is repeated."""
        self.surprised = False
        """Whether another member called something else than was prepared: it may do so every second time."""
        self.guessed = False
        """Whether it is being run for the first time, prepared for members that call the same."""
        self.prepared: PreparedCall | None = None
        self.template: Template | None = None

    def __str__(self) -> str:
        return (self._text or str(self.call)) + self._ranks

    def array_of(self, x: Any) -> Array | None:
        """``x``, like the value of the checked call, as an array; None if it does not count."""
        if not self.call.gives:
            return None
        array = np.asarray(x)
        return array if self.reduction is None else array.astype(self.reduction.dtype, copy=False)


def may_be_prepared(calls: Calls) -> bool:
    """Whether a direct call can be prepared: the arrays of its repetitions then keep their places in shared memory."""
    kind = calls[0].of_kind
    return not kind.lists and kind.function is None and all(call.form in (ARRAY, SCALAR) for call in calls)


class Buffer:
    """One of the two buffers of a slot, as its owner writes it and the others read it."""

    __slots__ = ("_arena", "_description", "described", "inline", "shows", "words")

    def __init__(self, endpoint: Endpoint, offset: int) -> None:
        self._arena = endpoint.arena
        self.described: int | None = None
        """The signature of what its owner wrote here last: repeated calls need not be described again."""
        self.shows: object = None
        """The prepared call whose description and places lie here: it need not write them again."""
        self.words = endpoint.arena.words(offset, _WORDS)
        start = offset + 8 * _WORDS
        self._description = endpoint.arena.view[start : start + DESCRIPTION_BYTES]
        self.inline = start + DESCRIPTION_BYTES

    def read_description(self) -> bytes:
        elsewhere = self.words[_DESCRIPTION]
        return bytes(
            (self._arena.view[elsewhere:] if elsewhere else self._description)[: self.words[_LENGTH]]
        )

    def write(self, call: Call, payload: int, out: int, elsewhere: int) -> None:
        """``elsewhere`` is a block for a description that is too long for its place here, or 0."""
        words, description = self.words, call.description
        self.shows = None
        words[PAYLOAD], words[OUT] = payload, out
        if words[_DESCRIPTION] or elsewhere or self.described != call.signature:
            words[_LENGTH], words[_DESCRIPTION] = len(description), elsewhere
            place = self._arena.view[elsewhere:] if elsewhere else self._description
            place[: len(description)] = description
            self.described = call.signature

    def array(self, place: int, call: Call) -> Array | None:
        """The payload of a call that lies at an offset in the arena; None if the call gives none."""
        if call.dtype is None or call.shape is None:
            return None
        return np.ndarray(call.shape, call.dtype, self._arena.view, place)


class Slot:
    """The memory that one member of a group shows the others."""

    __slots__ = ("buffers", "done", "offset", "posted", "released", "shared", "tokens")

    def __init__(self, endpoint: Endpoint, offset: int) -> None:
        self.offset = offset
        self.posted = endpoint.arena.words(offset)
        self.tokens = (endpoint.arena.words(offset + 8), endpoint.arena.words(offset + 16))
        """The tokens of the last operation with an even number, and of the last with an odd one."""
        self.done = endpoint.arena.words(offset + LINE)
        self.released = (endpoint.arena.words(offset + 2 * LINE), endpoint.arena.words(offset + 2 * LINE + 8))
        first = offset + _WORDS_BYTES
        self.buffers = (Buffer(endpoint, first), Buffer(endpoint, first + _BUFFER_BYTES))
        self.shared = first + 2 * _BUFFER_BYTES, first + 2 * _BUFFER_BYTES + INLINE_BYTES
        """The offsets of the results that a last arriver makes for all."""


class Group:
    """A group as one of its members sees it: the members' slots, and the number of its own next operation."""

    ways: Ways
    """How its members meet and run their calls."""

    def __init__(self, endpoint: Endpoint, ranks: Ranks) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.position = ranks.index(endpoint.number)
        self.key = group_key(ranks)
        self._listed = endpoint.listed_as(self.key)
        self.sequence = self._seen = 0
        self._endpoint = endpoint
        self.others = tuple(rank for rank in ranks if rank != endpoint.number)
        self._in_turn = [*range(self.position + 1, self.size), *range(self.position)]  # each begins elsewhere
        self.slots: list[Slot] = [None] * self.size  # type: ignore[list-item]
        """The members' slots, in group order, once each has posted something."""
        place = endpoint.heap.allocate(_SLOT_BYTES)
        endpoint.arena.view[place : place + _WORDS_BYTES] = bytes(_WORDS_BYTES)
        self.own = self.slots[self.position] = Slot(endpoint, place)
        self._blocks: tuple[list[int], list[int]] = ([], [])
        self._rooms: list[NDArray[np.uint8] | None] = [None, None]
        if self.size > 1:
            entry = endpoint.arena.words(self._entry(endpoint.number), 2)
            entry[1] = place
            endpoint.signals.fence()
            entry[0] = self._listed
            endpoint.arena.words(endpoint.layout.word(endpoint.number, GROUPS))[0] += 1

    @property
    def has_met(self) -> bool:
        """Whether the slots of all members are known."""
        return None not in self.slots

    def give_back(self) -> None:
        """Free the slot. No member reads it any more."""
        for offset in (self.own.offset, *self._blocks[0], *self._blocks[1]):
            self._endpoint.heap.free(offset)
        self._rooms = [None, None]

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Shared memory for the payload of the next operation: as the buffers of a slot, used by every second one."""
        nbytes = dtype.itemsize * prod(shape)
        parity = self.sequence & 1
        room = self._rooms[parity]
        if room is None or room.nbytes < nbytes:
            room = self._rooms[parity] = self._endpoint.heap.block(nbytes)[1]
        return np.ndarray(shape, dtype, room)

    def post(self, call: Call, payload: Array | None, place: int, out: int) -> Generator[Wait, None, int]:
        """Post an operation and return its number when every member has posted it.

        ``payload`` is a small array, for the slot; or None, and ``place`` is where a large one lies for as long as the
        others may read it (the caller then waits until all have finished): its offset in the arena or, negative, its
        address.  ``out`` is likewise where the others write.
        """
        sequence, endpoint = self.sequence, self._endpoint
        self.sequence += 1
        buffer = self.own.buffers[sequence & 1]
        blocks = self._blocks[sequence & 1]
        while blocks:
            endpoint.heap.free(blocks.pop())
        if payload is not None:
            place = buffer.inline
            buffer.array(place, call)[...] = payload  # type: ignore[index]
        if len(call.description) > DESCRIPTION_BYTES:
            blocks.append(endpoint.heap.allocate(len(call.description)))
        buffer.write(call, place, out, blocks[0] if blocks else 0)
        if not STORES_IN_ORDER:
            endpoint.signals.fence()
        self.own.tokens[sequence & 1][0] = call.signature + sequence
        self.own.posted[0] = sequence + 1
        self.wake_if_last(sequence + 1, 0)
        yield from self.all_come(sequence)
        return sequence

    def all_come(self, sequence: int) -> Steps:
        """Return when every member has posted an operation."""
        return self.all_come_or(sequence, 0, lambda: False)

    def all_come_or(self, sequence: int, seen: int, is_released: Callable[[], bool]) -> Steps:
        """Return when every member has posted an operation, or ``is_released()``.

        The first ``seen`` of the others, in turn, are known to have posted it.
        """
        self._seen = seen

        def is_ready() -> bool:
            return is_released() or self._all_have(sequence + 1, 0)

        if not is_ready():
            yield Wait(is_ready, lambda: self._missing(sequence + 1, 0))
        self._endpoint.signals.fence()

    def finish(self, sequence: int, *, together: bool) -> Steps:
        """This member has read all it needs of the others' memory; with ``together``, wait until each has."""
        self.own.done[0] = sequence + 1
        self.wake_if_last(sequence + 1, LINE)
        self._seen = 0
        if together and not self._all_have(sequence + 1, LINE):
            yield Wait(lambda: self._all_have(sequence + 1, LINE), lambda: self._missing(sequence + 1, LINE))

    def settle(self) -> Steps:
        """Wait until the arrays of messages that were sent may change again. Here they were copied."""
        yield from ()

    def buffers(self, sequence: int) -> list[Buffer]:
        """The members' buffers of an operation, in group order."""
        return [slot.buffers[sequence & 1] for slot in self.slots]

    def calls(self, sequence: int, call: Call) -> list[Call]:
        """The calls that the members posted, in group order; ``call`` is this member's.

        `CollectiveMismatchError` if they differ in what must agree.
        """
        parity, token = sequence & 1, call.signature + sequence
        for slot in self.slots:
            if slot.tokens[parity][0] != token:
                buffers = self.buffers(sequence)
                calls = [
                    call.as_seen_by(place, buffer.read_description()) for place, buffer in enumerate(buffers)
                ]
                check_agreement(call.ranks, call.kind, calls)
                return calls
        return [call] * self.size

    def inline_views(self, parity: int, calls: Calls) -> list[Array | None]:
        """The members' small payloads in the buffers for even (0) or odd operations; None where a call gives none."""
        return [
            buffer.array(buffer.inline, call)
            for buffer, call in zip(self.buffers(parity), calls, strict=True)
        ]

    def views(self, sequence: int, calls: Calls) -> list[Array | None]:
        """The members' payloads, wherever they lie in the arena."""
        both = zip(self.buffers(sequence), calls, strict=True)
        return [buffer.array(buffer.words[PAYLOAD], call) for buffer, call in both]

    def _missing(self, count: int, word: int) -> list[Need]:
        """The members that have not posted (``word`` 0) or finished (``word`` LINE) so many operations."""
        needs, lane = [], ("group", self.key)
        for position, rank in enumerate(self.ranks):
            slot = self.slots[position] or self._find(position)
            if slot is None:
                value = 0
            else:
                value = slot.done[0] if word else slot.posted[0]
            if value < count:
                needs.append(Need(rank, lane, *self._awaited(rank, slot, word, value)))
        return needs

    def _awaited(self, rank: int, slot: Slot | None, word: int, value: int) -> tuple[int, int]:
        """The place of the word that a member will change, and what that is. Without a slot it is its entry."""
        if slot is None:
            place = self._entry(rank)
            return place, self._endpoint.arena.words(place)[0]
        return slot.offset + word, value

    def _all_have(self, count: int, word: int) -> bool:
        """Whether every other member has posted (``word`` 0) or finished (``word`` LINE) so many operations."""
        slots, in_turn = self.slots, self._in_turn
        for place in range(self._seen, len(in_turn)):
            i = in_turn[place]
            slot = slots[i] or self._find(i)
            if slot is None or (slot.done if word else slot.posted)[0] < count:
                self._seen = place  # look here first the next time
                return False
        return True

    def wake_if_last(self, count: int, word: int, seen: int = 0) -> None:
        """Wake the others if every member has posted (``word`` 0) or finished (``word`` LINE) so many operations.

        None of them can go on before.  Of two that come last at the same moment, at least one sees both.  The first
        ``seen`` of the others, in turn, are known to have.
        """
        signals, slots = self._endpoint.signals, self.slots
        signals.fence()
        for i in self._in_turn[seen:] if seen else self._in_turn:
            slot = slots[i] or self._find(i)
            if slot is None or (slot.done if word else slot.posted)[0] < count:
                return
        signals.rouse(self.others)

    def _find(self, position: int) -> Slot | None:
        entry = self._endpoint.arena.words(self._entry(self.ranks[position]), 2)
        if entry[0] != self._listed:
            return None
        self._endpoint.signals.fence()
        slot = self.slots[position] = Slot(self._endpoint, entry[1])
        return slot

    def _entry(self, rank: int) -> int:
        """The place of this group's entry in the directory of a rank: where it is, or where it will be."""
        start = self._endpoint.layout.directory(rank)
        directory = self._endpoint.arena.words(start, 2 * DIRECTORY_ENTRIES)
        for i in range(DIRECTORY_ENTRIES):
            entry = 2 * ((self._listed + i) % DIRECTORY_ENTRIES)
            if directory[entry] in (self._listed, 0):
                return start + 8 * entry
        raise ClusterError(f"a device can belong to at most {DIRECTORY_ENTRIES} different groups in one run")


def group_key(ranks: Ranks) -> int:
    """The number by which a group is known in shared memory: in every process the same, as integers hash alike."""
    return abs(hash(ranks)) or 1
