"""The steps that run the schedule on a batch: `TrainStep`, with its result `Training`, and `PredictStep`.

A step of training sums the gradients over the replicas and updates; a prediction runs the forwards alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.kernels import Optimizer
from parallelism.mesh import Mesh
from parallelism.operation import Device
from pipeline_parallelism.gradients import Flushed, Stashed, count_bytes, update_layers
from pipeline_parallelism.microbatches import Microbatches
from pipeline_parallelism.model import Model
from pipeline_parallelism.resident import ModelStep, common_step
from pipeline_parallelism.trained_stage import Layers

_RETURNS = ("loss", "parameters", "gradients")

Recompute = str | Iterable[int]
"""``"none"``, ``"full"``, or the numbers of the layers whose activations are dropped and recomputed."""


@dataclass(frozen=True, eq=False)
class Training:
    """The result of a training step: the loss before the update, the gradients, and the parameters after it.

    >>> import numpy as np
    >>> from parallelism import Pipeline
    >>> from pipeline_parallelism import MLP
    >>> from vcluster import VirtualCluster
    >>> mlp = MLP((3, 4, 2), Pipeline(stages=2, microbatches=2))
    >>> with VirtualCluster(pp=2, backend="thread") as cluster:
    ...     training = cluster.run(mlp.train_step(), np.ones((4, 3)), np.ones((4, 2))).result
    >>> training.step, [weights.shape for weights, bias in training.gradients]
    (1, [(3, 4), (4, 2)])

    ``parameters`` and ``gradients`` have the arrays of each layer, ``(weights, bias)`` for a dense one; they are None
    if the step does not return them.  ``optimizer_state`` exists only after a step in one process, because devices keep
    theirs.  ``step`` is the number of steps so far, including this one.
    """

    loss: float
    parameters: Layers | None
    gradients: Layers | None
    optimizer_state: Any = None
    step: int = 0
    delayed: Layers | None = None
    """The parameters before a step in one process whose schedule double-buffers; the next step uses them."""


class TrainStep(ModelStep):
    """One step of training; see `MLP.train_step` and `Transformer.train_step`.

    It runs the schedule, sums the gradients over the replicas and updates the weights once.  If the schedule stashes
    weights, there is an update after every microbatch with the mean over its rows; ``gradients`` of the result is the
    sum of these means.  If weights are double-buffered, the step uses the weights before the last update (the current
    ones in the first step and after a restore).  If losses are local, the loss is the last stage's, and only forwards
    send messages.

    **Communication**: ``2 * (stages - 1)`` messages for each microbatch, if neighbouring stages are on different ranks.
    A message has the microbatch's rows x the layer size at the cut (see `Transformer` for its size there).  Over
    ``dp``: one all_reduce of the gradients of each stage (with stashed weights, for each microbatch), and one of the
    loss on the last stage's rank.
    """

    kept_by_devices = True

    def __init__(
        self, model: Model, optimizer: Optimizer, returns: str | Iterable[str], recompute: Recompute = "none"
    ) -> None:
        super().__init__(model)
        if not self.pipeline.schedule.training:
            raise ValueError(f"schedule {self.pipeline.schedule.name!r} has forwards only, and cannot train")
        if not callable(getattr(optimizer, "update", None)):
            raise TypeError(f"optimizer must be one, such as SGD(0.1) or Adam(), got {optimizer!r}")
        self.optimizer = optimizer
        self.returns = (returns,) if isinstance(returns, str) else tuple(returns)
        if unknown := [name for name in self.returns if name not in _RETURNS]:
            raise ValueError(f"returns may name {', '.join(_RETURNS)}; got {unknown[0]!r}")
        self.recompute = _recomputed(recompute, model.layer_count)

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """For each rank: its replica's inputs if it has the first stage, targets if it has a loss, numbers of rows."""
        places = self.places(mesh)
        if len(args) != 2:
            raise TypeError(f"a step of training takes x and targets, got {len(args)} arguments")
        x, targets = self.model.check_batch(*args)
        self.model.check_mesh(mesh, x)
        xs, ys = (_by_replica(array, places) for array in (x, targets))
        schedule = self.pipeline.schedule
        first, last = schedule.placement[0], schedule.placement[-1]
        inputs = []
        for i, d in places:
            has_loss = i == last or schedule.local
            inputs.append((xs[d] if i == first else None, ys[d] if has_loss else None, len(xs[d]), len(x)))
        return inputs

    def __call__(self, device: Device, *inputs: Any) -> dict[str, Any]:
        x, targets, rows, batch_rows = inputs
        replicas_axis = next(iter(self.axes(device.mesh)[1]), None)
        position, replica = self.places(device.mesh)[device.rank]
        resident, weights = self._resident(device, position), self.pipeline.schedule.weights
        # Another kind of optimizer cannot use this state.
        states = resident.optimizer_states if type(resident.optimizer) is type(self.optimizer) else {}
        work = Microbatches(
            self._rows(rows),
            None if x is None else self._split(x),
            None if targets is None else self._split(targets),
            self._divisors(batch_rows, device.mesh.shape[replicas_axis] if replicas_axis else 1),
            batch_rows,
            recompute=self.recompute,
            accumulate=weights != "stashed",
        )

        nbytes = count_bytes(resident.layers)
        parameters = nbytes + count_bytes(resident.delayed)
        held = {"parameters": parameters, "gradients": nbytes, "optimizer": count_bytes(states)}
        for category, size in held.items():
            device.hold(category, size)
        stages = self._stages(
            device,
            {**resident.layers, **resident.delayed} if weights == "double_buffered" else resident.layers,
            work,
        )
        if weights == "stashed":
            stashed = Stashed(device, replicas_axis, stages, work.divisors, self.optimizer, states)
            self.run_stages(device, stages, stashed.done)
            gradients, states = stashed.sums, stashed.states
            updated = {number: stage.layers for number, stage in stages.items()}
        else:
            flushed = Flushed(device, replicas_axis, stages, self.pipeline.microbatches)
            self.run_stages(device, stages, flushed.done)
            gradients = flushed.gradients()
            # An update reads parameters and gradients and writes parameters.
            updated, old_states, states = {}, states, {}
            with device.compute("update", nbytes=3 * nbytes, dtype=stages[min(stages)].dtype):
                for stage, layers in resident.layers.items():
                    updated[stage], states[stage] = update_layers(
                        self.optimizer, layers, gradients[stage], old_states.get(stage)
                    )
        device.hold("optimizer", count_bytes(states) - held["optimizer"])  # The first step creates the state.
        held["optimizer"] = count_bytes(states)
        loss = work.loss
        if replicas_axis and loss is not None:
            loss = float(device.all_reduce(np.float64(loss), replicas_axis))
        resident.delayed = resident.layers if weights == "double_buffered" else {}
        resident.layers, resident.optimizer_states = updated, states
        resident.optimizer, resident.step = self.optimizer, resident.step + 1
        for category, size in held.items():
            device.hold(category, -size)
        if replica:
            return {"step": resident.step}  # Replica 0 returns the same bits.
        return {
            "step": resident.step,
            "loss": loss,
            "parameters": resident.layers if "parameters" in self.returns else {},
            "gradients": gradients if "gradients" in self.returns else {},
        }

    def _divisors(self, rows: int, replicas: int) -> list[int]:
        """For each microbatch, the rows over which its loss is a mean: all, or its own if it has its own update."""
        if self.pipeline.schedule.weights != "stashed":
            return [rows] * self.pipeline.microbatches
        parts = [self._rows(len(part)) for part in np.array_split(np.arange(rows), replicas)]
        return [sum(of_microbatch) for of_microbatch in zip(*parts, strict=True)]

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Training:
        """The loss, parameters and gradients of the whole model, in the order of its layers.

        `MixedStepsError` if the stages are not at the same step.
        """
        step = common_step([output["step"] for output in outputs])
        by_position = [
            parts for (_, replica), parts in self._by_inner_place(mesh, outputs).items() if not replica
        ]
        loss = next(parts[0]["loss"] for parts in by_position if parts[0]["loss"] is not None)
        joined: dict[str, Layers | None] = {}
        for name in ("parameters", "gradients"):  # the devices return no stages of what was not asked for
            by_stage = {}
            for parts in by_position:
                for stage in parts[0][name]:
                    shards = [part[name][stage] for part in parts]
                    by_stage[stage] = self.model.join_layers(mesh, self.model.layers_of(stage), shards)
            joined[name] = [layer for stage in sorted(by_stage) for layer in by_stage[stage]] or None
        return Training(loss, joined["parameters"], joined["gradients"], step=step)


