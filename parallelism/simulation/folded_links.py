"""What the collectives of those that stand for their equals use of the links, which they share.

A collective has the links of its real group; of the others who use these only some are there.  It is enough to look at
links where that makes no difference:

    every device has ports of its own     what goes over those of the first of a lane is its own, and the links of its
                                          equals are as full, with what they do
    other links                           those of collectives that nobody else crosses: told by looking at all groups

Where neither is so folding is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.hardware import Channel, Hardware
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.folding import Lanes
from parallelism.timeline import CollectivePrice, Pricing, Way, way_of

MOST_GROUPS = 4096
"""So many collectives of others are looked at."""

Ints = npt.NDArray[np.int64]


class Used(NamedTuple):
    """The events of collectives that are simulated."""

    prices: Sequence[CollectivePrice]
    groups: Sequence[tuple[int, ...]]
    """The ranks that each of these is the price of, and of any that lie like these."""
    price: Ints
    """By event, which of the prices."""
    ranks: Ints
    keys: Ints
    """By event, which collective it is part of."""
    looks: Ints


def folded_ways(
    templates: Templates, pricing: Pricing, lanes: Lanes, used: Used, *, messages: bool
) -> tuple[tuple[Way | None, ...], Ints]:
    """The ways of collectives, and by event which of them it has; ``messages``: whether there are any besides.

    ``ValueError`` where others share links with a collective, so that one cannot stand for them.
    """
    hardware = pricing.hardware
    assert hardware is not None
    own, everybody = own_ports(hardware), len(lanes.first) == templates.mesh.size
    if not everybody and not own:
        _check_nobody_else(templates, pricing, used, messages)
    members: dict[int, list[int]] = {}
    for event, key in enumerate(used.keys.tolist()):
        members.setdefault(key, []).append(event)
    ways: list[Way | None] = [None]
    known: dict[tuple[tuple[int, int], ...], int] = {}
    of_key = {}
    for key, events in members.items():
        told = tuple((int(used.ranks[event]), int(used.price[event])) for event in events)
        if told not in known:
            known[told] = len(ways)
            crossing: dict[Channel, float] = {}
            for event, (rank, price) in zip(events, told, strict=True):
                if own:
                    member = used.groups[price][_position(templates, int(used.looks[event]), rank)]
                    crossing.update(_over_ports(hardware, used.prices[price], member, rank))
                else:
                    crossing.update(used.prices[price].crossing)
            ways.append(way_of(hardware, used.prices[told[0][1]]._replace(crossing=crossing)))
        of_key[key] = known[told]
    return tuple(ways), np.array([of_key[key] for key in used.keys.tolist()], np.int64)


def own_ports(hardware: Hardware) -> bool:
    """Whether each channel is the port of one device, numbered by its place: out 2 p, into 2 p + 1."""
    return not hardware.faults and all(
        link.shape == "memory" or (link.shape == "switch" and link.ports in (None, hardware.inside(level)))
        for level, link in enumerate(hardware.links))


def _position(templates: Templates, look: int, rank: int) -> int:
    """Of a device in its group."""
    slot = int(templates.axes_of[look])
    group = templates.groups[slot][templates.group_of[slot, rank]]
    return int(np.flatnonzero(group == rank)[0])


def _over_ports(hardware: Hardware, price: CollectivePrice, member: int, rank: int) -> dict[Channel, float]:
    """What goes over the ports of a device: as much as over those of its like in the group that was priced."""
    there, here = hardware.place(member), hardware.place(rank)
    return {
        (level, fault, 2 * here + number % 2): nbytes
        for (level, fault, number), nbytes in price.crossing.items() if number // 2 == there
    }


def _check_nobody_else(templates: Templates, pricing: Pricing, used: Used, messages: bool) -> None:
    """That the links of the collectives that are simulated are crossed by no message, and by no other collective."""
    numbers = templates.group_of[templates.axes_of[used.looks], used.ranks]
    simulated = set(zip(used.looks.tolist(), numbers.tolist(), strict=True))
    everywhere = [
        (look, number) for look in sorted({look for look, _ in simulated})
        for number in range(len(templates.groups[int(templates.axes_of[look])]))
    ]
    if messages or len(everywhere) > MOST_GROUPS:
        raise ValueError(_SHARED)
    own: set[Channel] = set()
    others: set[Channel] = set()
    for look, number in everywhere:
        crossing = pricing.collective(*templates.collective(look, number)).crossing
        (own if (look, number) in simulated else others).update(crossing)
    if own & others:
        raise ValueError(_SHARED)


_SHARED = ("collectives of equal devices share links, so that one of these cannot stand for the others; simulate all, "
           "or with link_sharing=False")
