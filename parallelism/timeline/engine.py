"""The engine of every replay: lanes of events with costs, and the time at which each event starts and ends.

Each rank is a lane with a clock that starts at 0.  An event is known by its place among all events, lane after lane.
Its role (`parallelism.timeline.matching`) says what it does to the clock of its lane:

    COMPUTE      advances the clock by its cost
    SEND         takes the ``overhead`` of a message; after that, the message arrives after its cost or, where links are
                 shared, later
    RECV         lasts until the message with the same key has arrived, and the overhead of a message longer
    COLLECTIVE   begins when all members have reached it and the communication stream of its group is free; it ends for
                 all members at once, after its cost or, where links are shared, later
    WAIT         lasts until the asynchronous operation of the same ``work`` is over
    POINT        takes no time
    OUTSIDE      takes no time, and is no step of the lane

An asynchronous recv or collective (one with a ``work``) lasts as long, but does not hold the clock of its lane; an
asynchronous send holds it for the overhead, and an asynchronous collective for a share of its price.

Each group has a communication stream of its own, as a communicator of NCCL has in training software: the collectives of
one group follow each other, those of different groups do not wait for each other.

The engine adds and compares costs, and does nothing else with them.  So costs that are integers give times that are
integers, costs that are floats give floats, and every time is the one that follows from the rules by hand.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelism.timeline.fair_sharing import Route, SharedLinks
from parallelism.timeline.matching import COLLECTIVE, COMPUTE, OUTSIDE, POINT, RECV, SEND, WAIT

if TYPE_CHECKING:
    from parallelism.hardware import Channel

_NONE = -1
_LINK, _LANE = 0, 1
"""Kinds of agenda entries.  At equal times transfers leave their links before lanes go on."""


class LaneEvents(NamedTuple):
    """The events of all lanes, lane after lane, with one entry for each event in every sequence but ``lengths``."""

    lengths: Sequence[int]
    """The number of events in each lane."""
    roles: Sequence[int]
    keys: Sequence[int]
    """The same number for a send and its recv, and for the members of a collective."""
    sizes: Sequence[int]
    """The number of members of a collective."""
    groups: Sequence[int]
    """The number of the group of a collective."""
    works: Sequence[int | None]
    """The number of an asynchronous operation within its lane, on the operation and on its wait."""
    costs: Sequence[Any]
    overheads: Sequence[Any]
    """How long a send or a recv holds its rank."""
    starts: Any
    """Zeros, of the type of the costs: becomes the start of each event."""
    durations: Any
    """Zeros, of the type of the costs: becomes the duration of each event."""


class Sharing(NamedTuple):
    """The data for transfers that share links (`parallelism.timeline.fair_sharing`)."""

    capacity: Callable[[Channel], float]
    """The part of a link's bandwidth that a channel has."""
    message_route: Callable[[int, int], tuple[Route | None, float]]
    """The links between two ranks, and the seconds that a message takes behind them."""
    message_bytes: Sequence[int]
    ranks: Sequence[int]
    peers: Sequence[int]
    collective_routes: Sequence[Route | None]
    collective_route: Sequence[int] | None
    """The index in ``collective_routes`` of each event; None if no collective uses links."""


