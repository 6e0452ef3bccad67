"""The replay of lanes as if no transfer disturbed another: quick, and right up to the first moment at which one does.

A transfer that has its links to itself takes as long as alone.  So all times are found first as if nothing were shared:
a lane runs on until it needs a message or a collective that is not there yet, in any order of the lanes, as in a Kahn
process network.  The first moment at which two transfers are on one link at the same time is found afterwards.  Up to
it, the times are those that `parallelism.timeline.engine` finds, to the last bit.

Only steps that do something are run one by one; what follows from their times is computed for all events at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Bools, distinct
from parallelism.events import ABSENT
from parallelism.events.columns import codes, combined
from parallelism.timeline.engine import Replay, Sharing
from parallelism.timeline.fair_sharing import Route
from parallelism.timeline.matching import COLLECTIVE, COMPUTE, RECV, SEND, WAIT, Places

Numbers = npt.NDArray[Any]

_PASS, _SEND, _TAKE, _MEET, _CALL, _JOIN = range(6)
"""What a step does: takes its cost; sends; takes a message; is a member of a collective, and waits for its end or goes
on; waits for a collective that it called."""


class Steps(NamedTuple):
    """The steps of all lanes, lane after lane; the fields are those of `parallelism.timeline.engine.LaneEvents`."""

    lengths: Places
    roles: npt.NDArray[np.uint8]
    keys: Places
    sizes: Places
    groups: Places
    works: Places
    """`ABSENT` for operations that are not asynchronous."""
    costs: Numbers
    overheads: Numbers
    """How long a send or a recv holds its rank; 0 for the others."""


class Times(NamedTuple):
    """When the steps start and how long they last, and the clock of each lane after its last step."""

    starts: Numbers
    durations: Numbers
    clocks: Numbers


class Undisturbed(NamedTuple):
    """The times of steps if no transfer disturbs another."""

    times: Times
    over: Numbers
    """By step: when what it started is over; for a send, when the message arrives."""
    operation: Places
    """By step: the message or collective that a wait waits for; -1 for other steps, and if it is over at once."""
    disturbed: float
    """The first moment at which a transfer disturbs another; infinite if none does."""


def undisturbed(
    steps: Steps, *, ordered: bool, sharing: Sharing | None, shares: Sequence[float] = ()
) -> Undisturbed | None:
    """The times of the steps; None if a lane is blocked for ever, or if the times may be others from the beginning.

    The arguments are those of `parallelism.timeline.engine.Replay`.
    """
    matched = _Matched.of(steps)
    if matched is None:
        return None
    crossing = _Crossing.of(sharing, matched.sends)
    run, program = _program(steps, matched, crossing)
    found = _Run(program, len(matched.sends), ordered=ordered, shares=shares)
    if not found.is_complete():
        return None
    dtype = steps.costs.dtype
    clocks, begun = np.array(found.clocks, dtype), np.array(found.begun, dtype)
    following = np.searchsorted(run, np.arange(len(steps.roles)))
    until = np.searchsorted(run, matched.ends)
    run_starts = np.append(np.array(found.starts, dtype), dtype.type(0))
    starts = np.where(following < until[matched.lane], run_starts[following], clocks[matched.lane])
    disturbed = float("inf")
    if sharing is not None:
        sends, overheads = matched.sends, steps.overheads
        disturbed = crossing.first_disturbed(
            sharing,
            starts[sends],
            steps.costs[sends] + overheads[sends],
            overheads[sends],
            matched.meets[matched.first_of_collective],
            begun,
            steps.costs,
        )
        if disturbed < float("inf") and found.queued:
            return None
    durations, over = _until(steps, matched, found, starts, clocks)
    return Undisturbed(Times(starts, durations, clocks), over, matched.operation, disturbed)


class _Matched(NamedTuple):
    """Which message or collective each step is about."""

    lane: Places
    """By step."""
    ends: Places
    """By lane, the place behind its last step."""
    sends: Places
    meets: Places
    recvs: Places
    slot_of_send: Places
    """The number of the message that each of ``sends`` sends."""
    slot_of_meet: Places
    """The number of the collective of each of ``meets``."""
    first_of_collective: Places
    """By collective, the first of ``meets`` that is a member."""
    slots: Places
    """By step, the number of its message or collective."""
    operation: Places
    """By step, the operation that a wait waits for; -1 for other steps."""
    asks: Places
    """By step, the receive that takes the message."""
    later: Bools
    """By step, whether it is an asynchronous operation, or a wait for one."""

    @classmethod
    def of(cls, steps: Steps) -> _Matched | None:
        """None where the steps do not fit together."""
        roles, keys, works = steps.roles, steps.keys, steps.works
        lane = np.repeat(np.arange(len(steps.lengths)), steps.lengths)
        ends = np.cumsum(steps.lengths)
        sends, meets = np.flatnonzero(roles == SEND), np.flatnonzero(roles == COLLECTIVE)
        messages, slot_of_send = np.unique(keys[sends], return_inverse=True)
        _, first, slot_of_meet = np.unique(keys[meets], return_index=True, return_inverse=True)
        if works.dtype != np.int64 or len(messages) < len(sends):
            return None
        if not _agree(steps, slot_of_meet, lane, meets):
            return None
        operation = _operations(roles, works, lane)
        slots = np.zeros(len(roles), np.int64)
        slots[sends], slots[meets] = slot_of_send, slot_of_meet
        recvs = np.flatnonzero(roles == RECV)
        slots[recvs] = np.searchsorted(messages, keys[recvs])
        waits = np.flatnonzero(operation >= 0)
        slots[waits] = slots[operation[waits]]
        asks = operation.copy()
        asks[recvs] = recvs
        return cls(
            lane,
            ends,
            sends,
            meets,
            recvs,
            slot_of_send,
            slot_of_meet,
            first,
            slots,
            operation,
            asks,
            works != ABSENT,
        )

    def does(self, roles: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """For each step, what it does: one of the numbers ``_SEND``, ``_CALL``, ``_MEET``, ``_TAKE``, ``_JOIN``."""
        does = np.zeros(len(roles), np.uint8)
        does[self.sends], does[self.meets] = _SEND, np.where(self.later[self.meets], _CALL, _MEET)
        does[self.recvs[~self.later[self.recvs]]] = _TAKE
        waits = np.flatnonzero(self.operation >= 0)
        does[waits] = np.where(roles[self.operation[waits]] == RECV, _TAKE, _JOIN)
        return does


def _program(steps: Steps, matched: _Matched, crossing: _Crossing) -> tuple[Places, _Program]:
    """The steps that do something, and the program of all lanes that has them alone."""
    roles, costs, overheads, sends = steps.roles, steps.costs, steps.overheads, matched.sends
    does = matched.does(roles)
    own = np.where(roles == COMPUTE, costs, costs.dtype.type(0))
    flights = costs.copy()
    flights[sends[crossing.shared]] += overheads[sends[crossing.shared]]
    before = np.zeros_like(costs)
    before[sends[~crossing.shared]] = overheads[sends[~crossing.shared]]

    runs = (does != _PASS) | (own != 0)
    runs[matched.recvs[overheads[matched.recvs] != 0]] = True
    run = np.flatnonzero(runs)
    asked = np.maximum(matched.asks, 0)
    members = np.bincount(matched.slot_of_meet, minlength=len(matched.first_of_collective))
    program = _Program(
        np.searchsorted(run, matched.ends).tolist(),
        does[run].tolist(),
        matched.slots[run].tolist(),
        np.searchsorted(run, asked)[run].tolist(),
        np.where(does == _PASS, own, flights)[run].tolist(),
        before[run].tolist(),
        overheads[np.where(does == _TAKE, asked, np.arange(len(roles)))[run]].tolist(),
        members.tolist(),
        steps.groups[matched.meets[matched.first_of_collective]].tolist(),
    )
    return run, program


def _until(
    steps: Steps, matched: _Matched, found: _Run, starts: Numbers, clocks: Numbers
) -> tuple[Numbers, Numbers]:
    """By step, how long it lasts, and when what it started is over."""
    costs, overheads, roles = steps.costs, steps.overheads, steps.roles
    arrivals = np.array(found.arrivals, costs.dtype)
    concluded = np.array(found.concluded, costs.dtype)
    next_starts = np.append(starts[1:], costs.dtype.type(0))
    next_starts[matched.ends[steps.lengths > 0] - 1] = clocks[steps.lengths > 0]
    durations = np.where(roles == COMPUTE, costs, next_starts - starts)
    over = starts + durations
    recvs, meets, sends = matched.recvs, matched.meets, matched.sends
    over[recvs] = np.maximum(arrivals[matched.slots[recvs]], starts[recvs]) + overheads[recvs]
    over[meets] = np.maximum(concluded[matched.slot_of_meet], starts[meets])
    asynchronous = np.flatnonzero(matched.later & np.isin(roles, (RECV, COLLECTIVE)))
    durations[asynchronous] = (over - starts)[asynchronous]
    at = sends[matched.later[sends]]
    durations[at] = (starts[at] + overheads[at]) - starts[at]
    over[sends] = arrivals[matched.slot_of_send]
    return durations, over


def _agree(steps: Steps, slot: Places, lane: Places, meets: Places) -> bool:
    """Whether each collective has one cost, and all its members, each on a lane of its own."""
    if not len(meets):
        return True
    first = np.unique(slot, return_index=True)[1]
    same = steps.costs[meets] == steps.costs[meets][first][slot]
    members = np.bincount(slot)[slot] == steps.sizes[meets]
    pairs = combined(slot.astype(np.int64), lane[meets])
    return bool(same.all() and members.all()) and len(distinct(pairs)) == len(pairs)


def _operations(roles: npt.NDArray[np.uint8], works: Places, lane: Places) -> Places:
    """The place of the message or collective of each wait; -1 for other steps, and if it is over at once."""
    operation = np.full(len(roles), -1)
    at = np.flatnonzero((works != ABSENT) & (roles != COMPUTE))
    if not len(at):
        return operation
    order = np.lexsort((at, works[at], lane[at]))
    at = at[order]
    begins = np.concatenate([[True], (works[at][1:] != works[at][:-1]) | (lane[at][1:] != lane[at][:-1])])
    count = np.arange(len(at))
    issued = np.maximum.accumulate(np.where(roles[at] != WAIT, count, -1))
    known = (roles[at] == WAIT) & (issued >= np.maximum.accumulate(np.where(begins, count, 0)))
    source = at[np.maximum(issued, 0)]
    known &= np.isin(roles[source], (RECV, COLLECTIVE))
    operation[at[known]] = source[known]
    return operation


class _Program(NamedTuple):
    """The steps that do something."""

    until: Sequence[int]
    """By lane, the place after its last step."""
    does: Sequence[int]
    slots: Sequence[int]
    """The message or the collective of each step."""
    operation: Sequence[int]
    """For a step that takes a message, the step that asked for it."""
    costs: Sequence[Any]
    before: Sequence[Any]
    """What a message takes before its cost."""
    overheads: Sequence[Any]
    """How long a step that sends or takes a message holds its lane."""
    members: Sequence[int]
    """By collective."""
    groups: Sequence[int]
    """By collective, the number of its group."""


class _Run:
    """The run of the lanes: the times found so far, and what lanes wait for."""

    def __init__(self, program: _Program, messages: int, *, ordered: bool, shares: Sequence[float]) -> None:
        self.program, self.ordered, self.shares = program, ordered, shares
        self.starts: list[Any] = [0] * len(program.does)
        self.clocks: list[Any] = [0] * len(program.until)
        self.arrivals: list[Any] = [None] * messages
        self.begun: list[Any] = [0] * len(program.members)
        """By collective: when it begins, after all that its members called before."""
        self.concluded: list[Any] = [None] * len(program.members)
        """By collective: its end."""
        self.queued = False
        """Whether a collective waited for the end of another that a member had called before."""
        self._ready = list(range(len(program.until) - 1, -1, -1))
        self._met = defaultdict[int, dict[int, None]](
            dict
        )  # collective -> the lanes that reached it, in order
        self._stream: dict[int, Any] = {}  # by group: when its communication stream is free
        self._for_message: dict[int, list[int]] = {}
        self._for_collective = defaultdict[int, list[int]](list)

    def is_complete(self) -> bool:
        """Runs the lanes; whether all of them come to their ends."""
        until, does, slots, _, costs, before, overheads, _, _ = self.program
        starts, clocks, arrivals, concluded = self.starts, self.clocks, self.arrivals, self.concluded
        ready, for_message = self._ready, self._for_message
        following = [0, *until[:-1]]
        while ready:
            lane = ready.pop()
            clock = clocks[lane]
            i = following[lane]
            for i in range(following[lane], until[lane]):
                starts[i] = clock
                what = does[i]
                if what == _PASS:
                    clock += costs[i]
                    continue
                slot = slots[i]
                if what == _SEND:
                    arrivals[slot] = clock + before[i] + costs[i]
                    clock += overheads[i]
                    if slot in for_message:
                        ready += for_message.pop(slot)
                    continue
                end = arrivals[slot] if what == _TAKE else concluded[slot]
                if end is None or overheads[i]:
                    end = self._take(i, lane) if what == _TAKE else self._meet(i, what, lane, clock)
                if end is None:
                    break
                if end > clock:
                    clock = end
            else:
                i = until[lane]
            following[lane], clocks[lane] = i, clock
        return following == list(until)

    def _take(self, i: int, lane: int) -> Any:
        """When a message is taken; None if it has not been sent: the lane waits."""
        end = self.arrivals[self.program.slots[i]]
        if end is None:
            self._for_message.setdefault(self.program.slots[i], []).append(lane)
            return None
        overhead = self.program.overheads[i]
        return max(end, self.starts[self.program.operation[i]]) + overhead if overhead else end

    def _meet(self, i: int, what: int, lane: int, clock: Any) -> Any:
        """When a lane goes on that calls a collective, or waits for its end; None if it waits."""
        slot = self.program.slots[i]
        end = self.concluded[slot]
        if end is None and what != _JOIN:
            reached = self._met[slot]
            if lane not in reached:
                reached[lane] = None
                if clock > self.begun[slot]:
                    self.begun[slot] = clock
            if len(reached) == self.program.members[slot]:
                end = self._conclude(slot, self.program.costs[i])
        if what == _CALL:
            return clock + self.shares[lane] * self.program.costs[i] if self.shares else clock
        if end is None:
            self._for_collective[slot].append(lane)
        return end

    def _conclude(self, slot: int, cost: Any) -> Any:
        """All members have reached a collective; its end."""
        group = self.program.groups[slot]
        # All members call the collectives of a group in one order, so those before this one are concluded.
        free = self._stream.get(group, 0)
        if self.ordered and free > self.begun[slot]:
            self.begun[slot], self.queued = free, True
        self.concluded[slot] = end = self.begun[slot] + cost
        self._stream[group] = end
        self._ready += self._for_collective.pop(slot, ())
        return end


class _Crossing(NamedTuple):
    """The messages that cross links which others may cross, too."""

    shared: Bools
    """True for each send whose link others use, too."""
    route: Places
    """The number of the route of each send among ``routes``."""
    routes: Sequence[tuple[Route | None, float]]
    """The different routes, each with the seconds behind its links."""

    @classmethod
    def of(cls, sharing: Sharing | None, sends: Places) -> _Crossing:
        """The routes of the ``sends``."""
        if sharing is None or not len(sends):
            return cls(np.zeros(len(sends), np.bool_), np.zeros(len(sends), np.int64), ())
        ranks, peers = np.asarray(sharing.ranks)[sends], np.asarray(sharing.peers)[sends]
        pairs = combined(codes(ranks), codes(peers))
        _, first, route = np.unique(pairs, return_index=True, return_inverse=True)
        routes = [sharing.message_route(ranks[i], peers[i]) for i in first.tolist()]
        has_route = np.array([each is not None for each, _ in routes])[route]
        has_bytes = np.asarray(sharing.message_bytes)[sends] != 0
        return cls(has_route & has_bytes, route, routes)

    def first_disturbed(
        self,
        sharing: Sharing,
        starts: Numbers,
        seconds: Numbers,
        overheads: Numbers,
        meets: Places,
        begun: Numbers,
        costs: Numbers,
    ) -> float:
        """The first moment at which a message or collective does not have what it asks for on its links; or infinity.

        ``starts``, ``seconds`` and ``overheads`` are those of all sends, ``meets`` a step of each collective, which
        begins at ``begun`` and takes the ``costs`` of the step.
        """
        lags = np.array([lag for _, lag in self.routes] or [0.0])[self.route] + overheads
        transfers: list[tuple[Numbers, Numbers, Places, Sequence[Route | None]]] = [
            (
                starts[self.shared],
                (seconds - lags)[self.shared],
                self.route[self.shared],
                [route for route, _ in self.routes],
            )
        ]
        if sharing.collective_route is not None and len(meets):
            used = np.flatnonzero(costs[meets])
            transfers.append(
                (
                    begun[used],
                    costs[meets][used],
                    np.asarray(sharing.collective_route)[meets][used],
                    sharing.collective_routes,
                )
            )
        channels: list[Places] = []
        begins: list[Numbers] = []
        ends: list[Numbers] = []
        number: dict[Any, int] = {}
        for begin, lasts, route, routes in transfers:
            for i in distinct(route).tolist():
                each = routes[i]
                if each is None:
                    continue
                if not _has_all(each, sharing):
                    return 0.0
                at = np.flatnonzero(route == i)
                taken = [number.setdefault(channel, len(number)) for channel, _ in each.channels]
                channels.append(np.repeat(taken, len(at)))
                begins.append(np.tile(begin[at], len(taken)))
                ends.append(np.tile((begin + lasts)[at], len(taken)))
        if sum(map(len, channels)) <= len(number):  # each link has one transfer at most
            return float("inf")
        channel, begin, end = np.concatenate(channels), np.concatenate(begins), np.concatenate(ends)
        order = np.lexsort((-end, begin, channel))
        channel = channel[order]
        begin = begin[order]
        end = end[order]
        # The first transfer that meets an earlier one on a channel meets the one before it.
        meets_other = (channel[1:] == channel[:-1]) & (begin[1:] < end[:-1])
        return float(begin[1:][meets_other].min(initial=float("inf")))


def _has_all(route: Route, sharing: Sharing) -> bool:
    """Whether a transfer that is alone on these links gets what it asks for."""
    return route.rate <= 1 and all(
        sharing.capacity(channel) >= max(1.0, route.rate * part) for channel, part in route.channels
    )


# -- the engine goes on ------------------------------------------------------------------------------------------------


def resumed(engine: Replay, steps: Steps, known: Undisturbed) -> Times:
    """The known times without those of the steps that the ``engine`` goes on with.

    The engine has the same steps, and is not run yet.
    """
    starts, durations, clocks = known.times
    lane = np.repeat(np.arange(len(steps.lengths)), steps.lengths)
    first = _first_steps(steps, lane, known)
    again = np.arange(len(lane)) >= first[lane]
    engine.next = first.tolist()
    goes_on = first < np.cumsum(steps.lengths)
    next_starts = np.append(starts, 0)[first]
    engine.clock = np.where(goes_on, next_starts, clocks).tolist()

    # Messages that were sent before, and are received from now on.
    recvs = np.flatnonzero(again & (steps.roles == RECV))
    sends = np.flatnonzero(~again & (steps.roles == SEND))
    arrived = sends[np.isin(steps.keys[sends], steps.keys[recvs])]
    engine.sent = dict(zip(steps.keys[arrived].tolist(), known.over[arrived].tolist(), strict=True))

    # Operations that were started before, and are waited for from now on.
    waits = np.flatnonzero(again & (known.operation >= 0))
    waits = waits[~again[known.operation[waits]]]
    started = known.operation[waits]
    works = zip(lane[waits].tolist(), steps.works[waits].tolist(), strict=True)
    engine.issued = dict(zip(works, started.tolist(), strict=True))
    engine.over = dict(zip(started.tolist(), known.over[started].tolist(), strict=True))
    return Times(np.where(again, 0, starts), np.where(again, 0, durations), clocks)


def _first_steps(steps: Steps, lane: Places, known: Undisturbed) -> Places:
    """For each lane, the place of the step to go on with; that after its last step if all are over."""
    starts, durations, _ = known.times
    first: Places = np.cumsum(steps.lengths)
    later = np.flatnonzero(np.maximum(known.over, starts + durations) > known.disturbed)
    np.minimum.at(first, lane[later], later)
    # All members of a collective go on before it, or none.
    meets = np.flatnonzero(steps.roles == COLLECTIVE)
    group = np.unique(steps.keys[meets], return_inverse=True)[1]
    while True:
        again = np.bincount(group, meets >= first[lane[meets]])[group] > 0
        before = first.copy()
        np.minimum.at(first, lane[meets[again]], meets[again])
        if (first == before).all():
            return first
