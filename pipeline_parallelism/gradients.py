"""Gradients are summed over the replicas and applied at the flush, or after every microbatch."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.kernels import Optimizer
from parallelism.operation import Device, Work
from pipeline_parallelism.trained_stage import Layer, Layers, TrainedStage, add_layers

BUCKET_BYTES = 25 * 2**20
"""The largest number of bytes of gradients in one all_reduce, unless a single array is larger."""


class Flushed:
    """Gradients that are applied at the flush.

    They are summed over the replicas as soon as a stage has finished its last microbatch.  **Communication**: over
    ``axis``, asynchronous all_reduces of each stage's gradients, in buckets of at most `BUCKET_BYTES` (or one array),
    while the backwards of other stages continue.
    """

    def __init__(
        self, device: Device, axis: str | None, stages: Mapping[int, TrainedStage], microbatches: int
    ) -> None:
        self.device, self.axis, self.stages = device, axis, stages
        self.left = dict.fromkeys(stages, microbatches)
        self.works: dict[int, list[Work[list[Array]]]] = {}

    def done(self, stage: int, microbatch: int) -> None:
        """Called when a microbatch has had the last of its backward on a stage."""
        self.left[stage] -= 1
        if self.axis is not None and not self.left[stage]:
            self.works[stage] = [
                self.device.all_reduce(bucket, self.axis, async_op=True)
                for bucket in buckets(flat(self.stages[stage].gradients))
            ]

    def gradients(self) -> dict[int, Layers]:
        """The gradients of each stage, summed over all microbatches and replicas."""
        if self.axis is None:
            return {number: stage.gradients for number, stage in self.stages.items()}
        gradients = {}
        for number, stage in self.stages.items():
            summed = [array for work in self.works[number] for array in work.wait()]
            gradients[number] = grouped(summed, stage.gradients)
        return gradients


class Stashed:
    """Gradients that are applied at once: the weights change after every microbatch.

    New forwards use the new weights; microbatches in flight keep the weights of their forward.  ``rows`` has the rows
    of each microbatch over all replicas; one without rows changes nothing.  **Communication**: over ``axis``, an
    all_reduce for each microbatch and stage.
    """

    def __init__(
        self,
        device: Device,
        axis: str | None,
        stages: Mapping[int, TrainedStage],
        rows: Sequence[int],
        optimizer: Optimizer,
        states: Mapping[int, Any],
    ) -> None:
        self.device, self.axis, self.stages, self.rows = device, axis, stages, rows
        self.optimizer, self.states = optimizer, {number: states.get(number) for number in stages}
        self.sums: dict[int, Layers] = {}
        self.stashed = dict.fromkeys(stages, 0)

    def done(self, number: int, microbatch: int) -> None:
        """Called when a microbatch has had the last of its backward on a stage."""
        stage = self.stages[number]
        gradients = stage.gradients
        if self.axis is not None:
            gradients = grouped(self.device.all_reduce(flat(gradients), self.axis), gradients)
        self.sums[number] = add_layers(self.sums[number], gradients) if number in self.sums else gradients
        if self.rows[microbatch]:
            with self.device.compute(
                f"update {number}",
                nbytes=3 * count_bytes(gradients),
                stage=number,
                microbatch=microbatch,
                dtype=stage.dtype,
            ):
                stage.layers, self.states[number] = update_layers(
                    self.optimizer, stage.layers, gradients, self.states[number]
                )
        self.device.hold("stashed weights", stage.stashed - self.stashed[number])
        self.stashed[number] = stage.stashed


def update_layers(
    optimizer: Optimizer, layers: Sequence[Layer], gradients: Sequence[Layer], state: Any
) -> tuple[Layers, Any]:
    """The layers after one update, and the optimizer's next state."""
    arrays, state = optimizer.update(flat(layers), flat(gradients), state)
    return grouped(arrays, layers), state


def buckets(arrays: Sequence[Array]) -> list[list[Array]]:
    """The arrays in their order, grouped in buckets of at most `BUCKET_BYTES`."""
    groups: list[list[Array]] = []
    room = 0
    for array in arrays:
        if array.nbytes > room:
            groups.append([])
            room = BUCKET_BYTES
        groups[-1].append(array)
        room -= array.nbytes
    return groups


def flat(layers: Sequence[Layer]) -> list[Array]:
    return list(chain.from_iterable(layers))


def grouped(arrays: Iterable[Array], like: Sequence[Layer]) -> Layers:
    """The inverse of `flat`: each layer gets as many arrays as that of ``like`` has."""
    left = iter(arrays)
    return [tuple(islice(left, len(layer))) for layer in like]


def count_bytes(value: Any) -> int:
    """The bytes of all arrays in nested dicts, lists and tuples."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        value = value.values()
    return sum(map(count_bytes, value)) if isinstance(value, Iterable) else 0
