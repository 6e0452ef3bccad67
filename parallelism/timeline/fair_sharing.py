"""Max-min fair sharing: the rates of transfers that use the same links at the same time.

Every transfer on a link gets the same rate.  A transfer that is limited by another link, or that asks for less, leaves
the rest to the others (Bertsekas and Gallager, *Data Networks*, section 6.5.2: progressive filling).  When a transfer
begins or ends, rates change for the transfers that share a link with it, for those that share a link with one of these,
and so on: a *connected* set.  No other rates are computed again.

A **message** asks for all of each link on its path.  A **collective** is one transfer from its begin to its end.  It
asks each link for the bytes that it carries there, spread over the seconds that it takes alone; so it takes exactly
those seconds if the others leave it that much.  If it gets a part of what it asks for, all of it slows down by as much.

A connected set of at most `FEW` transfers gets exact rates at every begin and end.  A larger set is a **crowd**, whose
rates are computed again only after `CHANGED` of its transfers began or ended, or after `PATIENCE` of the mean time to
their ends.  Until then a transfer that begins gets an equal part of its links.  A transfer that will end before counts
for the part of that time in which it is there, so that the others get what it leaves from the start.  In storms of
messages of random sizes the mean arrival is within 3 % of the exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from parallelism.hardware import Channel

FEW = 16
"""Most connected transfers whose rates are exact.  Exact rates cost time proportional to the size of the set at each
begin and end, so for the square of the size in all; up to this size that is cheaper than the heuristic."""

CHANGED = 1 / 6
"""Part of a crowd that begins or ends before its rates are computed again.  A smaller part is more exact and slower."""

PATIENCE = 1 / 4
"""Part of the mean time to the ends of a crowd's transfers, after which its rates are computed again even if few began
or ended: so a wrong rate does not last."""

LEAST = 1e-6
"""Smallest part of a transfer's rate that counts as use of a link.  It is far above the rounding of a sum of parts, so
rounding is never taken for a transfer."""

_TOGETHER = 1e-9
"""Part of the time to the next end: transfers that end within it end together, as they would in exact arithmetic."""

_FULL = 1 - 1e-9
"""Part of the rate that a transfer asks for; with that much it counts as not slowed down."""

_ONE_RATE = 1e-12
"""Part of a rate: rates that differ by less are one, as they would be in exact arithmetic.  So the rates do not depend on
the order in which channels are filled."""

_GONE = -1


class Route(NamedTuple):
    """The links that a transfer uses."""

    channels: tuple[tuple[Channel, float], ...]
    """Each with the part of the transfer's rate that goes over it, `LEAST` or more; above 1 where the transfer stands
    for several at once."""
    rate: float
    """The part of a link's bandwidth that it asks for where it uses most."""


_Uses = tuple[tuple[int, ...], tuple[float, ...] | None, float]
"""Channels by number, the parts that go over each, and the rate of a transfer that shares none of them; None: all goes over
all of them."""


@dataclass(slots=True, eq=False)
class _Flow:
    number: int
    channels: tuple[int, ...]
    parts: tuple[float, ...] | None
    alone: float  # the rate that it has where it shares no link
    wanted: float  # the rate that it asks for; rates are parts of a link's bandwidth
    left: float  # seconds at the whole bandwidth that remain at ``since``
    end: float  # when it leaves its links, if no rate changes
    since: float
    rate: float = 0.0
    fixed: float = 0.0  # the rate that is being computed
    share: float = 1.0  # part of the time until rates are computed again in which it is there
    held_up: bool = False
    version: int = 0  # of its foretold end, or `_GONE`
    crowd: _Crowd | None = None

    def goes_on(self, rate: float, now: float) -> None:
        """From now on it has this rate."""
        if rate != self.rate:
            left = self.left - self.rate * (now - self.since)
            self.left = left = left if left > 0.0 else 0.0
            self.since, self.rate = now, rate
            if rate < self.wanted * _FULL:
                self.held_up = True
            if self.held_up:
                self.end = now + left / rate


@dataclass(slots=True, eq=False)
class _Crowd:
    flows: list[_Flow]
    version: int
    patience: int  # begins and ends until rates are computed again
    until: float = 0.0
    waits: bool = False


def _patience(flows: list[_Flow]) -> int:
    return max(2, int(len(flows) * CHANGED))


