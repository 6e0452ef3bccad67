"""The links that collectives use in a folded simulation, in which only the representatives of equal devices are simulated.

A simulated collective uses the links of its real group.  Other collectives and messages may use the same links, but a
folded simulation does not contain all of them.  It is exact in two cases, besides those of
`parallelism.simulation.shared_channels`:

    every channel is of one device        a representative's ports, and its links to each device of a fully connected
                                          node, carry only its own traffic, and those of its equal devices carry as much
    other links                           no message, and no collective that is not simulated, crosses the links of a
                                          simulated collective; this is checked for all groups

In any other case folding is refused with `CannotFold`.
"""

from typing import NamedTuple

import numpy as np

from parallelism.arrays import Floats, Ints
from parallelism.cost.channel_loads import ChannelLoads
from parallelism.hardware import Channel, Hardware, Link, MixedHardware
from parallelism.operation.errors import keys_by_value
from parallelism.simulation.event_classes import Templates, first_of
from parallelism.simulation.folding import CannotFold, EqualDevices
from parallelism.timeline import CollectivePrice, Pricing, Route, route_of

MOST_GROUPS = 4096
"""The most collectives that are checked for shared links; with more, folding is refused."""


class PricedCollectives(NamedTuple):
    """The prices of the collective events that are simulated; groups with equal prices share one."""

    prices: list[CollectivePrice]
    """The different prices; the first is that of a free collective."""
    groups: list[tuple[int, ...]]
    """The group for which each price was computed; it also holds for groups that are connected in the same way."""
    price: Ints
    """The number of each event's price."""
    ranks: Ints
    """The rank of each event."""
    looks: Ints
    """The place of each event in `Templates.looks`."""

    @property
    def seconds(self) -> Floats:
        """The seconds of each event."""
        return np.array([price.seconds for price in self.prices])[self.price]


def folded_routes(
    templates: Templates,
    pricing: Pricing,
    equal: EqualDevices,
    used: PricedCollectives,
    keys: Ints,
    *,
    messages: bool,
) -> tuple[tuple[Route | None, ...], Ints]:
    """The `Route` of each different collective, and for each event its number.

    ``keys`` has the number of the collective that each event is part of; ``messages``: whether there are messages.
    ``ValueError`` if others share links with a collective, so that one collective cannot stand for its equals.
    """
    hardware = pricing.hardware
    assert hardware is not None
    own, whole = own_ports(hardware), len(equal.first) == templates.mesh.size
    parted = not whole and own_channels(hardware)
    if not (whole or parted):
        _check_alone(templates, pricing, used, messages)
    members, number = _different_members(used, keys)
    routes: list[Route | None] = [None]
    known: dict[tuple[tuple[int, int], ...], int] = {}
    of_members = np.zeros(len(members), np.int64)
    for place, events in enumerate(members):
        priced = tuple((int(used.ranks[event]), int(used.price[event])) for event in events)
        if priced not in known:
            known[priced] = len(routes)
            crossing: dict[Channel, float] = {}
            for event, (rank, price) in zip(events, priced, strict=True):
                if own:
                    member = used.groups[price][_position(templates, int(used.looks[event]), rank)]
                    crossing |= _over_ports(hardware, used.prices[price], member, rank)
                elif parted:
                    crossing |= _over_own_channels(hardware, used.prices[price], rank)
                else:
                    crossing |= used.prices[price].crossing
            routes.append(
                route_of(hardware, used.prices[priced[0][1]]._replace(crossing=ChannelLoads.of(crossing)))
            )
        of_members[place] = known[priced]
    return tuple(routes), of_members[number]


