"""What a pipelined perceptron does on a cluster: operations for `run`.

`TrainStep` and `PredictStep` work with what lies in the devices; `CheckpointStep`, `RestoreStep` and `ResetStep` get
it, put it there and free it.  A step that is broken off, or a device that is replaced, can leave the stages at
different steps of the training: each counts its own, and the host compares what they tell before it believes a result.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallelism.kernels import Optimizer
from parallelism.mesh import Mesh
from parallelism.operation import Device, PipelinedOperation
from pipeline_parallelism.checkpoint import Checkpoint, join_states, split_state
from pipeline_parallelism.execution import pipeline_axes, run_actions, split_rows
from pipeline_parallelism.stage import Array, DenseStage, Finish, Layer

if TYPE_CHECKING:
    from pipeline_parallelism.mlp import MLP

_RETURNS = ("loss", "parameters", "gradients")


@dataclass(frozen=True, eq=False)
class Training:
    """What a step of training gives: the loss before it, the parameters after it, and the gradients between.

    ``parameters`` and ``gradients`` have a ``(weights, bias)`` for each layer; they are None if the step was
    told not to return them.  ``optimizer_state`` is there after a step in one process: devices keep theirs.
    ``step`` says how many steps there were, this one included.
    """

    loss: float
    parameters: list[Layer] | None
    gradients: list[Layer] | None
    optimizer_state: Any = None
    step: int = 0


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


def update_layers(
    optimizer: Optimizer, layers: Sequence[Layer], gradients: Sequence[Layer], state: Any
) -> tuple[list[Layer], Any]:
    """One update of these layers, and the optimizer's next state for them."""
    flat, state = optimizer.update(_flat(layers), _flat(gradients), state)
    return _paired(flat), state


@dataclass
class _Resident:
    """What stays in a device from step to step, by stage."""

    layers: dict[int, list[Layer]]
    step: int = 0
    optimizer: Optimizer | None = None
    optimizer_states: dict[int, Any] = field(default_factory=dict)


class _Step(PipelinedOperation):
    """What the steps have in common: where stages lie, and the parameters in the devices."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__(mlp.pipeline)
        self.mlp = mlp
        self._key = ("pipeline_parallelism.MLP", mlp)

    def _places(self, mesh: Mesh) -> list[tuple[int, int]]:
        """By rank, its position in the pipeline and the number of its replica."""
        stages, replicas = pipeline_axes(self.pipeline, mesh)
        return [(i[stages] if stages else 0, i[replicas] if replicas else 0) for i in mesh]

    def _resident(self, device: Device, position: int) -> _Resident:
        if self._key not in device.state:
            here = [stage for stage, rank in enumerate(self.pipeline.schedule.placement) if rank == position]
            layers = {stage: self.mlp.initial_layers(self.mlp.layers_of(stage)) for stage in here}
            device.state[self._key] = _Resident(layers)
        resident: _Resident = device.state[self._key]
        return resident

    def _run(
        self, device: Device, resident: _Resident, x: Array | None, rows: int, finish: Finish, *, training: bool
    ) -> dict[int, DenseStage]:
        """Runs this device's actions, of a prediction the forwards only; gives the stages with what they made."""
        axis, _ = pipeline_axes(self.pipeline, device.mesh)
        position, _ = self._places(device.mesh)[device.rank]
        stages = {
            stage: DenseStage(
                layers,
                self.mlp.activations_of(self.mlp.layers_of(stage)),
                [len(part) for part in self._split(np.arange(rows))],
                inputs=self._split(x) if stage == 0 and x is not None else None,
                finish=finish if stage == self.pipeline.stages - 1 else None,
                training=training,
            )
            for stage, layers in resident.layers.items()
        }
        works = self.pipeline.schedule.works[position]
        actions = [action for action in works if training or action.kind == "F"]
        run_actions(device, self.pipeline, axis, stages, actions)
        return stages

    def _split(self, x: Array) -> list[Array]:
        return split_rows(x, self.pipeline.microbatches)


