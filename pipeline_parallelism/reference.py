"""The reference: a step of training in one process, without a pipeline, to test the cluster's steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import Optimizer
from parallelism.pipelining import weight_versions
from pipeline_parallelism.batch_steps import Training
from pipeline_parallelism.checkpoint import Checkpoint
from pipeline_parallelism.gradients import update_layers
from pipeline_parallelism.stage import layers_backward, layers_forward
from pipeline_parallelism.trained_stage import Layer, Layers, add_layers

if TYPE_CHECKING:
    from pipeline_parallelism.mlp import MLP


def reference_step(
    mlp: MLP,
    x: Array,
    targets: Array,
    optimizer: Optimizer,
    previous: Training | Checkpoint | None,
    microbatches: int,
    replicas: int,
) -> Training:
    """See `MLP.reference_step`.  The data are checked already."""
    parameters = mlp.initial_parameters() if previous is None else previous.parameters
    if parameters is None:
        raise ValueError("previous must have the parameters to go on from; that step did not return them")
    step = 1 if previous is None else previous.step + 1
    state = None if previous is None else previous.optimizer_state
    weights = mlp.pipeline.schedule.weights
    if weights == "stashed":
        return _stashed(mlp, x, targets, optimizer, parameters, state, step, replicas)
    backward = _local if mlp.pipeline.schedule.local else _backpropagated
    used = (previous.delayed if isinstance(previous, Training) else None) or parameters
    by_replica = []
    for replica in _split_both(x, targets, replicas):
        parts = _split_both(*replica, microbatches)
        by_replica.append(_total(backward(mlp, used, *part, len(x)) for part in parts))
    loss, gradients = _total(by_replica)
    updated, state = update_layers(optimizer, parameters, gradients, state)
    return Training(
        loss, updated, gradients, state, step, parameters if weights == "double_buffered" else None
    )


def _stashed(
    mlp: MLP,
    x: Array,
    targets: Array,
    optimizer: Optimizer,
    parameters: Layers,
    state: object,
    step: int,
    replicas: int,
) -> Training:
    """A step with an update after every microbatch; each stage uses the version that the schedule gives it."""
    pipeline = mlp.pipeline
    versions = weight_versions(pipeline.schedule)
    if any(version > k for (_, k), version in versions.items()):
        raise ValueError(f"schedule {pipeline.schedule.name!r} does not end its microbatches in their order")
    history, loss, sums = [parameters], 0.0, None
    by_replica = [_split_both(*part, pipeline.microbatches) for part in _split_both(x, targets, replicas)]
    for k, parts in enumerate(zip(*by_replica, strict=True)):
        rows = sum(len(inputs) for inputs, _ in parts)
        used = [
            history[versions[stage, k]][i] for stage in range(pipeline.stages) for i in mlp.layers_of(stage)
        ]
        mean, gradients = _total(_backpropagated(mlp, used, a, b, max(rows, 1)) for a, b in parts)
        loss += mean * max(rows, 1) / len(x)
        sums = gradients if sums is None else add_layers(sums, gradients)
        history.append(history[-1])
        if rows:
            history[-1], state = update_layers(optimizer, history[-1], gradients, state)
    return Training(loss, history[-1], sums, state, step)


def _backpropagated(
    mlp: MLP, parameters: Sequence[Layer], x: Array, targets: Array, rows: int
) -> tuple[float, Layers]:
    layers = parameters, mlp.activations_of(range(len(parameters)))
    y, saved = layers_forward(*layers, x)
    loss, grad = mlp.loss_function(y, targets, rows)
    return loss, layers_backward(*layers, saved, grad, first=True)[1]


def _local(
    mlp: MLP, parameters: Sequence[Layer], x: Array, targets: Array, rows: int
) -> tuple[float, Layers]:
    """The gradients of every stage from its own loss.  The returned loss is the last stage's."""
    gradients: Layers = []
    for stage in range(mlp.pipeline.stages):
        numbers = mlp.layers_of(stage)
        layers = [parameters[i] for i in numbers], mlp.activations_of(numbers)
        x, saved = layers_forward(*layers, x)
        if stage < mlp.pipeline.stages - 1:
            head = mlp.local_head(stage)
            grad = mlp.loss_function(x @ head, targets, rows)[1] @ head.T
        else:
            loss, grad = mlp.loss_function(x, targets, rows)
        gradients += layers_backward(*layers, saved, grad, first=True)[1]
    return loss, gradients


def _split_both(x: Array, targets: Array, parts: int) -> Iterator[tuple[Array, Array]]:
    return zip(np.array_split(x, parts), np.array_split(targets, parts), strict=True)


def _total(parts: Iterable[tuple[float, Layers]]) -> tuple[float, Layers]:
    """The sums of losses and gradients, in this order."""
    losses, gradients = zip(*parts, strict=True)
    return sum(losses), reduce(add_layers, gradients)
