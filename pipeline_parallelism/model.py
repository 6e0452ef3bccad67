"""`Model`: what the steps of a pipeline need from the model that they train, and what all models have in common."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import Pipeline
from pipeline_parallelism.microbatches import Microbatches
from pipeline_parallelism.trained_stage import Layers, TrainedStage


class Model(Protocol):
    """A hashable description of a model whose layers are split over stages.  Devices keep its parameters under it."""

    pipeline: Pipeline

    @property
    def inside(self) -> tuple[str, ...]:
        """The mesh axes inside a stage."""
        return ()

    @property
    def layer_count(self) -> int:
        """The number of layers."""

    def layers_of(self, stage: int) -> range:
        """The layers of a stage, split as evenly as possible; the first stages have more."""
        each, more = divmod(self.layer_count, self.pipeline.stages)
        first = stage * each + min(stage, more)
        return range(first, first + each + (stage < more))

    def initial_layers(self, layers: Iterable[int]) -> Layers:
        """The whole parameters of these layers before the first step."""

    def initial_parameters(self) -> Layers:
        """The whole parameters of every layer before the first step."""
        return self.initial_layers(range(self.layer_count))

    def initial_shards(self, mesh: Mesh, rank: int, layers: Iterable[int]) -> Layers:
        """The rank's shards of the parameters of these layers before the first step."""

    def join_layers(self, mesh: Mesh, layers: Sequence[int], shards: Sequence[Layers]) -> Layers:
        """The whole layers, from the shards of the ranks inside a stage, in the order of the ranks."""

    def join_outputs(self, mesh: Mesh, shards: Sequence[Array]) -> Array:
        """The whole outputs of the last stage, from the shards of the ranks inside it."""

    def check_inputs(self, x: npt.ArrayLike) -> Array:
        """``x`` as an array; ``ValueError``, ``TypeError`` if it does not fit the model."""

    def check_batch(self, x: npt.ArrayLike, targets: npt.ArrayLike) -> tuple[Array, Array]:
        """``x`` and ``targets`` as arrays; ``ValueError``, ``TypeError`` if they do not fit the model or each other."""

    def check_mesh(self, mesh: Mesh, x: Array) -> None:
        """``ValueError`` if the model cannot be split over the axes inside a stage for these inputs."""
        return  # a model without axes inside a stage always can be

    def stage(self, device: Device, number: int, layers: Layers, work: Microbatches) -> TrainedStage:
        """A stage on a device for one step."""


def inner_mesh(mesh: Mesh, inside: Sequence[str]) -> Mesh:
    """The mesh with only the axes inside a stage, in the order of ``mesh``; one device if there are none."""
    return Mesh(**({axis: mesh.shape[axis] for axis in mesh.axes if axis in inside} or {"inside": 1}))
