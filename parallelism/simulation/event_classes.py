"""The events that the devices of an executable would leave, by columns: each class of equal devices once, then by rank.

    templates   for each class of devices the events of one, without what differs between ranks
    by_rank     the events of some ranks: the templates taken as often as there are ranks, with group, sources and peer
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.collectives import CollectiveCall, MemberCall, Moved, kind_of, moved_alike
from parallelism.collectives.direct_traffic import moved
from parallelism.events import Columns, Table
from parallelism.ir import Op
from parallelism.layouts import step_of
from parallelism.mesh import Mesh, split_sizes
from parallelism.resharding.execute import called
from parallelism.simulation.device_events import DTYPE, FIELDS, NAME, Axes, Rows

Ints = npt.NDArray[np.int64]
MOST_SOURCES = 1024
"""Of larger groups it is not told who gives how much, only how much it is."""


class ByRank(NamedTuple):
    """The events of some ranks, one rank after the other."""

    events: Columns
    lengths: list[int]
    """How many each rank has."""
    looks: Ints
    """For each event, its place in `Templates.looks`."""


class Templates:
    """The events of each class of devices, and how the ranks of a mesh are dealt to the classes."""

    def __init__(self, mesh: Mesh, rows: Sequence[Rows], class_of: npt.NDArray[np.int64]) -> None:
        self.mesh, self.rows, self.class_of = mesh, rows, class_of
        self.axes: list[Axes] = sorted({axes for each in rows for _, axes, _, _ in each.collectives})
        """Those along which anybody meets; of each a number from 0."""
        self.groups = [members(mesh, axes) for axes in self.axes]
        self.group_of = np.array([_by_member(groups) for groups in self.groups]).reshape(len(self.axes), mesh.size)
        """``[axes, rank]``: which of the groups the rank is in."""
        self.priced_alike: dict[int, Ints] = {}
        """By axes, what `parallelism.simulation.folding` has found of the groups along them, on one hardware."""
        self.starts = np.cumsum([0, *(len(each.rows) for each in rows)])
        self.looks = Columns.of_rows((each for part in rows for each in part.rows), FIELDS)
        """The events of all classes, one class after the other."""
        self.axes_of = np.full(len(self.looks), -1)
        """Of each, the number of its axes; -1 for what is no collective."""
        self.peer_axis = np.full(len(self.looks), -1)
        """Of a message along an axis: the number of that axis in the mesh; its ``peer`` is a position."""
        for part, start in zip(rows, self.starts.tolist(), strict=False):
            for at, axis, _ in part.along:
                self.peer_axis[start + at] = mesh.axes.index(axis)
        self._calls: list[dict[tuple[Axes, int], Op]] = [
            {(axes, number): op for _, axes, number, op in each.collectives} for each in rows]
        self._uneven: dict[int, dict[int, Moved]] = {}
        self._even: dict[int, Moved] = {}
        self._count()

    def _count(self) -> None:
        """The bytes of each collective: once for the class where all its members move the same, else by group."""
        numbers = {axes: i for i, axes in enumerate(self.axes)}
        sent, received, messages = (
            self.looks.numbers(name).copy() for name in ("bytes_sent", "bytes_received", "messages"))
        met = [self._met(groups) for groups in self.groups]
        for which, (part, start) in enumerate(zip(self.rows, self.starts.tolist(), strict=False)):
            for at, axes, number, op in part.collectives:
                slot, look = numbers[axes], start + at
                self.axes_of[look] = slot
                found = self._alike(op, axes, number, met[slot][which])
                if found is not None:
                    self._even[look] = found
                    if found.even:
                        sent[look], received[look] = found.sent[0], found.received[0]
                        messages[look] = found.messages[0]
                        continue
                    everybody = dict.fromkeys(range(len(self.groups[slot])), found)
                else:
                    everybody = {
                        i: moved(tuple(self._called(self._call(rank, axes, number, op), rank) for rank in group))
                        for i, group in enumerate(self.groups[slot].tolist())
                        if which in self.class_of[group]        # others may call something else, or nothing
                    }
                self._uneven[look] = everybody
        self.looks = self.looks.with_columns(bytes_sent=sent, bytes_received=received, messages=messages)

    def _met(self, groups: Ints) -> list[tuple[int, ...]]:
        """For each class a rank of each class that shares a group with it."""
        if len(self.rows) == 1:
            return [(0,)]
        first = np.unique(self.class_of, return_index=True)[1].tolist()
        patterns = np.unique(np.sort(self.class_of[groups], axis=1), axis=0)
        found: list[set[int]] = [set() for _ in self.rows]
        for classes in (set(row) for row in patterns.tolist()):
            for which in classes:
                found[which] |= classes
        return [tuple(first[other] for other in sorted(classes)) for classes in found]

    def _alike(self, op: Op, axes: Axes, number: int, ranks: Sequence[int]) -> Moved | None:
        """What the members of a group move, if all who may be in it say the same; ``ranks``: one of each class."""
        if op.kind == "relayout":
            return None
        call = self._called(op, 0)
        for rank in ranks if len(ranks) > 1 else ():
            other = self._calls[int(self.class_of[rank])].get((axes, number))
            if other is None or self._called(other, 0) != call:
                return None
        size = prod(self.mesh.shape[axis] for axis in axes)
        return moved_alike(call, size)

    def _call(self, rank: int, axes: Axes, number: int, mine: Op) -> Op:
        other = self._calls[int(self.class_of[rank])].get((axes, number))
        if other is None or other.kind != mine.kind:
            raise ValueError(
                f"collective {number} over {', '.join(axes)} is {mine.kind} to some of a group, and "
                f"{'nothing' if other is None else other.kind} to rank {rank}")
        return other

    def _called(self, op: Op, rank: int) -> MemberCall:
        x, given = op.inputs[0].type, dict(op.attributes)
        if op.kind == "relayout":
            return called(step_of(op, self.mesh), rank, x.dtype)
        shape, axes = tuple(int(n) for n in x.shape), self.mesh.axes_of(op["axes"])
        factors = tuple(self.mesh.shape[axis] for axis in axes)
        dim = given.get("split_dim", given.get("dim", 0))
        sizes = split_sizes(shape[dim], factors) if kind_of(op.kind).cuts else ()
        pairs = tuple(map(tuple, given["pairs"])) if "pairs" in given else None
        return MemberCall(op.kind, x.dtype, shape, dim, sizes=sizes, pairs=pairs)

    def differences(self) -> list[Ints]:
        """What devices of one class move differently, by rank: bytes of the collectives whose pieces are uneven.

        Of an all_reduce they are so by one element at most, which takes nobody any longer: that is no difference.
        """
        found = []
        for look, by_group in self._uneven.items():
            if next(iter(by_group.values())).kind.sums_all:
                continue
            groups = self.groups[self.axes_of[look]]
            for of in ("sent", "received", "messages"):
                by_member = np.zeros(self.mesh.size, np.int64)
                for number, each in by_group.items():
                    by_member[groups[number]] = getattr(each, of)
                found.append(by_member)
        return found

    # -- by rank -------------------------------------------------------------------------------------------------------

    def by_rank(self, ranks: Sequence[int]) -> ByRank:
        """The events of these ranks, one rank after the other."""
        classes = self.class_of[list(ranks)]
        lengths = np.diff(self.starts)[classes]
        spans = [np.arange(self.starts[c], self.starts[c + 1]) for c in classes.tolist()]
        where = np.concatenate([np.zeros(0, np.int64), *spans])
        rank = np.repeat(np.array(ranks, np.int64), lengths)
        serial = np.arange(len(where)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        events = self.looks.take(where).with_columns(rank=rank, serial=serial)
        if (self.peer_axis >= 0).any():
            events = events.with_columns(peer=self.peers(where, rank))
        at = np.flatnonzero(self.axes_of[where] >= 0)
        if len(at):
            events = self._with_groups(events, where, rank, at)
        return ByRank(events, lengths.tolist(), where)

    def peers(self, look: Ints, rank: Ints) -> Ints:
        """The rank that each event's message is for, or from; `ABSENT` for what is no message."""
        peer, axis = self.looks.numbers("peer")[look], self.peer_axis[look]
        extents = np.array([*self.mesh.shape.values()], np.int64)
        strides = np.append(np.cumprod(extents[::-1])[::-1][1:], 1)
        position = rank // strides[axis] % extents[axis]
        return np.where(axis >= 0, rank + (peer - position) * strides[axis], peer)

    def _with_groups(self, events: Columns, where: Ints, rank: Ints, at: Ints) -> Columns:
        slots, look = self.axes_of[where[at]], where[at]
        first = np.cumsum([0, *(len(groups) for groups in self.groups)])
        number = first[slots] + self.group_of[slots, rank[at]]
        different, place = np.unique(number, return_inverse=True)
        group = np.zeros(len(events), np.int32)
        group[at] = place + 1
        told = [self._group(int(n), first) for n in different]
        positions = [{rank: i for i, rank in enumerate(members)} for members in told]
        sources, index = self._sources(look, place, rank[at], told, positions)
        source = np.zeros(len(events), np.int32)
        source[at] = index
        columns: dict[str, Any] = {
            "group": Table((None, *told), group), "sources": Table(((), *sources), source),
            **self._calls_of(len(events), at, look, number - first[slots])}
        uneven = np.isin(look, list(self._uneven)) if self._uneven else np.zeros(len(at), np.bool_)
        if uneven.any():
            sent, received, messages = (
                events.numbers(name).copy() for name in ("bytes_sent", "bytes_received", "messages"))
            for i in np.flatnonzero(uneven).tolist():
                found = self._uneven[int(look[i])][int(number[i] - first[slots[i]])]
                position = positions[place[i]][int(rank[at[i]])]
                sent[at[i]], received[at[i]] = found.sent[position], found.received[position]
                messages[at[i]] = found.messages[position]
            columns |= {"bytes_sent": sent, "bytes_received": received, "messages": messages}
        return events.with_columns(**columns)

    def _calls_of(self, count: int, at: Ints, look: Ints, numbers: Ints) -> dict[str, Table]:
        """The columns that describe the calls, for events of collectives ``at`` their places among ``count``."""
        different, inverse = np.unique(np.stack([look, numbers], axis=1), axis=0, return_inverse=True)
        found = [self.moved(one, number) for one, number in different.tolist()]
        return {
            name: _table(count, at, default, [getattr(each, name) for each in found], inverse.ravel())
            for name, default in (("payload_bytes", None), ("pairs", ()))}

    def _group(self, number: int, first: Ints) -> tuple[int, ...]:
        slot = int(np.searchsorted(first, number, "right")) - 1
        return tuple(self.groups[slot][number - first[slot]].tolist())

    def _sources(
        self, look: Ints, place: Ints, ranks: Ints, told: Sequence[tuple[int, ...]],
        positions: Sequence[dict[int, int]],
    ) -> tuple[list[Any], Ints]:
        """The different lists of who gives what, and for each collective event which is its own, from 1 on; 0 where the
        group is so large that it is not told."""
        key = np.stack([look, place, ranks], axis=1)
        different, inverse = np.unique(key, axis=0, return_inverse=True)
        known: dict[Any, int] = {}
        index = np.zeros(len(different), np.int64)
        made: list[Any] = []
        for i, (one, group, rank) in enumerate(different.tolist()):
            found = self.moved(one, int(self.group_of[self.axes_of[one], rank]))
            if len(told[group]) > MOST_SOURCES:
                continue
            same = id(found), group, rank
            if same not in known:
                made.append(tuple((told[group][q], n) for q, n in found.sources(positions[group][rank])))
                known[same] = len(made)
            index[i] = known[same]
        return made, index[inverse.ravel()]

    def collective(self, look: int, number: int) -> tuple[CollectiveCall, str | None]:
        """The call of a collective event by a group, given by its number along the axes; and its dtype."""
        slot = int(self.axes_of[look])
        group, found = tuple(self.groups[slot][number].tolist()), self.moved(look, number)
        of_class = int(np.searchsorted(self.starts, look, "right")) - 1
        event = self.rows[of_class].rows[look - int(self.starts[of_class])]
        return CollectiveCall(event[NAME], group, found.payload_bytes, pairs=found.pairs), event[DTYPE]

    def moved(self, look: int, number: int) -> Moved:
        """What the members of a group move in a collective."""
        found = self._even.get(look)
        return self._uneven[look][number] if found is None else found


def members(mesh: Mesh, axes: Axes) -> Ints:
    """The groups along axes, ``[group, position]``: `Mesh.groups`, as an array."""
    ranks = np.arange(mesh.size).reshape([*mesh.shape.values()] or [1])
    places = [mesh.axes.index(axis) for axis in axes]
    rest = [i for i in range(len(mesh.axes)) if i not in places]
    return ranks.transpose([*rest, *places] if mesh.axes else [0]).reshape(-1, prod(mesh.shape[axis] for axis in axes))


def _table(count: int, at: Ints, default: Any, values: Sequence[Any], index: Ints) -> Table:
    """A column with ``values[index]`` at some places, and the default elsewhere."""
    place: dict[Any, int] = {default: 0}
    codes = np.array([place.setdefault(value, len(place)) for value in values], np.int32)
    column = np.zeros(count, np.int32)
    column[at] = codes[index]
    return Table(tuple(place), column)


def _by_member(groups: Ints) -> Ints:
    found = np.empty(groups.size, np.int64)
    found[groups.ravel()] = np.repeat(np.arange(len(groups)), groups.shape[1])
    return found


