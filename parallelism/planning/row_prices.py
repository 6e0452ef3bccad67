"""`RowPrices`: the seconds of the rows of sheets on a hardware, each computed once by the simulator's functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.collectives import CollectiveCall
from parallelism.events import Columns
from parallelism.mesh import Mesh
from parallelism.planning.sheets import COMPUTE, Exact, Kind, Unpriceable
from parallelism.simulation.device_events import FIELDS
from parallelism.simulation.event_classes import members
from parallelism.simulation.folding import same_prices
from parallelism.timeline import Pricing, roles_of

Floats = npt.NDArray[np.float64]
Along = tuple[tuple[int, int], ...]
"""How the groups along some axes lie: the extent of each axis, and the distance between its neighbours."""


@dataclass(frozen=True)
class Layout:
    """A mesh as it lies on the hardware."""

    mesh: Mesh

    def along(self, axes: Sequence[str]) -> Along:
        """How the groups along these axes lie."""
        return tuple(self._axes[axis] for axis in axes)

    @cached_property
    def inside(self) -> Along:
        """How the groups along the axes lie that are inside a stage, or of replicas: equal for equal prices."""
        return tuple(self._axes.get(axis, (1, 1)) for axis in ("dp", "cp", "tp"))

    @cached_property
    def _axes(self) -> dict[str, tuple[int, int]]:
        stride, found = 1, {}
        for axis, extent in reversed([*self.mesh.shape.items()]):
            found[axis] = extent, stride
            stride *= extent
        return found


class RowPrices:
    """Seconds on one hardware.  `Unpriceable` where groups or messages of equal devices differ in price."""

    def __init__(self, pricing: Pricing) -> None:
        hardware = pricing.hardware
        assert hardware is not None
        if hardware.stragglers or hardware.faults:
            raise Unpriceable(f"devices of {hardware.name} differ")
        self.pricing, self.hardware = pricing, hardware
        self._computes: dict[tuple[Kind, bytes], float] = {}
        self._groups: dict[Along, tuple[int, ...] | None] = {}
        self._collectives: dict[Any, float] = {}
        self._messages: dict[Any, float] = {}

    def computes(self, kinds: Sequence[Kind], numbers: Exact) -> Floats:
        """The seconds of the rows that are computes; 0 for others."""
        seconds = np.zeros(len(kinds))
        keys: dict[int, tuple[Kind, bytes]] = {}
        plain = numbers.astype(np.float64)
        unknown: dict[tuple[Kind, bytes], int] = {}
        for place, kind in enumerate(kinds):
            if kind.what == COMPUTE:
                key = keys[place] = kind, plain[place].tobytes()
                if key not in self._computes:
                    unknown.setdefault(key, place)
        if unknown:
            found = self._priced([(kind, plain[place].tolist()) for (kind, _), place in unknown.items()])
            self._computes.update(zip(unknown, found.tolist(), strict=True))
        for place, key in keys.items():
            seconds[place] = self._computes[key]
        return seconds

    def _priced(self, rows: Sequence[tuple[Kind, Sequence[float]]]) -> Floats:
        """The seconds of computes, as the simulator prices their events."""
        given = []
        for kind, (nbytes, flops, *more) in rows:
            end = len(kind.others)
            row: Mapping[str, Any] = {
                "kind": COMPUTE, "name": kind.name, "nbytes": nbytes, "flops": flops, "dtype": kind.dtype,
                "seconds": kind.seconds, "bytes_sent": 0, "bytes_received": 0, "messages": 0,
                "other_bytes": tuple((name, int(size)) for name, size in zip(kind.others, more[:end], strict=True)),
                "shape": tuple(map(int, more[end:end + kind.extents])) or None}
            given.append(tuple(row.get(field) for field in FIELDS))
        events = Columns.of_rows(given, FIELDS).with_columns(
            rank=np.zeros(len(given), np.int64), serial=np.arange(len(given)))
        return self.pricing.prices(events, roles_of(events)).seconds

    def collective(self, kind: Kind, payload: float, layout: Layout) -> float:
        """The seconds of a collective."""
        along = layout.along(kind.axes)
        key = kind, payload, along
        if key not in self._collectives:
            assert kind.name is not None
            call = CollectiveCall(kind.name, self._group(kind.axes, along, layout), payload, pairs=kind.pairs)
            self._collectives[key] = self.pricing.collective(call, kind.dtype).seconds
        return self._collectives[key]

    def _group(self, axes: Sequence[str], along: Along, layout: Layout) -> tuple[int, ...]:
        """The first group along these axes, if all lie alike."""
        if along not in self._groups:
            groups = members(layout.mesh, tuple(axes))
            alike = same_prices(self.hardware, groups)
            self._groups[along] = tuple(groups[0].tolist()) if (alike == alike[0]).all() else None
        group = self._groups[along]
        if group is None:
            raise Unpriceable(f"the groups along {' and '.join(axes)} of {layout.mesh!r} lie differently")
        return group

    def message(self, nbytes: int, source: int, target: int, layout: Layout, axis: str = "pp") -> float:
        """The seconds of a message from one position of an axis to another."""
        (extent, stride), = layout.along([axis])
        key = nbytes, source, target, extent, stride
        if key not in self._messages:
            ranks = np.arange(layout.mesh.size)
            here = ranks[ranks // stride % extent == source]
            ends = np.stack([here, here + (target - source) * stride], axis=1)
            alike = same_prices(self.hardware, ends)
            seconds = {self.pricing.costs.message_seconds(nbytes, *ends[place].tolist())
                       for place in np.unique(alike, return_index=True)[1].tolist()}
            self._messages[key] = seconds.pop() if len(seconds) == 1 else np.nan
        found = self._messages[key]
        if np.isnan(found):
            raise Unpriceable(f"the messages along {axis} of {layout.mesh!r} take different ways")
        return found
