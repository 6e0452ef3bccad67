"""`PricedPieces`: which events of a device have one price together, so that one event may stand for them in a simulation.

PricedPieces            an action of a stage, or a run of compute in it, as one piece
folded_roles            the roles of events where each device is replaced by the one that stands for it
collective_prices       the prices of collectives, of their real groups
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from parallelism.arrays import Ints, distinct
from parallelism.events import HOST, Columns, Table
from parallelism.hardware import Hardware, MixedHardware
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.simulation.device_events import DeviceEvents, GroupKey
from parallelism.simulation.event_classes import Templates, first_of, members
from parallelism.simulation.folded_links import PricedCollectives, own_channels, own_ports
from parallelism.simulation.folding import EqualDevices, priced_alike, same_prices
from parallelism.simulation.repeated_stages import MESSAGES
from parallelism.timeline import COLLECTIVE, FREE, POINT, Prices, Pricing, Roles, replay_columns, roles_of


class PricedPieces:
    """Computes the price of an action of a stage as one piece, if all members of its groups are equal devices.

    Actions with the same events have one price on all devices whose groups have equal prices.
    """

    def __init__(self, mesh: Mesh, pricing: Pricing, of_messages: Collection[int] = frozenset()) -> None:
        """``of_messages`` are levels of links: what has collectives on one of them is no piece."""
        self.mesh, self.pricing, self.of_messages = mesh, pricing, frozenset(of_messages)
        self._alike: dict[tuple[GroupKey, bytes], int | None] = {}
        self._seconds: dict[Any, tuple[DeviceEvents, float | None]] = {}
        """By the id of the events and the numbers of their groups.  The value keeps the events alive."""
        self._columns: dict[Any, tuple[DeviceEvents, Columns, set[int]]] = {}
        """What `_priced` returns, in the same way."""
        self.levels: set[int] = set()
        """The levels of the links that collectives inside of pieces use."""
        self.refused: set[int] = set()
        """Those of the collectives of what is no piece for its levels."""

    def __call__(self, ranks: Ints, events: DeviceEvents) -> float | None:
        """Seconds of the events on each of these ranks; None if they have messages, or if a price differs by rank."""
        hardware = self.pricing.hardware
        if any(row.kind in MESSAGES for row in events.rows) or (
            hardware is not None and (hardware.stragglers or hardware.path_faults)
        ):
            return None
        kind = _number_of_part(hardware, ranks)
        if kind is None:
            return None
        groups = []
        for axes in sorted({each.axes for each in events.collectives}, key=str):
            alike = self._alike_for_all(axes, ranks)
            if alike is None:
                return None
            groups.append((axes, alike))
        key = id(events), kind, tuple(groups)
        if key not in self._seconds:
            columns, levels = self._priced(int(ranks[0]), events)
            seconds = columns.numbers("duration_seconds")
            lasts = (
                (columns.numbers("start_seconds") + seconds).max() if events.asynchronous else seconds.sum()
            )
            is_piece = levels.isdisjoint(self.of_messages)
            self._seconds[key] = events, float(lasts) if is_piece else None
            (self.levels if is_piece else self.refused).update(levels)
        return self._seconds[key][1]

    def of_own_channels(self, ranks: Ints, events: DeviceEvents) -> float | None:
        """As the call, where each channel is of one device; None for other events with collectives.

        A device is in one collective after the other, so that none is beside those of a piece, unless there are
        asynchronous ones.
        """
        alone = self.pricing.hardware is not None and own_channels(self.pricing.hardware)
        return self(ranks, events) if alone or not events.collectives else None

    def of_computes(self, ranks: Ints, events: DeviceEvents) -> float | None:
        """As the call, of events without collectives; None for others."""
        return None if events.collectives else self(ranks, events)

    def same_price(self, rank: int, events: DeviceEvents) -> tuple[Any, ...]:
        """A key: these events take equal seconds on all ranks with the same key."""
        hardware = self.pricing.hardware
        all_axes = {each.axes for each in events.collectives}
        groups = [(axes, self._number(axes, rank)) for axes in sorted(all_axes, key=str)]
        return _number_of_part(hardware, np.array([rank])), *groups

    @memoized
    def _number(self, axes: GroupKey, rank: int) -> int:
        """The number of the group of a rank along the axes, as in `_numbers`."""
        return int(self._numbers(axes)[(members(self.mesh, axes) == rank).any(axis=1)][0])

    def priced(self, rank: int, events: DeviceEvents) -> Columns:
        """The events on a rank, with the seconds that each takes where it waits for no other device.

        If collectives overlap with compute, the events also have start times, relative to the first event.
        """
        return self._priced(rank, events)[0]

    def _priced(self, rank: int, events: DeviceEvents) -> tuple[Columns, set[int]]:
        """`priced`, and the levels of the links that its collectives use."""
        key = id(events), self.same_price(rank, events)
        if key not in self._columns:
            part = self._part_of_priced(rank, events)
            self._columns[key] = events, *(self._price(rank, events) if part is None else (part, set()))
        return self._columns[key][1:]

    def _part_of_priced(self, rank: int, events: DeviceEvents) -> Columns | None:
        """The part for these events of the columns that they were cut out of; None if those have no price yet, or if
        something overlaps among them."""
        whole, start = events.part_of or (None, 0)
        if whole is None or whole.asynchronous:
            return None
        known = self._columns.get((id(whole), self.same_price(rank, whole)))
        return None if known is None else known[1].take(slice(start, start + len(events)))

    def _price(self, rank: int, events: DeviceEvents) -> tuple[Columns, set[int]]:
        templates = Templates(self.mesh, [events], np.zeros(self.mesh.size, np.int64))
        columns, _, looks = templates.by_rank([rank])
        at = np.flatnonzero(columns.isin("kind", {"collective"}))
        seconds = self.pricing.prices(columns, roles_of(columns)).seconds
        own = collective_prices(templates, self.pricing, looks[at], columns.numbers("rank")[at])
        seconds[at] = own.seconds
        levels = {channel[0] for price in own.prices for channel in price.crossing}
        if not events.asynchronous:
            return columns.with_columns(duration_seconds=seconds), levels
        equal = EqualDevices(
            np.zeros(self.mesh.size, np.int64), np.array([rank])
        )  # all members call at the same time
        nothing = np.zeros(len(columns), np.int64)
        timed = replay_columns(
            columns,
            [len(columns)],
            self.pricing,
            roles=folded_roles(columns, templates.axes_of[looks], equal),
            prices=Prices(seconds, Table((None,), nothing.astype(np.int32)), (None,), nothing),
        )
        return timed, levels

    def _alike_for_all(self, axes: GroupKey, ranks: Ints) -> int | None:
        """The number that `same_prices` gives to all groups of these ranks along the axes; None if they differ, or if
        the groups have other members, too."""
        key = axes, ranks.tobytes()
        if key not in self._alike:
            groups = members(self.mesh, axes)
            own = np.isin(groups, ranks).any(axis=1)
            alike = self._numbers(axes)[own]
            self._alike[key] = (
                int(alike[0]) if groups[own].size == len(ranks) and (alike == alike[0]).all() else None
            )
        return self._alike[key]

    def are_of_equals(self, equal: EqualDevices) -> bool:
        """Whether all members of each group in a piece are in one set, so that they begin the piece at one time."""
        for (axes, ranks), alike in self._alike.items():
            if alike is not None:
                groups = members(self.mesh, axes)
                sets = equal.set_of[groups[np.isin(groups, np.frombuffer(ranks, np.int64)).any(axis=1)]]
                if (sets != sets[:, :1]).any():
                    return False
        return True

    @memoized
    def _numbers(self, axes: GroupKey) -> Ints:
        """A number for each group along the axes; equal numbers for groups in which all collectives cost the same."""
        groups, hardware = members(self.mesh, axes), self.pricing.hardware
        if hardware is None or groups.shape[1] < 2:
            return np.zeros(len(groups), np.int64)
        return same_prices(hardware, groups)


def _number_of_part(hardware: Hardware | None, ranks: Ints) -> int | None:
    """The number of the part that all ranks are in, 0 on hardware of one kind; None if they are in both."""
    return hardware.part_of_group(ranks.tolist()) if isinstance(hardware, MixedHardware) else 0


def folded_roles(events: Columns, axes: Ints, equal: EqualDevices) -> Roles:
    """Roles of the events for the replay, with each rank replaced by its representative in groups and peers.

    ``axes`` has, for each event, the number of the axes of its collective.  Groups along different axes stay apart,
    even if their representatives are the same.
    """
    group, peer = events["group"], events.numbers("peer")
    assert isinstance(group, Table)
    groups = [
        ranks and tuple(equal.first[distinct(equal.set_of[list(ranks)])].tolist()) for ranks in group.values
    ]
    numbers = {each: number for number, each in enumerate(dict.fromkeys(groups))}
    between = events.present("peer") & (peer != HOST)
    representative = peer.copy()
    representative[between] = equal.first[equal.set_of[peer[between]]]
    sequence = events.numbers("sequence")
    roles = roles_of(
        events.with_columns(
            sequence=np.where(axes >= 0, sequence * (int(axes.max(initial=0)) + 1) + axes, sequence),
            group=Table(tuple(numbers), np.array([numbers[each] for each in groups], np.int32)[group.index]),
            peer=representative if between.any() else None,
        )
    )
    sizes = np.array([len(ranks or ()) for ranks in group.values])[group.index]
    alone = (roles.roles == POINT) & (roles.sizes == 1) & (sizes > 1)
    return roles._replace(roles=np.where(alone, COLLECTIVE, roles.roles).astype(np.uint8))


def collective_prices(templates: Templates, pricing: Pricing, looks: Ints, ranks: Ints) -> PricedCollectives:
    """The price of each of these collectives on these ranks, from the bytes that its real group receives.

    Equal calls of a group share one price.  So do groups that `priced_alike` finds equal, unless links are shared and each
    group has its own.
    """
    prices, of_event = [FREE], np.zeros(len(looks), np.int64)
    result = PricedCollectives(prices, [()], of_event, ranks, looks)
    hardware = pricing.hardware
    if hardware is None:
        return result
    known: dict[tuple[Any, ...], int] = {}
    together = not pricing.shares_links or own_ports(hardware)
    slots = templates.axes_of[looks]
    numbers = templates.group_of[slots, ranks]
    first, which = first_of(templates.first_alike[looks], numbers)
    of_different = np.zeros(len(first), np.int64)
    for i in np.argsort(first).tolist():  # a price is that of the first of its groups
        look, slot, number = (int(each[first[i]]) for each in (looks, slots, numbers))
        alike = int(priced_alike(templates, slot, hardware)[number]) if together else number
        key = templates.moved(look, number), slot, alike, templates.algorithms[look]
        if key not in known:
            known[key] = len(prices)
            call, dtype = templates.collective(look, number)
            prices.append(pricing.collective(call, dtype))
            result.groups.append(call.group)
        of_different[i] = known[key]
    of_event[:] = of_different[which]
    return result
