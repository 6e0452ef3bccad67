"""Messages that are on their way at the same time share the links they have in common: max-min fairly.

Every message on a link gets as much as the others, but one that is held up elsewhere leaves what it cannot use to
them (Bertsekas and Gallager, *Data Networks*, section 6.5.2: progressive filling).  When a message begins or ends, the
rates change of those that share a link with it, with one that does, and so on; no others are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from parallelism.hardware import Channel, LinkPath


@dataclass(slots=True)
class _Flow:
    number: int
    path: LinkPath
    left: float
    """Bytes still to go, at ``since``."""
    since: float
    rate: float
    arrival: float
    """If nothing holds it up."""
    held_up: bool = False
    version: int = 0


class SharedLinks:
    """The messages under way.  ``foretell(end, number, version)`` is told when each will leave its links.

    What was foretold holds unless another end, of a higher version, is foretold for the same message before.  When all
    that begins or ends at a time is known, and before time goes on, `settle` is to be called.
    """

    def __init__(self, capacity: Callable[[Channel], float], foretell: Callable[[float, int, int], object]) -> None:
        self._capacity = capacity
        self._foretell = foretell
        self._flows: dict[int, _Flow] = {}
        self._users: dict[Channel, dict[int, _Flow]] = {}
        self.unsettled: dict[int, _Flow] = {}
        """The messages whose rates may have changed."""

    def begin(self, number: int, path: LinkPath, nbytes: float, now: float) -> None:
        """A message with more than no bytes enters its path."""
        alone = path.latency_seconds + nbytes / path.bytes_per_second
        flow = _Flow(number, path, nbytes, now, 0.0, now + alone)
        self._flows[number] = self.unsettled[number] = flow
        for channel in path.channels:
            self._users.setdefault(channel, {})[number] = flow

    def end(self, number: int, version: int, now: float) -> float | None:
        """When the message arrives that leaves its links now; None if another end was foretold since."""
        flow = self._flows.get(number)
        if flow is None or flow.version != version:
            return None
        del self._flows[number]
        self.unsettled.pop(number, None)
        for channel in flow.path.channels:
            users = self._users[channel]
            del users[number]
            self.unsettled.update(users)
        return now + flow.path.latency_seconds if flow.held_up else flow.arrival

    def settle(self, now: float) -> None:
        """New rates for the messages that began, and for all that share with these or with one that ended."""
        while self.unsettled:
            flows, channels = self._together(next(iter(self.unsettled.values())))
            rates = self._filled(flows, channels)
            for each in flows:
                self.unsettled.pop(each.number, None)
                rate = rates[each.number]
                if rate != each.rate:
                    each.left = max(0.0, each.left - each.rate * (now - each.since))
                    each.since, each.rate = now, rate
                    each.held_up = each.held_up or rate < each.path.bytes_per_second
                    each.version += 1
                    self._foretell(now + each.left / rate, each.number, each.version)

    def _together(self, flow: _Flow) -> tuple[list[_Flow], dict[Channel, None]]:
        flows, channels, seen = [flow], dict[Channel, None](), {flow.number}
        for each in flows:      # grows
            for channel in each.path.channels:
                if channel not in channels:
                    channels[channel] = None
                    for number, other in self._users[channel].items():
                        if number not in seen:
                            seen.add(number)
                            flows.append(other)
        return flows, channels

    def _filled(self, flows: list[_Flow], channels: dict[Channel, None]) -> dict[int, float]:
        """All rates grow alike until a channel is full; what goes through it stays as it is, and so on."""
        room = {channel: self._capacity(channel) for channel in channels}
        growing = {channel: len(self._users[channel]) for channel in channels}
        rates: dict[int, float] = {}
        while len(rates) < len(flows):
            level, full = inf, None
            for channel, count in growing.items():
                if count and room[channel] / count < level:
                    level, full = room[channel] / count, channel
            assert full is not None
            for number, flow in self._users[full].items():
                if number not in rates:
                    rates[number] = level
                    for channel in flow.path.channels:
                        room[channel] -= level
                        growing[channel] -= 1
            room[full] = 0.0
        return rates