def _different_members(used: PricedCollectives, keys: Ints) -> tuple[list[list[int]], Ints]:
    """The events that are the members of each collective, and by event the number of its collective in that list.

    Where a rank is the only simulated member of several collectives that have one price, the first stands for all.
    """
    _, which, count = np.unique(keys, return_inverse=True, return_counts=True)
    alone, others = np.flatnonzero(count[which] == 1), np.flatnonzero(count[which] > 1)
    first, of_alone = first_of(used.ranks[alone], used.price[alone])
    members = [[event] for event in alone[first].tolist()]
    of_others = keys_by_value(dict(zip(others.tolist(), which[others].tolist(), strict=True)))
    number = np.zeros(len(keys), np.int64)
    number[alone] = of_alone
    for events in of_others.values():
        number[events] = len(members)
        members.append(events)
    return members, number


def own_ports(hardware: Hardware) -> bool:
    """Whether each channel is a port of one device: that at place p sends over port 2 p and receives over 2 p + 1."""
    if isinstance(hardware, MixedHardware):
        return all(map(own_ports, hardware.parts))
    return not hardware.path_faults and all(
        _has_own_ports(link, hardware.inside(level)) for level, link in enumerate(hardware.links)
    )


def _has_own_ports(link: Link, inside: int) -> bool:
    """Whether each of the ``inside`` devices of a unit has a port of its own on a level of links."""
    return link.shape == "memory" or (link.shape == "switch" and link.ports in (None, inside))


def own_channels(hardware: Hardware) -> bool:
    """Whether everything that crosses a channel is sent or received by one device, the same for all: `own_ports`, or the
    links between the devices of a fully connected node, each of which is of the device that sends over it."""
    if isinstance(hardware, MixedHardware):
        return own_ports(hardware)
    return not hardware.path_faults and all(
        _has_own_ports(link, hardware.inside(level))
        or (link.shape == "fully_connected" and hardware.inside(level) == 1)
        for level, link in enumerate(hardware.links)
    )


def _position(templates: Templates, look: int, rank: int) -> int:
    """The position of a rank in its group of a collective."""
    slot = int(templates.axes_of[look])
    return int(np.flatnonzero(templates.groups[slot][templates.group_of[slot, rank]] == rank)[0])


def _over_ports(hardware: Hardware, price: CollectivePrice, member: int, rank: int) -> dict[Channel, float]:
    """The bytes over the ports of a rank: those over the ports of ``member``, the same position in the priced group."""
    there, here = hardware.place(member), hardware.place(rank)
    return {
        (level, fault, 2 * here + number % 2): nbytes
        for (level, fault, number), nbytes in price.crossing.between(2 * there, 2 * there + 2)
    }


def _over_own_channels(hardware: Hardware, price: CollectivePrice, rank: int) -> dict[Channel, float]:
    """The bytes over the channels of a rank, of a price that was computed for its own group."""
    place, found = hardware.place(rank), dict[Channel, float]()
    for level, link in enumerate(hardware.links):
        each = link.units if link.shape == "fully_connected" else 2
        for channel, nbytes in price.crossing.between(each * place, each * (place + 1)):
            if channel[0] == level:
                found[channel] = nbytes
    return found


def _check_alone(templates: Templates, pricing: Pricing, used: PricedCollectives, messages: bool) -> None:
    """``ValueError`` unless no message and no other collective crosses the links of the simulated collectives."""
    numbers = templates.group_of[templates.axes_of[used.looks], used.ranks]
    simulated = set(zip(used.looks.tolist(), numbers.tolist(), strict=True))
    looks = {look for look, _ in simulated}
    everywhere = [(look, number) for look in sorted(looks) for number in templates.groups_with(look)]
    if messages or len(everywhere) > MOST_GROUPS:
        raise CannotFold(_SHARED)
    own, others = set[Channel](), set[Channel]()
    for look, number in everywhere:
        users = own if (look, number) in simulated else others
        users.update(pricing.collective(*templates.collective(look, number)).crossing)
    if own & others:
        raise CannotFold(_SHARED)


_SHARED = (
    "collectives of equal devices share links, so that one of these cannot stand for the others; simulate all, "
    "or with link_sharing=False"
)
