"""What a model has in the devices from step to step, and what every step of it needs: places, parameters, a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.kernels import Optimizer
from parallelism.operation import Device
from parallelism.pipelined_operation import PipelinedOperation
from pipeline_parallelism.stage import Array, DenseStage, Layer, split_rows

if TYPE_CHECKING:
    from pipeline_parallelism.mlp import MLP


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

    def __init__(self, mlp: MLP) -> None:
        super().__init__(mlp.pipeline)
        self.mlp = mlp
        self._key = ("pipeline_parallelism.MLP", mlp)

    def _resident(self, device: Device, position: int) -> Resident:
        if self._key not in device.state:
            layers = {stage: self.mlp.initial_layers(self.mlp.layers_of(stage)) for stage in self.stages_on(position)}
            device.state[self._key] = Resident(layers)
        resident: Resident = device.state[self._key]
        return resident

    def _stages(
        self, layers: dict[int, list[Layer]], x: Array | None, rows: int,
        finish: Callable[[int, int, Array], Array | None], *, training: bool, recompute: Collection[int] = (),
        accumulate: bool = True,
    ) -> dict[int, DenseStage]:
        """This device's stages for one step, by number.

        ``finish(stage, microbatch, output)`` is for the stages that have a loss.  ``recompute`` has layers of the
        model.
        """
        stages = {}
        for stage, held in layers.items():
            numbers, last = self.mlp.layers_of(stage), stage == self.pipeline.stages - 1
            local = training and self.pipeline.schedule.local
            stages[stage] = DenseStage(
                held,
                self.mlp.activations_of(numbers),
                [len(part) for part in self._split(np.arange(rows))],
                inputs=self._split(x) if stage == 0 and x is not None else None,
                finish=partial(finish, stage) if last or local else None,
                head=self.mlp.local_head(stage) if local and not last else None,
                alone=local,
                training=training,
                recompute=[place for place, number in enumerate(numbers) if number in recompute],
                accumulate=accumulate,
            )
        return stages

    def _split(self, x: Array) -> list[Array]:
        return split_rows(x, self.pipeline.microbatches)


def common_step(steps: Sequence[int]) -> int:
    if len(set(steps)) > 1:
        raise MixedStepsError(steps)
    return steps[0]
