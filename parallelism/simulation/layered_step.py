"""`LayeredStep`: a step of a model with many equal layers as an operation, from steps of two models with few.

It has the events of a `PipelinedStep` of the whole model, whose program is never made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from parallelism.execution import StagePrograms
from parallelism.hardware import Software
from parallelism.layouts.stages import Part
from parallelism.memoized import memoized
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.equal_layers import UnequalLayers, with_layers
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.operations import PipelinedStep, PriceEvents, SimulatedOperation
from parallelism.simulation.repeated_actions import run_repeated
from parallelism.simulation.repeated_stages import RepeatedEvents, RepeatingStage
from parallelism.simulation.typed_device import TypedDevice


class LayeredStep:
    """A step with ``layers`` more layers than that of ``few``; that of ``more`` has one more.

    ``made`` makes the step for other software.  `UnequalLayers` where its events do not follow from those of the two.
    """

    def __init__(
        self,
        few: PipelinedStep,
        more: PipelinedStep,
        layers: int,
        software: Software,
        made: Callable[[Software], SimulatedOperation],
    ) -> None:
        self.few, self.more, self.layers, self.software, self.made = few, more, layers, software, made
        self.mesh, self.pipeline = few.mesh, few.program.pipeline
        if self.pipeline.stages > 1:
            raise UnequalLayers("a step of several stages is made of its program")
        (self.first, self.class_of), (first, class_of) = few.classes, more.classes
        if self.first != first or few.parts != more.parts or not np.array_equal(self.class_of, class_of):
            raise UnequalLayers("other devices are equal with a layer more")
        self._known: dict[Any, RepeatedEvents] = {}
        self._around = [self._around_actions(rank) for rank in self.first]
        self._programs = [
            self._programs_of(few.programs(0, rank), more.programs(0, rank)) for rank in self.first
        ]

    @property
    def pipeline_axis(self) -> str | None:
        """The mesh axis on which the stages lie."""
        return self.few.pipeline_axis

    def under(self, software: Software) -> SimulatedOperation:
        """The step as this software runs it."""
        return self if software == self.software else self.made(software)

    def templates(self, price: PriceEvents | None = None) -> Templates:
        """The events of the devices of each class: see `parallelism.simulation.PipelinedStep`."""
        events = [
            self._events(number, price and partial(price, np.flatnonzero(self.class_of == number)))
            for number in range(len(self.first))
        ]
        return Templates(self.mesh, events, self.class_of)

    def _events(self, number: int, price: Any) -> DeviceEvents:
        """The events of each device of a class."""
        rank, programs = self.first[number], self._programs[number]
        position, replica = self.few.places[rank]
        before, behind = self._around[number]
        device = TypedDevice(self.mesh, rank)
        device.events.repeat(before)
        stage = RepeatingStage(
            device, 0, programs, self.few.parts[replica], {}, {}, last=True, known=self._known, price=price
        )
        works = self.pipeline.schedule.works[position]
        run_repeated(device, self.pipeline, self.few.program.axes(self.mesh)[0], {0: stage}, works)
        device.events.repeat(behind)
        return device.events

    def _around_actions(self, rank: int) -> tuple[DeviceEvents, DeviceEvents]:
        """The events of a rank before the first action, and behind the last."""
        few, more = (_around(step.events(rank, None)) for step in (self.few, self.more))
        before, behind = (with_layers(*each, self.layers) for each in zip(few, more, strict=True))
        return before, behind

    @memoized
    def _programs_of(self, few: StagePrograms, more: StagePrograms) -> Any:
        """The programs of the stage, whose actions are known."""
        programs = _LayeredPrograms(few, more, self.layers)
        known = self.few.actions, self.more.actions
        for key in [key for key in known[0] if key[0] is few.first]:
            _, *action = key
            self._known[programs, *action] = _repeated(
                known[0][key], known[1][more.first, *action], self.layers
            )
        return programs


class _LayeredPrograms:
    """The programs of a stage, as far as a stage of known events asks for them."""

    like = None
    adds_up = False
    sum_types = ()

    def __init__(self, few: StagePrograms, more: StagePrograms, layers: int) -> None:
        self.few, self.more, self.layers, self.functions = few, more, layers, few.functions

    @property
    def first(self) -> _LayeredPrograms:
        """This."""
        return self

    def alike(self, part: Part) -> Part:
        """As `StagePrograms.alike`."""
        return self.few.alike(part)

    def all_alike(self, parts: Sequence[Part]) -> list[Part]:
        """As `StagePrograms.all_alike`."""
        return self.few.all_alike(parts)

    def held(self, kind: str | None, part: Part) -> int:
        """As `StagePrograms.held`."""
        return _further(self.few.held(kind, part), self.more.held(kind, part), self.layers)

    def freed(self, kind: str, part: Part) -> int:
        """As `StagePrograms.freed`."""
        return _further(self.few.freed(kind, part), self.more.freed(kind, part), self.layers)


def _around(events: DeviceEvents) -> tuple[DeviceEvents, DeviceEvents]:
    """The events before the actions of all stages, and those behind them."""
    if events.bulk is None:
        raise UnequalLayers("actions with messages of their own are not repeated")
    start, behind = events.bulk_start, events.bulk_start + len(events.bulk.columns)
    rows = events.rows[:start], events.rows[start:]
    before = [each for each in events.collectives if each.event < start]
    after = [each._replace(event=each.event - behind) for each in events.collectives if each.event >= behind]
    return DeviceEvents(rows[0], before), DeviceEvents(rows[1], after)


def _repeated(few: RepeatedEvents, more: RepeatedEvents, layers: int) -> RepeatedEvents:
    """An action of a stage with further layers."""
    kept: Mapping[str, Any] | None = None if few.kept is None else {}
    kept_more, freed = (
        _further(few.kept_more, more.kept_more, layers),
        _further(few.freed, more.freed, layers),
    )
    events = with_layers(few.events, more.events, layers)
    return RepeatedEvents(kept, kept_more, freed, few.result, few.outputs, events)


def _further(few: int, more: int, layers: int) -> int:
    """A number of bytes that grows with each layer."""
    return few + layers * (more - few)
