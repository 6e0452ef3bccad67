"""The updates of a training step that is cut into the stages of a pipeline: one at each position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.execution.around_stages import AroundStages
from parallelism.execution.device_calls import Later
from parallelism.execution.device_program import GRADIENTS, DeviceProgram
from parallelism.execution.endings import Endings
from parallelism.execution.last_backward import Place, Sums, gradients_of, sums_behind, without_sums
from parallelism.execution.overlapping import arranged
from parallelism.ir import Function, Op, TensorType
from parallelism.ir.passes import Form, Kinds, donations
from parallelism.ir.passes.joined_calls import joined
from parallelism.ir.passes.overlapping import Order, overlapped
from parallelism.layouts.localization import Localized
from parallelism.layouts.localization.localized import localize
from parallelism.layouts.stages import GRADIENT, Stages
from parallelism.layouts.stages.batches import checked
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import Pipeline
from parallelism.transforms import Overlap
from parallelism.transforms.parts import NEXT
from parallelism.transforms.pipelines import Step
from parallelism.transforms.training import carried, categories


@dataclass(frozen=True, eq=False)
class StepUpdates:
    """The updates of a step on a mesh, of the stages at each position of its pipeline."""

    step: Step
    mesh: Mesh
    pipeline: Pipeline
    stages: Stages
    """They have a layout on every value if a stage is on several devices."""
    endings: Endings
    replicas: tuple[str, ...]
    around: AroundStages
    """The axes over which parameters and state are split in the update of the stages at a position."""
    overlap: Overlap | None
    fused: bool | str

    @cached_property
    def _first(self) -> dict[tuple[Form, Mesh], Update]:
        """The first update of each form; others of the form are this one with other names."""
        return {}

    @property
    def stages_summed(self) -> int:
        """The positions of the pipeline over which the updates sum numbers of all stages."""
        return self.pipeline.ranks if self.step.sums_over_stages else 1

    @memoized
    def at(self, position: int) -> Update:
        """The update of the parameters of all stages at a position; laid out and localized once for each form."""
        placement, holders = self.pipeline.schedule.placement, self.endings.holders
        names = dict.fromkeys(
            name
            for number, stage in enumerate(self.stages.functions)
            if placement[number] == position
            for name in stage.trained
        )
        counted = []
        for name in names:
            first_holder = min(placement[number] for number in holders[name])
            if first_holder == position:
                counted.append(name)
        function = self.step.update(
            names,
            self._layouts,
            replicas=self.replicas,
            pending=self.endings.pending,
            counted=counted,
            stages=self.stages_summed,
        )
        inside = self.around.at(position)
        early = self._early(function)
        form = Form([function], more=early), inside
        if form not in self._first:
            over = {self.pipeline.axis: self.stages_summed} if self.stages_summed > 1 else {}
            self._first[form] = Update(
                localize(function, Mesh(**over | dict(inside.shape))),
                function,
                categories(self.step.function),
                self.fused,
                self.overlap,
                early,
            )
        return replace(self._first[form], function=function)

    @cached_property
    def _layouts(self) -> dict[str, Any]:
        """The layouts of inputs of the stages, by name."""
        return {value.name: value.layout for value in self.stages.function.inputs if value.layout}

    def _early(self, function: Function) -> tuple[int, ...]:
        """The numbers of the inputs of an update that are gradients of one stage alone, summed over devices."""
        if self.overlap is None or not (self.replicas or self.endings.pending):
            return ()
        return tuple(
            number
            for number, value in enumerate(function.inputs)
            if value.name.startswith(GRADIENT) and value.name.removeprefix(GRADIENT) in self.endings.alone
        )

    # -- the update of a device ----------------------------------------------------------------------------------------

    def _rank(self, rank: int, position: int) -> int:
        """The rank on the mesh on which the update is laid out, where the axis of the stages is the outermost."""
        before = position % self.stages_summed
        return (before and before * self.around.at(position).size) + self.around.place(rank)

    def program(self, rank: int, position: int) -> DeviceProgram:
        """The program of a rank's update, with the names of the first update of its form."""
        return self.at(position).program(self._rank(rank, position))

    def function(self, rank: int, position: int) -> Function:
        """What a rank's update does, with the names of its own parameters."""
        update = self.at(position)
        return localize(update.function, update.localized.mesh).program(self._rank(rank, position))

    def class_in_time(self, rank: int, position: int) -> int:
        """Devices at a position of one class have updates of the same shapes, which take equally long."""
        return self.at(position).localized.class_in_time(self._rank(rank, position))

    def state_types(self, rank: int, position: int) -> Mapping[str, TensorType]:
        """The types of a rank's parts of the state, by name."""
        inputs = zip(
            self.at(position).function.inputs, self.program(rank, position).function.inputs, strict=True
        )
        return {value.name: own.type for value, own in inputs if value.name in self._state}

    @cached_property
    def _state(self) -> frozenset[str]:
        return frozenset(value.name for value in self.step.parts.state)

    # -- sums over replicas in the last backward -----------------------------------------------------------------------

    def sums(self, place: Place, trained: Collection[str]) -> Sums:
        """The ops that the update of a stage begins with, for gradients of ``trained`` that no other stage has."""
        position = self.pipeline.schedule.placement[place.number]
        update = self.at(position)
        chains = update.sums_before(self._rank(place.rank, position))
        names = {number: update.function.inputs[number].name.removeprefix(GRADIENT) for number in chains}
        return {name: chains[number] for number, name in names.items() if name in trained}

    # -- a run ---------------------------------------------------------------------------------------------------------

    def split_inputs(self, mesh: Mesh, forward: Function, given: Any) -> tuple[list[Array], dict[str, Array]]:
        """The inputs that the stages of ``forward`` take, and the state, from what the whole step takes."""
        function: Function = self.step.function
        if mesh != self.mesh:
            raise ValueError(f"@{function.name} is cut for {self.mesh!r} and cannot run on {mesh!r}")
        arrays, _ = checked(function, given)
        state = {name: arrays[name] for name in self._state}
        return [arrays[value.name] for value in forward.inputs], state

    def shards(self, state: Mapping[str, Array], rank: int, position: int) -> dict[str, Array]:
        """A rank's parts of the state."""
        update = self.at(position)
        inside = self.around.at(position)
        place = self.around.place(rank)
        inputs = zip(update.function.inputs, update.localized.inputs, strict=True)
        return {
            value.name: layout.shard(state[value.name], inside)[place]
            for value, layout in inputs
            if value.name in self._state
        }

    def update_of(
        self, device: Device, rank: int, position: int, held: Mapping[str, Array]
    ) -> Callable[[dict[str, Any]], dict[str, Array]]:
        """The update of a device, which gives new parameters and state from sums of gradients.

        ``held`` are its weights and state.
        """
        return partial(_run, device, self.at(position).function, self.program(rank, position), held)

    def result(
        self, places: Sequence[tuple[int, int]], outputs: Sequence[dict[str, Array]]
    ) -> tuple[Array, ...]:
        """The outputs of the whole step, in order."""
        whole: dict[str, Array] = {}
        for position in range(self.pipeline.ranks):
            by_place = {
                self.around.place(rank): outputs[rank]
                for rank, (other, _) in enumerate(places)
                if other == position
            }
            update, inside = self.at(position), self.around.at(position)
            for value, layout in zip(update.function.outputs, update.localized.outputs, strict=True):
                parts = [by_place[place][value.name] for place in range(inside.size)]
                whole.setdefault(value.name, layout.unshard(parts, inside))
        results = next(each[""] for each in outputs if "" in each)
        nexts = (value.name for value in self.step.function.outputs if value.name.startswith(NEXT))
        return (*results, *(whole[name] for name in nexts))


