"""What faults of single ports cost the collectives of a group: they go as fast as its slowest port on each level.

The rings and trees of a collective wait for their slowest member, so on each level that a faulty port's rank meets others
of its group at, the whole group has the rate of the slowest such port, and its delay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallelism.arrays import Bools, Floats, Ints
from parallelism.cost.group_shapes import places_of
from parallelism.hardware import Hardware
from parallelism.hardware.fields import changed


def slowest_ports(hardware: Hardware, groups: Ints) -> Floats:
    """For each row of ``groups``, by level: what part of its bandwidth the slowest port has, and then the longest delay.

    An array ``[group, 2 * level]``, of ones and zeros where no fault is met.
    """
    levels = len(hardware.links)
    found = np.concatenate([np.ones((len(groups), levels)), np.zeros((len(groups), levels))], axis=1)
    if not hardware.port_faults:
        return found
    places = places_of(hardware, groups)
    names = [link.name for link in hardware.links]
    for fault in hardware.port_faults:
        level = names.index(str(fault.level))
        met = np.flatnonzero(_meets(hardware, level, places, groups == fault.rank))
        found[met, level] = np.minimum(found[met, level], fault.bandwidth_factor)
        found[met, levels + level] = np.maximum(found[met, levels + level], fault.delay_seconds)
    return found


def _meets(hardware: Hardware, level: int, places: Ints, faulty: Bools) -> Bools:
    """For each group, whether its faulty member meets another member at the level."""
    inside = hardware.inside(level)
    outside = inside * hardware.links[level].units
    place = np.where(faulty, places, 0).sum(axis=1, keepdims=True)
    meets = (places // outside == place // outside) & (places // inside != place // inside)
    found: Bools = faulty.any(axis=1) & meets.any(axis=1)
    return found


def as_met(hardware: Hardware, slowest: Sequence[float]) -> Hardware:
    """The hardware without faults of ports, and with links as slow as a row of `slowest_ports` says."""
    levels = len(hardware.links)
    links = list(hardware.links)
    for level, (factor, delay) in enumerate(zip(slowest[:levels], slowest[levels:], strict=True)):
        if (factor, delay) != (1.0, 0.0):
            links[level] = links[level].slowed(factor, delay)
    return changed(hardware, links=tuple(links), faults=hardware.path_faults)