class TrainStep(_Step):
    """One step of training: the schedule's actions, the sum over the replicas, one update; see `MLP.train_step`.

    **Communication**: ``2 * (stages - 1)`` messages for each microbatch, if stages that follow each other lie on
    different ranks, each of its rows x the layer size at the cut; over ``dp`` one all_reduce of the gradients on
    each rank, and one of the loss on the last stage's.
    """

    def __init__(self, mlp: MLP, optimizer: Optimizer, returns: str | Iterable[str]) -> None:
        super().__init__(mlp)
        if not callable(getattr(optimizer, "update", None)):
            raise TypeError(f"optimizer must be one, such as SGD(0.1) or Adam(), got {optimizer!r}")
        self.optimizer = optimizer
        self.returns = (returns,) if isinstance(returns, str) else tuple(returns)
        for name in self.returns:
            if name not in _RETURNS:
                raise ValueError(f"returns may name {', '.join(_RETURNS)}; got {name!r}")

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The replica's inputs to the first stage, its targets to the last, numbers of rows to all."""
        places = self._places(mesh)
        if len(args) != 2:
            raise TypeError(f"a step of training takes x and targets, got {len(args)} arguments")
        x, targets = self.mlp.check_batch(*args)
        replicas = 1 + max(replica for _, replica in places)
        xs, ys = split_rows(x, replicas), split_rows(targets, replicas)
        placement = self.pipeline.schedule.placement
        return [
            (xs[d] if i == placement[0] else None, ys[d] if i == placement[-1] else None, len(xs[d]), len(x))
            for i, d in places
        ]

    def __call__(self, device: Device, *inputs: Any) -> dict[str, Any]:
        x, targets, rows, batch_rows = inputs
        _, replicas_axis = pipeline_axes(self.pipeline, device.mesh)
        position, replica = self._places(device.mesh)[device.rank]
        resident = self._resident(device, position)
        # Another rule cannot go on with the state of this one.
        states = resident.optimizer_states if type(resident.optimizer) is type(self.optimizer) else {}
        expected = [] if targets is None else self._split(targets)
        losses: dict[int, float] = {}

        def finish(microbatch: int, y: Array) -> Array:
            losses[microbatch], grad = self.mlp.loss_function(y, expected[microbatch], batch_rows)
            return grad

        nbytes = _nbytes(resident.layers)
        held = {"parameters": nbytes, "gradients": nbytes, "optimizer": _nbytes(states)}
        for category, size in held.items():
            device.hold(category, size)
        stages = self._run(device, resident, x, rows, finish, training=True)
        gradients = {number: stage.gradients for number, stage in stages.items()}
        loss = sum(losses[k] for k in sorted(losses)) if losses else None
        if replicas_axis:
            gradients = _reduced(device, gradients, replicas_axis)
            loss = None if loss is None else float(device.all_reduce(np.float64(loss), replicas_axis))
        with device.compute("update", nbytes=3 * nbytes):  # reads parameters and gradients, writes parameters
            updates = {
                stage: update_layers(self.optimizer, layers, gradients[stage], states.get(stage))
                for stage, layers in resident.layers.items()
            }
        resident.layers = {stage: layers for stage, (layers, _) in updates.items()}
        resident.optimizer_states = {stage: state for stage, (_, state) in updates.items()}
        resident.optimizer, resident.step = self.optimizer, resident.step + 1
        for category, size in held.items():
            device.hold(category, -size)
        if replica:
            return {"step": resident.step}  # the others have the same bits
        return {
            "step": resident.step,
            "loss": loss,
            "parameters": resident.layers if "parameters" in self.returns else {},
            "gradients": gradients if "gradients" in self.returns else {},
        }

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Training:
        """Loss, parameters and gradients of the whole model, in the order of its layers.

        `MixedStepsError` if the stages were not at the same step.
        """
        step = _common_step([output["step"] for output in outputs])
        told = [output for output in outputs if "loss" in output]
        loss = next(output["loss"] for output in told if output["loss"] is not None)
        joined: dict[str, list[Layer] | None] = dict.fromkeys(("parameters", "gradients"))
        for name in joined:
            if name in self.returns:
                by_stage = {stage: layers for output in told for stage, layers in output[name].items()}
                joined[name] = [layer for stage in sorted(by_stage) for layer in by_stage[stage]]
        return Training(loss, joined["parameters"], joined["gradients"], step=step)


