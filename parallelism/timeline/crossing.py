"""Which links transfers cross, and the first moment at which two of them are on one link.

A transfer that has its links to itself takes as long as alone.  So the engine first runs as if nothing were shared,
which is quick.  Its times are right up to the moment that is found here; from there on it runs again, with shared links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from parallelism.arrays import Array, Floats, Ints, distinct
from parallelism.timeline.fair_sharing import Route

if TYPE_CHECKING:
    from parallelism.hardware import Channel

NO_LINKS = -1


class Crossing(NamedTuple):
    """The links that steps cross."""

    capacity: Callable[[Channel], float]
    """The part of a link's bandwidth that a channel has."""
    routes: Sequence[tuple[Route, float]]
    """The different routes, each with the seconds that a transfer takes behind its links."""
    numbers: Ints
    """The number of the route of each step; `NO_LINKS` if it uses none."""

    def route(self, step: int) -> tuple[Route, float] | None:
        """The links of a step, and the seconds behind them; None if it uses none."""
        number = self.numbers[step]
        return None if number == NO_LINKS else self.routes[number]

    def lags(self, steps: Ints) -> Floats:
        """The seconds behind the links of these steps, all of which use links."""
        return np.array([lag for _, lag in self.routes])[self.numbers[steps]]

    def first_disturbed(self, steps: Ints, begins: Array, lasts: Array) -> float:
        """The first moment at which a transfer does not have what it asks for on its links; infinite if all have it.

        The transfer of each of these steps is on its links from ``begins`` on for ``lasts``.
        """
        numbers, ends = self.numbers[steps], begins + lasts
        channel_of: dict[Channel, int] = {}
        channels: list[Ints] = []
        transfers: list[Ints] = []
        for number in distinct(numbers).tolist():
            route, _ = self.routes[number]
            if not self._has_all(route):
                return 0.0
            at = np.flatnonzero(numbers == number)
            taken = [channel_of.setdefault(channel, len(channel_of)) for channel, _ in route.channels]
            channels.append(np.repeat(taken, len(at)))
            transfers.append(np.tile(at, len(taken)))
        if sum(map(len, channels)) <= len(channel_of):  # each link has one transfer at most
            return inf
        channel, transfer = np.concatenate(channels), np.concatenate(transfers)
        begin, end = begins[transfer], ends[transfer]
        order = np.lexsort((-end, begin, channel))
        channel, begin, end = channel[order], begin[order], end[order]
        # The first transfer that meets an earlier one on a channel meets the one before it.
        meets_other = (channel[1:] == channel[:-1]) & (begin[1:] < end[:-1])
        return float(begin[1:][meets_other].min(initial=inf))

    def _has_all(self, route: Route) -> bool:
        """Whether a transfer that is alone on these links gets what it asks for."""
        return route.rate <= 1 and all(
            self.capacity(channel) >= max(1.0, route.rate * part) for channel, part in route.channels
        )
