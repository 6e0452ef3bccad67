"""Runs a schedule on one device: for each action it takes the input, runs the action, and passes on the result.

The loop does not know layers: a `Stage` computes.  Of the schedule it uses only the actions and the placement of
stages, so it runs any valid order, also with several stages on a device.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.operation import Device, Work
from parallelism.pipelining.actions import MESSAGES, Action
from parallelism.pipelining.pipeline import Pipeline


class Stage(Protocol):
    """The computation of one stage.  The stage keeps the values for a backward itself, by microbatch.

    A subclass must define `forward`, `backward_input` and `backward_weights`; the other methods have defaults.
    """

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The output.  ``x`` is the output of the stage before; None on the first stage, which has the data."""

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """The gradient of the input; None on the first stage.  ``grad`` is None on a stage that has the loss."""

    def backward_weights(self, microbatch: int) -> None:
        """Computes the gradients of the weights, after `backward_input` of the same microbatch."""

    def backward(self, microbatch: int, grad: Array | None) -> Array | None:
        """`backward_input` and `backward_weights` in one."""
        grad = self.backward_input(microbatch, grad)
        self.backward_weights(microbatch)
        return grad

    @property
    def dropped(self) -> Collection[int]:
        """The values that are computed again before a backward; empty if there are none."""
        return ()

    def recompute(self, microbatch: int) -> None:
        """Computes the dropped values again."""
        return

    @property
    def dtype(self) -> npt.DTypeLike | None:
        """The dtype of the computation; None if it is not known."""
        return None

    def cost(self, kind: str, microbatch: int) -> tuple[float, float]:
        """Flops, and bytes of memory traffic, of an action of this kind; ``R`` is for `recompute`."""
        return 0.0, 0.0

    def seconds(self, kind: str, microbatch: int) -> float | None:
        """The seconds of an action of this kind, in place of its cost; None if they are not known."""
        return None

    def held(self, microbatch: int) -> int:
        """The bytes that are kept now for the backward of this microbatch."""
        return 0


def run_actions(
    device: Device, pipeline: Pipeline, axis: str | None, stages: Mapping[int, Stage], actions: Iterable[Action],
    done: Callable[[int, int], None] | None = None,
) -> None:
    """Runs ``actions`` in their order on the ``stages`` of this device.

    ``axis`` is the mesh axis of the pipeline; None if the pipeline has one rank and no axis.
    ``done(stage, microbatch)`` is called after the last backward action of a microbatch on a stage.

    **Communication**: a forward sends its output to the next stage, and a B or I its gradient to the stage before,
    unless the receiver is on the same device or there is none.  Every message has its own tag, so no order of the
    actions can mix them up, and no send waits for the receiver.  A message is sent at once; its receive is posted one
    action before the action that uses it.  If the schedule lists its messages, they are sent at ``SEND`` and their
    receives posted at ``RECV``.

    **Memory**: ``activations`` hold the bytes that stages keep, by stage and microbatch.
    """
    mail = _Mail(device, pipeline, axis)
    order = list(actions)
    for action, following in zip(order, [*order[1:], None], strict=True):
        number, kind, k = action
        if kind in MESSAGES:
            mail.handle(action)
            continue
        stage = stages[number]
        x = mail.take(action)
        if following is not None:
            mail.expect(following)
        y: Array | None = None
        for part in ("R", kind) if kind in ("B", "I") and stage.dropped else (kind,):
            before = stage.held(k)
            with _priced(device, stage, number, part, k):
                if part == "R":
                    stage.recompute(k)
                elif part == "F":
                    y = stage.forward(k, x)
                elif part == "B":
                    y = stage.backward(k, x)
                elif part == "I":
                    y = stage.backward_input(k, x)
                else:
                    stage.backward_weights(k)
            device.hold("activations", stage.held(k) - before, stage=number, microbatch=k)
        if y is not None:
            mail.give(action, y)
        if done is not None and kind in ("B", "W"):
            done(number, k)
    for work in mail.sent:
        work.wait()


def _priced(device: Device, stage: Stage, number: int, kind: str, microbatch: int) -> AbstractContextManager[None]:
    """The compute event of an action, with the cost that the stage declares."""
    flops, nbytes = stage.cost(kind, microbatch)
    name, phase = (f"recompute {number}F{microbatch}", None) if kind == "R" else (f"{number}{kind}{microbatch}", kind)
    return device.compute(
        name, flops=flops, nbytes=nbytes, seconds=stage.seconds(kind, microbatch), phase=phase, stage=number,
        microbatch=microbatch, dtype=stage.dtype,
    )


