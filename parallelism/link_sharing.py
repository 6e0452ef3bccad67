"""Transfers that are on their way at the same time share the links they have in common: max-min fairly.

Every transfer on a link gets as much of it as the others, but one that is held up elsewhere, or that asks for less,
leaves what it cannot use to them (Bertsekas and Gallager, *Data Networks*, section 6.5.2: progressive filling).  When
one begins or ends, the rates change of those that share a link with it, with one that does, and so on; no others are
looked at.

A **message** asks for all of each link on its path.  A **collective** is one transfer from its begin to its end: it
asks of each link for what it carries there in all, spread over the time that it takes by itself; so it takes just that
time where nobody wants more than it leaves.  Where it gets a part of what it asks for, all of it is as much slower.

Up to `FEW` transfers that hang together get exact rates at every begin and end.  In a **crowd** of more, rates are
found anew when `CHANGED` of them have begun or ended, or `PATIENCE` of the mean time to their ends is over.  Until then
one that begins has an equal part of its links; and those that will end count for the part of that time in which they
are there, so that what they leave goes to the others from the start.  The mean arrival in storms of messages of random
sizes is within three hundredths of the exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from parallelism.hardware import Channel

FEW = 16
CHANGED = 1 / 6
"""Of a crowd."""
PATIENCE = 1 / 4
LEAST = 1e-6
"""So that nothing is taken for the rounding of a sum."""
_GONE = -1
_TOGETHER = 1e-9
"""Of the time to the next end: what ends within that of it ends with it."""
_FULL = 1 - 1e-9
"""Of the rate that a transfer asks for: with so much it is not held up."""


class Way(NamedTuple):
    """The links that a transfer uses."""

    channels: tuple[tuple[Channel, float], ...]
    """Each with the part of the transfer's rate that goes over it, `LEAST` or more."""
    rate: float
    """The part of a link's bandwidth that it asks for where it uses most."""


_Uses = tuple[tuple[int, ...], tuple[float, ...] | None]
"""Channels by number, and the parts that go over each; None: all over all of them."""


class _Flow:
    __slots__ = (
        "channels", "crowd", "end", "fixed", "held_up", "left", "number", "parts", "rate", "share", "since",
        "version", "wanted")

    def __init__(self, number: int, uses: _Uses, wanted: float, left: float, end: float, now: float) -> None:
        self.number, self.wanted = number, wanted
        self.channels, self.parts = uses
        self.left = left            # seconds at the whole bandwidth, still to go at ``since``
        self.since = now
        self.rate = 0.0             # part of the bandwidth
        self.fixed = 0.0            # the rate that is being found
        self.end = end              # when it leaves its links, if all stays as it is
        self.share = 1.0            # of the time until rates are found anew in which it is there
        self.held_up = False
        self.version = 0            # of the foretelling, or gone
        self.crowd: _Crowd | None = None


class _Crowd:
    __slots__ = ("flows", "patience", "until", "version", "waits")

    def __init__(self, flows: list[_Flow], version: int) -> None:
        self.flows, self.version, self.until = flows, version, 0.0
        self.patience = _patience(flows)   # begins and ends until rates are found anew
        self.waits = False


def _patience(flows: list[_Flow]) -> int:
    return max(2, int(len(flows) * CHANGED))


