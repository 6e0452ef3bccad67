"""Finds the devices that do the same at the same times, before anything is timed.  One of them can stand for all.

The devices are divided into sets of equal devices.  At first, two devices are in one set if they have equal
programs, groups with equal prices (`same_prices`), equal slowdowns, and messages over paths of equal length.  Then
devices whose partners (the members of their groups, and the peers of their messages) are in different sets are
separated.  This is repeated until nothing changes.  The result is the coarsest equitable partition (Paige and Tarjan,
*Three partition refinement algorithms*, 1987).  The devices of a set then arrive at every collective at the same time
and leave it at the same time, as follows by induction over the events.

If the number of elements of an array is not a multiple of the number of devices that all_reduce it, some devices move
one element more than others.  These devices count as equal.

Messages share links, which is a problem if only some of the devices are simulated.  Where several devices use a channel,
`parallelism.simulation.shared_channels` divides devices and channels together.  Elsewhere two conditions must hold: a link
that the messages of representatives cross is crossed by no other messages, and equal messages meet equal messages on
their links.  Otherwise folding is refused with `CannotFold`.  The *representative* of a set is its lowest rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Ints, distinct
from parallelism.cost.group_shapes import group_shapes, places_of
from parallelism.cost.port_faults import slowest_ports
from parallelism.events.columns import combined
from parallelism.hardware import Hardware, MixedHardware
from parallelism.simulation.event_classes import Templates

NARROW = 4
"""Rows of up to so many numbers are made one number each before they are compared."""


class CannotFold(ValueError):
    """One of several equal devices cannot stand for the others, because they share links."""


class EqualDevices(NamedTuple):
    """The devices of a mesh, divided into sets of equal devices."""

    set_of: Ints
    """The number of the set of each rank."""
    first: Ints
    """The representative of each set: its lowest rank, which stands for all others."""

    @property
    def sizes(self) -> Ints:
        """The number of devices in each set."""
        return np.bincount(self.set_of)


def fold(
    templates: Templates, hardware: Hardware | None, link_sharing: bool = True, *, shifted: bool = False
) -> EqualDevices:
    """The sets, sorted by their lowest ranks.  On a hardware with faults of paths each device has a set of its own.

    With ``shifted``, groups are alike also where they lie elsewhere on a torus.  ``ValueError`` if messages of equal
    devices share links.
    """
    ranks = np.arange(templates.mesh.size)
    if hardware is not None and hardware.path_faults:
        return EqualDevices(ranks, ranks)
    keys = [templates.class_of, *templates.differences()]
    messages = messages_of(templates)
    if hardware is not None:
        keys += _speeds(hardware, ranks)
        if hardware.port_faults and messages:
            keys.append(_ports(hardware, len(ranks)))
        for slot, groups in enumerate(templates.groups):
            if groups.shape[1] > 1:
                alike = (
                    same_prices(hardware, groups, shifted=True)
                    if shifted
                    else priced_alike(templates, slot, hardware)
                )
                keys.append(alike[templates.group_of[slot]])
        keys += [_codes_at(ends[0], Routes(hardware, *ends).lengths, len(ranks)) for ends in messages]
    colour = codes(combined(*keys))
    while True:
        partners = [
            _of_groups(colour, groups)[templates.group_of[i]] for i, groups in enumerate(templates.groups)
        ]
        # The colours of the rank that each rank sends to, and of the rank that it receives from.
        partners += [
            _codes_at(here, colour[there], len(colour))
            for source, target in messages
            for here, there in ((source, target), (target, source))
        ]
        finer = codes(combined(colour, *partners))
        if finer.max(initial=0) == colour.max(initial=0):
            break
        colour = finer
    _, first, colour = np.unique(colour, return_index=True, return_inverse=True)
    order = np.argsort(first)
    first, colour = first[order], np.argsort(order)[colour.ravel()]
    if hardware is not None and link_sharing and messages:
        _check_links(hardware, colour, first, messages)
    return EqualDevices(colour, first)


def priced_alike(templates: Templates, slot: int, hardware: Hardware) -> Ints:
    """A number for each group along the axes of a slot; groups in which everything costs the same have the same."""
    if slot not in templates.priced_alike:
        groups = templates.groups[slot]
        apart = hardware.path_faults or groups.shape[1] < 2
        templates.priced_alike[slot] = np.arange(len(groups)) if apart else same_prices(hardware, groups)
    return templates.priced_alike[slot]


def same_prices(hardware: Hardware, groups: Ints, *, shifted: bool = False) -> Ints:
    """A number for each row of ``groups``: equal numbers only for groups in which every collective takes equally long
    (`parallelism.cost.group_shapes`), behind equally slow ports."""
    shapes = group_shapes(hardware, groups, shifted=shifted)
    if hardware.port_faults:
        slowest = slowest_ports(hardware, groups)
        ports = np.unique(slowest, axis=0, return_inverse=True)[1].reshape(-1, 1)
        shapes = np.concatenate([shapes, ports], axis=1)
    return _codes_of_rows(shapes)


def _speeds(hardware: Hardware, ranks: Ints) -> list[Ints]:
    """Numbers for each rank: equal for ranks that compute equally fast.  None if all do."""
    found = list[Ints]()
    if isinstance(hardware, MixedHardware):
        found.append(codes(np.array([hardware.number_of_part(rank) for rank in ranks.tolist()])))
    if hardware.stragglers:
        found.append(codes(np.array([hardware.slowdown(rank) for rank in ranks.tolist()])))
    return found


def _ports(hardware: Hardware, size: int) -> Ints:
    """A number for each rank: equal for ranks whose ports have the same faults, as messages meet them."""
    faults: list[list[tuple[object, ...]]] = [[] for _ in range(size)]
    for fault in hardware.port_faults:
        if fault.rank < size:
            faults[fault.rank].append(
                (fault.level, fault.source is None, fault.delay_seconds, fault.bandwidth_factor)
            )
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(tuple(each), len(numbers)) for each in faults], np.int64)


def _of_groups(colour: Ints, groups: Ints) -> Ints:
    """A number for each group: equal for groups with the same colours (numbers of sets), in any order."""
    return (
        _codes_of_rows(np.sort(colour[groups], axis=1)) if colour.any() else np.zeros(len(groups), np.int64)
    )


def codes(values: npt.NDArray[np.generic]) -> Ints:
    """A number from 0 for each value."""
    if (
        values.dtype == np.int64
        and values.size
        and values.min() >= 0
        and (most := int(values.max())) < 4 * values.size
    ):
        known = np.zeros(most + 1, np.int64)
        known[values] = 1
        without_sorting: Ints = (np.cumsum(known) - 1)[values.ravel()]
        return without_sorting
    found: Ints = np.unique(values, return_inverse=True)[1].ravel().astype(np.int64)
    return found


def _codes_of_rows(values: Ints) -> Ints:
    """A number from 0 for each row."""
    if values.shape[1] <= NARROW and values.size:
        return codes(combined(*values.T))
    rows = np.ascontiguousarray(values)
    return codes(rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))))


def _codes_at(where: Ints, values: Ints, size: int) -> Ints:
    """Numbers from 1 for values that stand at some places of an array of this ``size``; 0 at all other places."""
    found = np.zeros(size, np.int64)
    found[where] = codes(values) + 1
    return found


# -- messages ----------------------------------------------------------------------------------------------------------

Ends = tuple[Ints, Ints]
"""Messages that are alike: the sending ranks, and the receiving ranks."""


def messages_of(templates: Templates) -> list[Ends]:
    """All messages: one entry for each class, axis and peer, however often they are sent."""
    looks, ranks = templates.looks, np.arange(templates.mesh.size)
    at = np.flatnonzero(looks.isin("kind", {"send"}) & looks.present("peer"))
    of_class = np.searchsorted(templates.starts, at, "right") - 1
    key = np.stack([of_class, templates.peer_axis[at], looks.numbers("peer")[at]])
    messages = []
    for i in np.unique(key, axis=1, return_index=True)[1].tolist():
        source = ranks[templates.class_of == of_class[i]]
        messages.append((source, templates.peers(np.full(len(source), at[i]), source)))
    return messages


class Routes:
    """The paths of messages: the length of each, and the channels that each crosses."""

    def __init__(self, hardware: Hardware, source: Ints, target: Ints) -> None:
        if isinstance(hardware, MixedHardware):
            self._one_by_one(hardware, source, target)
            return
        here, there = places_of(hardware, source), places_of(hardware, target)
        self.lengths = np.zeros(len(here), np.int64)
        """The level and the hops of each path as one number; 0 for a message from a rank to itself."""
        messages, channels = [], []
        met = here == there
        for level, link in enumerate(hardware.links):
            inside = hardware.inside(level)
            at = np.flatnonzero(~met & (here // (inside * link.units) == there // (inside * link.units)))
            met[at] = True
            uses = link.uses(inside, here[at], there[at])
            self.lengths[at] = uses.distance * len(hardware.links) + level + 1
            messages.append(at[uses.message])
            channels.append(uses.channel * len(hardware.links) + level)
        self.message, self.channel = np.concatenate(messages), np.concatenate(channels)

    def levels(self, hardware: Hardware) -> set[int]:
        """The levels of the links that messages share."""
        crossed = distinct(self.channel % len(hardware.links)).tolist()
        return {level for level in crossed if hardware.links[level].shared}

    def _one_by_one(self, hardware: MixedHardware, source: Ints, target: Ints) -> None:
        paths = [hardware.path(*ends) for ends in zip(source.tolist(), target.tolist(), strict=True)]
        kinds: dict[tuple[float, float, int | None], int] = {}
        self.lengths = np.array(
            [
                kinds.setdefault((path.latency_seconds, path.bytes_per_second, path.level), len(kinds))
                for path in paths
            ],
            np.int64,
        )
        levels = len(hardware.links)
        self.message = np.repeat(np.arange(len(paths)), [len(path.channels) for path in paths])
        self.channel = np.array(
            [number * levels + level for path in paths for level, _, number in path.channels], np.int64
        )


def _check_links(hardware: Hardware, colour: Ints, first: Ints, messages: Sequence[Ends]) -> None:
    """``ValueError`` unless representatives share links only with each other, and equal messages meet equal traffic."""
    source, target = map(np.concatenate, zip(*messages, strict=True))
    like = combined(np.repeat(np.arange(len(messages)), [len(ends[0]) for ends in messages]), colour[source])
    routes = Routes(hardware, source, target)
    channel = codes(routes.channel)
    among, count = np.bincount(channel, weights=np.isin(source, first)[routes.message]), np.bincount(channel)
    # The kinds of messages on each channel; and on each path its channels by these.
    users = bags(like[routes.message], channel, len(count))
    if (
        not _all_alike(like, bags(users[channel], routes.message, len(like)))
        or ((among > 0) & (among < count)).any()
    ):
        raise CannotFold(_SHARED)


def bags(values: Ints, owner: Ints, owners: int) -> Ints:
    """A number for each of the ``owners``: equal for those that own the same values, in any order."""
    counts = np.bincount(owner, minlength=owners)
    begins, values = np.cumsum(counts) - counts, values[np.lexsort((values, owner))]
    numbers = np.zeros(owners, np.int64)
    for length in np.flatnonzero(np.bincount(counts)).tolist():
        at = np.flatnonzero(counts == length)
        if length:
            numbers[at] = 1 + numbers.max() + _codes_of_rows(values[begins[at, None] + np.arange(length)])
    return numbers


def _all_alike(like: Ints, routes: Ints) -> bool:
    """Whether messages that are alike have equal ``routes``."""
    _, first, place = np.unique(like, return_index=True, return_inverse=True)
    return bool((routes == routes[first][place]).all())


_SHARED = (
    "messages of equal devices share links, so that one of them cannot stand for the others; simulate them all, "
    "or with link_sharing=False"
)