class SharedLinks:
    """The pending transfers.  ``foretell(end, number, version)`` is called with the times when they leave their links.

    ``capacity`` is the part of a link's bandwidth that a channel has: 1 for all but faults.  The caller hands each
    foretold end to `end` at its time.  It calls `settle` when everything that begins or ends at a time is known, and
    before time goes on.
    """

    def __init__(
        self, capacity: Callable[[Channel], float], foretell: Callable[[float, int, int], object]
    ) -> None:
        self._capacity, self._foretell = capacity, foretell
        self._numbers: dict[Channel, int] = {}
        # By channel: its users and its bandwidth; while rates are computed, what is left and how many want of that.
        self._users: list[dict[int, _Flow]] = []
        self._whole: list[float] = []
        self._room: list[float] = []
        self._weight: list[float] = []
        self._seen: list[int] = []
        self._routes: dict[
            int, tuple[_Uses, Route]
        ] = {}  # by id, which is faster than a hash; kept alive here
        self._flows: dict[int, _Flow] = {}
        self._arrivals: dict[int, tuple[float, float]] = {}
        self._crowds: dict[int, _Crowd] = {}
        self._serial = 0
        self._changed: dict[int, _Flow] = {}  # at least one of each connected set whose rates may change
        self._time = -1.0
        self._fresh: dict[int, _Flow] = {}  # began at that time, each with its links to itself so far
        self._impatient: list[_Crowd] = []
        self.unsettled = False
        """Whether any rates may have changed."""

    def begin(self, number: int, route: Route, seconds: float, lag: float, now: float) -> None:
        """A transfer enters its links; by itself it takes ``seconds``, the last ``lag`` of them behind the links."""
        known = self._routes.get(id(route))
        if known is None:
            known = self._routes[id(route)] = self._uses(route), route
        uses = known[0]
        flow = _Flow(number, *uses, route.rate, (seconds - lag) * route.rate, now + (seconds - lag), now)
        self._flows[number] = flow
        self._arrivals[number] = now + seconds, lag
        crowd, alone = None, not self.unsettled
        for channel in uses[0]:
            users = self._users[channel]
            if users:
                alone = False
                if crowd is None:
                    crowd = next(iter(users.values())).crowd
            users[number] = flow
        if alone:
            if now != self._time:
                self._time = now
                self._fresh.clear()
            self._fresh[number] = flow
            self._has_links_to_itself(flow, now)
            return
        self._unsettle(now)
        self._changed[number] = flow
        if crowd is not None:
            flow.crowd, flow.version = crowd, crowd.version
            crowd.flows.append(flow)
            self._counts(crowd, now)

    def _uses(self, route: Route) -> _Uses:
        """What a transfer on a route uses.  Alone it has the rate that `_filled` gives it."""
        channels, parts = zip(
            *((self._numbered(channel), part) for channel, part in route.channels), strict=True
        )
        if min(parts) == max(parts) == 1.0:
            return channels, None, min([route.rate, *map(self._whole.__getitem__, channels)])
        weights = [1.0 - (1.0 - part) for part in parts]  # rounded as there
        limits = [
            self._whole[channel] / weight
            for channel, weight in zip(channels, weights, strict=True)
            if weight >= LEAST / 2
        ]
        return channels, parts, min([*limits, *[route.rate] * (route.rate < 1.0)])

    def alone(self, number: int, end: float) -> None:
        """An operation that uses no links ends at ``end``."""
        self._flows[number] = _Flow(number, (), None, 1.0, 1.0, 0.0, end, end)
        self._arrivals[number] = end, 0.0
        self._foretell(end, number, 0)

    def end(self, number: int, version: int, now: float) -> float | None:
        """The arrival of a transfer that leaves its links now; None if the foretold end is out of date."""
        if number < 0:  # a crowd has waited
            self._loses_patience(self._crowds.pop(version), now)
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
                self._unsettle(now)
                self._changed[other.number] = other
        if crowd_of is not None:
            self._counts(crowd_of, now)
        arrival, lag = self._arrivals.pop(number)
        return now + lag if flow.held_up else arrival

    def settle(self, now: float) -> None:
        """Computes anew the rates of transfers that share links, also through others, with one that began or ended."""
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
        """Computes the rates of the connected set of a transfer."""
        if first.crowd is None:
            users = self._users
            for channel in first.channels:
                if len(users[channel]) > 1:
                    break
            else:
                self._has_links_to_itself(first, now)
                return
        flows, channels = self._together(first)
        crowd = None
        if len(flows) > FEW:
            self._shares(flows, now)
            crowd = _Crowd(flows, self._serial, _patience(flows))
        self._filled(flows, channels)
        for flow in flows:
            flow.crowd, flow.share = crowd, 1.0
            flow.goes_on(flow.fixed, now)
        self._foretold(flows, crowd, now)

    def _has_links_to_itself(self, flow: _Flow, now: float) -> None:
        """A connected set of one transfer."""
        self._serial = flow.version = self._serial + 1
        flow.goes_on(flow.alone, now)
        self._foretell(flow.end, flow.number, flow.version)

    def _joins(self, flow: _Flow, now: float) -> None:
        """A transfer that begins in a crowd gets an equal part of its links until rates are computed again."""
        flow.rate = min(
            flow.wanted,
            *(
                self._whole[channel] / (len(self._users[channel]) * max(part, 1.0))
                for channel, part in zip(flow.channels, flow.parts or repeat(1.0), strict=False)
            ),
        )
        if flow.rate < flow.wanted * _FULL:
            flow.held_up, flow.end = True, now + flow.left / flow.rate
        self._foretell(flow.end, flow.number, flow.version)

    def _shares(self, flows: list[_Flow], now: float) -> None:
        """Sets ``share`` of transfers that end before rates are computed again: the part of that time they last."""
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

    # -- foretold ends -----------------------------------------------------------------------------------------------

    def _foretold(self, flows: list[_Flow], crowd: _Crowd | None, now: float) -> None:
        """Foretells the next end of a connected set, and what ends with it; in a crowd as many ends as its patience."""
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
        """A transfer of a crowd began or ended."""
        crowd.patience -= 1
        if crowd.patience == 0:
            self._loses_patience(crowd, now)
        elif crowd.patience > 0 and not crowd.waits:
            crowd.waits = True
            self._crowds[crowd.version] = crowd
            self._foretell(max(now, crowd.until), -1, crowd.version)

    def _loses_patience(self, crowd: _Crowd, now: float) -> None:
        crowd.patience = 0
        self._impatient.append(crowd)
        self._unsettle(now)

    def _unsettle(self, now: float) -> None:
        """Rates may change: also those of transfers that began just now, in the order in which they began."""
        if not self.unsettled:
            self.unsettled = True
            if now == self._time:
                self._changed.update(self._fresh)
        self._fresh.clear()

    # -- rates ---------------------------------------------------------------------------------------------------------

    def _together(self, flow: _Flow) -> tuple[list[_Flow], list[int]]:
        """The connected set of a transfer, and the channels that it uses."""
        self._serial = serial = self._serial + 1
        seen, all_users = self._seen, self._users
        flow.version = serial
        flows, channels = [flow], []
        for each in flows:  # grows
            for channel in each.channels:
                if seen[channel] == serial:
                    continue
                seen[channel] = serial
                channels.append(channel)
                for other in all_users[channel].values():
                    if other.version != serial:
                        other.version = serial
                        flows.append(other)
        return flows, channels

    def _filled(self, flows: list[_Flow], channels: list[int]) -> None:
        """Progressive filling: all rates grow alike until a channel is full or a transfer has what it asks for."""
        room, weight, all_users = self._room, self._weight, self._users
        limits = self._limits(flows, channels)
        reached: Iterable[_Flow]
        left, last = len(flows), 0.0
        while left:
            level, full = heappop(limits)
            if full < 0:
                reached = flows[-1 - full :][:1]
            else:
                if weight[full] < LEAST / 2:
                    continue  # no transfer there grows any more
                grown = room[full] / weight[full]
                if grown > level and limits and grown > limits[0][0]:
                    heappush(limits, (grown, full))  # other transfers left room
                    continue
                level = max(level, grown)
                if level - last <= last * _ONE_RATE:
                    level = last
                reached = all_users[full].values()
            last = level
            for flow in reached:
                if flow.fixed:
                    continue
                flow.fixed = level
                left -= 1
                share = flow.share
                if flow.parts is not None:
                    self._fill_parts(flow.channels, flow.parts, level, share)
                    continue
                used = level * share
                for channel in flow.channels:
                    room[channel] -= used
                    weight[channel] -= share

    def _limits(self, flows: list[_Flow], channels: list[int]) -> list[tuple[float, int]]:
        """The rates at which growth may end, as a heap: with channels, and -1 - i for flow i, which asks for less."""
        room, weight = self._room, self._weight
        for channel in channels:
            room[channel] = self._whole[channel]
            weight[channel] = float(len(self._users[channel]))
        limits: list[tuple[float, int]] = []
        for place, flow in enumerate(flows):
            flow.fixed = 0.0
            if flow.wanted < 1.0 or flow.share < 1.0:
                limits.append((flow.wanted, -1 - place))
            if flow.parts is not None or flow.share < 1.0:
                for channel, part in zip(flow.channels, flow.parts or repeat(1.0), strict=False):
                    weight[channel] -= 1.0 - part * flow.share
        limits += [(room[channel] / weight[channel], channel) for channel in channels]
        heapify(limits)
        return limits

    def _fill_parts(
        self, channels: Iterable[int], parts: Iterable[float], level: float, share: float
    ) -> None:
        """Takes the room of a transfer whose rate goes over its channels in parts."""
        for channel, part in zip(channels, parts, strict=True):
            self._room[channel] -= level * share * part
            self._weight[channel] -= share * part

    def _numbered(self, channel: Channel) -> int:
        number = self._numbers.setdefault(channel, len(self._numbers))
        if number == len(self._users):
            self._users.append({})
            self._whole.append(self._capacity(channel))
            self._room.append(0.0)
            self._weight.append(0.0)
            self._seen.append(0)
        return number
