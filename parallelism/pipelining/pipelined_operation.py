"""`PipelinedOperation`: an operation cut into stages that lie on different devices, which run a schedule together."""

from collections.abc import Callable, Collection, Mapping, Sequence

from parallelism.mesh import Mesh
from parallelism.operation import Device, Operation
from parallelism.pipelining.execution import Stage, pipeline_axes, run_actions
from parallelism.pipelining.pipeline import Pipeline


class PipelinedOperation(Operation):
    """What has a stage on each rank of a pipeline, or several; subclasses make the stages and call `run_stages`.

    >>> from parallelism import Mesh, Pipeline, PipelinedOperation
    >>> operation = PipelinedOperation(Pipeline(stages=2, microbatches=4))
    >>> operation.places(Mesh(dp=2, pp=2))
    [(0, 0), (1, 0), (0, 1), (1, 1)]

    Stages lie on ``pipeline.axis``, replicas of the pipeline on the axes ``replicas``, outermost first; mesh axes that
    are ``inside`` belong to the stages, which may use them as they like.  A `Stage` has a forward and a backward in two
    halves; it sees its own microbatches only, and nothing of the schedule.
    """

    def __init__(
        self, pipeline: Pipeline, inside: Collection[str] = (), replicas: Sequence[str] = ("dp",)
    ) -> None:
        self.pipeline, self.inside, self.replicas = pipeline, tuple(inside), tuple(replicas)

    def axes(self, mesh: Mesh) -> tuple[str | None, tuple[str, ...]]:
        """The axis of the stages, None without one, and those of the replicas.  ``ValueError`` if the mesh is unfit."""
        return pipeline_axes(self.pipeline, mesh, self.inside, self.replicas)

    def places(self, mesh: Mesh) -> list[tuple[int, int]]:
        """The position in the pipeline and the number of the replica, by rank.  ``ValueError`` if the mesh is unfit."""
        stages, replicas = self.axes(mesh)
        places = []
        for index in mesh:
            replica = 0
            for axis in replicas:
                replica = replica * mesh.shape[axis] + index[axis]
            places.append((index[stages] if stages else 0, replica))
        return places

    def position(self, device: Device) -> int:
        """The position of a device in the pipeline.  ``ValueError`` if its mesh is unfit."""
        axis, _ = self.axes(device.mesh)
        return 0 if axis is None else device.index[axis]

    def stages_on(self, position: int) -> list[int]:
        """The stages that lie at a position of the pipeline."""
        return [stage for stage, holder in enumerate(self.pipeline.schedule.placement) if holder == position]

    def run_stages(
        self,
        device: Device,
        stages: Mapping[int, Stage],
        done: Callable[[int, int], None] | None = None,
        *,
        forward_only: bool = False,
    ) -> None:
        """Runs this device's actions of the schedule, in its order, on its ``stages``, given by their numbers.

        ``done(stage, microbatch)`` is called when a microbatch has had the last of its backward on a stage.  With
        ``forward_only`` the forwards are run alone.  **Communication**: as in `run_actions`.
        """
        axis, _ = self.axes(device.mesh)
        works = self.pipeline.schedule.works[self.position(device)]
        if forward_only:
            works = tuple(work for work in works if work.kind in ("F", "SEND_F", "RECV_F"))
        run_actions(device, self.pipeline, axis, stages, works, done)
