"""The engine of every replay: lanes of steps, and the time at which each step starts.

Each rank is a lane with a clock that starts at 0.  The role of a step says what it does to the clock of its lane:

    COMPUTE      advances the clock by its cost
    SEND         takes the overhead of a message.  The message arrives after its cost or, on shared links, later
    RECV         lasts until the message has arrived, and the overhead of a message longer
    COLLECTIVE   begins when all members have reached it and the communication stream of its group is free; it ends for
                 all members at once, after its cost or, on shared links, later
    CALL         is a COLLECTIVE that the lane does not wait for; it holds the clock for a share of the cost
    WAIT         lasts until a collective that the lane called is over

Each group has a communication stream of its own, as a communicator of NCCL has in training software: the collectives of
one group follow each other, those of different groups do not wait for each other.

The engine adds and compares costs, and does nothing else with them.  So costs that are integers give times that are
integers, costs that are floats give floats, and every time is the one that follows from the rules by hand.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelism.timeline.fair_sharing import SharedLinks
from parallelism.timeline.matching import CALL, COMPUTE, RECV, SEND, WAIT

if TYPE_CHECKING:
    from parallelism.timeline.crossing import Crossing

_NONE = -1
_LINK, _LANE = 0, 1
"""Kinds of agenda entries.  At equal times transfers leave their links before lanes go on."""


class Program(NamedTuple):
    """The steps of all lanes, lane after lane.

    A collective or a message is known by a number, its *slot*: first those of the collectives, then those of the
    messages.  The fields from ``roles`` to ``overheads`` have an entry for each step.
    """

    lengths: Sequence[int]
    """The number of steps in each lane."""
    roles: Sequence[int]
    slots: Sequence[int]
    posts: Sequence[int]
    """For a RECV with an overhead, the step at which it was posted; itself, unless it is asynchronous."""
    costs: Sequence[Any]
    """That of a message on links has its overhead inside."""
    leads: Sequence[Any]
    """What a message takes before its cost: its overhead, where it uses no links."""
    overheads: Sequence[Any]
    """How long a SEND or a RECV holds its lane."""
    members: Sequence[int]
    """The number of members of each collective."""
    groups: Sequence[int]
    """The number of the group of each collective."""
    messages: int
    """The number of messages."""


class Replay:
    """Runs each lane until a step blocks it, and again when what it waits for has happened.

    As long as nothing shares a link, what a lane waits for depends on the steps only, not on the order in which lanes
    are run; so every order gives the same times, as in a Kahn process network.  After `share` lanes come to messages and
    collectives in the order of their clocks.  Of the collectives of one group whose last members come at one moment,
    those begin first that are first in the programs of the members.

    ``streams``: whether the collectives of a group follow each other.  ``shares``: by lane, the part of the cost of a
    CALL that holds its clock.
    """

    def __init__(self, program: Program, *, streams: bool = False, shares: Sequence[float] = ()) -> None:
        lengths = program.lengths
        self.program, self.streams, self.shares = program, streams, shares
        self.ends = list(accumulate(lengths))
        """By lane: the place after its last step."""
        self.next = [end - length for end, length in zip(self.ends, lengths, strict=True)]
        """By lane: the step to go on with."""
        self.clocks: list[Any] = [0] * len(lengths)
        self.starts: list[Any] = [0] * len(program.roles)
        self.over: list[Any] = [None] * (len(program.members) + program.messages)
        """By slot: when the message arrives, or the collective ends; None as long as that is not known."""
        self.begun: list[Any] = [0] * len(program.members)
        """By collective: when it begins, on links of its own."""
        self.queued = False
        """Whether a collective waited for another one of its group."""
        self._ready = list(range(len(lengths) - 1, -1, -1))
        self._blocked = [_NONE] * len(lengths)  # by lane: the slot that it waits for
        self._lanes: dict[int, list[int]] = {}  # by slot: the lanes that reached the collective or the RECV
        self._free: dict[int, Any] = {}  # by group: when its communication stream is free
        self._now: float = inf  # no lane reaches what is shared before this time
        self._links: SharedLinks | None = None

    def run(self) -> list[int]:
        """Runs all lanes as far as possible; the lanes that are blocked for ever, if there are any."""
        self._advance()
        while self._links is not None and self._goes_on(self._links):
            self._advance()
        return [lane for lane, end in enumerate(self.ends) if self.next[lane] < end]

    def release(self, lanes: Sequence[int]) -> None:
        """Ends the steps that block these lanes where they stand: for the record of a failed run."""
        for lane in lanes:
            self.next[lane] += 1
            self._blocked[lane] = _NONE
            self._ready.append(lane)

    def _advance(self) -> None:
        """Runs each lane that is ready up to the next step that blocks it."""
        _, roles, slots, _, costs, leads, overheads, *_ = self.program
        starts, over, lanes, links = self.starts, self.over, self._lanes, self._links
        ready, following, clocks, ends = self._ready, self.next, self.clocks, self.ends
        while ready:
            lane = ready.pop()
            clock, i = clocks[lane], ends[lane]
            for i in range(following[lane], ends[lane]):
                starts[i] = clock
                role = roles[i]
                if role == COMPUTE:
                    clock += costs[i]
                    continue
                slot = slots[i]
                if role == SEND and links is None:
                    over[slot] = clock + leads[i] + costs[i]
                    clock += overheads[i]
                    if slot in lanes:
                        self._wake(slot)
                    continue
                until = over[slot]
                if until is None or overheads[i]:
                    until = self._until(i, role, lane, clock)
                    if until is None:
                        break
                if until > clock:
                    clock = until
            else:
                i = ends[lane]
            following[lane], clocks[lane] = i, clock

    def _until(self, i: int, role: int, lane: int, clock: Any) -> Any:
        """When the lane goes on after a step that its own clock does not tell; None if that is not known yet."""
        slot = self.program.slots[i]
        end = self.over[slot]
        if role == RECV and end is not None:
            return max(end, self.starts[self.program.posts[i]]) + self.program.overheads[i]
        if role == RECV:
            self._lanes.setdefault(slot, []).append(lane)
        elif role != WAIT and self._blocked[lane] != slot:
            if clock > self._now:
                heappush(self._agenda, (clock, _LANE, lane, 0))
                return None
            if role == SEND:
                return self._send(i, slot, clock)
            end = self._reach(i, slot, lane, clock)
            if role == CALL:
                return clock + self.shares[lane] * self.program.costs[i] if self.shares else clock
        if end is None:
            self._blocked[lane] = slot
        return end

    def _reach(self, i: int, slot: int, lane: int, clock: Any) -> Any:
        """A member reaches a collective; the end of the collective, if it is known then."""
        members = self._lanes.setdefault(slot, [])
        members.append(lane)
        if clock > self.begun[slot]:
            self.begun[slot] = clock
        if len(members) < self.program.members[slot]:
            return None
        if self._links is not None:
            self._complete.append(i)
            return None
        group = self.program.groups[slot]
        # All members call the collectives of a group in one order, so the end of the one before is known.
        free = self._free.get(group, 0)
        if self.streams and free > self.begun[slot]:
            self.begun[slot], self.queued = free, True
        self._free[group] = self.over[slot] = self.begun[slot] + self.program.costs[i]
        self._wake(slot)
        return self.over[slot]

    def _wake(self, slot: int) -> None:
        """A message has arrived, or a collective is over: the lanes that it blocked go on."""
        for lane in self._lanes.pop(slot, ()):
            if self._blocked[lane] == slot:
                self._ready.append(lane)

    # -- shared links --------------------------------------------------------------------------------------------------

    def share(self, crossing: Crossing, first: Sequence[int]) -> None:
        """Goes back to the steps ``first`` of the lanes; from there on transfers share their links.

        What was not over before these steps is found again.
        """
        roles, slots = self.program.roles, self.program.slots
        for lane, (i, end) in enumerate(zip(first, self.ends, strict=True)):
            if i < end:
                self.clocks[lane] = self.starts[i]
            for j in range(i, end):
                if roles[j] not in (COMPUTE, RECV, WAIT):
                    self.over[slots[j]] = None
        self.next = list(first)
        self._blocked = [_NONE] * len(first)
        self._lanes.clear()
        self._ready[:] = range(len(first) - 1, -1, -1)
        self._now = 0.0
        self._crossing = crossing
        self._agenda: list[tuple[float, int, int, int]] = []
        self._complete: list[int] = []  # the last members of collectives that all members reached just now
        self._queues = defaultdict[int, deque[int]](deque)  # by group: such members of all that did not end
        self._links = SharedLinks(crossing.capacity, self._foretell)

    def _goes_on(self, links: SharedLinks) -> bool:
        """Lets time go on until a lane is ready; whether one is."""
        ready, agenda = self._ready, self._agenda
        while not ready:
            is_settled = bool(agenda) and agenda[0][0] <= self._now
            if self._complete and not is_settled:
                self._begin(links)
            elif links.unsettled and not is_settled:
                links.settle(self._now)
            elif agenda:
                self._now, what, number, version = heappop(agenda)
                if what == _LANE:
                    ready.append(number)
                else:
                    self._leave(number, links.end(number, version, self._now), links)
            else:
                return False
        return True

    def _foretell(self, time: float, number: int, version: int) -> None:
        """Notes that a transfer will leave its links at ``time``, unless rates change before."""
        heappush(self._agenda, (time, _LINK, number, version))

    def _send(self, i: int, slot: int, start: Any) -> Any:
        """Puts a message onto its links, if it uses any; when the lane goes on."""
        costs, leads, overhead = self.program.costs, self.program.leads, self.program.overheads[i]
        found = self._crossing.route(i)
        if found is None:
            self.over[slot] = start + leads[i] + costs[i]
            self._wake(slot)
        elif self._links is not None:
            route, lag = found
            self._links.begin(i, route, costs[i], lag + overhead, max(start, self._now))
        return start + overhead

    def _begin(self, links: SharedLinks) -> None:
        """The collectives that all members reached at this moment begin, or wait in the queues of their groups."""
        complete, self._complete = self._complete, []
        for i in sorted(complete, key=self.program.slots.__getitem__):
            queue = self._queues[self.program.groups[self.program.slots[i]]]
            queue.append(i)
            if queue[0] == i:
                self._lead(i, links)

    def _lead(self, i: int, links: SharedLinks) -> None:
        """A collective became the first in the queue of its group: it begins."""
        found, cost = self._crossing.route(i), self.program.costs[i]
        if found is None:
            links.alone(i, self._now + cost)
        else:
            links.begin(i, found[0], cost, 0.0, self._now)

    def _leave(self, i: int, end: float | None, links: SharedLinks) -> None:
        """A message arrives, or a collective is over; ``end`` is None if it has not left its links yet."""
        if end is None:
            return
        slot = self.program.slots[i]
        self.over[slot] = end
        self._wake(slot)
        if self.program.roles[i] == SEND:
            return
        queue = self._queues[self.program.groups[slot]]
        queue.popleft()
        if queue:
            self._lead(queue[0], links)