class _Mail:
    """The results that pass between actions: kept if both actions are on this device, else sent and received."""

    def __init__(self, device: Device, pipeline: Pipeline, axis: str | None) -> None:
        self.device, self.pipeline, self.axis = device, pipeline, axis
        self.placement = pipeline.schedule.placement
        self.here = device.position(axis) if axis is not None else 0
        self.kept: dict[Action, Array] = {}     # by the action that takes the result
        self.sent: list[Work] = []
        self.posted: dict[Action, Work] = {}

    def take(self, action: Action) -> Array | None:
        """The input of an action; None if it has none from another stage."""
        source, user = self.source(action), _user(*action)
        if source is None:
            return None
        if source == self.here:
            return self.kept.pop(user)
        if user in self.posted:
            received: Array = self.posted.pop(user).wait()
        else:
            received = self.device.recv(source, tag=self.tag(user), axes=self.axis)
        return received

    def expect(self, action: Action) -> None:
        """Posts the receive of an action's input, unless the schedule lists its messages."""
        source = None if self.pipeline.schedule.lists_messages else self.source(action)
        if source is not None and source != self.here:
            self.post(_user(*action), source)

    def give(self, action: Action, y: Array) -> None:
        """Keeps the result of an action for the action that takes it, or sends it there."""
        number, kind, k = action
        user = _user(number + 1 if kind == "F" else number - 1, kind, k)
        if not self.pipeline.schedule.passes_on(kind) or not 0 <= user.stage < self.pipeline.stages:
            return
        if self.placement[user.stage] == self.here or self.pipeline.schedule.lists_messages:
            self.kept[user] = y
        else:
            self.send(user, y)

    def handle(self, message: Action) -> None:
        """Sends the kept result of a listed message, or posts its receive."""
        number, kind, k = message
        other_end = number + 1 if kind in ("SEND_F", "RECV_B") else number - 1
        if kind[0] == "S":
            user = _user(other_end, kind[-1], k)
            self.send(user, self.kept.pop(user))
        else:
            self.post(_user(number, kind[-1], k), self.placement[other_end])

    def source(self, action: Action) -> int | None:
        """The rank of the stage whose result an action takes; None if it takes none from another stage."""
        maker = action.stage - 1 if action.kind == "F" else action.stage + 1
        takes = self.pipeline.schedule.passes_on(action.kind) and 0 <= maker < self.pipeline.stages
        return self.placement[maker] if takes else None

    def send(self, user: Action, y: Array) -> None:
        self.sent.append(self.device.isend(y, self.placement[user.stage], tag=self.tag(user), axes=self.axis))

    def post(self, user: Action, source: int) -> None:
        self.posted[user] = self.device.irecv(source, tag=self.tag(user), axes=self.axis)

    def tag(self, user: Action) -> int:
        """The tag of the message that an action (F or B) receives; every message of a run has another."""
        return 2 * (user.stage * self.pipeline.microbatches + user.microbatch) + (user.kind != "F")


def message_user(pipeline: Pipeline, tag: int) -> Action:
    """The action that receives the message with this tag: F, or B for any backward that takes a gradient."""
    stage, microbatch = divmod(tag // 2, pipeline.microbatches)
    return Action(stage, "B" if tag % 2 else "F", microbatch)


def free_tag(pipeline: Pipeline) -> int:
    """The first tag that no message between stages has."""
    return 2 * pipeline.stages * pipeline.microbatches


def _user(stage: int, kind: str, microbatch: int) -> Action:
    """The action that takes a result; whether the other stage splits its backward does not matter."""
    return Action(stage, "F" if kind == "F" else "B", microbatch)


def pipeline_axes(
    pipeline: Pipeline, mesh: Mesh, inside: Collection[str] = ()
) -> tuple[str | None, str | None]:
    """The mesh axes on which the stages lie and on which the pipeline is replicated; None where there is none.

    Stages lie on ``pipeline.axis``, replicas on ``dp``.  A mesh of one axis serves for the stages, whatever
    its name, unless it is ``dp`` or ``inside`` a stage and the pipeline needs one rank only.  Axes that are ``inside``
    a stage may have any size.  ``ValueError`` if the mesh does not fit.
    """
    stages: str | None = pipeline.axis
    if stages not in mesh.axes:
        alone = len(mesh.axes) == 1 and not (mesh.axes[0] in ("dp", *inside) and pipeline.ranks == 1)
        stages = mesh.axes[0] if alone else None
    replicas = "dp" if "dp" in mesh.axes and stages != "dp" else None
    extent = 1 if stages is None else mesh.shape[stages]
    if extent != pipeline.ranks:
        actual = f"axis {stages!r} of size {extent}" if stages else f"no axis {pipeline.axis!r}"
        raise ValueError(f"{pipeline!r} takes {pipeline.ranks} ranks on axis {pipeline.axis!r}; {mesh!r} has {actual}")
    for axis in mesh.axes:
        if axis not in (stages, replicas, *inside) and mesh.shape[axis] > 1:
            raise ValueError(
                f"{pipeline!r} uses axis {pipeline.axis!r} and replicas on 'dp'; {mesh!r} also has {axis!r} "
                f"of size {mesh.shape[axis]}"
            )
    return stages, replicas