def _run(
    device: Device,
    function: Function,
    program: DeviceProgram,
    held: Mapping[str, Array],
    sums: dict[str, Any],
) -> dict[str, Array]:
    """What an update returns, by name.  The ``sums`` are taken out, so that it frees them."""
    made = program.run(device, program.own(_inputs(function, program, held, sums)))
    return {value.name: array for value, array in zip(function.outputs, made, strict=True)}


def _inputs(
    function: Function, program: DeviceProgram, held: Mapping[str, Array], sums: dict[str, Any]
) -> list[Any]:
    """What an update takes.  The ``sums`` are taken out, so that the program has the only references to them."""
    given: dict[str, Any] = {**held}
    while sums:
        name, array = sums.popitem()
        given[f"{GRADIENT}{name}"] = array
    inputs: list[Any] = []
    for value, own in zip(function.inputs, program.function.inputs, strict=True):
        array = given.pop(value.name)
        inputs.append(array if isinstance(array, Later) else np.reshape(array, own.type.shape))
    return inputs


@dataclass(frozen=True)
class Update:
    """The update at a position of the pipeline: the programs of its devices have the names of the first of its form."""

    localized: Localized
    function: Function
    """The update of this position."""
    categories: Mapping[str, str]
    """The category of memory of each value of the step that has one."""
    fused: bool | str = False
    overlap: Overlap | None = None
    early: tuple[int, ...] = ()
    """The numbers of the inputs that are summed over replicas before, where possible."""
    programs: dict[int, DeviceProgram] = field(default_factory=dict)
    """The programs by place; those of all positions of a form."""

    def program(self, place: int) -> DeviceProgram:
        """The program of the device at a place of the mesh, without the sums that come before it (`sums_before`)."""
        if place not in self.programs:
            alone = self._alone(place)
            early = dict.fromkeys(self._order.made_early(alone), GRADIENTS)
            function, calls, chains = arranged(alone, self._order, fused=self.fused)
            known = {value.name for value in function.values}
            self.programs[place] = DeviceProgram(
                function,
                early | {name: kind for name, kind in self.categories.items() if name in known},
                donated=donations(
                    function, carried(self.localized.function), Kinds.of(self.localized.function)
                ),
                calls=calls,
                chains=chains,
                given_up=gradients_of(self.localized.function, function),
                at_once=self._order.at_once,
            )
        return self.programs[place]

    @memoized
    def sums_before(self, place: int) -> dict[int, tuple[Op, ...]]:
        """By the numbers of inputs: the ops that sum them, on the device at a place."""
        return sums_behind(self.localized.program(place), self.early)

    def _alone(self, place: int) -> Function:
        function = self.localized.program(place)
        return without_sums(
            function, {function.inputs[number].name: ops for number, ops in self.sums_before(place).items()}
        )

    @cached_property
    def _order(self) -> Order:
        first = self._alone(self.localized.classes[0].rank)
        return joined(first) if self.overlap is None else overlapped(first, self.overlap)
