"""`AroundStages`: the devices that do one thing together before or after the actions of their stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parallelism.execution.stage_messages import OwnMeshes
from parallelism.mesh import Mesh


@dataclass(frozen=True, eq=False)
class AroundStages:
    """For each position of a pipeline on ``mesh``, the mesh of its devices: replicas, and the axes inside a stage."""

    mesh: Mesh
    axis: str
    """The axis of the pipeline."""
    own: OwnMeshes | None
    """The meshes of the stages, if each has its own."""

    def at(self, position: int) -> Mesh:
        """The mesh of the devices at a position; that of one device has an axis of 1."""
        if self.own is not None:
            return self.own.meshes[position]
        around = {axis: n for axis, n in self.mesh.shape.items() if axis != self.axis}
        return Mesh(**around or {"one": 1})

    def place(self, rank: int) -> int:
        """The rank of a device on the mesh at its position."""
        return self._places[rank] if self.own is None else self.own.place(rank)

    @cached_property
    def _places(self) -> list[int]:
        shape = {**self.mesh.shape, self.axis: 1}
        places = np.arange(self.at(0).size).reshape([shape[axis] for axis in self.mesh.axes])
        found: list[int] = np.broadcast_to(places, tuple(self.mesh.shape.values())).ravel().tolist()
        return found
