"""Replicas in two parts: what those of each part take and hold, and their step as an operation that can be simulated.

All replicas have the same stages and as many microbatches; the microbatches of a part have rows of their own number.  At
the end of a step all replicas sum their gradients together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parallelism.hardware import MixedHardware, Software
from parallelism.memoized import memoized
from parallelism.planning.assembled_steps import AssembledStep
from parallelism.planning.plan import Task
from parallelism.planning.plan_costs import PlanCosts
from parallelism.planning.space import Choices
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.operations import PriceEvents, SimulatedOperation
from parallelism.symbolic.event_prices import EventPrices, MeshOnHardware
from parallelism.symbolic.stage_costs import StageCosts, StageSeconds
from parallelism.timeline import Pricing

ORDER = "dp pp cp ep tp"
"""The order of the mesh axes: replicas are outermost, so that each lies in one part."""


class ReplicaCosts(PlanCosts):
    """The costs of plans as the replicas of one part have them: only the ends of steps know the other part.

    A step takes as long, or longer, where this part waits for the other.  ``task.hardware`` has the part first.  Rows are
    those that `row_of` gave.
    """

    def __init__(self, task: Task, possible: Choices) -> None:
        assert isinstance(task.hardware, MixedHardware)
        self.part = task.hardware.parts[0]
        super().__init__(replace(task, hardware=self.part), possible)
        self.together = EventPrices(Pricing.of(task.hardware, "modelled", None, link_sharing=False))
        self.all_devices = task.hardware.devices
        self.counts: list[int] = []
        """By row, the microbatches of each replica."""
        self._rows: dict[Any, int] = {}

    def row_of(self, settings: Mapping[str, Any], microbatches: int) -> int:
        """The number of a plan with these settings and so many microbatches."""
        row = self._rows.setdefault((*settings.values(), microbatches), len(self.counts))
        if row == len(self.counts):
            self.counts.append(microbatches)
            self._settings[row] = dict(settings)
        return row

    def microbatches(self, row: int) -> int:
        """The microbatches of each replica of a plan."""
        return self.counts[row]

    @memoized
    def layout(self, row: int) -> MeshOnHardware:
        """The mesh of the replicas in this part."""
        settings = self.settings(row)
        replicas = settings["dp"] * self.part.devices // self.all_devices
        return self._mesh_of(row, replicas)

    @memoized
    def layout_of_ends(self, row: int) -> MeshOnHardware:
        """The mesh of all replicas."""
        return self._mesh_of(row, self.settings(row)["dp"])

    def _mesh_of(self, row: int, replicas: int) -> MeshOnHardware:
        mesh = self.task.mesh({**self.settings(row), "dp": replicas})
        return self._layouts.setdefault(tuple(mesh.shape.items()), MeshOnHardware(mesh))

    def seconds_of(self, costs: StageCosts, layout: MeshOnHardware) -> StageSeconds:
        """The seconds of actions in this part, or of ends over both."""
        if layout.mesh.size != self.all_devices:
            return super().seconds_of(costs, layout)
        key = id(costs), layout.inside, "together"
        if key not in self._seconds:
            self._seconds[key] = costs.seconds(self.together, layout)
        return self._seconds[key]


class UnevenReplicas:
    """The step of replicas in two parts: devices of each part have the events of a plan with the rows of that part.

    `Unpriceable` as for `AssembledStep`.
    """

    pipeline_axis = AssembledStep.pipeline_axis

    def __init__(
        self, task: Task, settings: Mapping[str, Any], microbatches: int, rows: Sequence[int]
    ) -> None:
        assert isinstance(task.hardware, MixedHardware)
        self.task, self.hardware = task, task.hardware
        self.mesh = task.mesh(settings)
        self.of_parts = [
            AssembledStep(
                replace(task, hardware=part, batch=settings["dp"] * settings["ep"] * microbatches * own),
                {**settings, "microbatch": own},
            )
            for part, own in zip(task.hardware.parts, rows, strict=True)
        ]
        ranks = range(self.mesh.size)
        self.part_of = np.array([task.hardware.number_of_part(rank) for rank in ranks])

    def under(self, software: Software) -> SimulatedOperation:
        """The step as the software of each part runs it."""
        return self

    def templates(self, price: PriceEvents | None = None) -> Templates:
        """The events of the devices at each position of each part."""
        class_of = np.zeros(self.mesh.size, np.int64)
        events = list[DeviceEvents]()
        for part, step in enumerate(self.of_parts):
            here = self.part_of == part
            for number in np.unique(step.class_of[here]):
                ranks = np.flatnonzero(here & (step.class_of == number))
                class_of[ranks] = len(events)
                events.append(step.events(ranks, price and partial(price, ranks)))
        return Templates(self.mesh, events, class_of)
