"""The replay of lanes as if no transfer disturbed another: quick, and right up to the first moment at which one does.

A transfer that has its links to itself takes as long as alone.  So all times are found first as if nothing were shared:
a lane runs on until it needs a message or a collective that is not there yet, in any order of the lanes, as in a Kahn
process network.  The first moment at which two transfers are on one link at the same time is found afterwards.  Up to
it, the times are those that `parallelism.timeline.engine` finds, to the last bit.

Only steps that do something are run one by one; what follows from their times is computed for all events at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import distinct
from parallelism.events import ABSENT
from parallelism.events.columns import codes, combined
from parallelism.timeline.engine import Sharing
from parallelism.timeline.fair_sharing import Way
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
    steps: Steps, *, ordered: bool, sharing: Sharing | None, share: float = 0
) -> Undisturbed | None:
    """The times of the steps; None if a lane is blocked for ever, or if the times may be others from the beginning.

    The arguments are those of `parallelism.timeline.engine.Replay`.
    """
    roles, keys, works, costs, overheads = steps.roles, steps.keys, steps.works, steps.costs, steps.overheads
    count, lanes = len(roles), len(steps.lengths)
    lane, ends = np.repeat(np.arange(lanes), steps.lengths), np.cumsum(steps.lengths)
    sends, meets = np.flatnonzero(roles == SEND), np.flatnonzero(roles == COLLECTIVE)
    messages, slot_of_send = np.unique(keys[sends], return_inverse=True)
    groups, first_of_group, slot_of_meet = np.unique(keys[meets], return_index=True, return_inverse=True)
    if works.dtype != np.int64 or len(messages) < len(sends) or not _agree(steps, slot_of_meet, lane, meets):
        return None
    operation = _operations(roles, works, lane)

    slots = np.zeros(count, np.int64)
    slots[sends], slots[meets] = slot_of_send, slot_of_meet
    recvs = np.flatnonzero(roles == RECV)
    slots[recvs] = np.searchsorted(messages, keys[recvs])
    waits = np.flatnonzero(operation >= 0)
    slots[waits] = slots[operation[waits]]
    asks = operation.copy()
    asks[recvs] = recvs
    later = works != ABSENT

    does = np.zeros(count, np.uint8)
    does[sends], does[meets] = _SEND, np.where(later[meets], _CALL, _MEET)
    does[recvs[~later[recvs]]] = _TAKE
    does[waits] = np.where(roles[operation[waits]] == RECV, _TAKE, _JOIN)
    crossing = _Crossing.of(sharing, sends)
    own = np.where(roles == COMPUTE, costs, costs.dtype.type(0))
    flights = costs.copy()
    flights[sends[crossing.shared]] += overheads[sends[crossing.shared]]
    before = np.zeros_like(costs)
    before[sends[~crossing.shared]] = overheads[sends[~crossing.shared]]

    runs = (does != _PASS) | (own != 0)
    runs[recvs[overheads[recvs] != 0]] = True
    run = np.flatnonzero(runs)
    until = np.searchsorted(run, ends)
    place = np.searchsorted(run, np.maximum(asks, 0))[run]
    found = _run(
        _Program(until.tolist(), does[run].tolist(), slots[run].tolist(), place.tolist(),
                 np.where(does == _PASS, own, flights)[run].tolist(), before[run].tolist(),
                 overheads[np.where(does == _TAKE, np.maximum(asks, 0), np.arange(count))[run]].tolist(),
                 np.bincount(slot_of_meet, minlength=len(groups)).tolist()),
        len(messages), ordered=ordered, share=share)
    if found is None:
        return None

    clocks = np.array(found.clocks, costs.dtype)
    following = np.searchsorted(run, np.arange(count))
    run_starts = np.append(np.array(found.starts, costs.dtype), costs.dtype.type(0))
    starts = np.where(following < until[lane], run_starts[following], clocks[lane])
    arrivals, concluded = np.array(found.arrivals, costs.dtype), np.array(found.concluded, costs.dtype)
    begun = np.array(found.begun, costs.dtype)
    disturbed = float("inf")
    if sharing is not None:
        disturbed = crossing.first_disturbed(
            sharing, starts[sends], costs[sends] + overheads[sends], overheads[sends], meets[first_of_group], begun,
            costs)
        if disturbed < float("inf") and found.queued:
            return None
    next_starts = np.append(starts[1:], costs.dtype.type(0))
    last = ends[steps.lengths > 0] - 1
    next_starts[last] = clocks[steps.lengths > 0]
    durations = np.where(roles == COMPUTE, costs, next_starts - starts)
    asynchronous = np.flatnonzero(later & np.isin(roles, (RECV, COLLECTIVE)))
    over = starts + durations
    over[recvs] = np.maximum(arrivals[slots[recvs]], starts[recvs]) + overheads[recvs]
    over[meets] = np.maximum(concluded[slot_of_meet], starts[meets])
    durations[asynchronous] = (over - starts)[asynchronous]
    at = sends[later[sends]]
    durations[at] = (starts[at] + overheads[at]) - starts[at]
    over[sends] = arrivals[slot_of_send]
    return Undisturbed(Times(starts, durations, clocks), over, operation, disturbed)


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


class _Found(NamedTuple):
    starts: list[Any]
    clocks: list[Any]
    arrivals: list[Any]
    begun: list[Any]
    """By collective: when it begins, after all that its members called before."""
    concluded: list[Any]
    """By collective: its end."""
    queued: bool
    """Whether a collective waited for the end of another that a member had called before."""


def _run(program: _Program, messages: int, *, ordered: bool, share: Any) -> _Found | None:
    """Runs the lanes; None if one is blocked for ever, or if collectives of a lane are not in its order."""
    until, does, slots, operation, costs, before, overheads, members = program
    starts: list[Any] = [0] * len(does)
    clocks: list[Any] = [0] * len(until)
    following = [0, *until[:-1]]
    arrivals: list[Any] = [None] * messages
    concluded: list[Any] = [None] * len(members)
    begun: list[Any] = [0] * len(members)
    met: dict[int, dict[int, None]] = {}        # collective -> the lanes that reached it, in this order
    stream: list[Any] = [0] * len(until)        # by lane: when its communication stream is free,
    joined: list[Any] = [-1] * len(until)       # and when all members had reached its last collective
    for_message: dict[int, list[int]] = {}
    for_collective: dict[int, list[int]] = {}
    queued = False
    ready = list(range(len(until) - 1, -1, -1))
    while ready:
        lane = ready.pop()
        clock = clocks[lane]
        i = following[lane]
        for i in range(following[lane], until[lane]):
            starts[i] = clock
            what = does[i]
            if what == _PASS:
                clock += costs[i]
            elif what == _TAKE:
                end = arrivals[slots[i]]
                if end is None:
                    for_message.setdefault(slots[i], []).append(lane)
                    break
                overhead = overheads[i]
                if overhead:
                    asked = starts[operation[i]]
                    end = (end if end > asked else asked) + overhead
                if end > clock:
                    clock = end
            elif what == _SEND:
                slot = slots[i]
                arrivals[slot] = clock + before[i] + costs[i]
                clock += overheads[i]
                if slot in for_message:
                    ready += for_message.pop(slot)
            else:
                slot = slots[i]
                end = concluded[slot]
                if end is None and what != _JOIN:
                    reached = met.setdefault(slot, {})
                    if lane not in reached:
                        reached[lane] = None
                        begun[slot] = max(begun[slot], clock)
                    if len(reached) == members[slot]:
                        time = begun[slot]
                        for member in reached if ordered else ():
                            if stream[member] > time:
                                if joined[member] >= time:
                                    return None
                                begun[slot], queued = max(begun[slot], stream[member]), True
                        concluded[slot] = end = begun[slot] + costs[i]
                        for member in reached:
                            stream[member], joined[member] = end, time
                        ready += for_collective.pop(slot, ())
                if what != _CALL:
                    if end is None:
                        for_collective.setdefault(slot, []).append(lane)
                        break
                    if end > clock:
                        clock = end
                elif share:
                    clock += share * costs[i]
        else:
            i = until[lane]
        following[lane], clocks[lane] = i, clock
    return None if following != list(until) else _Found(starts, clocks, arrivals, begun, concluded, queued)


class _Crossing(NamedTuple):
    """The messages that cross links which others may cross, too."""

    shared: npt.NDArray[np.bool_]
    """Which of the sends are such."""
    way: Places
    """The number of the way of each send among ``ways``."""
    ways: Sequence[tuple[Way | None, float]]
    """The different ways, each with the seconds behind its links."""

    @classmethod
    def of(cls, sharing: Sharing | None, sends: Places) -> "_Crossing":
        """Those of the ``sends``."""
        if sharing is None or not len(sends):
            return cls(np.zeros(len(sends), np.bool_), np.zeros(len(sends), np.int64), ())
        ranks, peers = (np.asarray(each)[sends] for each in (sharing.ranks, sharing.peers))
        _, first, way = np.unique(combined(codes(ranks), codes(peers)), return_index=True, return_inverse=True)
        ways = [sharing.message_way(ranks[i], peers[i]) for i in first.tolist()]
        used = np.array([each is not None for each, _ in ways])[way]
        return cls(used & (np.asarray(sharing.message_bytes)[sends] != 0), way, ways)

    def first_disturbed(
        self, sharing: Sharing, starts: Numbers, seconds: Numbers, overheads: Numbers, meets: Places, begun: Numbers,
        costs: Numbers,
    ) -> float:
        """The first moment at which a message or collective does not have what it asks for on its links; or infinity.

        ``starts``, ``seconds`` and ``overheads`` are those of all sends, ``meets`` a step of each collective, which
        begins at ``begun`` and takes the ``costs`` of the step.
        """
        lags = np.array([lag for _, lag in self.ways] or [0.0])[self.way] + overheads
        transfers: list[tuple[Numbers, Numbers, Places, Sequence[Way | None]]] = [(
            starts[self.shared], (seconds - lags)[self.shared], self.way[self.shared], [way for way, _ in self.ways])]
        if sharing.collective_way is not None and len(meets):
            used = np.flatnonzero(costs[meets])
            transfers.append((begun[used], costs[meets][used], np.asarray(sharing.collective_way)[meets][used],
                              sharing.collective_ways))
        channels: list[Places] = []
        begins: list[Numbers] = []
        ends: list[Numbers] = []
        number: dict[Any, int] = {}
        for begin, lasts, way, ways in transfers:
            for i in distinct(way).tolist():
                each = ways[i]
                if each is None:
                    continue
                if not _has_all(each, sharing):
                    return 0.0
                at = np.flatnonzero(way == i)
                taken = [number.setdefault(channel, len(number)) for channel, _ in each.channels]
                channels.append(np.repeat(taken, len(at)))
                begins.append(np.tile(begin[at], len(taken)))
                ends.append(np.tile((begin + lasts)[at], len(taken)))
        if sum(map(len, channels)) <= len(number):      # each link has one transfer at most
            return float("inf")
        channel, begin, end = np.concatenate(channels), np.concatenate(begins), np.concatenate(ends)
        order = np.lexsort((-end, begin, channel))
        channel, begin, end = channel[order], begin[order], end[order]
        # The first transfer that meets an earlier one on a channel meets the one before it.
        meets_other = (channel[1:] == channel[:-1]) & (begin[1:] < end[:-1])
        return float(begin[1:][meets_other].min(initial=float("inf")))


def _has_all(way: Way, sharing: Sharing) -> bool:
    """Whether a transfer that is alone on these links gets what it asks for."""
    return way.rate <= 1 and all(sharing.capacity(channel) >= 1 for channel, _ in way.channels)
