"""Which calls of different ranks belong together: collectives by group and number, messages by pair, in order."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Bools, Ints
from vcluster.hangs.records import RankRecord, Records


class Place(NamedTuple):
    """An entry: a rank, and which of its calls."""

    rank: int
    at: int


class Channel(NamedTuple):
    """The messages between two ranks in one direction, in one group with one tag."""

    source: int
    target: int
    group: int
    tag: int


class Members(NamedTuple):
    """How far the members of a group are at one of its collectives."""

    here: dict[int, int]
    """By rank, which of its calls is this one."""
    not_yet: tuple[int, ...]
    """Ranks that have not made it, or have left no dump."""
    past: tuple[int, ...]
    """Ranks that have made a later one; this one is no longer in their ring buffer."""
    unknown: tuple[int, ...]
    """Ranks whose ring buffer does not tell."""


class Matching:
    """Finds the calls that belong to a call."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._places: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        self._members: dict[tuple[int, int], Members] = {}

    def members(self, group: int, sequence: int) -> Members:
        """How far the members of a group are at its collective of this number."""
        if (group, sequence) not in self._members:
            self._members[group, sequence] = self._members_of(group, sequence)
        return self._members[group, sequence]

    def _members_of(self, group: int, sequence: int) -> Members:
        here: dict[int, int] = {}
        others: dict[str, list[int]] = {"not_yet": [], "past": [], "unknown": []}
        for rank in self.records.members(group):
            if (at := self.find(rank, group, sequence)) is not None:
                here[rank] = at
            else:
                others[self._absence(rank, group, sequence)].append(rank)
        return Members(here, *(tuple(ranks) for ranks in others.values()))

    def find(self, rank: int, group: int, sequence: int) -> int | None:
        """Which call of a rank is the collective of this number in a group; None if it is not in its dump."""
        if rank not in self.records.ranks:
            return None
        numbers, places = self.collectives(rank, group)
        at = int(np.searchsorted(numbers, sequence))
        return int(places[at]) if at < len(numbers) and numbers[at] == sequence else None

    def collectives(self, rank: int, group: int) -> tuple[Ints, Ints]:
        """The collectives of a rank in a group: their numbers, ascending, and which of its calls they are."""
        key = rank, group
        if key not in self._places:
            record = self.records.ranks[rank]
            places = np.flatnonzero((record.group == group) & ~record.is_message)
            numbers, first = np.unique(
                record.sequence[places], return_index=True
            )  # coalesced calls share a number
            self._places[key] = numbers, places[first]
        return self._places[key]

    def is_matched(self, place: Place) -> bool | None:
        """Whether the other end of a message has called, too; None if the dumps cannot tell."""
        channel = self.channel(place)
        is_send = self._is_send(place)
        other = channel.target if is_send else channel.source
        if other not in self.records.ranks:
            return False
        mine = self.records.ranks[place.rank]
        its = self.records.ranks[other]
        sent, received = self._sides(channel)
        own, others = (sent, received) if is_send else (received, sent)
        if mine.is_cut or its.is_cut:  # those that have completed belong together, so that the open ones do
            own, others = own & mine.is_open, others & its.is_open
        return int(own[: place.at].sum()) < int(others.sum())

    def channel(self, place: Place) -> Channel:
        record = self.records.ranks[place.rank]
        form = self.records.form(*place)
        group = int(record.group[place.at])
        peer = self.records.peer(place.rank, group, form.peer)
        ends = (place.rank, peer) if form.name == "send" else (peer, place.rank)
        return Channel(*ends, group, int(record.tag[place.at]))

    def _is_send(self, place: Place) -> bool:
        return self.records.form(*place).name == "send"

    def _sides(self, channel: Channel) -> tuple[Bools, Bools]:
        """Which calls of its two ranks send and receive in a channel."""
        ranks = self.records.members(channel.group)
        source, target = self.records.ranks[channel.source], self.records.ranks[channel.target]
        sent = self._selected(source, "send", ranks.index(channel.target), channel)
        return sent, self._selected(target, "recv", ranks.index(channel.source), channel)

    def _selected(self, record: RankRecord, name: str, peer: int, channel: Channel) -> Bools:
        kind, peers = self._of_forms
        call = record.call
        is_one = (kind[call] == name) & (peers[call] == peer)
        selected: Bools = is_one & (record.group == channel.group) & (record.tag == channel.tag)
        return selected

    @cached_property
    def _of_forms(self) -> tuple[npt.NDArray[np.str_], Ints]:
        """Of each form of a call, what it is if it is a message, and its peer."""
        forms = self.records.calls
        names = np.array([form.name if form.is_message else "" for form in forms] or [""])
        return names, np.array([form.peer for form in forms] or [-1], np.int64)

    def _absence(self, rank: int, group: int, sequence: int) -> str:
        record = self.records.ranks.get(rank)
        if record is None:
            return "not_yet"
        numbers, _ = self.collectives(rank, group)
        last = max([record.enqueued.get(group, -1), *numbers[-1:].tolist()])
        if last >= sequence:
            return "past"
        return "unknown" if last < 0 and record.is_cut else "not_yet"