class PredictStep(_Step):
    """The forwards of the schedule alone; see `MLP.predict_step`.  The result is the last layer's outputs.

    **Communication**: ``stages - 1`` messages for each microbatch, as in `TrainStep`.
    """

    def inputs(self, mesh: Mesh, *args: npt.ArrayLike) -> list[tuple[Any, ...]]:
        """The replica's inputs to the first stage, their number to all."""
        places = self._places(mesh)
        if len(args) != 1:
            raise TypeError(f"a prediction takes x alone, got {len(args)} arguments")
        xs = split_rows(self.mlp.check_inputs(*args), 1 + max(replica for _, replica in places))
        first = self.pipeline.schedule.placement[0]
        return [(xs[d] if i == first else None, len(xs[d])) for i, d in places]

    def __call__(self, device: Device, *inputs: Any) -> tuple[int, Array | None]:
        x, rows = inputs
        position, _ = self._places(device.mesh)[device.rank]
        resident = self._resident(device, position)
        outputs: dict[int, Array] = {}
        self._run(device, resident, x, rows, outputs.__setitem__, training=False)
        return resident.step, np.concatenate([outputs[k] for k in sorted(outputs)]) if outputs else None

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Array:
        """The outputs of the whole batch, joined over the replicas; `MixedStepsError` as in `TrainStep`."""
        _common_step([step for step, _ in outputs])
        by_replica = {d: y for (_, d), (_, y) in zip(self._places(mesh), outputs, strict=True) if y is not None}
        return np.concatenate([by_replica[d] for d in sorted(by_replica)])


class CheckpointStep(_Step):
    """Gets the training as it stands in the devices; see `MLP.checkpoint_step`.  No communication between devices."""

    def __call__(self, device: Device, *inputs: Any) -> dict[str, Any]:
        position, replica = self._places(device.mesh)[device.rank]
        resident = self._resident(device, position)
        if replica:
            return {"step": resident.step}
        return {
            "step": resident.step, "layers": resident.layers, "optimizer": resident.optimizer,
            "states": resident.optimizer_states,
        }

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Checkpoint:
        """The `Checkpoint` of the whole model; `MixedStepsError` as in `TrainStep`."""
        step = _common_step([output["step"] for output in outputs])
        told = [output for output in outputs if "layers" in output]
        layers = {stage: part for output in told for stage, part in output["layers"].items()}
        states = {stage: part for output in told for stage, part in output["states"].items()}
        stages = range(self.pipeline.stages)
        return Checkpoint(
            step, [layer for stage in stages for layer in layers[stage]], told[0]["optimizer"],
            join_states([states.get(stage) for stage in stages]),
        )


class RestoreStep(_Step):
    """Puts a `Checkpoint` into the devices, in the place of what they have; see `MLP.restore_step`."""

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """To each rank the layers and the optimizer's state of its stages.  ``ValueError`` if the model is another."""
        places = self._places(mesh)
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
            {stage: parts[stage] for stage, holder in enumerate(self.pipeline.schedule.placement) if holder == position}
            for position in range(self.pipeline.ranks)
        ]
        return [(checkpoint.step, checkpoint.optimizer, by_position[position]) for position, _ in places]

    def __call__(self, device: Device, *inputs: Any) -> None:
        step, optimizer, parts = copy.deepcopy(inputs)  # they lie in memory of the host's
        device.state[self._key] = _Resident(
            {stage: layers for stage, (layers, _) in parts.items()}, step, optimizer,
            {stage: state for stage, (_, state) in parts.items()},
        )


class ResetStep(_Step):
    """Frees the parameters and the optimizer's state in the devices; see `MLP.reset_step`."""

    def __call__(self, device: Device, *inputs: Any) -> None:
        device.state.pop(self._key, None)


def _common_step(steps: Sequence[int]) -> int:
    if len(set(steps)) > 1:
        raise MixedStepsError(steps)
    return steps[0]


def _reduced(device: Device, gradients: dict[int, list[Layer]], axis: str) -> dict[int, list[Layer]]:
    """The gradients summed over the replicas, in one operation."""
    numbers = list(gradients)
    summed = iter(device.all_reduce([x for n in numbers for x in _flat(gradients[n])], axis))
    return {n: [(next(summed), next(summed)) for _ in gradients[n]] for n in numbers}


def _flat(layers: Sequence[Layer]) -> list[Array]:
    return list(chain.from_iterable(layers))


def _paired(arrays: Sequence[Array]) -> list[Layer]:
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def _nbytes(value: Any) -> int:
    """Bytes of the arrays in dicts, lists and tuples."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        value = value.values()
    return sum(map(_nbytes, value)) if isinstance(value, Iterable) else 0