class Replay:
    """Runs each lane until an event blocks it, and again when what it waits for has happened.

    If nothing is shared, what a lane waits for depends on the events only, not on the order in which lanes are run; so
    every order gives the same times, as in a Kahn process network.  If lanes share a communication stream or a link
    (``ordered``), they reach it in the order of their clocks.  Of the collectives of one group whose last members come
    at one moment, those begin first that are first in the programs of the members.
    """

    def __init__(
        self,
        events: LaneEvents,
        *,
        ordered: bool = False,
        sharing: Sharing | None = None,
        shares: Sequence[float] = (),
    ) -> None:
        lengths = events.lengths
        self.roles, self.keys, self.sizes, self.works = events.roles, events.keys, events.sizes, events.works
        self.groups = events.groups
        self.costs, self.overheads = events.costs, events.overheads
        self.starts, self.durations = events.starts, events.durations
        self.ends = list(accumulate(lengths))  # by lane: the place after its last event
        self.next = list(map(sub, self.ends, lengths))  # by lane: the event to go on with
        self.clock: list[Any] = [0] * len(lengths)
        self.ready = list(range(len(lengths) - 1, -1, -1))
        self.blocked = [_NONE] * len(lengths)  # by lane: the event of its own that has to be over
        self.issued: dict[tuple[int, int], int] = {}  # lane, work -> the event that started it
        self.over: dict[int, Any] = {}  # event of an asynchronous operation -> its end
        self.sent: dict[int, Any] = {}  # message -> its arrival; inf: not known yet
        self.awaited: dict[
            int, list[tuple[int, int]]
        ] = {}  # message -> the recvs that wait for it: lane, event
        self.members: dict[
            int, list[tuple[int, int]]
        ] = {}  # collective -> members that reached it: lane, event
        self.complete: list[tuple[int, list[tuple[int, int]]]] = []  # those that all members reached just now
        self.ordered = ordered
        self.shares = shares
        self.now = 0.0 if ordered else inf  # no lane reaches what is shared before this time
        self.agenda: list[tuple[float, int, int, int]] = []
        self.stream: dict[int, Any] = {}  # by group: when its communication stream is free
        self.links: SharedLinks | None = None
        if sharing is not None:
            self.sharing = sharing
            self.message_routes: dict[tuple[int, int], tuple[Route | None, float]] = {}
            self.queues = defaultdict[int, deque[int]](
                deque
            )  # by group: collectives that all members reached
            self.joined: dict[int, list[tuple[int, int]]] = {}  # such a collective -> its members
            self.links = SharedLinks(sharing.capacity, self.foretell)

    def run(self) -> list[int]:
        """Replays as far as possible; the lanes that are blocked for ever, if there are any."""
        ready, agenda, links, advance = self.ready, self.agenda, self.links, self.advance
        while True:
            if ready:
                advance(ready.pop())
            elif self.complete and not (agenda and agenda[0][0] <= self.now):
                self.begin()
            elif links is not None and links.unsettled and not (agenda and agenda[0][0] <= self.now):
                links.settle(self.now)
            elif agenda:
                self.now, what, number, version = heappop(agenda)
                if what == _LANE:
                    advance(number)
                elif links is not None:
                    end = links.end(number, version, self.now)
                    if end is not None and number in self.joined:
                        self.conclude(number, end)
                    elif end is not None:
                        self.arrive(self.keys[number], end)
            else:
                return [lane for lane, event in enumerate(self.blocked) if event != _NONE]

    def release(self, lanes: Sequence[int]) -> None:
        """Ends the events that block these lanes where they stand: for the record of a failed run."""
        for lane in lanes:
            self.resume(lane, self.clock[lane])

    def foretell(self, time: float, number: int, version: int) -> None:
        """Notes that a transfer will leave its links at ``time``, unless rates change before."""
        heappush(self.agenda, (time, _LINK, number, version))

    def advance(self, lane: int) -> None:
        """Runs the lane up to the next event that blocks it."""
        starts = self.starts
        durations = self.durations
        roles = self.roles
        costs = self.costs
        works = self.works
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
            end: Any
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
                    clock = self.issue(lane, i, work, role, clock, end)
                    continue
            if end is None:
                self.clock[lane], self.next[lane], self.blocked[lane] = clock, i, waited
                return
            if end > clock:
                durations[i] = end - clock
                clock = end
        self.clock[lane], self.next[lane] = clock, self.ends[lane]

    def issue(self, lane: int, i: int, work: int, role: int, clock: Any, end: Any) -> Any:
        """Starts an asynchronous operation that ends at ``end``, if this is known; the lane's clock afterwards."""
        self.issued[lane, work] = i
        if end is not None:
            self.finish(lane, i, end)
        if role == SEND:
            clock += self.overheads[i]
        elif self.shares and role == COLLECTIVE:
            clock += self.shares[lane] * self.costs[i]
        return clock

    def meet(self, lane: int, i: int, role: int, start: Any) -> Any:
        """The end of the operation that starts here; None if it is not known yet."""
        key = self.keys[i]
        if role == COLLECTIVE:
            members = self.members.setdefault(key, [])
            members.append((lane, i))
            if len(members) < self.sizes[i]:
                return None
            del self.members[key]
            if self.ordered:
                self.complete.append((i, members))
                return None
            end = self.costs[i] + max([self.starts[j] for _, j in members])
            for member, j in members[:-1]:
                self.finish(member, j, end)
            return end
        if role == RECV:
            arrival = self.sent.get(key, inf)
            if arrival < inf:
                return max(start, arrival) + self.overheads[i]
            self.awaited.setdefault(key, []).append((lane, i))
            return None
        if key not in self.sent:
            self.sent[key] = inf
            if self.links is None or not self.leave(i, start, self.links):
                self.arrive(key, start + self.overheads[i] + self.costs[i])
        return start + self.overheads[i]

    def leave(self, i: int, start: Any, links: SharedLinks) -> bool:
        """Puts the message of a send onto its shared links; False if it uses none."""
        if not self.sharing.message_bytes[i]:
            return False
        ends = self.sharing.ranks[i], self.sharing.peers[i]
        known = self.message_routes.get(ends)
        if known is None:
            known = self.message_routes[ends] = self.sharing.message_route(*ends)
        route, lag = known
        if route is not None:
            overhead = self.overheads[i]
            links.begin(i, route, self.costs[i] + overhead, lag + overhead, max(start, self.now))
        return route is not None

    def begin(self) -> None:
        """Begins the collectives that all members reached at this moment, or puts them into the queues of groups."""
        complete, self.complete = self.complete, []
        # The first lane of a group has its collectives in the order of its program.
        complete.sort(key=lambda reached: min(reached[1]))
        for i, members in complete:
            if self.links is not None:
                self.join(i, members)
                continue
            group = self.groups[i]
            reached = max([self.starts[j] for _, j in members])
            end = self.stream[group] = max(reached, self.stream.get(group, 0)) + self.costs[i]
            for member, j in members:
                self.finish(member, j, end)

    def join(self, i: int, members: list[tuple[int, int]]) -> None:
        """All members reached a collective: it begins when it is the first in the queue of its group."""
        self.joined[i] = members
        queue = self.queues[self.groups[i]]
        queue.append(i)
        if queue[0] == i:
            self.lead(i)

    def lead(self, i: int) -> None:
        """A collective became the first in the queue of its group: it begins."""
        assert self.links is not None
        indices = self.sharing.collective_route
        route = None if indices is None else self.sharing.collective_routes[indices[i]]
        if route is None or not self.costs[i]:
            self.links.alone(i, self.now + self.costs[i])
        else:
            self.links.begin(i, route, self.costs[i], 0.0, self.now)

    def conclude(self, i: int, end: float) -> None:
        """A collective is over."""
        for member, j in self.joined.pop(i):
            self.finish(member, j, end)
        queue = self.queues[self.groups[i]]
        queue.popleft()
        if queue:
            self.lead(queue[0])

    def arrive(self, key: int, arrival: Any) -> None:
        """The arrival of a message is known."""
        self.sent[key] = arrival
        for receiver, j in self.awaited.pop(key, ()):
            self.finish(receiver, j, max(arrival, self.starts[j]) + self.overheads[j])

    def finish(self, lane: int, i: int, end: Any) -> None:
        """The operation that event ``i`` of the lane started is over; a lane that it blocked goes on."""
        if self.works[i] is not None:
            start = self.starts[i]
            self.over[i] = end = max(end, start)
            self.durations[i] = end - start
        if self.blocked[lane] == i:
            clock = self.clock[lane]
            self.resume(lane, end if end > clock else clock)

    def resume(self, lane: int, end: Any) -> None:
        """Ends the event that blocks the lane."""
        i = self.next[lane]
        self.durations[i] = end - self.clock[lane]
        self.clock[lane] = end
        self.next[lane] = i + 1
        self.blocked[lane] = _NONE
        self.ready.append(lane)