def _recomputed(recompute: Recompute, layers: int) -> frozenset[int]:
    """The numbers of the layers whose activations are recomputed."""
    if isinstance(recompute, str):
        if recompute not in ("none", "full"):
            raise ValueError(f"recompute is 'none', 'full' or a list of layers; got {recompute!r}")
        return frozenset(range(layers) if recompute == "full" else ())
    numbers = frozenset(recompute)
    if wrong := numbers.difference(range(layers)):
        raise ValueError(f"recompute names layers 0 to {layers - 1}; got {min(wrong)}")
    return numbers


class PredictStep(ModelStep):
    """Run only the forwards of the schedule; see `MLP.predict_step` and `Transformer.predict_step`.

    The result is the array of the last layer's outputs.

    **Communication**: ``stages - 1`` messages for each microbatch, as in `TrainStep`.
    """

    kept_by_devices = True

    def inputs(self, mesh: Mesh, *args: npt.ArrayLike) -> list[tuple[Any, ...]]:
        """For each rank: the inputs of its replica, if it has the first stage, and their number of rows."""
        places = self.places(mesh)
        if len(args) != 1:
            raise TypeError(f"a prediction takes x alone, got {len(args)} arguments")
        x = self.model.check_inputs(*args)
        self.model.check_mesh(mesh, x)
        xs = _by_replica(x, places)
        first = self.pipeline.schedule.placement[0]
        inputs = []
        for i, d in places:
            inputs.append((xs[d] if i == first else None, len(xs[d])))
        return inputs

    def __call__(self, device: Device, *inputs: Any) -> tuple[int, Array | None]:
        x, rows = inputs
        resident = self._resident(device, self.position(device))
        work = Microbatches(self._rows(rows), None if x is None else self._split(x), training=False)
        self.run_stages(device, self._stages(device, resident.layers, work), forward_only=True)
        parts = [work.outputs[k] for k in sorted(work.outputs)]
        return resident.step, np.concatenate(parts) if parts else None

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> Array:
        """The outputs of the whole batch, joined over the replicas; `MixedStepsError` as in `TrainStep`."""
        common_step([step for step, _ in outputs])
        by_place = self._by_inner_place(mesh, [y for _, y in outputs])
        by_replica = {
            d: self.model.join_outputs(mesh, ys) for (_, d), ys in by_place.items() if ys[0] is not None
        }
        return np.concatenate([by_replica[d] for d in sorted(by_replica)])


def _by_replica(x: Array, places: Iterable[tuple[int, int]]) -> list[Array]:
    """The rows of each replica, split as by ``numpy.array_split``; ``places`` are those of `PipelinedOperation`."""
    return np.array_split(x, 1 + max(replica for _, replica in places))
