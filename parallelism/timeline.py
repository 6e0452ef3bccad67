"""THE clock: replays what devices did, and so tells when each thing would have happened.

Eight processes on two cores cannot show a cluster's timeline by the wall clock.  So a device records what it
did, and this module goes through the records afterwards, with a clock for each rank that starts at 0.  In its
simplest form compute takes the CPU seconds of the device's thread and messages are free; what remains is who
waits for whom:

    compute      advances the clock by ``cpu_seconds``
    send         takes no time; its message is there from the sender's clock on
    recv         lasts until the send of that message
    collective   lasts until the last member of the group has come to it; it ends for all at once
    wait         lasts until the asynchronous operation of the same ``work`` is over
    the rest     takes no time: host traffic, memory

An asynchronous recv or collective lasts just as long but does not hold the clock of its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from parallelism.columns import Columns, Table, codes, combined, whole_nanoseconds
from parallelism.event import HOST, Event

_NONE = -1
_POINT, _COMPUTE, _WAIT, _COLLECTIVE, _SEND, _RECV, _OUTSIDE = range(7)
"""What an event is to the clock: a point takes no time, what lies outside of it (children, memory) is only placed."""


def replay(events_by_rank: Sequence[Sequence[Event]]) -> tuple[Event, ...]:
    """The same events with ``start_seconds`` and ``duration_seconds`` filled in, rank after rank.

    ``events_by_rank`` holds each rank's events in the order of its record (`Trace.by_rank`).  A send and a recv
    belong together by source, destination, tag and sequence, the events of a collective by group and
    sequence.  What happens inside a collective (``parent``) is placed at the collective's start and takes no time.

    The result does not depend on the order in which ranks are looked at, and the time taken grows with the number of
    events only.  The record of a failed run has events without partners, or even a circle of waits: such an
    event ends where it starts, and its rank goes on.
    """
    columns = Columns.of(chain.from_iterable(events_by_rank))
    return tuple(replay_columns(columns, [len(events) for events in events_by_rank]).events())


def replay_columns(columns: Columns, lengths: Sequence[int]) -> Columns:
    """`replay` of events by columns: rank after rank, so many of each."""
    return _Replay(columns, lengths).columns()


class _Replay:
    """Runs each rank until something holds it, and again when what it waits for has come.

    Nothing a rank waits for depends on when others are looked at, only on their records: so every order of
    looking gives the same times, as in a network of Kahn's processes.

    An event is known by its place among all of them.  Times are counted in whole nanoseconds if all are such.
    The arrays are used through their memoryviews, which give Python's numbers, and take a quarter of a list's memory.
    """

    def __init__(self, events: Columns, lengths: Sequence[int]) -> None:
        self.events = events
        ends = np.cumsum(lengths, dtype=np.int64)
        self.ends: list[int] = ends.tolist()
        self.next: list[int] = (ends - lengths).tolist()    # by lane: the event to go on with
        self.roles, self.keys, self.sizes = _roles(events)
        self.works = events.values("work")
        seconds = events.numbers("cpu_seconds").astype(np.float64)
        whole = whole_nanoseconds(seconds)
        if whole is not None and int(np.abs(whole).max()) * len(events) >= 2**62:
            whole = None
        self.unit = 1.0 if whole is None else 1e9
        costs = seconds if whole is None else whole
        views: list[Any] = [costs.data, np.zeros_like(costs).data, np.zeros_like(costs).data]
        self.costs, self.starts, self.durations = views
        self.clock: list[float] = [0] * len(lengths)
        self.ready = list(range(len(lengths)))
        self.blocked = [_NONE] * len(lengths)               # by lane: the event of its own that has to be over
        self.issued: dict[tuple[int, int], int] = {}        # lane, work -> the event that started it
        self.over: dict[int, float] = {}                    # event of an asynchronous operation -> its end
        self.sent: dict[int, float] = {}                    # message -> when
        self.awaited: dict[int, list[tuple[int, int]]] = {}     # message -> who waits for it: lane, event
        self.come: dict[int, list[tuple[int, int]]] = {}        # collective -> who has come: lane, event

    def columns(self) -> Columns:
        while self.ready:
            self.advance(self.ready.pop())
            if not self.ready:      # in a broken record some are left, and wait for each other
                for lane, waited in enumerate(self.blocked):
                    if waited != _NONE:
                        self.resume(lane, self.clock[lane])
        starts, durations = (np.asarray(times) / self.unit for times in (self.starts, self.durations))
        if self.events.present("parent").any():
            starts = self.with_children_placed(starts)
        return self.events.with_columns(
            start_seconds=starts if starts.any() else None, duration_seconds=durations if durations.any() else None)

    def advance(self, lane: int) -> None:
        """Goes on with the lane, up to the next event that holds it."""
        starts, durations, roles, costs, works = self.starts, self.durations, self.roles, self.costs, self.works
        clock = self.clock[lane]
        for i in range(self.next[lane], self.ends[lane]):
            role = roles[i]
            starts[i] = clock
            if role == _COMPUTE:
                durations[i] = cost = costs[i]
                clock += cost
                continue
            if role == _OUTSIDE:
                continue
            work = works[i]
            waited = i
            end: float | None
            if role == _WAIT:
                waited = _NONE if work is None else self.issued.get((lane, work), _NONE)
                end = clock if waited == _NONE else self.over.get(waited)
            else:
                end = clock if role == _POINT else self.meet(lane, i, role, clock)
                if work is not None:
                    self.issued[lane, work] = i
                    if end is not None:
                        self.finish(lane, i, end)
                    continue
            if end is None:
                self.clock[lane], self.next[lane], self.blocked[lane] = clock, i, waited
                return
            if end > clock:
                durations[i] = end - clock
                clock = end
        self.clock[lane], self.next[lane] = clock, self.ends[lane]

    def meet(self, lane: int, i: int, role: int, start: float) -> float | None:
        """When the operation that starts here is over; None if that is up to others who have not come yet."""
        key = self.keys[i]
        if role == _COLLECTIVE:
            members = self.come.get(key)
            if members is None:
                self.come[key] = [(lane, i)]
                return None
            if len(members) + 1 < self.sizes[i]:
                members.append((lane, i))
                return None
            end = start
            for _, j in members:
                if self.starts[j] > end:
                    end = self.starts[j]
            for member, j in members:
                self.finish(member, j, end)
            del self.come[key]
            return end
        if role == _RECV:
            if key in self.sent:
                return max(start, self.sent[key])
            self.awaited.setdefault(key, []).append((lane, i))
            return None
        if self.sent.setdefault(key, start) == start:
            for receiver, j in self.awaited.pop(key, ()):
                self.finish(receiver, j, start)
        return start

    def finish(self, lane: int, i: int, end: float) -> None:
        """The operation that event ``i`` of the lane started is over; a lane that it held goes on."""
        if self.works[i] is not None:
            start = self.starts[i]
            self.over[i] = end = max(end, start)
            self.durations[i] = end - start
        if self.blocked[lane] == i:
            clock = self.clock[lane]
            self.resume(lane, end if end > clock else clock)

    def resume(self, lane: int, end: float) -> None:
        """Ends the event that holds the lane."""
        i = self.next[lane]
        self.durations[i] = end - self.clock[lane]
        self.clock[lane] = end
        self.next[lane] = i + 1
        self.blocked[lane] = _NONE
        self.ready.append(lane)

    def with_children_placed(self, starts: Any) -> Any:
        """Puts what happened inside an operation at its start, whichever of the two was recorded first."""
        serials, parents = self.events.values("serial"), self.events.values("parent")
        begin = 0
        for end in self.ends:
            place = {serials[i]: i for i in range(begin, end)}
            placed: set[int] = set()
            for i in range(begin, end):
                path = []
                at: int | None = i
                while at is not None and at not in placed and parents[at] is not None:
                    placed.add(at)
                    path.append(at)
                    at = place.get(parents[at])
                for child in path:
                    starts[child] = starts[path[-1] if at is None else at]
            begin = end
        return starts


def _roles(events: Columns) -> tuple[memoryview, memoryview, memoryview]:
    """What each event is to the clock, what those that belong together have in common, and how many they are.

    An operation that cannot meet its partners, because there are none in the records, is a point.
    """
    outermost = ~events.present("parent")
    roles = np.full(len(events), _OUTSIDE, np.uint8)
    roles[outermost & ~events.isin("kind", {"memory"})] = _POINT
    for kind, role in (("compute", _COMPUTE), ("wait", _WAIT)):
        roles[outermost & events.isin("kind", {kind})] = role
    keys, sizes = np.zeros(len(events), np.int64), np.zeros(len(events), np.int64)

    at = np.flatnonzero(outermost & events.isin("kind", {"collective"}))
    collectives = events.only("group", "sequence").take(at)
    keys[at] = key = collectives.key("group", "sequence")
    group = collectives["group"]
    assert isinstance(group, Table)
    sizes[at] = size = np.array([-1 if ranks is None else len(ranks) for ranks in group.values], np.int64)[group.index]
    _, place, came = np.unique(key, return_inverse=True, return_counts=True)
    roles[at[(came[place] == size) & (size > 1)]] = _COLLECTIVE

    between = events.present("peer") & ~events.isin("peer", {HOST})
    at = np.flatnonzero(outermost & between & events.isin("kind", {"send", "recv"}))
    messages = events.only("kind", "rank", "peer", "tag", "sequence").take(at)
    sends = messages.isin("kind", {"send"})
    rank, peer = messages.numbers("rank"), messages.numbers("peer")
    keys[at] = key = combined(
        codes(np.where(sends, rank, peer)), codes(np.where(sends, peer, rank)), messages.key("tag"),
        messages.key("sequence"))
    roles[at[sends]] = _SEND
    roles[at[~sends & np.isin(key, key[sends])]] = _RECV
    return roles.data, keys.data, sizes.data