class SharedLinks:
    """The transfers under way.  ``foretell(end, number, version)`` is told when the next of them leave their links.

    ``capacity`` is the part of a link's bandwidth that a channel has: 1 but for faults.  What was foretold is to be
    handed to `end` then, unless time does not get there.  When all that begins or ends at a time is known, and before
    time goes on, `settle` is to be called.
    """

    def __init__(self, capacity: Callable[[Channel], float], foretell: Callable[[float, int, int], object]) -> None:
        self._capacity, self._foretell = capacity, foretell
        self._numbers: dict[Channel, int] = {}
        # By channel: who uses it, what it has; while rates are found, what is left of it and how many want of that.
        self._users: list[dict[int, _Flow]] = []
        self._whole: list[float] = []
        self._room: list[float] = []
        self._weight: list[float] = []
        self._seen: list[int] = []
        self._ways: dict[int, tuple[_Uses, Way]] = {}      # by id, which is quicker than to hash one; and so it lives
        self._flows: dict[int, _Flow] = {}
        self._arrivals: dict[int, tuple[float, float]] = {}
        self._crowds: dict[int, _Crowd] = {}
        self._serial = 0
        self._changed: dict[int, _Flow] = {}        # one at least of any that hang together and whose rates may change
        self._impatient: list[_Crowd] = []
        self.unsettled = False
        """Whether any rates may have changed."""

    def begin(self, number: int, way: Way, seconds: float, lag: float, now: float) -> None:
        """A transfer enters its links; by itself it takes ``seconds``, the last ``lag`` of them behind the links."""
        known = self._ways.get(id(way))
        if known is None:
            channels, parts = zip(*((self._numbered(channel), part) for channel, part in way.channels), strict=True)
            known = self._ways[id(way)] = (channels, None if min(parts) == 1.0 else parts), way
        uses = known[0]
        flow = _Flow(number, uses, way.rate, (seconds - lag) * way.rate, now + (seconds - lag), now)
        self._flows[number] = flow
        self._arrivals[number] = now + seconds, lag
        crowd = None
        for channel in uses[0]:
            users = self._users[channel]
            if users and crowd is None:
                crowd = next(iter(users.values())).crowd
            users[number] = flow
        self._changed[number] = flow
        self.unsettled = True
        if crowd is not None:
            flow.crowd, flow.version = crowd, crowd.version
            crowd.flows.append(flow)
            self._counts(crowd, now)

    def alone(self, number: int, end: float) -> None:
        """What uses no links ends then."""
        self._flows[number] = _Flow(number, ((), None), 1.0, 0.0, end, end)
        self._arrivals[number] = end, 0.0
        self._foretell(end, number, 0)

    def end(self, number: int, version: int, now: float) -> float | None:
        """When what leaves its links now has arrived; None if that was not foretold, or is no more."""
        if number < 0:      # a crowd has waited
            self._loses_patience(self._crowds.pop(version))
            return None
        flow = self._flows.get(number)
        if flow is None or flow.version != version:
            return None
        del self._flows[number]
        flow.version = _GONE
        crowd_of = flow.crowd
        for channel in flow.channels:
            users = self._users[channel]
            del users[number]
            if users and crowd_of is None:
                other = next(iter(users.values()))
                self._changed[other.number] = other
                self.unsettled = True
        if crowd_of is not None:
            self._counts(crowd_of, now)
        arrival, lag = self._arrivals.pop(number)
        return now + lag if flow.held_up else arrival

    def settle(self, now: float) -> None:
        """New rates for what began, and for all that share with this or with what ended."""
        before = self._serial
        for crowd in self._impatient:
            for flow in crowd.flows:
                if flow.crowd is crowd and flow.version != _GONE:
                    self._settled(flow, now)
        for flow in self._changed.values():
            if flow.version != _GONE and flow.version <= before:
                if flow.crowd is None:
                    self._settled(flow, now)
                else:
                    self._joins(flow, now)
        self._impatient.clear()
        self._changed.clear()
        self.unsettled = False

    def _settled(self, first: _Flow, now: float) -> None:
        """New rates for all that hang together with one."""
        flows, channels = self._together(first)
        crowd = None
        if len(flows) > FEW:
            self._shares(flows, now)
            crowd = _Crowd(flows, self._serial)
        self._filled(flows, channels)
        for flow in flows:
            flow.crowd, flow.share = crowd, 1.0
            rate = flow.fixed
            if rate != flow.rate:
                left = flow.left - flow.rate * (now - flow.since)
                flow.left = left = left if left > 0.0 else 0.0
                flow.since, flow.rate = now, rate
                if rate < flow.wanted * _FULL:
                    flow.held_up = True
                if flow.held_up:
                    flow.end = now + left / rate
        self._foretold(flows, crowd, now)

    def _joins(self, flow: _Flow, now: float) -> None:
        """One that began in a crowd has an equal part of its links until rates are found anew."""
        equal = min(self._whole[channel] / len(self._users[channel]) for channel in flow.channels)
        flow.rate = min(equal, flow.wanted)
        if flow.rate < flow.wanted * _FULL:
            flow.held_up, flow.end = True, now + flow.left / flow.rate
        self._foretell(flow.end, flow.number, flow.version)

    def _shares(self, flows: list[_Flow], now: float) -> None:
        """Of the time that a crowd has patience, the part in which each of those is there that end within it."""
        ends = sorted([flow.end for flow in flows if flow.fixed])
        patience = _patience(flows)
        if len(ends) < patience:
            return
        until = min(ends[patience - 1], now + PATIENCE * (sum(ends) / len(ends) - now))
        if until <= now:
            return
        for flow in flows:
            if flow.fixed and flow.end < until:
                flow.share = max((flow.end - now) / (until - now), 0.01)

    # -- what is to come -----------------------------------------------------------------------------------------------

    def _foretold(self, flows: list[_Flow], crowd: _Crowd | None, now: float) -> None:
        """The next end of those that hang together, and what ends with it; of a crowd, as many as it has patience."""
        version = self._serial
        if crowd is None:
            first = min([flow.end for flow in flows])
            limit = first + (first - now) * _TOGETHER
            for flow in flows:
                if flow.end <= limit:
                    self._foretell(first, flow.number, version)
            return
        ends = sorted([flow.end for flow in flows])
        crowd.until = now + PATIENCE * (sum(ends) / len(ends) - now)
        limit = ends[crowd.patience - 1]
        limit += (limit - now) * _TOGETHER
        time = now
        for end, number in sorted([(flow.end, flow.number) for flow in flows if flow.end <= limit]):
            if end - time > (end - now) * _TOGETHER:
                time = end
            self._foretell(time, number, version)

    def _counts(self, crowd: _Crowd, now: float) -> None:
        """One of a crowd has begun or ended."""
        crowd.patience -= 1
        if crowd.patience == 0:
            self._loses_patience(crowd)
        elif crowd.patience > 0 and not crowd.waits:
            crowd.waits = True
            self._crowds[crowd.version] = crowd
            self._foretell(max(now, crowd.until), -1, crowd.version)

    def _loses_patience(self, crowd: _Crowd) -> None:
        crowd.patience = 0
        self._impatient.append(crowd)
        self.unsettled = True

    # -- rates ---------------------------------------------------------------------------------------------------------

    def _together(self, flow: _Flow) -> tuple[list[_Flow], list[int]]:
        """The transfers that hang together with one, and the channels by which they do."""
        self._serial = serial = self._serial + 1
        seen, all_users = self._seen, self._users
        flow.version = serial
        flows, channels = [flow], []
        for each in flows:      # grows
            for channel in each.channels:
                if seen[channel] != serial:
                    seen[channel] = serial
                    channels.append(channel)
                    users = all_users[channel]
                    if len(users) > 1:
                        for other in users.values():
                            if other.version != serial:
                                other.version = serial
                                flows.append(other)
        return flows, channels

    def _filled(self, flows: list[_Flow], channels: list[int]) -> None:
        """All rates grow alike until a channel is full, or one has what it asks for; these stay as they are."""
        room, weight, all_users = self._room, self._weight, self._users
        for channel in channels:
            room[channel] = self._whole[channel]
            weight[channel] = float(len(all_users[channel]))
        limits: list[tuple[float, int]] = []
        reached: Iterable[_Flow]
        for place, flow in enumerate(flows):
            flow.fixed = 0.0
            if flow.wanted < 1.0 or flow.share < 1.0:
                limits.append((flow.wanted, -1 - place))
            if flow.parts is not None or flow.share < 1.0:
                for channel, part in zip(flow.channels, flow.parts or repeat(1.0), strict=False):
                    weight[channel] -= 1.0 - part * flow.share
        limits += [(room[channel] / weight[channel], channel) for channel in channels]
        heapify(limits)
        left = len(flows)
        while left:
            level, full = heappop(limits)
            if full < 0:
                reached = flows[-1 - full:][:1]
            else:
                if weight[full] < LEAST / 2:
                    continue    # nobody there grows any more
                grown = room[full] / weight[full]
                if grown > level:
                    if limits and grown > limits[0][0]:
                        heappush(limits, (grown, full))     # others left room
                        continue
                    level = grown
                reached = all_users[full].values()
            for flow in reached:
                if not flow.fixed:
                    flow.fixed = level
                    left -= 1
                    share = flow.share
                    if flow.parts is None:
                        used = level * share
                        for channel in flow.channels:
                            room[channel] -= used
                            weight[channel] -= share
                    else:
                        for channel, part in zip(flow.channels, flow.parts, strict=True):
                            room[channel] -= level * share * part
                            weight[channel] -= share * part

    def _numbered(self, channel: Channel) -> int:
        number = self._numbers.setdefault(channel, len(self._numbers))
        if number == len(self._users):
            self._users.append({})
            self._whole.append(self._capacity(channel))
            self._room.append(0.0)
            self._weight.append(0.0)
            self._seen.append(0)
        return number
