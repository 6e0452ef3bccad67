"""How groups of ranks lie on the levels of links: groups that lie alike have equal prices.

Where each device has ports of its own, it only matters at which level two members meet.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Ints
from parallelism.hardware import Hardware, Link, MixedHardware


def places_of(hardware: Hardware, ranks: Ints) -> Ints:
    """The places of ranks.  ``ValueError`` if one has none."""
    if ranks.size and not 0 <= int(ranks.min()) <= int(ranks.max()) < hardware.ranks:
        hardware.place(next(rank for rank in ranks.ravel().tolist() if not 0 <= rank < hardware.ranks))
    return np.array(hardware.placement, np.int64)[ranks] if hardware.placement else ranks


def group_shapes(hardware: Hardware, groups: Ints, *, shifted: bool = False) -> Ints:
    """A row for each row of ``groups``; equal rows only for groups in which every collective takes equally long.

    Two groups are equal if the members at any two positions are connected in the same way in both.  Over switches and
    fully connected links on which each device has ports of its own, it is enough that the two members meet at the same
    level of the hardware.  Otherwise, such as along a ring or torus, the members must lie at the same places.  Faults
    are not considered.  On a mixed hardware a row is a number, which says nothing beside the others of this call.
    """
    if isinstance(hardware, MixedHardware):
        return _shapes_in_parts(hardware, groups)
    places = places_of(hardware, groups)
    keys = []
    for level, link in enumerate(hardware.links):
        inside = hardware.inside(level)
        unit = places // inside
        if link.shape in ("switch", "fully_connected") and all(
            above.ports in (None, hardware.inside(i)) for i, above in enumerate(hardware.links) if i >= level
        ):
            keys.append(_first_alike(unit))
        else:
            apart = (unit != unit[:, :1]).any(axis=1, keepdims=True)
            place = (
                _from_corner(unit, link) if shifted and link.shape in ("ring", "torus") else unit % link.units
            )
            keys += [np.where(apart, place, 0), np.where(apart, places % inside, 0)]
    return np.concatenate(keys, axis=1)


def _from_corner(units: Ints, link: Link) -> Ints:
    """The places of units of groups on a ring or torus, from the least coordinates of each group on."""
    coordinates = np.unravel_index(units % link.units, link.extents)
    moved = tuple(along - along.min(axis=1, keepdims=True) for along in coordinates)
    return np.asarray(np.ravel_multi_index(moved, link.extents), np.int64)


def _shapes_in_parts(hardware: MixedHardware, groups: Ints) -> Ints:
    """`group_shapes` as one number for each group: of which part each member is, and how those of each part lie there."""
    first = np.array(hardware.first_ranks)
    part_of = (groups >= first[1]).astype(np.int64)
    patterns, pattern_of = np.unique(part_of, axis=0, return_inverse=True)
    found, known = np.zeros((len(groups), 1), np.int64), 0
    for number, pattern in enumerate(patterns):
        rows = np.flatnonzero(pattern_of.ravel() == number)
        shapes = [
            group_shapes(kind, groups[np.ix_(rows, np.flatnonzero(pattern == part))] - first[part])
            for part, kind in enumerate(hardware.parts)
            if (pattern == part).any()
        ]
        alike = np.unique(np.concatenate(shapes, axis=1), axis=0, return_inverse=True)[1].ravel()
        found[rows, 0] = known + alike
        known += int(alike.max()) + 1
    return found


def has_own_ports(hardware: Hardware) -> bool:
    """Whether each device has ports of its own on every level, so that no two devices share a channel."""
    return not hardware.faults and all(
        link.shape == "memory"
        or (link.shape in ("switch", "fully_connected") and link.ports in (None, hardware.inside(level)))
        for level, link in enumerate(hardware.links)
    )


def is_striped(hardware: Hardware, level: int) -> bool:
    """Whether a message on this level spreads over the ports of all members in its unit."""
    return hardware.links[level].striped and has_own_ports(hardware)


def unit_of_member(inside: int, places: Ints) -> Ints:
    """The number of the unit of each member of each group; those of different groups are different units."""
    units = places // inside
    numbers: Ints = np.unique(
        units + np.arange(len(places))[:, None] * (int(units.max()) + 1), return_inverse=True
    )[1].reshape(places.shape)
    return numbers


class Blocks(NamedTuple):
    """A group whose members in each unit follow each other, equally many in every unit."""

    size: int
    inside: tuple[int, ...]
    """By level, how many members are in a unit that the level joins; at the end, in all."""

    def levels(self, distance: int) -> tuple[int, ...]:
        """The levels at which members at this distance meet, counted around the group."""
        nearest = min(distance, self.size - distance)
        return tuple(
            level
            for level, (inner, outer) in enumerate(zip(self.inside, self.inside[1:], strict=False))
            if inner < outer and nearest < outer
        )

    def units(self) -> Iterator[tuple[int, int]]:
        """By level, how many members are in a unit that it joins, and in all units that it joins together."""
        return itertools.pairwise(self.inside)

    def distances(self) -> list[tuple[int, int]]:
        """The distances from 1 on, as ranges (first, end) in which `levels` are the same."""
        edges = {1, self.size, *(edge for inside in self.inside for edge in (inside, self.size - inside + 1))}
        ordered = sorted(edge for edge in edges if 1 <= edge <= self.size)
        return list(itertools.pairwise(ordered))


def blocks_of(hardware: Hardware, group: tuple[int, ...]) -> Blocks | None:
    """The group as blocks; None if it is not regular in this way."""
    if min(group) < 0 or max(group) >= hardware.ranks:
        places_of(hardware, np.array(group, np.int64))  # refuses them
    units = tuple(hardware.inside(level) for level in range(len(hardware.links)))
    return _blocks(units, hardware.placement, group)


@lru_cache(maxsize=16)
def _blocks(units: tuple[int, ...], placement: tuple[int, ...], group: tuple[int, ...]) -> Blocks | None:
    places = np.array([placement[rank] for rank in group] if placement else group, np.int64)
    size = len(group)
    inside = []
    for each in units:
        unit = places // each
        count = int(np.count_nonzero(unit == unit[0]))
        if size % count:
            return None
        rows = unit.reshape(-1, count)
        if (rows != rows[:, :1]).any() or len(set(rows[:, 0].tolist())) < len(rows):
            return None
        inside.append(count)
    return Blocks(size, (*inside, size))


def _first_alike(values: Ints) -> Ints:
    """For each value, the first place in its row that has the same value."""
    before, after = values[:, :-1], values[:, 1:]
    if (before <= after).all() or (before >= after).all():  # then equal values stand side by side
        first = np.zeros(values.shape, np.int64)
        np.multiply(before != after, np.arange(1, values.shape[1]), out=first[:, 1:])
        return np.maximum.accumulate(first, axis=1, out=first)
    order = np.argsort(values, axis=1, kind="stable")
    in_order = np.take_along_axis(values, order, axis=1)
    begins = np.ones(values.shape, np.bool_)
    begins[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    run = np.maximum.accumulate(np.where(begins, np.arange(values.shape[1]), 0), axis=1)
    first = np.empty(values.shape, np.int64)
    np.put_along_axis(first, order, np.take_along_axis(order, run, axis=1), axis=1)
    return first
