"""A training step cut into the stages of a pipeline, as an operation: schedule, sums over replicas, and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from parallelism.arrays import Array, plain_array
from parallelism.execution.device_calls import Later
from parallelism.execution.device_program import GRADIENTS, DeviceProgram
from parallelism.execution.last_backward import Place, Sums, gradients_of, sums_behind, without_sums
from parallelism.execution.overlapping import arranged
from parallelism.execution.pipelined_program import PipelinedProgram, Share
from parallelism.ir import Function, Op, TensorType
from parallelism.ir.passes import Form, Kinds, donations
from parallelism.ir.passes.overlapping import Order, overlapped, uneven
from parallelism.layouts.localization import Localized
from parallelism.layouts.localization.localized import localize
from parallelism.layouts.stages import GRADIENT, Stages
from parallelism.layouts.stages.batches import checked
from parallelism.layouts.stages.laid_out_stages import laid_out_stages
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import Pipeline
from parallelism.sharding import TensorSharding
from parallelism.transforms import Overlap
from parallelism.transforms.fusion import Fused
from parallelism.transforms.parts import NEXT
from parallelism.transforms.pipelines import Step
from parallelism.transforms.training import carried, categories


class TrainedPipeline(PipelinedProgram):
    """A `parallelism.transforms.Step` on ``mesh``: it computes what the whole step computes.

    ``cluster.run(TrainedPipeline(step, mesh), inputs)``, with the inputs of ``step.function`` by name or in order,
    returns its outputs in order: the loss, then parameters and state for the next step.  Stages lie on the axis of the
    pipeline, replicas on the axes ``step.replicas``; the other axes of the mesh are inside a stage.

    **Communication**: that of `PipelinedProgram`, but each device sums its gradients over replicas in its update, each
    gradient for itself; with Zero by a reduce_scatter, and an all_gather of the new parameters.  Stages that share
    weights exchange their gradients before.  If the update needs the norm of all gradients, it has an all_reduce of
    one number over the stages.  A gradient of which each device of a stage has a term, as of norms under sequence
    parallelism, is summed over them before the update.  With `parallelism.transforms.Overlap` the other gradients that
    one stage has alone are summed over the replicas in its last backward.

    ``ValueError`` for a mesh without the axis of the pipeline, and as from `PipelinedProgram`.
    """

    kept_by_devices = True
    gives_up = True

    def __init__(self, step: Step, mesh: Mesh, *, fused: bool | str = False, overlapping: bool = False) -> None:
        if step.pipeline.meshes and not self.apart:
            raise ValueError(f"{step.pipeline} has stages with meshes of their own: a MeshedPipeline runs it")
        self.step, self.mesh, pipeline = step, mesh, step.pipeline.on(mesh)
        axes = dict.fromkeys(axis for each in step.pipeline.meshes or (mesh,) for axis in each.axes)
        if missing := [axis for axis in step.split if axis not in axes]:
            raise ValueError(f"@{step.function.name}: %{step.split[missing[0]]} is split over axis {missing[0]!r}, but "
                             f"the axes of {'the stages' if step.pipeline.meshes else repr(mesh)} are "
                             f"{', '.join(map(repr, axes))}")
        replicas = tuple(axis for axis in step.replicas if axis in mesh.shape)
        inside = self._inside(pipeline, replicas)
        sums = {value.name.removeprefix(GRADIENT): value.type.dtype for value in step.parts.gradients}
        super().__init__(step.stages(pipeline.stages), pipeline, Mesh(**inside) if inside else None, replicas, sums,
                         fused=fused or Fused.of(step.function) is not None, overlapping=overlapping)
        self.overlap = Overlap.of(step.function)
        self.stages_summed = pipeline.ranks if step.sums_over_stages else 1
        """The positions of the pipeline over which the updates sum numbers of all stages."""
        self._updates: dict[int, _Update] = {}
        self._first: dict[tuple[Form, Mesh], _Update] = {}
        """The first update of each form; others of the form are this one with other names."""
        self._places: dict[Mesh, list[int]] = {}

    def laid_out(self, stages: Stages) -> Stages:
        """The stages with a layout on every value, if a stage is on several devices."""
        return laid_out_stages(stages, self.mesh_inside, self.sums, pending=True) if self.mesh_inside else stages

    def _inside(self, pipeline: Pipeline, replicas: Sequence[str]) -> dict[str, int]:
        """The axes inside a stage."""
        return {axis: n for axis, n in self.mesh.shape.items() if axis not in (pipeline.axis, *replicas)}

    def mesh_of_update(self, position: int) -> Mesh:
        """The axes over which parameters and state are split in the update of the stages at a position."""
        around = {axis: n for axis, n in self.mesh.shape.items() if axis != self.pipeline.axis}
        return Mesh(**around or {"one": 1})

    def __getstate__(self) -> dict[str, Any]:
        """Everything except the programs, which each device computes."""
        return super().__getstate__() | {"_updates": {}, "_first": {}, "_places": {}}

    # -- the update of a position of the pipeline ----------------------------------------------------------------------

    def update(self, position: int) -> _Update:
        """The update of the parameters of all stages at a position; laid out and localized once for each form."""
        if position not in self._updates:
            names = dict.fromkeys(
                name for number in self.stages_on(position) for name in self.stages.functions[number].trained)
            placement, holders = self.pipeline.schedule.placement, self.endings.holders
            counted = [name for name in names if position == min(placement[number] for number in holders[name])]
            function = self.step.update(
                names, self._laid, replicas=self.replicas, counted=counted, stages=self.stages_summed)
            inside, early = self.mesh_of_update(position), self._early(function)
            first = self._first.get(form := (Form([function], more=early), inside))
            over = {self.pipeline.axis: self.stages_summed} if self.stages_summed > 1 else {}
            self._updates[position] = _Update(
                localize(function, Mesh(**over | dict(inside.shape))), function,
                categories(self.step.function), self.fused, self.overlap, early,
            ) if first is None else replace(first, function=function)
            self._first.setdefault(form, self._updates[position])
        return self._updates[position]

    @cached_property
    def _laid(self) -> dict[str, TensorSharding]:
        """The layouts of inputs of the stages, by name."""
        return {value.name: value.layout for value in self.stages.function.inputs if value.layout}

    def _early(self, function: Function) -> tuple[int, ...]:
        """The numbers of the inputs of an update that are gradients of one stage alone, summed over replicas."""
        if self.overlap is None or not self.replicas:
            return ()
        return tuple(number for number, value in enumerate(function.inputs)
                     if value.name.startswith(GRADIENT) and value.name.removeprefix(GRADIENT) in self.endings.alone)

    def sums_over_replicas(self, place: Place) -> Sums:
        """The ops that the update of a stage begins with, for gradients that no other stage has."""
        position = self.pipeline.schedule.placement[place.number]
        update, own = self.update(position), {*self.stages.functions[place.number].trained}
        chains = update.sums_before(self.rank_of_update(place.mesh, place.rank, position))
        names = {number: update.function.inputs[number].name.removeprefix(GRADIENT) for number in chains}
        return {name: chains[number] for number, name in names.items() if name in own}

    def ranks_summing(self, place: Place) -> Sequence[int]:
        """A rank of each class of devices of the update."""
        position = self.pipeline.schedule.placement[place.number]
        ranks = {self.update(position).localized.class_of(self.rank_of_update(place.mesh, rank, position)): rank
                 for rank, (other, _) in enumerate(self.places(place.mesh)) if other == position}
        return list(ranks.values())

    def place_of_update(self, mesh: Mesh, rank: int) -> int:
        """The rank on `mesh_of_update`."""
        if mesh not in self._places:
            inside, sizes = self.mesh_of_update(0), tuple(mesh.shape.values())
            index = dict(zip(mesh.axes, np.unravel_index(np.arange(mesh.size), sizes), strict=True))
            found = np.zeros(mesh.size, np.int64)
            for axis, extent in inside.shape.items():
                found = found * extent + index.get(axis, 0)
            self._places[mesh] = found.tolist()
        return self._places[mesh][rank]

    def program_of_update(self, mesh: Mesh, rank: int, position: int) -> DeviceProgram:
        """The program of a rank's update, with the names of the first update of its form."""
        return self.update(position).program(self.rank_of_update(mesh, rank, position))

    def class_in_time(self, mesh: Mesh, rank: int, position: int) -> int:
        """Devices at a position of one class have updates of the same shapes, which take equally long."""
        return self.update(position).localized.class_in_time(self.rank_of_update(mesh, rank, position))

    def rank_of_update(self, mesh: Mesh, rank: int, position: int) -> int:
        """The rank on the mesh on which the update is laid out, where the axis of the stages is the outermost."""
        before = position % self.stages_summed
        return (before and before * self.mesh_of_update(position).size) + self.place_of_update(mesh, rank)

    def state_types(self, mesh: Mesh, rank: int, position: int) -> Mapping[str, TensorType]:
        """The types of a rank's parts of the state, by name."""
        update = self.update(position)
        inputs = self.program_of_update(mesh, rank, position).function.inputs
        types = zip((value.name for value in update.function.inputs), (value.type for value in inputs), strict=True)
        return {name: type for name, type in types if name in self._state}

    @cached_property
    def _state(self) -> frozenset[str]:
        return frozenset(value.name for value in self.step.parts.state)

    @property
    def writes_inputs(self) -> bool:
        """True: new parameters and state lie in the memory of the old ones."""
        return True

    # -- a run ---------------------------------------------------------------------------------------------------------

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Share]]:
        """For each rank, the data of its replica, the weights of its stages, and its part of the state."""
        function: Function = self.step.function
        if mesh != self.mesh:
            raise ValueError(f"@{function.name} is cut for {self.mesh!r} and cannot run on {mesh!r}")
        arrays, _ = checked(function, *args)
        forward = [arrays[value.name] for value in self.stages.function.inputs]
        state = {name: plain_array(f"%{name}", arrays[name]) for name in self._state}
        shares = []
        for rank, (share,) in enumerate(super().inputs(mesh, forward)):
            position = self.places(mesh)[rank][0]
            update, inside = self.update(position), self.mesh_of_update(position)
            place = self.place_of_update(mesh, rank)
            mine = {
                value.name: layout.shard(state[value.name], inside)[place]
                for value, layout in zip(update.function.inputs, update.localized.inputs, strict=True)
                if value.name in self._state}
            shares.append((replace(share, state=mine),))
        return shares

    def updated(
        self, device: Device, position: int, share: Share, sums: dict[str, Any]
    ) -> dict[str, Array]:
        """New parameters and state of this device."""
        update, program = self.update(position), self.program_of_update(device.mesh, device.rank, position)
        made = program.run(device, program.own(self._given(update, program, share, sums)))
        return {value.name: array for value, array in zip(update.function.outputs, made, strict=True)}

    @staticmethod
    def _given(update: _Update, program: DeviceProgram, share: Share, sums: dict[str, Any]) -> list[Any]:
        """The inputs of an update; the ``sums`` are taken out, so that the update frees them."""
        given: dict[str, Any] = {**share.weights, **share.state}
        while sums:
            name, array = sums.popitem()
            given[f"{GRADIENT}{name}"] = array
        return [
            given[value.name] if isinstance(given[value.name], Later) else np.reshape(given[value.name], own.type.shape)
            for value, own in zip(update.function.inputs, program.function.inputs, strict=True)]

    def result(self, mesh: Mesh, outputs: Sequence[dict[str, Array]]) -> Any:
        """The outputs of the whole step, in order."""
        whole: dict[str, Array] = {}
        for position in range(self.pipeline.ranks):
            ranks = [rank for rank, place in enumerate(self.places(mesh)) if place[0] == position]
            by_place = {self.place_of_update(mesh, rank): outputs[rank] for rank in ranks}
            update, inside = self.update(position), self.mesh_of_update(position)
            for value, layout in zip(update.function.outputs, update.localized.outputs, strict=True):
                parts = [by_place[place][value.name] for place in range(inside.size)]
                whole.setdefault(value.name, layout.unshard(parts, inside))
        loss = next(each[""] for each in outputs if "" in each)
        return tuple(whole[value.name] if value.name.startswith(NEXT) else loss for value in self.step.function.outputs)


