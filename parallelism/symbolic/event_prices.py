"""`EventPrices`: the seconds of events on a hardware, each computed once by the functions that price a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from parallelism.arrays import Floats, Ints
from parallelism.collectives import CollectiveCall
from parallelism.events import Columns
from parallelism.hardware import MixedHardware
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.simulation.device_events import FIELDS, EventRow
from parallelism.simulation.event_classes import members
from parallelism.simulation.folding import same_prices
from parallelism.symbolic.events import COMPUTE, EventKind, Events
from parallelism.timeline import Pricing, roles_of
from parallelism.training.sequence_split import HEADS_AXIS
from parallelism.transforms.words import REPLICA

Along = tuple[tuple[int, int], ...]
"""How the groups along some axes lie: the extent of each axis, and the distance between its neighbours."""


@dataclass(frozen=True)
class MeshOnHardware:
    """A mesh as it lies on the hardware."""

    mesh: Mesh

    def along(self, axes: Sequence[str]) -> Along:
        """How the groups along these axes lie."""
        return tuple(self._axes[axis] for axis in axes)

    def group(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes along which the groups have several devices: equal for equal groups."""
        return tuple(axis for axis in axes if self._axes[axis][0] > 1)

    @cached_property
    def inside(self) -> Along:
        """How the groups along the axes lie that are inside a stage, or of replicas: equal for equal prices."""
        return tuple(self._axes.get(axis, (1, 1)) for axis in (REPLICA, "dp", "cp", HEADS_AXIS, "ep", "tp"))

    @cached_property
    def lines(self) -> Along:
        """How the groups along each axis lie."""
        return tuple(self._axes.values())

    @cached_property
    def _axes(self) -> dict[str, tuple[int, int]]:
        stride, found = 1, {}
        for axis, extent in reversed([*self.mesh.shape.items()]):
            found[axis] = extent, stride
            stride *= extent
        return found


