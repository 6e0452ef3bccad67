"""The steps that read or replace the state of a model on its devices: checkpoint, restore and reset.

They run nothing of the schedule (see `pipeline_parallelism.batch_steps` for the steps that do).

A step that fails, or a device that is replaced, can leave the stages at different steps of the training.  Each device
counts its steps, and the host compares the counts before it uses a result.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.mesh import Mesh
from parallelism.operation import Device
from pipeline_parallelism.checkpoint import Checkpoint, join_states, split_state
from pipeline_parallelism.resident import ModelStep, Resident, common_step

if TYPE_CHECKING:
    from pipeline_parallelism.mlp import MLP


class CheckpointStep(ModelStep):
    """Return the devices' state of the training; see `MLP.checkpoint_step`.  No communication between devices."""

    def __call__(self, device: Device, *inputs: Any) -> dict[str, Any]:
        position, replica = self.places(device.mesh)[device.rank]
        resident = self._resident(device, position)
        state = {
            "layers": resident.layers,
            "optimizer": resident.optimizer,
            "states": resident.optimizer_states,
        }
        return {"step": resident.step, **({} if replica else state)}

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Checkpoint:
        """The `Checkpoint` of the whole model; `MixedStepsError` as in `TrainStep`."""
        step = common_step([output["step"] for output in outputs])
        holders = [output for output in outputs if "layers" in output]
        layers = {stage: part for output in holders for stage, part in output["layers"].items()}
        states = {stage: part for output in holders for stage, part in output["states"].items()}
        stages = range(self.pipeline.stages)
        return Checkpoint(
            step,
            [layer for stage in stages for layer in layers[stage]],
            holders[0]["optimizer"],
            join_states([states.get(stage) for stage in stages]),
        )


class RestoreStep(ModelStep):
    """Replace the devices' state by a `Checkpoint`; see `MLP.restore_step`."""

    model: MLP

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """For each rank: the layers and the optimizer's state of its stages.  ``ValueError`` for another model."""
        places = self.places(mesh)
        if len(args) != 1 or not isinstance(args[0], Checkpoint):
            got = ", ".join(type(arg).__name__ for arg in args)
            raise TypeError(f"restoring takes a Checkpoint, got {got or 'nothing'}")
        checkpoint: Checkpoint = args[0]
        if checkpoint.layer_sizes != self.model.layer_sizes:
            raise ValueError(
                f"the model has layer_sizes={self.model.layer_sizes}, and the checkpoint {checkpoint.layer_sizes}"
            )
        dtype = checkpoint.parameters[0][0].dtype
        if dtype.newbyteorder("=") != np.dtype(self.model.dtype).newbyteorder("="):
            raise ValueError(f"the model has dtype {self.model.dtype}, and the checkpoint {dtype}")
        layers_of = [self.model.layers_of(stage) for stage in range(self.pipeline.stages)]
        states = split_state(checkpoint.optimizer_state, [2 * len(layers) for layers in layers_of])
        inputs = []
        for position, _ in places:
            parts = {}
            for stage in self.stages_on(position):
                parts[stage] = [checkpoint.parameters[i] for i in layers_of[stage]], states[stage]
            inputs.append((checkpoint.step, checkpoint.optimizer, parts))
        return inputs

    def __call__(self, device: Device, *inputs: Any) -> None:
        step, optimizer, parts = copy.deepcopy(inputs)  # They share the host's memory.
        device.state[self._key] = Resident(
            {stage: layers for stage, (layers, _) in parts.items()},
            step,
            optimizer,
            {stage: state for stage, (_, state) in parts.items()},
        )


class ResetStep(ModelStep):
    """Free the parameters and the optimizer's state in the devices; see `MLP.reset_step`."""

    def __call__(self, device: Device, *inputs: Any) -> None:
        device.state.pop(self._key, None)
