"""The other steps of a pipelined model: predict, checkpoint, restore and reset.

A step that fails, or a device that is replaced, can leave the stages at different steps of the training.  Each device
counts its steps, and the host compares the counts before it uses a result.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.operation import Device
from pipeline_parallelism.checkpoint import Checkpoint, join_states, split_state
from pipeline_parallelism.microbatches import Microbatches, split_rows
from pipeline_parallelism.resident import ModelStep, Resident, common_step

if TYPE_CHECKING:
    from pipeline_parallelism.mlp import MLP


class PredictStep(ModelStep):
    """Run only the forwards of the schedule; see `MLP.predict_step` and `Transformer.predict_step`.

    The result is the array of the last layer's outputs.

    **Communication**: ``stages - 1`` messages for each microbatch, as in `TrainStep`.
    """

    def inputs(self, mesh: Mesh, *args: npt.ArrayLike) -> list[tuple[Any, ...]]:
        """For each rank: the inputs of its replica, if it has the first stage, and their number of rows."""
        places = self.places(mesh)
        if len(args) != 1:
            raise TypeError(f"a prediction takes x alone, got {len(args)} arguments")
        x = self.model.check_inputs(*args)
        self.model.check_mesh(mesh, x)
        xs = split_rows(x, 1 + max(replica for _, replica in places))
        first = self.pipeline.schedule.placement[0]
        return [(xs[d] if i == first else None, len(xs[d])) for i, d in places]

    def __call__(self, device: Device, *inputs: Any) -> tuple[int, Array | None]:
        x, rows = inputs
        position, _ = self.places(device.mesh)[device.rank]
        resident = self._resident(device, position)
        work = Microbatches(self._rows(rows), None if x is None else self._split(x), training=False)
        self.run_stages(device, self._stages(device, resident.layers, work), forward_only=True)
        parts = [work.outputs[k] for k in sorted(work.outputs)]
        return resident.step, np.concatenate(parts) if parts else None

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Array:
        """The outputs of the whole batch, joined over the replicas; `MixedStepsError` as in `TrainStep`."""
        common_step([step for step, _ in outputs])
        by_place = self._by_inner_place(mesh, [y for _, y in outputs])
        by_replica = {d: self.model.join_outputs(mesh, ys) for (_, d), ys in by_place.items() if ys[0] is not None}
        return np.concatenate([by_replica[d] for d in sorted(by_replica)])


class CheckpointStep(ModelStep):
    """Return the devices' state of the training; see `MLP.checkpoint_step`.  No communication between devices."""

    def __call__(self, device: Device, *inputs: Any) -> dict[str, Any]:
        position, replica = self.places(device.mesh)[device.rank]
        resident = self._resident(device, position)
        if replica:
            return {"step": resident.step}
        return {
            "step": resident.step, "layers": resident.layers, "optimizer": resident.optimizer,
            "states": resident.optimizer_states,
        }

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Checkpoint:
        """The `Checkpoint` of the whole model; `MixedStepsError` as in `TrainStep`."""
        step = common_step([output["step"] for output in outputs])
        holders = [output for output in outputs if "layers" in output]
        layers = {stage: part for output in holders for stage, part in output["layers"].items()}
        states = {stage: part for output in holders for stage, part in output["states"].items()}
        stages = range(self.pipeline.stages)
        return Checkpoint(
            step, [layer for stage in stages for layer in layers[stage]], holders[0]["optimizer"],
            join_states([states.get(stage) for stage in stages]),
        )


class RestoreStep(ModelStep):
    """Replace the devices' state by a `Checkpoint`; see `MLP.restore_step`."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__(mlp)
        self.mlp = mlp

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """For each rank: the layers and the optimizer's state of its stages.  ``ValueError`` for another model."""
        places = self.places(mesh)
        if len(args) != 1 or not isinstance(args[0], Checkpoint):
            got = ", ".join(type(arg).__name__ for arg in args)
            raise TypeError(f"restoring takes a Checkpoint, got {got or 'nothing'}")
        checkpoint: Checkpoint = args[0]
        sizes, wanted = checkpoint.layer_sizes, self.mlp.layer_sizes
        if sizes != wanted:
            raise ValueError(f"the model has layer_sizes={wanted}, and the checkpoint {sizes}")
        dtype = checkpoint.parameters[0][0].dtype
        if dtype.newbyteorder("=") != np.dtype(self.mlp.dtype).newbyteorder("="):
            raise ValueError(f"the model has dtype {self.mlp.dtype}, and the checkpoint {dtype}")
        layers_of = [self.mlp.layers_of(stage) for stage in range(self.pipeline.stages)]
        states = split_state(checkpoint.optimizer_state, [2 * len(layers) for layers in layers_of])
        layers = [[checkpoint.parameters[i] for i in numbers] for numbers in layers_of]
        parts = list(zip(layers, states, strict=True))
        by_position = [
            {stage: parts[stage] for stage in self.stages_on(position)} for position in range(self.pipeline.ranks)
        ]
        return [(checkpoint.step, checkpoint.optimizer, by_position[position]) for position, _ in places]

    def __call__(self, device: Device, *inputs: Any) -> None:
        step, optimizer, parts = copy.deepcopy(inputs)  # They share the host's memory.
        device.state[self._key] = Resident(
            {stage: layers for stage, (layers, _) in parts.items()}, step, optimizer,
            {stage: state for stage, (_, state) in parts.items()},
        )


class ResetStep(ModelStep):
    """Free the parameters and the optimizer's state in the devices; see `MLP.reset_step`."""

    def __call__(self, device: Device, *inputs: Any) -> None:
        device.state.pop(self._key, None)
