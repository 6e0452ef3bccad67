"""The events of all devices, made from the events of one device of each class of devices that run the same program.

Templates           the events of each class, as columns, without the fields that differ between ranks
Templates.looks     these events, one class after the other; a *look* is the place of an event in them
Templates.by_rank   the events of some ranks: those of their classes, with group, sources and peer added
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Ints, distinct
from parallelism.collectives import CollectiveCall, MemberCall, Moved, moved_alike
from parallelism.collectives.call import moved
from parallelism.events import Columns, Table
from parallelism.events.columns import combined
from parallelism.mesh import Mesh
from parallelism.simulation.device_events import Call, DeviceEvents, GroupKey, StepCall

MOST_SOURCES = 1024
"""The most members of a group whose events list their sources. Events of larger groups have only a number of bytes."""
_COUNTED = ("bytes_sent", "bytes_received", "messages")


class ByRank(NamedTuple):
    """The events of some ranks, one rank after the other."""

    events: Columns
    lengths: list[int]
    """The number of events of each rank."""
    looks: Ints
    """The place of each event in `Templates.looks`."""


class Templates:
    """The events of each class of devices; ``class_of`` is the class of each rank of the mesh."""

    def __init__(self, mesh: Mesh, classes: Sequence[DeviceEvents], class_of: Ints) -> None:
        self.mesh, self.classes, self.class_of = mesh, classes, class_of
        self.axes: list[GroupKey] = sorted(
            {each.axes for part in classes for each in part.collectives}, key=lambda key: tuple(map(str, key))
        )
        """The axes of all collectives, or the ranks of groups without axes; each has a number from 0, its slot."""
        self.groups = [members(mesh, axes) for axes in self.axes]
        self.group_of = np.array([_group_of(mesh, axes) for axes in self.axes]).reshape(
            len(self.axes), mesh.size
        )
        """``[slot, rank]``: the number of the group that the rank is in; -1 if it is in none."""
        self.priced_alike: dict[int, Ints] = {}
        """A cache of `parallelism.simulation.folding.priced_alike` by slot, for one hardware."""
        self.starts = np.cumsum([0, *map(len, classes)])
        self.looks = Columns.joined([part.columns for part in classes])
        """The events of all classes, one class after the other."""
        self.axes_of = np.full(len(self.looks), -1)
        """The slot of each event; -1 if it is no collective."""
        self.peer_axis = np.concatenate([np.zeros(0, np.int64), *(part.peer_axis(mesh) for part in classes)])
        """The number of the mesh axis of each message along an axis, whose ``peer`` is a position; else -1."""
        self._calls: list[dict[tuple[GroupKey, int], Call]] = [
            {(each.axes, each.number): each.call for each in part.collectives} for part in classes
        ]
        self._uneven: dict[int, dict[int, Moved]] = {}
        self._even: dict[int, Moved] = {}
        self.first_alike = np.arange(len(self.looks))
        """For each event, the first with the same traffic."""
        self._count()

    def _count(self) -> None:
        """Finds the bytes of each collective: once for the class if all its members move the same, else by group."""
        numbers = {axes: i for i, axes in enumerate(self.axes)}
        counted = np.array([self.looks.numbers(name) for name in _COUNTED])
        met = [self._met(groups) for groups in self.groups]
        for which, (part, start) in enumerate(zip(self.classes, self.starts.tolist(), strict=False)):
            looks_of: dict[tuple[int, GroupKey], tuple[Call, list[int]]] = {}
            for event, axes, number, call in part.collectives:
                slot, look = numbers[axes], start + event
                ranks = met[slot][which]
                is_own = len(ranks) == 1 and isinstance(call, MemberCall)
                if not is_own and not self._is_alike(call, axes, number, ranks):
                    self.axes_of[look] = slot
                    self._uneven[look] = self._by_group(which, slot, number, call)
                elif (key := (id(call), axes)) in looks_of:
                    looks_of[key][1].append(look)
                else:
                    looks_of[key] = call, [look]
            for (_, axes), (call, looks) in looks_of.items():
                self._count_alike(numbers[axes], call, looks, counted)
        self.looks = self.looks.with_columns(**dict(zip(_COUNTED, counted, strict=True)))

    def _count_alike(self, slot: int, call: Any, looks: list[int], counted: Ints) -> None:
        """Notes the bytes of these looks, at which all members of groups make one call."""
        traffic = moved_alike(call, self.groups[slot].shape[1])
        self.axes_of[looks], self.first_alike[looks] = slot, looks[0]
        self._even.update(dict.fromkeys(looks, traffic))
        if traffic.even:
            counted[:, looks] = [[traffic.sent[0]], [traffic.received[0]], [traffic.messages[0]]]
        else:
            by_group = dict.fromkeys(range(len(self.groups[slot])), traffic)
            self._uneven.update(dict.fromkeys(looks, by_group))

    def _by_group(self, which: int, slot: int, number: int, call: Call) -> dict[int, Moved]:
        """The traffic of each group in which some members, of this class, make a call; others may call something else, or
        nothing."""
        own = np.flatnonzero((self.class_of[self.groups[slot]] == which).any(axis=1))
        traffic = self._moved_by(self.groups[slot][own], self.axes[slot], number, call)
        return dict(zip(own.tolist(), traffic, strict=True))

    def _met(self, groups: Ints) -> list[tuple[int, ...]]:
        """For each class, the first rank of every class that has members in a group with it, itself included."""
        if len(self.classes) == 1:
            return [(0,)]
        first = np.unique(self.class_of, return_index=True)[1].tolist()
        patterns = distinct(np.sort(self.class_of[groups], axis=1), axis=0)
        met: list[set[int]] = [set() for _ in self.classes]
        for classes in (set(row) for row in patterns.tolist()):
            for which in classes:
                met[which] |= classes
        return [tuple(first[other] for other in sorted(classes)) for classes in met]

    def _is_alike(self, call: Call, axes: GroupKey, number: int, ranks: Sequence[int]) -> bool:
        """Whether all members of a group make this call, and move what it says; ``ranks``: one of each class."""
        if isinstance(call, StepCall):
            return False
        if len(ranks) < 2:
            return True
        for rank in ranks:
            other = self._calls[int(self.class_of[rank])].get((axes, number))
            if other is not call and other != call:
                return False
        return True

    def _moved_by(self, groups: Ints, axes: GroupKey, number: int, mine: Call) -> list[Moved]:
        """The traffic of each group, in which some members make the call ``mine``."""
        classes = self.class_of[groups]
        calls: dict[int, list[tuple[MemberCall, ...]]] = {}
        for which in distinct(classes).tolist():
            other = self._calls[which].get((axes, number))
            if other is None or (other.kind, type(other)) != (mine.kind, type(mine)):
                raise ValueError(
                    f"collective {number} over {', '.join(map(str, axes))} is {mine.kind} to some of a group, and "
                    f"{'nothing' if other is None else other.kind} to rank {groups[classes == which][0]}"
                )
            calls[which] = (
                [(other,) * groups.shape[1]] * len(groups)
                if isinstance(other, MemberCall)
                else other.of_groups(groups)
            )
        if len(calls) == 1:
            (each,) = calls.values()
        else:
            each = [
                tuple(calls[which][i][place] for place, which in enumerate(row))
                for i, row in enumerate(classes.tolist())
            ]
        found: dict[int, Moved] = {}  # many groups call the same
        return [found[id(of)] if id(of) in found else found.setdefault(id(of), moved(of)) for of in each]

    def differences(self) -> list[Ints]:
        """The bytes and messages that differ between devices of one class, by rank: of collectives with uneven pieces.

        The pieces of an all_reduce differ by one element at most, which has no price, so they are left out.
        """
        differences = []
        for look, by_group in self._uneven.items():
            if next(iter(by_group.values())).kind.sums_all:
                continue
            by_member = np.zeros((3, self.mesh.size), np.int64)
            for number, each in by_group.items():
                by_member[:, self.groups[self.axes_of[look]][number]] = (
                    each.sent,
                    each.received,
                    each.messages,
                )
            differences += list(by_member)
        return differences

    # -- by rank -------------------------------------------------------------------------------------------------------

    def by_rank(self, ranks: Sequence[int]) -> ByRank:
        """The events of these ranks, one rank after the other."""
        classes = self.class_of[list(ranks)]
        lengths = np.diff(self.starts)[classes]
        where = np.concatenate(
            [
                np.zeros(0, np.int64),
                *(np.arange(self.starts[c], self.starts[c + 1]) for c in classes.tolist()),
            ]
        )
        rank = np.repeat(np.array(ranks, np.int64), lengths)
        events = self.looks.take(where).with_columns(
            rank=rank, serial=np.arange(len(where)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        )
        if (self.peer_axis >= 0).any():
            events = events.with_columns(peer=self.peers(where, rank))
        at = np.flatnonzero(self.axes_of[where] >= 0)
        if len(at):
            events = self._with_groups(events, where, rank, at)
        return ByRank(events, lengths.tolist(), where)

    def peers(self, look: Ints, rank: Ints) -> Ints:
        """The other rank of each message; `ABSENT` for an event that is no message."""
        peer, axis = self.looks.numbers("peer")[look], self.peer_axis[look]
        extents = np.array([*self.mesh.shape.values()], np.int64)
        strides = np.append(np.cumprod(extents[::-1])[::-1][1:], 1)
        return np.where(
            axis >= 0, rank + (peer - rank // strides[axis] % extents[axis]) * strides[axis], peer
        )

    def _with_groups(self, events: Columns, where: Ints, rank: Ints, at: Ints) -> Columns:
        slots, look = self.axes_of[where[at]], where[at]
        first = np.cumsum([0, *(len(groups) for groups in self.groups)])
        number = first[slots] + self.group_of[slots, rank[at]]
        different, place = np.unique(number, return_inverse=True)
        group = np.zeros(len(events), np.int32)
        group[at] = place + 1
        slot_of = np.searchsorted(first, different, "right") - 1
        ranks = [
            tuple(self.groups[slot][i].tolist())
            for slot, i in zip(slot_of.tolist(), (different - first[slot_of]).tolist(), strict=True)
        ]
        positions = [{rank: i for i, rank in enumerate(members)} for members in ranks]
        sources, index = self._sources(look, place, rank[at], ranks, positions)
        source = np.zeros(len(events), np.int32)
        source[at] = index
        columns: dict[str, Any] = {
            "group": Table((None, *ranks), group),
            "sources": Table(((), *sources), source),
            **self._calls_of(len(events), at, look, number - first[slots]),
        }
        uneven = np.isin(look, list(self._uneven)) if self._uneven else np.zeros(len(at), np.bool_)
        if uneven.any():
            counted = np.array([events.numbers(name) for name in _COUNTED])
            for i in np.flatnonzero(uneven).tolist():
                traffic = self._uneven[int(look[i])][int(number[i] - first[slots[i]])]
                p = positions[place[i]][int(rank[at[i]])]
                counted[:, at[i]] = traffic.sent[p], traffic.received[p], traffic.messages[p]
            columns |= dict(zip(_COUNTED, counted, strict=True))
        return events.with_columns(**columns)

    def _calls_of(self, count: int, at: Ints, look: Ints, numbers: Ints) -> dict[str, Table]:
        """The columns that describe the calls, for events of collectives ``at`` their places among ``count``."""
        first, inverse = first_of(self.first_alike[look], numbers)
        traffic = list(map(self.moved, look[first].tolist(), numbers[first].tolist()))
        payloads, pairs = [each.payload_bytes for each in traffic], [each.pairs for each in traffic]
        return {
            "payload_bytes": _table(count, at, None, payloads, inverse),
            "pairs": _table(count, at, (), pairs, inverse),
        }

    def _sources(
        self,
        look: Ints,
        place: Ints,
        ranks: Ints,
        groups: Sequence[tuple[int, ...]],
        positions: Sequence[dict[int, int]],
    ) -> tuple[list[Any], Ints]:
        """The different lists of sources, and the number of each collective event's list, from 1 on; 0 if its group has
        more than `MOST_SOURCES` members."""
        first, inverse = first_of(self.first_alike[look], place, ranks)
        known: dict[tuple[Moved, int, int], int] = {}
        named: dict[tuple[Moved, int], Moved] = {}
        index = np.zeros(len(first), np.int64)
        sources: list[Any] = []
        different = np.stack([look[first], place[first], ranks[first]], axis=1)
        for i, (one, group, rank) in enumerate(different.tolist()):
            members = groups[group]
            if len(members) > MOST_SOURCES:
                continue
            traffic = self.moved(one, int(self.group_of[self.axes_of[one], rank]))
            same = traffic, group, rank
            if same not in known:
                if same[:2] not in named:
                    named[same[:2]] = traffic.named(members)
                sources.append(named[same[:2]].sources(positions[group][rank]))
                known[same] = len(sources)
            index[i] = known[same]
        return sources, index[inverse]

    def collective(self, look: int, number: int) -> tuple[CollectiveCall, str | None]:
        """The call of a collective event by the group of this number along its axes; and its dtype."""
        group, traffic = (
            tuple(self.groups[int(self.axes_of[look])][number].tolist()),
            self.moved(look, number),
        )
        event = self.looks.only("name", "dtype", "algorithm").take(slice(look, look + 1))
        (name,), (algorithm,) = event.values("name"), event.values("algorithm")
        call = CollectiveCall(name, group, traffic.payload_bytes, algorithm, pairs=traffic.pairs)
        return call, event.values("dtype")[0]

    def groups_with(self, look: int) -> list[int]:
        """The numbers of the groups in which some member has this collective event; others may call nothing."""
        which = int(np.searchsorted(self.starts, look, "right")) - 1
        members_of = self.class_of[self.groups[int(self.axes_of[look])]]
        return [int(number) for number in np.flatnonzero((members_of == which).any(axis=1))]

    @cached_property
    def algorithms(self) -> list[str | None]:
        """By event, the algorithm that it names."""
        return list(self.looks.values("algorithm"))

    def traffic_id(self, look: int) -> int:
        """Equal for collective events of a class which move the same in each group."""
        traffic = self._even.get(look)
        return id(self._uneven[look] if traffic is None else traffic)

    def moved(self, look: int, number: int) -> Moved:
        """The traffic of a collective event in the group of this number along its axes."""
        traffic = self._even.get(look)
        return self._uneven[look][number] if traffic is None else traffic


@lru_cache(maxsize=64)
def members(mesh: Mesh, axes: GroupKey) -> Ints:
    """The groups along axes, ``[group, position]``: `Mesh.groups`, as an array; or one group, of the given ranks."""
    names = [axis for axis in axes if isinstance(axis, str)]
    if len(names) < len(axes):
        return np.array([axes])
    ranks = np.arange(mesh.size).reshape([*mesh.shape.values()] or [1])
    places = [mesh.axes.index(axis) for axis in names]
    rest = [i for i in range(len(mesh.axes)) if i not in places]
    return ranks.transpose([*rest, *places] if mesh.axes else [0]).reshape(
        -1, prod(mesh.shape[axis] for axis in names)
    )


@lru_cache(maxsize=64)
def _group_of(mesh: Mesh, axes: GroupKey) -> Ints:
    """The number of the group along axes that each rank is in; -1 if it is in none."""
    groups = members(mesh, axes)
    if groups.size < mesh.size:
        own = np.full(mesh.size, -1)
        own[groups[0]] = 0
        return own
    return np.asarray(np.argsort(groups, axis=None) // groups.shape[1], np.int64)


def first_of(*codes: Ints) -> tuple[Ints, Ints]:
    """The first place of each combination of numbers, and by place the number of its combination."""
    _, first, inverse = np.unique(combined(*codes), return_index=True, return_inverse=True)
    return first, inverse.ravel()


def _table(count: int, at: Ints, default: Any, values: Sequence[Any], index: Ints) -> Table:
    """A column with ``values[index]`` at some places, and the default elsewhere."""
    place: dict[Any, int] = {default: 0}
    codes = np.array([place.setdefault(value, len(place)) for value in values], np.int32)
    column = np.zeros(count, np.int32)
    column[at] = codes[index]
    return Table(tuple(place), column)