class EventPrices:
    """Seconds on hardware whose devices are equal; of groups or messages that differ in price those of the cheapest."""

    def __init__(self, pricing: Pricing) -> None:
        assert pricing.hardware is not None
        self.pricing, self.hardware = pricing, pricing.hardware
        self._kinds: dict[EventKind, int] = {}
        """The numbers of kinds."""
        self._computes: dict[bytes, float] = {}
        """By the number of the kind and the numbers of the event."""
        self._groups: dict[Along, tuple[tuple[int, ...], ...]] = {}
        self._different: set[tuple[int, int]] = set()
        """How axes lie along which messages differ in price."""
        self._collectives: dict[Any, float] = {}
        self._messages: dict[Any, float] = {}

    def computes(self, events: Events, wanted: Ints) -> Floats:
        """The seconds of the ``wanted`` events, which are computes; 0 for the others."""
        kinds = events.symbolic.kinds
        seconds = np.zeros(len(kinds))
        number = [self._kinds.setdefault(kinds[event], len(self._kinds)) for event in wanted.tolist()]
        plain = np.ascontiguousarray(np.column_stack([number, events.numbers(wanted).astype(np.float64)]))
        keys = plain.view(f"V{plain.shape[1] * plain.itemsize}").ravel().tolist()
        unknown = {key: each for each, key in enumerate(keys) if key not in self._computes}
        if unknown:
            found = self._priced(
                [(kinds[wanted[each]], plain[each, 1:].tolist()) for each in unknown.values()]
            )
            self._computes.update(zip(unknown, found.tolist(), strict=True))
        seconds[wanted] = [self._computes[key] for key in keys]
        return seconds

    def _priced(self, computes: Sequence[tuple[EventKind, Sequence[float]]]) -> Floats:
        """The seconds of computes, as the simulator prices their events."""
        given = []
        for kind, (nbytes, flops, *more) in computes:
            end = len(kind.others)
            others = zip(kind.others, more[:end], strict=True)
            given.append(
                EventRow(
                    COMPUTE,
                    kind.name or COMPUTE,
                    nbytes,
                    flops,
                    kind.dtype,
                    kind.seconds,
                    other_bytes=tuple((name, int(size)) for name, size in others),
                    shape=tuple(map(int, more[end : end + kind.extents])) or None,
                )
            )
        events = Columns.of_rows(given, FIELDS).with_columns(
            rank=np.zeros(len(given), np.int64), serial=np.arange(len(given))
        )
        return self.pricing.prices(events, roles_of(events)).seconds

    def collective(self, kind: EventKind, payload: float, layout: MeshOnHardware) -> float:
        """The seconds of a collective."""
        along = layout.along(kind.axes)
        key = kind, payload, along
        if key not in self._collectives:
            assert kind.name is not None
            self._collectives[key] = min(
                self.pricing.collective(
                    CollectiveCall(kind.name, group, payload, kind.algorithm, pairs=kind.pairs), kind.dtype
                ).seconds
                for group in self._different_groups(along, kind.axes, layout)
            )
        return self._collectives[key]

    def _different_groups(
        self, along: Along, axes: Sequence[str], layout: MeshOnHardware
    ) -> tuple[tuple[int, ...], ...]:
        """One group for each price that groups along these axes have."""
        if along not in self._groups:
            groups = members(layout.mesh, tuple(axes))
            _, first = np.unique(groups[:, 0] % self._period, return_index=True)
            groups = groups[np.sort(first)]
            _, first = np.unique(same_prices(self.hardware, groups), return_index=True)
            self._groups[along] = tuple(tuple(groups[each].tolist()) for each in sorted(first.tolist()))
        return self._groups[along]

    def is_exact(self, layout: MeshOnHardware) -> bool:
        """Whether all groups and messages along the axes of a mesh have one price, of those that were priced."""
        return not any(
            along in self._different or len(self._groups.get((along,), ())) > 1 for along in layout.lines
        ) and not any(
            len(groups) > 1
            for along, groups in self._groups.items()
            if len(along) > 1 and {*along} <= {*layout.lines}
        )

    def message(
        self, nbytes: int, source: int, target: int, layout: MeshOnHardware, axis: str = "pp"
    ) -> float:
        """The seconds of a message from one position of an axis to another."""
        ((extent, stride),) = layout.along([axis])
        key = nbytes, source, target, extent, stride
        if key not in self._messages:
            seconds = {
                self._message_seconds(nbytes, *ends)
                for ends in self._different_ends(source, target, extent, stride, layout.mesh.size)
            }
            self._messages[key] = min(seconds)
            if len(seconds) > 1:
                self._different.add((extent, stride))
        return self._messages[key]

    @memoized
    def _message_seconds(self, nbytes: int, source: int, target: int) -> float:
        """The seconds of a message from one rank to another."""
        return self.pricing.costs.message_seconds(nbytes, source, target)

    @memoized
    def _different_ends(
        self, source: int, target: int, extent: int, stride: int, size: int
    ) -> list[tuple[int, int]]:
        """A message of each price from one position of an axis to another, as ranks."""
        distance = (target - source) * stride
        here = np.unique(self._alike(distance, size).reshape(-1, extent, stride)[:, source]).tolist()
        return [(rank, rank + distance) for rank in here]

    @memoized
    def _alike(self, distance: int, size: int) -> Ints:
        """For each rank the first whose message over this distance has the same price; -1 where it ends nowhere."""
        ranks = np.arange(max(-distance, 0), size - max(distance, 0))
        few = ranks[: self._period]
        alike = same_prices(self.hardware, np.stack([few, few + distance], axis=1))
        _, first, number = np.unique(alike, return_index=True, return_inverse=True)
        found = np.full(size, -1)
        found[ranks] = np.resize(few[first[number.ravel()]], len(ranks))
        return found

    @cached_property
    def _period(self) -> int:
        """What is moved by so many ranks has the same price: over a switch on top that has equal units, on which each
        device has ports of its own, it does not matter which units members are in."""
        hardware = self.hardware
        if isinstance(hardware, MixedHardware) or hardware.placement or hardware.port_faults:
            return hardware.ranks
        top = hardware.links[-1]
        unit = hardware.inside(len(hardware.links) - 1)
        moves = top.shape in ("switch", "fully_connected") and top.ports in (None, unit)
        return unit if moves else hardware.ranks