@dataclass(frozen=True)
class _Update:
    """The update at a position of the pipeline: the programs of its devices have the names of the first of its form."""

    localized: Localized
    function: Function
    """That of this position."""
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
            early = dict.fromkeys(self._order.made_early(alone), GRADIENTS) if self._order else {}
            function, calls, chains = arranged(alone, self._order, fused=self.fused)
            known = {value.name for value in function.values}
            self.programs[place] = DeviceProgram(
                function, early | {name: kind for name, kind in self.categories.items() if name in known},
                donated=donations(function, carried(self.localized.function), Kinds.of(self.localized.function)),
                calls=calls, chains=chains, given_up=gradients_of(self.localized.function, function))
        return self.programs[place]

    def sums_before(self, place: int) -> dict[int, tuple[Op, ...]]:
        """By the numbers of inputs: the ops that sum them, on the device at a place."""
        function = self.localized.program(place)
        found = {number: sums_behind(function, function.inputs[number]) for number in self.early}
        return {number: ops for number, ops in found.items() if ops}

    def _alone(self, place: int) -> Function:
        function = self.localized.program(place)
        return without_sums(function, {
            function.inputs[number].name: ops for number, ops in self.sums_before(place).items()})

    @cached_property
    def _order(self) -> Order | None:
        if self.overlap is None:
            return None
        programs = [self._alone(each.rank) for each in self.localized.classes]
        return overlapped(programs[0], self.overlap, {name for program in programs for name in uneven(program)})
