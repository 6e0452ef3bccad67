"""A training step cut into stages that lie on meshes of their own: other numbers of devices, and other splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import lcm
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.execution.stage_messages import Crossing, StageDevice, arriving, leaving
from parallelism.execution.trained_pipeline import TrainedPipeline
from parallelism.ir import TensorType
from parallelism.layouts.stages import Stages, gradient_layout
from parallelism.layouts.stages.laid_out_stages import laid_out_stages
from parallelism.layouts.stages.messages import packed, unpacked
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.operation.part import part_of
from parallelism.pipelining import Pipeline, message_user
from parallelism.pipelining.execution import run_actions
from parallelism.transforms.pipelines import Step


class MeshedPipeline(TrainedPipeline):
    """A `Step` whose pipeline has ``meshes``, on a ``mesh`` of as many devices as these have together.

    The stages at a position lie on its mesh, whose ranks are consecutive ranks of the whole.  An axis that a mesh lacks
    has one device there.  All axes are inside the stages: the rows of a microbatch are split by their layout, and each
    microbatch's gradients are summed in its backward.

    **Communication**: that of `TrainedPipeline`, but a message between stages is one for each pair of devices whose
    blocks overlap (`parallelism.resharding.between_meshes`).  A number that the updates of all stages need is reduced
    among the first devices of the meshes, and broadcast in each.
    """

    kept_by_devices = True
    apart = True

    def __init__(self, step: Step, mesh: Mesh, *, fused: bool | str = False, overlapping: bool = False) -> None:
        given = step.pipeline.meshes
        axes = dict.fromkeys(axis for each in given for axis in each.axes)
        self.meshes = tuple(Mesh(**{**each.shape, **{axis: 1 for axis in axes if axis not in each.shape}})
                            for each in given)
        """The mesh at each position."""
        starts = accumulate((each.size for each in self.meshes[:-1]), initial=0)
        self.ranks = {position: range(start, start + each.size)
                      for position, (start, each) in enumerate(zip(starts, self.meshes, strict=True))}
        """The ranks at each position."""
        super().__init__(step, mesh, fused=fused, overlapping=overlapping)

    def laid_out(self, stages: Stages) -> Stages:
        """The stages with a layout on every value.  A split is one that all meshes of its axes can have."""
        own = [self.meshes[position] for position in self.pipeline.schedule.placement]
        return laid_out_stages(stages, whole_of(self.meshes), self.sums, own)

    # -- where a device is ---------------------------------------------------------------------------------------------

    def _inside(self, pipeline: Pipeline, replicas: Sequence[str]) -> dict[str, int]:
        return {}

    def axes(self, mesh: Mesh) -> tuple[None, tuple[str, ...]]:
        """None: the whole mesh has no axis of the stages, and there are no replicas."""
        return None, ()

    def places(self, mesh: Mesh) -> list[tuple[int, int]]:
        """The position in the pipeline by rank, and 0 for the only replica."""
        return [(position, 0) for position, ranks in self.ranks.items() for _ in ranks]

    def position(self, device: Device) -> int:
        """The position of a device, or of a part of one."""
        rank = device.rank if device.mesh == self.mesh else device.of.ranks[0]      # type: ignore[attr-defined]
        return next(position for position, ranks in self.ranks.items() if rank in ranks)

    def mesh_at(self, position: int) -> Mesh:
        """The mesh at a position."""
        return self.meshes[position]

    def mesh_of_update(self, position: int) -> Mesh:
        """The mesh at a position."""
        return self.meshes[position]

    def place(self, mesh: Mesh, rank: int) -> int:
        """The rank on the mesh at its position."""
        return rank if mesh != self.mesh else next(rank - ranks[0] for ranks in self.ranks.values() if rank in ranks)

    def place_of_update(self, mesh: Mesh, rank: int) -> int:
        """The rank on the mesh at its position."""
        return self.place(mesh, rank)

    def part(self, device: Device) -> Device:
        """The device on the mesh at its position."""
        position = self.position(device)
        first = [ranks[0] for ranks in self.ranks.values()]
        return part_of(device, self.meshes[position], self.ranks[position], (self.pipeline.axis, first))

    # -- messages ------------------------------------------------------------------------------------------------------

    def run_stages(
        self, device: Device, stages: Mapping[int, Any], done: Callable[[int, int], None] | None = None, *,
        forward_only: bool = False,
    ) -> None:
        """Runs this device's actions of the schedule; see `PipelinedOperation.run_stages`."""
        position, known = self.position(device), dict[Any, Crossing]()

        def crossing(tag: int) -> Crossing:
            user, kind, microbatch = message_user(self.pipeline, tag)
            lower, upper = (user - 1, user) if kind == "F" else (user, user + 1)
            mine = stages[upper] if upper in stages else stages[lower]
            key = user, kind == "F", mine.programs.alike(mine.parts[microbatch])
            if key not in known:
                numbers, functions = mine.programs.numbers(key[2]), mine.programs.functions
                forward = {value.name: value for value in (*functions.forward.outputs, *functions.forward.inputs)}
                above = upper in stages
                names = (functions.received if above else functions.sent) if kind == "F" else (
                    functions.returned if above else functions.answered)
                placement = self.pipeline.schedule.placement
                ends = self.meshes[placement[lower]], self.meshes[placement[upper]]
                values = [forward[name] for name in names]
                known[key] = Crossing(
                    tuple(value.type.specialize(numbers) for value in values),
                    tuple(gradient_layout(value.layout) for value in values if value.layout),
                    *(ends if kind == "F" else ends[::-1]))
            return known[key]

        works = self.pipeline.schedule.works[position]
        sender: Any = StageDevice(device, position, self.ranks, crossing)
        run_actions(sender, self.pipeline, self.pipeline.axis, stages, works, done)

    def exchanged(
        self, device: Device, axis: str | None, mine: Array, names: Sequence[str], other: int, tag: int
    ) -> Array:
        """The sums of another position for weights that both have, as one array, in exchange for those of this one."""
        here, values = self.position(device), {value.name: value for value in self.stages.function.inputs}
        layouts = tuple(gradient_layout(layout) for name in names if (layout := values[name].layout))
        types = tuple(TensorType(mine.dtype, values[name].type.shape) for name in names)
        out, back = (Crossing(types, layouts, self.meshes[source], self.meshes[target])
                     for source, target in ((here, other), (other, here)))
        own, start = [], 0
        for type in out.local(self.meshes[here], device.rank):
            own.append(mine[start:start + int(type.size)].reshape(tuple(map(int, type.shape))))
            start += int(type.size)
        sent = leaving(device, out, packed(own), self.ranks[other], tag)
        received = arriving(device, back, self.ranks[other], tag).wait()
        sent.wait()
        arrays = unpacked(received, back.local(self.meshes[here], device.rank))
        return np.concatenate([np.ravel(array) for array in arrays])


def whole_of(meshes: Sequence[Mesh]) -> Mesh:
    """The mesh with the least common multiples of the extents of meshes that have the same axes."""
    return Mesh(**{axis: lcm(*(mesh.shape[axis] for mesh in meshes)) for axis in meshes[0].axes})
