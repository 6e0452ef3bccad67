"""A program cut into stages, run on a pipeline: the loss of a batch, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.layouts.batches import Part, checked, dealt, rows_of
from parallelism.program_stage import ProgramStage
from parallelism.layouts.stages import Stages
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipeline_execution import pipeline_axes
from parallelism.pipelined_operation import PipelinedOperation
from parallelism.pipelining import Pipeline

Array = npt.NDArray[Any]


class LossAndGradients(NamedTuple):
    """Of a whole batch."""

    loss: Array
    gradients: dict[str, Array]
    """By the names of the weights."""


@dataclass(frozen=True)
class Share:
    """What a device gets from the host: numbers for the symbols, its rows of the data, the weights of its stages."""

    numbers: Mapping[str, int]
    rows: int
    """Of the whole batch."""
    parts: tuple[Part, ...]
    """The first row and the rows of each microbatch of this replica."""
    data: Mapping[str, Array]
    weights: Mapping[str, Array]


class PipelinedProgram(PipelinedOperation):
    """The loss of a batch and its gradients, by stages that run a schedule: what `gradient` of the whole returns.

    ``cluster.run(PipelinedProgram(stages, pipeline), inputs)``, with the inputs of ``stages.function`` by name or in
    their order, returns `LossAndGradients`.  Stages lie on ``pipeline.axis``; the rows are dealt to replicas on ``dp``,
    then to microbatches, as even as can be, the longer parts first.

    **Communication**: a message for each forward and backward that passes a boundary between devices, of the bytes of
    ``sent`` and ``returned``; after the last of them, over ``dp``, an all_reduce of the gradients of each stage, with
    the loss of the last one; then for weights that stages on several devices have, an all_reduce over those devices.

    ``ValueError`` for another number of stages than the pipeline has, for a pipeline that does not train the whole, for
    inputs that do not fit and for a batch with less rows than microbatches.
    """

    def __init__(self, stages: Stages, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        if len(stages) != pipeline.stages:
            raise ValueError(f"@{stages.function.name} is cut into {len(stages)} stages; {pipeline!r} has "
                             f"{pipeline.stages}")
        if not pipeline.schedule.training or pipeline.schedule.local:
            raise ValueError(f"the gradients of a whole program are wanted; schedule {pipeline.schedule.name!r} has "
                             f"{'losses of single stages' if pipeline.schedule.local else 'no backward'}")
        self.stages = stages

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Share]]:
        """The data of its replica, and the weights of its stages, for each rank."""
        arrays, numbers = checked(self.stages.function, *args)
        batch, places = self.stages.batch, self.places(mesh)
        rows = numbers.pop(batch)
        replicas = dealt(0, rows, 1 + max(replica for _, replica in places))
        parts = [dealt(first, count, self.pipeline.microbatches) for first, count in replicas]
        if not all(count for each in parts for _, count in each):
            raise ValueError(f"a batch of {rows} rows cannot be dealt to {len(replicas)} x "
                             f"{self.pipeline.microbatches} microbatches: some would have none")
        found = []
        for position, replica in places:
            mine = [self.stages.functions[number] for number in self.stages_on(position)]
            data = {
                value.name: rows_of(arrays[value.name], value.type.specialize(numbers), batch, *replicas[replica])
                for value in self.stages.function.inputs if any(value.name in stage.data for stage in mine)
            }
            weights = {name: arrays[name] for stage in mine for name in stage.weights}
            found.append((Share(numbers, rows, parts[replica], data, weights),))
        return found

    def __call__(self, device: Device, share: Share) -> dict[str, Array]:
        """Of each weight of the device's stages the gradient, and under ``""`` the loss where the last stage is."""
        stages = {
            number: self.stage(number, share)
            for number in self.stages_on(self.places(device.mesh)[device.rank][0])
        }
        self.run_stages(device, stages)
        _, replicas = pipeline_axes(self.pipeline, device.mesh, self.inside)
        found: dict[str, Array] = {}
        for stage in stages.values():
            arrays = [*stage.gradients]
            if stage.last:
                arrays.append(np.asarray(reduce(np.add, (stage.outputs[k][0] for k in sorted(stage.outputs)))))
            if replicas is not None and arrays:
                arrays = device.all_reduce(arrays, replicas)
            if stage.last:
                found[""] = arrays.pop()
            for name, gradient in zip(stage.functions.trained, arrays, strict=True):
                found[name] = found[name] + gradient if name in found else gradient
        return self._added_up(device, found)

    def stage(self, number: int, share: Share) -> ProgramStage:
        """A stage for one step."""
        functions = self.stages.functions[number]
        numbers = {name: share.numbers[name] for name in share.numbers.keys() & functions.symbols}
        return ProgramStage(
            functions.specialize(**numbers), self.stages.batch, share.rows, share.parts, share.data, share.weights,
            last=number == len(self.stages) - 1)

    def _added_up(self, device: Device, found: dict[str, Array]) -> dict[str, Array]:
        """With the gradients of weights that other devices of the pipeline have copies of."""
        axis, _ = pipeline_axes(self.pipeline, device.mesh, self.inside)
        placement = self.pipeline.schedule.placement
        shared: dict[tuple[int, ...], list[str]] = {}
        for name, holders in sorted(self.stages.holders.items()):
            positions = tuple(sorted({placement[number] for number in holders}))
            if name in found and len(positions) > 1:
                shared.setdefault(positions, []).append(name)
        for positions, names in sorted(shared.items()):
            ranks = device.group(axis)
            sums = device.all_reduce([found[name] for name in names], groups=[[ranks[p] for p in positions]])
            found.update(zip(names, sums, strict=True))
        return found

    def result(self, mesh: Mesh, outputs: Sequence[dict[str, Array]]) -> LossAndGradients:
        """Of each weight that of the lowest rank that has it; they are the same everywhere."""
        found: dict[str, Array] = {}
        for output in reversed(outputs):
            found.update(output)
        loss = found.pop("")
        names = [value.name for value in self.stages.function.inputs if value.name in found]
        return LossAndGradients(loss, {name: found[name] for name in names})
