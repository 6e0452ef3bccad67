"""A training step cut into the stages of a pipeline, as an operation: schedule, sums over replicas, and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from parallelism.execution.pipelined_program import PipelinedProgram, check_stages
from parallelism.execution.stage_messages import OwnMeshes, whole_of
from parallelism.execution.step_updates import StepUpdates
from parallelism.ir.passes.chunked_collectives import chunked_over
from parallelism.layouts.stages import Part, Stages
from parallelism.layouts.stages.laid_out_stages import laid_out_stages
from parallelism.mesh import Mesh
from parallelism.shared_results import shared
from parallelism.transforms import Overlap
from parallelism.transforms.overlap import Fused
from parallelism.transforms.pipelines import Step


class TrainedPipeline(PipelinedProgram):
    """A `parallelism.transforms.Step` on ``mesh``: it computes what the whole step computes.

    ``cluster.run(TrainedPipeline(step, mesh), inputs)``, with the inputs of ``step.function`` by name or in order,
    returns its outputs in order: the loss, then parameters and state for the next step.  Stages lie on the axis of the
    pipeline, replicas on the axes ``step.replicas``; the other axes of the mesh are inside a stage.

    If the pipeline has ``meshes``, ``mesh`` has as many devices as these together.  The stages at a position lie on its
    mesh, whose ranks are consecutive ranks of the whole; an axis that a mesh lacks has one device there.  All axes are
    inside the stages: the rows of a microbatch are split by their layout, and each microbatch's gradients are summed in
    its backward.

    **Communication**: that of `PipelinedProgram`, but each device sums its gradients over replicas in its update, each
    gradient for itself; with Zero by a reduce_scatter, and an all_gather of the new parameters.  Stages that share
    weights exchange their gradients before.  If the update needs the norm of all gradients, it has an all_reduce of
    one number over the stages.  A gradient of which each device of a stage has a term, as of norms under sequence
    parallelism, is summed over them before the update.  With `parallelism.transforms.Overlap` the other gradients that
    one stage has alone are summed over the replicas in its last backward.

    With ``meshes`` a message between stages is one for each pair of devices whose blocks overlap
    (`parallelism.resharding.between_meshes`), and a number that the updates of all stages need is reduced among the
    first devices of the meshes, and broadcast in each.

    The gradients of several microbatches are added up in buffers.  With ``gradient_buffers`` those of a single one are,
    too; else they need none.

    ``ValueError`` for a mesh without the axis of the pipeline, and as from `PipelinedProgram`.
    """

    kept_by_devices = True
    writes_inputs = True

    def __init__(
        self,
        step: Step,
        mesh: Mesh,
        *,
        fused: bool | str = False,
        overlapping: bool = False,
        gradient_buffers: bool = False,
    ) -> None:
        self.step, self.mesh, self.gradient_buffers = step, mesh, gradient_buffers
        self.chunked = chunked_over(step.function)
        pipeline, meshes = step.pipeline.on(mesh), step.pipeline.meshes
        axes = dict.fromkeys(axis for each in meshes or (mesh,) for axis in each.axes)
        if missing := [axis for axis in step.split if axis not in axes]:
            raise ValueError(
                f"@{step.function.name}: %{step.split[missing[0]]} is split over axis {missing[0]!r}, but "
                f"the axes of {'the stages' if meshes else repr(mesh)} are "
                f"{', '.join(map(repr, axes))}"
            )
        replicas = tuple(axis for axis in step.replicas if axis in mesh.shape)
        around = {pipeline.axis, *replicas}
        shape = {axis: n for axis, n in mesh.shape.items() if axis not in around and not meshes}
        inside = Mesh(**shape) if shape else None
        own = OwnMeshes(meshes) if meshes else None
        sums, stages = step.sum_dtypes, step.stages(pipeline.stages)
        check_stages(stages, pipeline)
        if own is not None:  # a split is one that all meshes of its axes can have
            placed = [own.meshes[position] for position in pipeline.schedule.placement]
            stages = laid_out_stages(stages, whole_of(own.meshes), sums, placed)
        elif inside is not None and inside.size > 1:
            stages = self._laid_out(stages, inside, sums)
        self.set_up(
            stages,
            pipeline,
            inside,
            replicas,
            sums,
            Overlap.of(step.function),
            fused or Fused.of(step.function) is not None,
            overlapping,
            own,
        )

    @staticmethod
    def _laid_out(stages: Stages, inside: Mesh, sums: Mapping[str, np.dtype[Any]]) -> Stages:
        """The stages with layouts over the axes inside them."""
        return shared(
            "laid out",
            lambda: laid_out_stages(stages, inside, sums, pending=True),
            stages,
            by=(inside, tuple(sums.items())),
        )

    def rows_of(self, rows: int, replicas: int) -> Sequence[Part]:
        """As `PipelinedProgram.rows_of`; by the ``shares`` of the pipeline, if it has any."""
        counts = self.step.pipeline.rows_of_replicas(rows, replicas)
        if counts is None:
            return super().rows_of(rows, replicas)
        return tuple(zip(accumulate(counts[:-1], initial=0), counts, strict=True))

    @cached_property
    def updates(self) -> StepUpdates:
        """The updates of the stages at each position."""
        parts, pipeline = self.step.parts, self.pipeline
        of_step = parts.forward, parts.update, self.step.function.attributes
        around = tuple(pipeline.schedule.placement), pipeline.axis, self.replicas
        return shared(
            "updates",
            lambda: StepUpdates(
                self.step,
                self.mesh,
                self.pipeline,
                self.stages,
                self.endings,
                self.replicas,
                self.around(self.mesh),
                self.overlap,
                self.fused,
            ),
            self.stages,
            by=(*of_step, *around, self.mesh, self.overlap, self.fused),
        )


MeshedPipeline = TrainedPipeline
"""The name of a `TrainedPipeline` whose pipeline has meshes, from when it was another class."""
