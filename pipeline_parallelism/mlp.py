"""`MLP` describes a pipelined perceptron.  Its steps run on a cluster; `MLP.reference_step` runs in one process.

A step equals the full-batch step: the gradients of the microbatches, weighted by their rows, are summed in the
order of the microbatches and over the replicas, and applied once, at the flush.  With the same order of sums, as in
``reference_step`` with the same ``microbatches`` and ``replicas``, the results have the same bits.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array, plain_array
from parallelism.kernels import ACTIVATIONS, IDENTITY, LOSSES, SGD, Activation, Loss, Optimizer
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import Pipeline
from parallelism.spelling import did_you_mean, explains_keywords
from pipeline_parallelism.batch_steps import PredictStep, Recompute, Training, TrainStep
from pipeline_parallelism.checkpoint import Checkpoint
from pipeline_parallelism.microbatches import Microbatches
from pipeline_parallelism.model import Model
from pipeline_parallelism.reference import reference_step
from pipeline_parallelism.stage import DenseStage, layers_forward
from pipeline_parallelism.state_steps import CheckpointStep, ResetStep, RestoreStep
from pipeline_parallelism.trained_stage import Layer, Layers

_PLAIN_SGD = SGD(0.1)


@explains_keywords("MLP")
@dataclass(frozen=True)
class MLP(Model):
    """Dense layers between ``layer_sizes``, with an activation after each but the last, split over the stages.

    >>> mlp = MLP(layer_sizes=(64, 128, 128, 128, 10), pipeline=Pipeline(stages=3, microbatches=8))
    >>> [list(mlp.layers_of(stage)) for stage in range(3)]
    [[0, 1], [2], [3]]

    Layer ``i`` draws its weights from ``numpy.random.default_rng((seed, i))``, whatever its stage; biases start at
    zero.  ``loss`` is ``"mean_squared_error"`` or ``"softmax_cross_entropy"``; for the latter the outputs are logits
    and the targets are classes or probabilities.  From the first step on, the parameters are kept in
    ``device.state`` under this description: an equal `MLP` continues with them, a different one has its own.
    ``ValueError`` for sizes, names or a pipeline that do not fit.
    """

    layer_sizes: Sequence[int]
    pipeline: Pipeline
    activation: str = "relu"
    loss: str = "mean_squared_error"
    dtype: npt.DTypeLike = np.float64
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = tuple(self.layer_sizes)
        if len(sizes) < 2 or not all(isinstance(n, (int, np.integer)) and n >= 1 for n in sizes):
            raise ValueError(
                f"layer_sizes must be two or more integers of at least 1, got {self.layer_sizes!r}"
            )
        if self.pipeline.stages > len(sizes) - 1:
            raise ValueError(
                f"{self.pipeline.stages} stages need a layer each; layer_sizes={sizes} makes {len(sizes) - 1} layers"
            )
        _known("activation", self.activation, ACTIVATIONS)
        _known("loss", self.loss, LOSSES)
        if np.dtype(self.dtype).kind != "f":
            raise ValueError(f"the dtype of an MLP must be a floating one, got {np.dtype(self.dtype)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        object.__setattr__(self, "layer_sizes", tuple(map(int, sizes)))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    # ------------------------------------------------------------------------------------------ layers

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return len(self.layer_sizes) - 1

    def activations_of(self, layers: Iterable[int]) -> list[Activation]:
        """The activation of each of these layers; the model's last layer has none."""
        activations = [ACTIVATIONS[self.activation]] * (self.layer_count - 1) + [IDENTITY]
        return [activations[i] for i in layers]

    def initial_layers(self, layers: Iterable[int]) -> Layers:
        """Weights and bias of these layers before the first step.

        Normal, of variance 2 / inputs for relu and gelu (He et al. 2015, arXiv:1502.01852), else 1 / inputs.
        """
        gain = 2 if self.activation in ("relu", "gelu") else 1
        drawn: Layers = []
        for i in layers:
            inputs, outputs = self.layer_sizes[i : i + 2]
            normal = np.random.default_rng((self.seed, i)).standard_normal((inputs, outputs))
            drawn.append(
                ((normal * math.sqrt(gain / inputs)).astype(self.dtype), np.zeros(outputs, self.dtype))
            )
        return drawn

    def local_head(self, stage: int) -> Array:
        """The fixed random weights between a stage and its own loss, for schedules with local losses.

        Their shape is (outputs of the stage, outputs of the model), their variance 1 / outputs of the stage; they are
        never trained.  Mostafa et al., *Deep Supervised Learning Using Local Errors*, 2018, arXiv:1711.06756.
        """
        width = self.layer_sizes[self.layers_of(stage)[-1] + 1]
        classes = self.layer_sizes[-1]
        drawn = np.random.default_rng((self.seed, len(self.layer_sizes) - 1 + stage)).standard_normal(
            (width, classes)
        )
        return np.asarray(drawn / math.sqrt(width), self.dtype)

    @property
    def loss_function(self) -> Loss:
        """``(predictions, targets, rows of the batch) -> (loss, gradient)``."""
        return LOSSES[self.loss]

    # ------------------------------------------------------------------------------------- on a cluster

    def train_step(
        self,
        optimizer: Optimizer = _PLAIN_SGD,
        returns: str | Iterable[str] = ("loss", "parameters", "gradients"),
        recompute: Recompute = "none",
    ) -> TrainStep:
        """One step of training.  ``cluster.run(step, x, targets).result`` is a `Training`.

        ``x`` has shape ``(rows, layer_sizes[0])``; ``targets`` has ``(rows, layer_sizes[-1])``, or ``(rows,)`` for
        classes.  The host always gets the loss; ``returns`` names what else it gets.  ``recompute="full"`` keeps only
        the input of a stage and recomputes the rest before the backward, with the same bits; a list of layers does
        so for these layers.
        """
        return TrainStep(self, optimizer, returns, recompute)

    def predict_step(self) -> PredictStep:
        """A step that computes the outputs ``(rows, layer_sizes[-1])`` with the devices' parameters."""
        return PredictStep(self)

    def checkpoint_step(self) -> CheckpointStep:
        """A step that returns the devices' state as a `Checkpoint`: ``cluster.run(step).result.save(path)``."""
        return CheckpointStep(self)

    def restore_step(self) -> RestoreStep:
        """A step that puts a `Checkpoint` into the devices: ``cluster.run(step, Checkpoint.load(path))``.

        The next step continues from it, on a pipeline of any length, with the same bits if its optimizer is the same.
        ``ValueError`` for a checkpoint with other layer sizes or another dtype.
        """
        return RestoreStep(self)

    def reset_step(self) -> ResetStep:
        """A step that frees the model's state in the devices, so that training starts again: ``cluster.run(step)``."""
        return ResetStep(self)

    # ------------------------------------------------------------------------------ the Model protocol

    def initial_shards(self, mesh: Mesh, rank: int, layers: Iterable[int]) -> Layers:
        """`initial_layers`, because a stage is on one rank."""
        return self.initial_layers(layers)

    def join_layers(self, mesh: Mesh, layers: Sequence[int], shards: Sequence[Layers]) -> Layers:
        """The layers of the one rank."""
        return shards[0]

    def join_outputs(self, mesh: Mesh, shards: Sequence[Array]) -> Array:
        """The outputs of the one rank."""
        return shards[0]

    def stage(self, device: Device, number: int, layers: Layers, work: Microbatches) -> DenseStage:
        """A stage for one step."""
        numbers = self.layers_of(number)
        last = number == self.pipeline.stages - 1
        local = work.training and self.pipeline.schedule.local
        return DenseStage(
            layers,
            self.activations_of(numbers),
            work.rows,
            inputs=work.inputs if number == 0 else None,
            finish=partial(self._finished, work, last) if last or local else None,
            head=self.local_head(number) if local and not last else None,
            alone=local,
            training=work.training,
            recompute=[place for place, layer in enumerate(numbers) if layer in work.recompute],
            accumulate=work.accumulate,
        )

    def _finished(self, work: Microbatches, last: bool, microbatch: int, y: Array) -> Array | None:
        """The gradient of an output with respect to its loss; None without training."""
        if not work.training:
            work.outputs[microbatch] = y
            return None
        assert work.targets is not None
        loss, grad = self.loss_function(y, work.targets[microbatch], work.divisor(microbatch))
        if last:
            work.add_loss(microbatch, loss)
        return grad

    # ------------------------------------------------------------------------------------ in one process

    def forward(self, parameters: Sequence[Layer], x: npt.ArrayLike) -> Array:
        """The outputs of the last layer, computed in this process."""
        return layers_forward(parameters, self.activations_of(range(len(parameters))), self.check_inputs(x))[
            0
        ]

    def reference_step(
        self,
        x: npt.ArrayLike,
        targets: npt.ArrayLike,
        optimizer: Optimizer = _PLAIN_SGD,
        *,
        previous: Training | Checkpoint | None = None,
        microbatches: int = 1,
        replicas: int = 1,
    ) -> Training:
        """The same step in this process, without a pipeline.  It continues from ``previous``.

        ``microbatches`` and ``replicas`` only determine the order of sums.  If the pipeline's schedule stashes weights,
        there is an update for each of the pipeline's microbatches, as on the cluster.
        """
        return reference_step(
            self, *self.check_batch(x, targets), optimizer, previous, microbatches, replicas
        )

    # ------------------------------------------------------------------------------------------- the data

    def check_inputs(self, x: npt.ArrayLike) -> Array:
        """``x`` as an array of the model's dtype; ``ValueError`` if its shape is wrong or a number is not finite."""
        return self._finite("x", plain_array("x", x), self.layer_sizes[0])

    def check_batch(self, x: npt.ArrayLike, targets: npt.ArrayLike) -> tuple[Array, Array]:
        """``x`` and ``targets`` as arrays; ``ValueError`` if they do not fit the model or each other."""
        x = self.check_inputs(x)
        targets = plain_array("targets", targets)
        classes = self.layer_sizes[-1]
        if len(x) == 0:
            raise ValueError(f"a step needs at least one row, got x of shape {x.shape}")
        if self.loss == "softmax_cross_entropy" and targets.ndim == 1:
            if targets.dtype.kind not in "iu":
                raise ValueError(f"targets of one dim are classes and must be integers, got {targets.dtype}")
            if len(wrong := targets[(targets < 0) | (targets >= classes)]):
                raise ValueError(f"targets must be classes 0 to {classes - 1}, got {wrong[0]}")
        else:
            targets = self._finite("targets", targets, classes)
        if len(x) != len(targets):
            raise ValueError(f"x has {len(x)} rows and targets {len(targets)}; they must be as many")
        return x, targets

    def _finite(self, name: str, array: Array, columns: int) -> Array:
        if array.ndim != 2 or array.shape[1] != columns:
            classes = name == "targets" and array.ndim == 1 and array.dtype.kind in "iu"
            hint = "; for classes as targets, the loss is 'softmax_cross_entropy'" if classes else ""
            raise ValueError(f"{name} must have shape (rows, {columns}), got {array.shape}{hint}")
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{name} must hold real numbers, got {array.dtype}")
        array = array.astype(self.dtype, copy=False)
        if len(wrong := np.argwhere(~np.isfinite(array))):
            row, column = wrong[0]
            raise ValueError(f"{name} must be finite, got {array[row, column]} in row {row}, column {column}")
        return array


def _known(subject: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        known = ", ".join(map(repr, names))
        raise ValueError(f"unknown {subject} {name!r}{did_you_mean(name, names)} (known: {known})")
