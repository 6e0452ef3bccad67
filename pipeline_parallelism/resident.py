"""The state of a model that devices keep between steps, and the base class of the steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import Optimizer
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.operation.errors import keys_by_value
from parallelism.pipelining import PipelinedOperation
from pipeline_parallelism.microbatches import Microbatches
from pipeline_parallelism.model import Model
from pipeline_parallelism.trained_stage import Layers, TrainedStage


class MixedStepsError(RuntimeError):
    """The stages of a model are at different steps, so that together they are not a model.

    >>> from pipeline_parallelism import MixedStepsError
    >>> print(str(MixedStepsError([3, 3, 2])).split(".")[0])
    the devices hold the model at different steps: after 2 on rank 2; after 3 on rank 0, 1

    This happens when a step fails after some devices have done their update, and when a device is replaced, because
    its stage starts again.  ``steps`` has the number of steps of each rank.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        ranks = keys_by_value(dict(enumerate(steps)))
        counts = "; ".join(
            f"after {step} on rank {', '.join(map(str, ranks[step]))}" for step in sorted(ranks)
        )
        super().__init__(
            f"the devices hold the model at different steps: {counts}. A step was broken off, or a device replaced; "
            f"go on from a checkpoint (run restore_step()) or begin anew (run reset_step())"
        )
        self.steps = tuple(steps)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.steps,)


@dataclass
class Resident:
    """The state that a device keeps between steps, by stage."""

    layers: dict[int, Layers]
    step: int = 0
    optimizer: Optimizer | None = None
    optimizer_states: dict[int, Any] = field(default_factory=dict)
    delayed: dict[int, Layers] = field(default_factory=dict)
    """The layers before the last update, if the schedule's weights are double-buffered."""


class ModelStep(PipelinedOperation):
    """The base class of all steps: it finds the stages and the state of the model on a device."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.pipeline, model.inside)
        self.model = model
        self._key = (f"pipeline_parallelism.{type(model).__name__}", model)

    def _resident(self, device: Device, position: int) -> Resident:
        if self._key not in device.state:
            device.state[self._key] = Resident(
                {
                    stage: self.model.initial_shards(device.mesh, device.rank, self.model.layers_of(stage))
                    for stage in self.stages_on(position)
                }
            )
        resident: Resident = device.state[self._key]
        return resident

    def _stages(
        self, device: Device, layers: dict[int, Layers], work: Microbatches
    ) -> dict[int, TrainedStage]:
        """This device's stages for one step, by number."""
        return {number: self.model.stage(device, number, held, work) for number, held in layers.items()}

    def _split(self, x: Array) -> list[Array]:
        return np.array_split(x, self.pipeline.microbatches)

    def _rows(self, rows: int) -> list[int]:
        """The number of rows of each microbatch, for a replica with ``rows`` rows: as `_split` cuts them."""
        count = self.pipeline.microbatches
        least, more = divmod(rows, count)
        return [least + 1] * more + [least] * (count - more)

    def _by_inner_place(self, mesh: Mesh, outputs: Sequence[Any]) -> dict[tuple[int, int], list[Any]]:
        """The outputs by (position in the pipeline, replica), each a list in the order of the ranks."""
        by_place: dict[tuple[int, int], list[Any]] = {}
        for place, output in zip(self.places(mesh), outputs, strict=True):
            by_place.setdefault(place, []).append(output)
        return by_place


def common_step(steps: Sequence[int]) -> int:
    if len(set(steps)) > 1:
        raise MixedStepsError(steps)
    return steps[0]
