"""THE clock: replays what devices did, and so tells when each thing would have happened.

Eight processes on two cores cannot show a cluster's timeline by the wall clock.  So a device records what it
did, and this module goes through the records afterwards, with a clock for each rank that starts at 0:

    compute      advances the clock by its price
    send         takes no time: a copy is on its way, and arrives after what its path takes
    recv         lasts until the message has arrived
    collective   begins when the last member of the group has come to it and the communication streams of all members
                 are free, and ends for all at once, after its price or, where links are shared, later
    wait         lasts until the asynchronous operation of the same ``work`` is over
    the rest     takes no time: host traffic, memory

An asynchronous recv or collective lasts just as long but does not hold the clock of its rank: a rank has a stream for
compute and one for communication.  The collectives of a rank follow each other on the latter, in the order in which
their last members come.  Messages and collectives under way at the same time share their links
(`parallelism.timeline.fair_sharing`), or, where that is switched off, have each the whole of them.  What things cost is
said by `parallelism.timeline.pricing`; without it compute takes the CPU seconds of the device's thread and all else is
free: what remains is who waits for whom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parallelism.events import Columns, Event, whole_nanoseconds
from parallelism.timeline.fair_sharing import SharedLinks, Way
from parallelism.timeline.matching import (
    COLLECTIVE,
    COMPUTE,
    OUTSIDE,
    POINT,
    RECV,
    WAIT,
    Roles,
    roles_of,
    with_children_placed,
)

if TYPE_CHECKING:
    from parallelism.timeline.pricing import Prices, Pricing

_NONE = -1
_LINK, _LANE = 0, 1
"""What comes up: first what leaves its links at a time, then who goes on."""


def replay(events_by_rank: Sequence[Sequence[Event]], pricing: Pricing | None = None) -> tuple[Event, ...]:
    """The same events with ``start_seconds`` and ``duration_seconds`` filled in, rank after rank.

    ``events_by_rank`` holds each rank's events in the order of its record (`Trace.by_rank`).  A send and a recv
    belong together by source, destination, tag and sequence, the events of a collective by group and
    sequence.  What happens inside a collective (``parent``) is placed at the collective's start and takes no time.

    The result is the same to the last bit whenever it is made, and the time taken grows with the number of
    events only.  The record of a failed run has events without partners, or even a circle of waits: such an
    event ends where it starts, and its rank goes on.
    """
    columns = Columns.of(chain.from_iterable(events_by_rank))
    return tuple(replay_columns(columns, [len(events) for events in events_by_rank], pricing).events())


def replay_columns(
    columns: Columns, lengths: Sequence[int], pricing: Pricing | None = None, told: Told | None = None
) -> Columns:
    """`replay` of events by columns: rank after rank, so many of each; ``told``: what is known of them already."""
    return _Replay(columns, lengths, pricing, told).columns()


class Told(NamedTuple):
    """What the events of a record are to the clock, and what each costs by itself, found elsewhere."""

    roles: Roles
    prices: Prices


class _Replay:
    """Runs each rank until something holds it, and again when what it waits for has come.

    Where nothing is shared, nothing a rank waits for depends on when others are looked at, only on their records: so
    every order of looking gives the same times, as in a network of Kahn's processes.  Where a stream or a link is,
    ranks come to it in the order of their clocks, of two at the same time the lower lane first.

    An event is known by its place among all of them.  Times without a hardware are counted in whole nanoseconds if all
    are such.  The arrays are used through their memoryviews, which give Python's numbers, and take a quarter of a
    list's memory.
    """

    def __init__(
        self, events: Columns, lengths: Sequence[int], pricing: Pricing | None, told: Told | None = None
    ) -> None:
        self.events = events
        ends = np.cumsum(lengths, dtype=np.int64)
        self.ends: list[int] = ends.tolist()
        self.next: list[int] = (ends - lengths).tolist()    # by lane: the event to go on with
        found = roles_of(events) if told is None else told.roles
        self.roles, self.keys, self.sizes = (part.data for part in found)
        self.works = events.values("work")
        self.algorithms = None
        if told is not None:
            prices = told.prices
            seconds, self.algorithms = prices.seconds, prices.algorithms
        elif pricing is None:
            seconds = np.where(found.roles == COMPUTE, events.numbers("cpu_seconds"), 0.0).astype(np.float64)
        else:
            prices = pricing.prices(events, found)
            seconds, self.algorithms = prices.seconds, prices.algorithms
        self.ordered = pricing is not None and pricing.hardware is not None
        whole = None if self.ordered else whole_nanoseconds(seconds)
        if whole is not None and int(np.abs(whole).max()) * len(events) >= 2**62:
            whole = None
        self.unit = 1.0 if whole is None else 1e9
        costs = seconds if whole is None else whole
        views: list[Any] = [costs.data, np.zeros_like(costs).data, np.zeros_like(costs).data]
        self.costs, self.starts, self.durations = views
        self.clock: list[float] = [0] * len(lengths)
        self.ready = list(range(len(lengths) - 1, -1, -1))
        self.blocked = [_NONE] * len(lengths)               # by lane: the event of its own that has to be over
        self.issued: dict[tuple[int, int], int] = {}        # lane, work -> the event that started it
        self.over: dict[int, float] = {}                    # event of an asynchronous operation -> its end
        self.sent: dict[int, float] = {}                    # message -> when it arrives; inf: not known yet
        self.awaited: dict[int, list[tuple[int, int]]] = {}     # message -> who waits for it: lane, event
        self.come: dict[int, list[tuple[int, int]]] = {}        # collective -> who has come: lane, event
        self.now = 0.0 if self.ordered else inf             # nobody comes before that to what is shared
        self.agenda: list[tuple[float, int, int, int]] = []
        self.stream: list[float] = [0] * len(lengths)       # by lane: when its communication stream is free
        self.links: SharedLinks | None = None
        if pricing is not None and pricing.shares_links:
            self.way_of, self.nbytes = pricing.way, pricing.message_bytes(events).data
            self.ranks, self.peers = (events.numbers(end).data for end in ("rank", "peer"))
            self.message_ways: dict[tuple[int, int], tuple[Way | None, float]] = {}
            self.ways, self.way = prices.ways, None if prices.way is None else prices.way.data
            self.queues: list[deque[int]] = [deque() for _ in lengths]      # by lane: collectives that all have come to
            self.joined: dict[int, list[tuple[int, int]]] = {}              # such a collective -> its members
            self.behind: dict[int, int] = {}                                # ... -> in how many queues it is not first
            self.links = SharedLinks(pricing.capacity, self.foretell)

    def columns(self) -> Columns:
        while True:
            if self.ready:
                self.advance(self.ready.pop())
            elif self.links and self.links.unsettled and not (self.agenda and self.agenda[0][0] <= self.now):
                self.links.settle(self.now)
            elif self.agenda:
                self.now, what, number, version = heappop(self.agenda)
                if what == _LANE:
                    self.advance(number)
                elif self.links is not None:
                    end = self.links.end(number, version, self.now)
                    if end is not None and number in self.joined:
                        self.concludes(number, end)
                    elif end is not None:
                        self.arrives(self.keys[number], end)
            elif not self.released():
                break
        starts, durations = (np.asarray(times) / self.unit for times in (self.starts, self.durations))
        if self.events.present("parent").any():
            starts = with_children_placed(self.events, self.ends, starts)
        return self.events.with_columns(
            start_seconds=starts if starts.any() else None, duration_seconds=durations if durations.any() else None,
            priced_algorithm=self.algorithms)

    def released(self) -> bool:
        """In a broken record some are left, and wait for each other: they go on; whether there were any."""
        waiting = [lane for lane, waited in enumerate(self.blocked) if waited != _NONE]
        for lane in waiting:
            self.resume(lane, self.clock[lane])
        return bool(waiting)

    def foretell(self, time: float, number: int, version: int) -> None:
        heappush(self.agenda, (time, _LINK, number, version))

    def advance(self, lane: int) -> None:
        """Goes on with the lane, up to the next event that holds it."""
        starts, durations, roles, costs, works = self.starts, self.durations, self.roles, self.costs, self.works
        clock, now, links = self.clock[lane], self.now, self.links
        for i in range(self.next[lane], self.ends[lane]):
            role = roles[i]
            starts[i] = clock
            if role == COMPUTE:
                durations[i] = cost = costs[i]
                clock += cost
                continue
            if role == OUTSIDE:
                continue
            work = works[i]
            waited = i
            end: float | None
            if role == WAIT:
                waited = _NONE if work is None else self.issued.get((lane, work), _NONE)
                end = clock if waited == _NONE else self.over.get(waited)
            elif clock > now and (role == COLLECTIVE or (links is not None and role not in (RECV, POINT))):
                self.clock[lane], self.next[lane] = clock, i
                heappush(self.agenda, (clock, _LANE, lane, 0))
                return
            else:
                end = clock if role == POINT else self.meet(lane, i, role, clock)
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
        """When the operation that starts here is over; None if that is not known yet."""
        key = self.keys[i]
        if role == COLLECTIVE:
            members = self.come.setdefault(key, [])
            members.append((lane, i))
            if len(members) < self.sizes[i]:
                return None
            if self.links is not None:
                self.joins(i, self.come.pop(key))
                return None
            begin: float = start
            for member, j in members:
                begin = max(begin, self.starts[j], self.stream[member])
            end: float = begin + self.costs[i]
            if self.ordered:
                for member, _ in members:
                    self.stream[member] = end
            members.pop()
            for member, j in members:
                self.finish(member, j, end)
            del self.come[key]
            return end
        if role == RECV:
            arrival = self.sent.get(key, inf)
            if arrival < inf:
                return max(start, arrival)
            self.awaited.setdefault(key, []).append((lane, i))
            return None
        if key not in self.sent:
            self.sent[key] = inf
            way, lag = None, 0.0
            if self.links is not None and self.nbytes[i]:
                ends = self.ranks[i], self.peers[i]
                if ends not in self.message_ways:
                    self.message_ways[ends] = self.way_of(*ends)
                way, lag = self.message_ways[ends]
            if way is None:
                self.arrives(key, start + self.costs[i])
            elif self.links is not None:
                self.links.begin(i, way, self.costs[i], lag, max(start, self.now))
        return start

    def joins(self, i: int, members: list[tuple[int, int]]) -> None:
        """All have come to a collective: it begins when it is the first in the queues of all members."""
        self.joined[i] = members
        self.behind[i] = len(members)
        for member, _ in members:
            self.queues[member].append(i)
            if self.queues[member][0] == i:
                self.is_first(i)

    def is_first(self, i: int) -> None:
        """In one more queue of its members; in all, a collective begins."""
        self.behind[i] -= 1
        if self.behind[i]:
            return
        assert self.links is not None
        way = None if self.way is None else self.ways[self.way[i]]
        if way is None or not self.costs[i]:
            self.links.alone(i, self.now + self.costs[i])
        else:
            self.links.begin(i, way, self.costs[i], 0.0, self.now)

    def concludes(self, i: int, end: float) -> None:
        """A collective is over."""
        del self.behind[i]
        members = self.joined.pop(i)
        for member, j in members:
            self.queues[member].popleft()
            self.finish(member, j, end)
        for member, _ in members:
            if self.queues[member]:
                self.is_first(self.queues[member][0])

    def arrives(self, key: int, arrival: float) -> None:
        """A message is there, or will be."""
        self.sent[key] = arrival
        for receiver, j in self.awaited.pop(key, ()):
            self.finish(receiver, j, arrival)

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
