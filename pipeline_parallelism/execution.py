"""Running a schedule on one device: take what an action needs, run it, pass on what it made.

The loop knows nothing of layers: a `Stage` does the arithmetic.  It knows nothing of a schedule either, beyond
its actions and where its stages lie, so any valid order runs, several stages on a device included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from parallelism.mesh import Mesh
from parallelism.operation import Device, Work
from parallelism.pipelining import Action, Pipeline

Array = npt.NDArray[Any]


class Stage(Protocol):
    """The arithmetic of one stage; what a forward keeps for its backward, the stage keeps by microbatch."""

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The output; ``x`` is that of the stage before, None on the first stage, which has the data."""

    def backward(self, microbatch: int, grad: Array | None) -> Array | None:
        """The gradient of the input, None on the first stage; ``grad`` is None on the last, which has the loss."""

    def cost(self, kind: str, microbatch: int) -> tuple[float, float]:
        """Flops, and bytes of memory traffic, of an action of this kind."""

    def held(self, microbatch: int) -> int:
        """Bytes kept at the moment for the backward of this microbatch."""


def run_actions(
    device: Device, pipeline: Pipeline, axis: str | None, stages: Mapping[int, Stage], actions: Iterable[Action]
) -> None:
    """Runs ``actions``, in their order, on the ``stages`` that lie on this device.

    ``axis`` is the mesh axis of the pipeline (None: there is none, and the pipeline has one rank).

    **Communication**: a message for each action, but those whose result stays on the device or is wanted by
    nobody: the output of a forward, to the next stage, and the gradient of a backward, to the stage before.
    Each has a tag of its own, so no order of the actions can mix them up, and none of them waits for room.
    """
    placement = pipeline.schedule.placement
    here = device.position(axis) if axis is not None else 0
    kept: dict[Action, Array] = {}  # made here, wanted here
    sent: list[Work] = []

    def give(x: Array, user: Action) -> None:
        if placement[user.stage] == here:
            kept[user] = x
        else:
            sent.append(device.isend(x, placement[user.stage], tag=_tag(pipeline, user), axes=axis))

    def take(user: Action, maker: int) -> Array:
        if placement[maker] == here:
            return kept.pop(user)
        received: Array = device.recv(placement[maker], tag=_tag(pipeline, user), axes=axis)
        return received

    last = pipeline.stages - 1
    for action in actions:
        number, kind, k = action
        stage = stages[number]
        neighbour = number - 1 if kind == "F" else number + 1
        x = take(action, neighbour) if 0 <= neighbour <= last else None
        before = stage.held(k)
        flops, nbytes = stage.cost(kind, k)
        with device.compute(str(action), flops=flops, nbytes=nbytes, stage=number, microbatch=k, phase=kind):
            y = stage.forward(k, x) if kind == "F" else stage.backward(k, x)
        device.hold("activations", stage.held(k) - before)
        if kind == "F" and number < last and y is not None:
            give(y, Action(number + 1, "F", k))
        if kind == "B" and y is not None:
            give(y, Action(number - 1, "B", k))
    for work in sent:
        work.wait()


def _tag(pipeline: Pipeline, user: Action) -> int:
    """A number for each message of a run, by the action that takes it."""
    return 2 * (user.stage * pipeline.microbatches + user.microbatch) + (user.kind != "F")


def pipeline_axes(pipeline: Pipeline, mesh: Mesh) -> tuple[str | None, str | None]:
    """The mesh axes on which the stages lie and on which the pipeline is replicated; None where there is none.

    Stages lie on ``pipeline.axis``, replicas on ``dp``.  A mesh of one axis serves for the stages, whatever
    its name, unless it is ``dp`` and the pipeline needs one rank only.  ``ValueError`` if the mesh does not fit.
    """
    stages: str | None = pipeline.axis
    if stages not in mesh.axes:
        alone = len(mesh.axes) == 1 and not (mesh.axes == ("dp",) and pipeline.ranks == 1)
        stages = mesh.axes[0] if alone else None
    replicas = "dp" if "dp" in mesh.axes and stages != "dp" else None
    extent = 1 if stages is None else mesh.shape[stages]
    if extent != pipeline.ranks:
        found = f"axis {stages!r} of size {extent}" if stages else f"no axis {pipeline.axis!r}"
        raise ValueError(f"{pipeline!r} takes {pipeline.ranks} ranks on axis {pipeline.axis!r}; {mesh!r} has {found}")
    for axis in mesh.axes:
        if axis not in (stages, replicas) and mesh.shape[axis] > 1:
            raise ValueError(
                f"{pipeline!r} uses axis {pipeline.axis!r} and replicas on 'dp'; {mesh!r} also has {axis!r} "
                f"of size {mesh.shape[axis]}"
            )
    return stages, replicas


def split_rows(x: Array, parts: int) -> list[Array]:
    """The rows in ``parts`` parts as even as can be, the longer ones first; views, some of them perhaps empty."""
    return np.array_split(x, parts)
