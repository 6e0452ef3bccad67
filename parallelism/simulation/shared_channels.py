"""Equal devices where several devices share links, as on a torus; and the links of one transfer that stands for its equals.

Devices, transfers and channels are divided into sets together, as finely as they have to be: transfers are alike if they
are the same call or message, between devices of the same sets, over channels of the same sets; channels are, if transfers
of the same sets cross them; devices, if they take part in the same transfers.  This is the coarsest equitable partition
of the three (`parallelism.simulation.folding`).

Transfers of a set begin at the same time, since equal devices do, and each channel of a set has equally many of them.  So
they all get one rate, as max-min fair rates are unique, and end together.  One of them is simulated.  Where it crosses a
channel it stands for all of its equals that cross this channel too: its part of the channel is the sum of theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Floats, Ints
from parallelism.events.columns import combined
from parallelism.hardware import Channel, Hardware, MixedHardware
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.folded_links import own_channels
from parallelism.simulation.folding import CannotFold, Ends, EqualDevices, bags, codes, messages_of
from parallelism.timeline import Pricing, Route, route_of

MOST_TRANSFERS = 50_000
"""The most transfers that are divided into sets; with more, folding is refused."""
DIGITS = 12
"""Parts of channels that agree in so many digits are equal."""
SOURCE, TARGET, MEMBER = range(3)
"""What a device does in a transfer."""


class Transfer(NamedTuple):
    """A message between two ranks, or one of the different calls of a group."""

    kind: Any
    """Equal for those that are alike, but for where they are."""
    ends: Sequence[tuple[int, int]]
    """The ranks, each with what it does."""
    route: Route | None
    lag_seconds: float = 0.0
    """Of a message, behind its links."""


def are_shared(hardware: Hardware | None) -> bool:
    """Whether a channel may be of several devices, none of which has a fault of its own."""
    return not (
        hardware is None
        or isinstance(hardware, MixedHardware)
        or hardware.path_faults
        or hardware.port_faults
        or own_channels(hardware)
    )


class SharedChannels:
    """The sets of equal devices, of which those of ``before`` are the largest possible, and routes of what is simulated.

    `CannotFold` for more than `MOST_TRANSFERS`.
    """

    def __init__(self, templates: Templates, pricing: Pricing, before: EqualDevices) -> None:
        self.templates, self.pricing = templates, pricing
        self._transfers: list[Transfer] = []
        self._of_message: dict[tuple[int, int], int] = {}
        """The transfer of the messages from one rank to another."""
        self._of_call: dict[Any, int] = {}
        """The transfer of a call, by `_key`."""
        self._routes: dict[int, Route | None] = {}
        for number, ends in enumerate(messages_of(templates)):
            self._add_messages(number, ends)
        self._add_collectives()
        self._index()
        self._device, self._transfer, self._channel = self._divided(before.set_of)

    @cached_property
    def equal(self) -> EqualDevices:
        """The sets of equal devices."""
        _, first, number = np.unique(self._device, return_index=True, return_inverse=True)
        order = np.argsort(first)
        return EqualDevices(np.argsort(order)[number.ravel()], first[order])

    def message_route(self, source: int, target: int) -> tuple[Route | None, float]:
        """The links of a message that stands for all its equals, and its latency behind them."""
        number = self._of_message[source, target]
        return self._route(number), self._transfers[number].lag_seconds

    def collective_routes(self, looks: Ints, ranks: Ints) -> tuple[tuple[Route | None, ...], Ints]:
        """The different links of collectives that stand for all their equals, and for each event the number of its own.

        The events are given by their places in `Templates.looks` and their ranks.
        """
        templates = self.templates
        numbers = templates.group_of[templates.axes_of[looks], ranks]
        transfers = [
            self._of_call[self._key(*each)] for each in zip(looks.tolist(), numbers.tolist(), strict=True)
        ]
        # Members of a collective may be in different transfers of its set, all of which have the same route.
        first: dict[int, int] = {}
        different = [first.setdefault(int(self._transfer[each]), each) for each in transfers]
        places = {each: place for place, each in enumerate(first.values(), 1)}
        routes = (None, *(self._route(each) for each in places))
        return routes, np.array([places[each] for each in different], np.int64)

    # -- all transfers -------------------------------------------------------------------------------------------------

    def _add(self, transfer: Transfer) -> int:
        if len(self._transfers) == MOST_TRANSFERS:
            raise CannotFold(_TOO_MANY)
        self._transfers.append(transfer)
        return len(self._transfers) - 1

    def _add_messages(self, number: int, ends: Ends) -> None:
        """Adds messages that are alike."""
        for source, target in zip(*(side.tolist() for side in ends), strict=True):
            route, lag_seconds = self.pricing.route(source, target)
            kind = "message", number, lag_seconds, route and route.rate
            both = (source, SOURCE), (target, TARGET)
            self._of_message[source, target] = self._add(Transfer(kind, both, route, lag_seconds))

    def _add_collectives(self) -> None:
        """Adds each different call of each group, once: a group makes one call after the other."""
        templates, hardware = self.templates, self.pricing.costs.hardware
        known: dict[Any, int] = {}
        for look in self._different_looks():
            slot = int(templates.axes_of[look])
            for number in templates.groups_with(look):
                key = self._key(look, number)
                if key in self._of_call:
                    continue
                call, dtype = templates.collective(look, number)
                if (slot, call, dtype) not in known:
                    route = route_of(hardware, self.pricing.collective(call, dtype))
                    kind = "collective", slot, call._replace(group=()), dtype
                    members = [(rank, MEMBER) for rank in call.group]
                    known[slot, call, dtype] = self._add(Transfer(kind, members, route))
                self._of_call[key] = known[slot, call, dtype]

    def _different_looks(self) -> list[int]:
        """Of the collective events of each class, one for each different call."""
        found: dict[Any, int] = {}
        templates = self.templates
        looks = np.flatnonzero(templates.axes_of >= 0)
        classes = np.searchsorted(templates.starts, looks, "right") - 1
        slots = templates.axes_of[looks]
        for look, which, slot in zip(looks.tolist(), classes.tolist(), slots.tolist(), strict=True):
            found.setdefault((which, slot, templates.traffic_id(look), templates.algorithms[look]), look)
        return sorted(found.values())

    def _key(self, look: int, number: int) -> Any:
        """What the calls of one group have in common that are one transfer."""
        templates = self.templates
        return templates.moved(look, number), int(templates.axes_of[look]), number, templates.algorithms[look]

    # -- sets ----------------------------------------------------------------------------------------------------------

    def _index(self) -> None:
        """Puts transfers, the ranks in them and the channels that they cross into arrays."""
        transfers = self._transfers
        kinds: dict[Any, int] = {}
        self._kind: Ints = np.array([kinds.setdefault(each.kind, len(kinds)) for each in transfers], np.int64)
        ends = [(number, *end) for number, each in enumerate(transfers) for end in each.ends]
        self._ends: Ints = np.array(ends, np.int64).reshape(-1, 3)
        numbers: dict[Channel, int] = {}
        crossed, parts = list[tuple[int, int]](), list[float]()
        for number, each in enumerate(transfers):
            for channel, part in each.route.channels if each.route is not None else ():
                crossed.append((number, numbers.setdefault(channel, len(numbers))))
                parts.append(part)
        self._channels = [*numbers]
        self._crossed: Ints = np.array(crossed, np.int64).reshape(-1, 2)
        self._parts: Floats = np.array(parts, np.float64)

    def _divided(self, device: Ints) -> tuple[Ints, Ints, Ints]:
        """The number of the set of each device, transfer and channel."""
        transfer = self._kind
        levels: dict[Any, int] = {}
        channel = np.array([levels.setdefault(each[:2], len(levels)) for each in self._channels], np.int64)
        (by, rank, does), (crossing, at) = self._ends.T, self._crossed.T
        part = codes(np.round(self._parts, DIGITS))
        # Sets are divided by the sets of what their members touch, until no set is divided any more (color refinement).
        while True:
            before = [len(np.unique(each)) for each in (device, transfer, channel)]
            between = bags(combined(device[rank], does), by, len(transfer))
            over = bags(combined(channel[at], part), crossing, len(transfer))
            transfer = codes(combined(transfer, between, over))
            channel = codes(combined(channel, bags(combined(transfer[crossing], part), at, len(channel))))
            device = codes(combined(device, bags(combined(transfer[by], does), rank, len(device))))
            if before == [len(np.unique(each)) for each in (device, transfer, channel)]:
                return device, transfer, channel

    # -- routes --------------------------------------------------------------------------------------------------------

    def _route(self, number: int) -> Route | None:
        """The links of a transfer, one channel of each set, with the parts of all of its equals there."""
        if number not in self._routes:
            own = self._transfers[number].route
            self._routes[number] = own and Route(tuple(self._summed(number).items()), own.rate)
        return self._routes[number]

    def _summed(self, number: int) -> dict[Channel, float]:
        """The part of each channel, the first of its set, that the equals of a transfer take together."""
        found: dict[Channel, float] = {}
        for at in self._crossed[self._crossed[:, 0] == number, 1].tolist():
            first = self._channels[self._first_channel[int(self._channel[at])]]
            if first not in found:
                found[first] = self._parts_of[int(self._transfer[number]), at]
        return found

    @cached_property
    def _first_channel(self) -> dict[int, int]:
        """The first channel of each set."""
        found: dict[int, int] = {}
        for number, which in enumerate(self._channel.tolist()):
            found.setdefault(which, number)
        return found

    @cached_property
    def _parts_of(self) -> dict[tuple[int, int], float]:
        """The part of each channel that the transfers of a set take together."""
        found: dict[tuple[int, int], float] = defaultdict(float)
        of = self._transfer[self._crossed[:, 0]].tolist()
        for which, at, part in zip(of, self._crossed[:, 1].tolist(), self._parts.tolist(), strict=True):
            found[which, at] += part
        return found


_TOO_MANY = (
    "too many messages and collectives share links, so that one of equal devices cannot stand for the others; simulate "
    "them all, or with link_sharing=False"
)
