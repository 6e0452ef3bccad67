"""What a model has in the devices from step to step, and what every step of it needs: places, parameters, a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import Optimizer
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelined_operation import PipelinedOperation
from pipeline_parallelism.microbatches import Microbatches, split_rows
from pipeline_parallelism.model import Model
from pipeline_parallelism.trained_stage import Layer, TrainedStage


class MixedStepsError(RuntimeError):
    """The stages of a model are at different steps, so that together they are no model any more.

    So it is after a step that failed when some of the devices had done their update, and when a device was replaced:
    its stage begins anew.  ``steps`` has the count of each rank.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        ranks: dict[int, list[str]] = {}
        for rank, step in enumerate(steps):
            ranks.setdefault(step, []).append(str(rank))
        told = "; ".join(f"after {step} on rank {', '.join(ranks[step])}" for step in sorted(ranks))
        super().__init__(
            f"the devices hold the model at different steps: {told}. A step was broken off, or a device replaced; "
            f"go on from a checkpoint (run restore_step()) or begin anew (run reset_step())"
        )
        self.steps = tuple(steps)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.steps,)


@dataclass
class Resident:
    """What stays in a device from step to step, by stage."""

    layers: dict[int, list[Layer]]
    step: int = 0
    optimizer: Optimizer | None = None
    optimizer_states: dict[int, Any] = field(default_factory=dict)
    delayed: dict[int, list[Layer]] = field(default_factory=dict)
    """The layers before the last update, where a schedule's weights are double-buffered."""


class Step(PipelinedOperation):
    """What the steps have in common: where stages lie, and the parameters in the devices."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.pipeline, model.inside)
        self.model = model
        self._key = (f"pipeline_parallelism.{type(model).__name__}", model)

    def _resident(self, device: Device, position: int) -> Resident:
        if self._key not in device.state:
            device.state[self._key] = Resident({
                stage: self.model.initial_shards(device.mesh, device.rank, self.model.layers_of(stage))
                for stage in self.stages_on(position)
            })
        resident: Resident = device.state[self._key]
        return resident

    def _stages(self, device: Device, layers: dict[int, list[Layer]], work: Microbatches) -> dict[int, TrainedStage]:
        """This device's stages for one step, by number."""
        return {number: self.model.stage(device, number, held, work) for number, held in layers.items()}

    def _split(self, x: Array) -> list[Array]:
        return split_rows(x, self.pipeline.microbatches)

    def _rows(self, rows: int) -> list[int]:
        """How many each microbatch has of so many rows."""
        return [len(part) for part in self._split(np.arange(rows))]

    def _by_inner_place(self, mesh: Mesh, outputs: Sequence[Any]) -> dict[tuple[int, int], list[Any]]:
        """The outputs by position in the pipeline and replica, each a list in the order of the ranks."""
        found: dict[tuple[int, int], list[Any]] = {}
        for place, output in zip(self.places(mesh), outputs, strict=True):
            found.setdefault(place, []).append(output)
        return found


def common_step(steps: Sequence[int]) -> int:
    if len(set(steps)) > 1:
        raise MixedStepsError(steps)
    return steps[0]
