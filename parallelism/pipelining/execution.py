"""Running a schedule on one device: take what an action needs, run it, pass on what it made.

The loop knows nothing of layers: a `Stage` does the arithmetic.  It knows nothing of a schedule either, beyond
its actions and where its stages lie, so any valid order runs, several stages on a device included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy.typing as npt

from parallelism.mesh import Mesh
from parallelism.operation import Device, Work
from parallelism.pipelining.actions import MESSAGES, Action
from parallelism.pipelining.pipeline import Pipeline

Array = npt.NDArray[Any]


class Stage(Protocol):
    """The arithmetic of one stage; what a forward keeps for its backward, the stage keeps by microbatch.

    A subclass has `forward`, `backward_input` and `backward_weights`; the rest it may leave as it is here.
    """

    def forward(self, microbatch: int, x: Array | None) -> Array:
        """The output; ``x`` is that of the stage before, None on the first stage, which has the data."""

    def backward_input(self, microbatch: int, grad: Array | None) -> Array | None:
        """The gradient of the input, None on the first stage; ``grad`` is None on a stage that has the loss."""

    def backward_weights(self, microbatch: int) -> None:
        """The gradients of the weights, after `backward_input` of the same microbatch."""

    def backward(self, microbatch: int, grad: Array | None) -> Array | None:
        """Both halves at once."""
        grad = self.backward_input(microbatch, grad)
        self.backward_weights(microbatch)
        return grad

    @property
    def dropped(self) -> Collection[int]:
        """What is to be computed again before a backward; empty if nothing is."""
        return ()

    def recompute(self, microbatch: int) -> None:
        """Computes again what was dropped after the forward."""
        return

    @property
    def dtype(self) -> npt.DTypeLike | None:
        """What the stage computes in; None: it does not say."""
        return None

    def cost(self, kind: str, microbatch: int) -> tuple[float, float]:
        """Flops, and bytes of memory traffic, of an action of this kind; ``R`` is for `recompute`."""
        return 0.0, 0.0

    def seconds(self, kind: str, microbatch: int) -> float | None:
        """What an action of this kind takes, whatever it costs and computes; None: that is not said."""
        return None

    def held(self, microbatch: int) -> int:
        """Bytes kept at the moment for the backward of this microbatch."""
        return 0


def run_actions(
    device: Device, pipeline: Pipeline, axis: str | None, stages: Mapping[int, Stage], actions: Iterable[Action],
    done: Callable[[int, int], None] | None = None,
) -> None:
    """Runs ``actions``, in their order, on the ``stages`` that lie on this device.

    ``axis`` is the mesh axis of the pipeline (None: there is none, and the pipeline has one rank).
    ``done(stage, microbatch)`` is called when a microbatch has had the last of its backward on a stage.

    **Communication**: a message for each forward and each B or I, but those whose result stays on the device or is
    wanted by nobody: the output of a forward, to the next stage, and the gradient of a backward, to the stage before.
    Each has a tag of its own, so no order of the actions can mix them up, and none of them waits for room.  A message
    is sent as soon as it is made; its receive is posted an action ahead of the one that uses it, which waits for it.
    Where the schedule lists its messages, one is sent at its ``SEND``, and its receive posted at its ``RECV``.  What
    stages keep is noted as ``activations``, by stage and microbatch.
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
        before = stage.held(k)
        if kind in ("B", "I") and stage.dropped:
            with _priced(device, stage, number, "R", k):
                stage.recompute(k)
            device.hold("activations", stage.held(k) - before, stage=number, microbatch=k)
            before = stage.held(k)
        y: Array | None = None
        with _priced(device, stage, number, kind, k):
            if kind == "F":
                y = stage.forward(k, x)
            elif kind == "B":
                y = stage.backward(k, x)
            elif kind == "I":
                y = stage.backward_input(k, x)
            else:
                stage.backward_weights(k)
        device.hold("activations", stage.held(k) - before, stage=number, microbatch=k)
        if y is not None:
            mail.give(action, y)
        if done is not None and kind in ("B", "W"):
            done(number, k)
    mail.close()


def _priced(device: Device, stage: Stage, number: int, kind: str, microbatch: int) -> AbstractContextManager[None]:
    """What is computed for an action, with the price that the stage gives it."""
    flops, nbytes = stage.cost(kind, microbatch)
    again = kind == "R"
    return device.compute(
        f"recompute {number}F{microbatch}" if again else f"{number}{kind}{microbatch}", flops=flops, nbytes=nbytes,
        seconds=stage.seconds(kind, microbatch), phase=None if again else kind, stage=number, microbatch=microbatch,
        dtype=stage.dtype,
    )


class _Mail:
    """What the actions of a device make and want: kept where both are on it, sent and received where not."""

    def __init__(self, device: Device, pipeline: Pipeline, axis: str | None) -> None:
        self.device, self.pipeline, self.axis = device, pipeline, axis
        self.placement = pipeline.schedule.placement
        self.here = device.position(axis) if axis is not None else 0
        self.kept: dict[Action, Array] = {}     # by who wants it
        self.sent: list[Work] = []
        self.posted: dict[Action, Work] = {}

    def take(self, action: Action) -> Array | None:
        """The input of an action; None if it has none from another stage."""
        number, kind, k = action
        maker = number - 1 if kind == "F" else number + 1
        if not self.pipeline.schedule.passes_on(kind) or not 0 <= maker < self.pipeline.stages:
            return None
        user = _user(number, kind, k)
        if self.placement[maker] == self.here:
            return self.kept.pop(user)
        if user in self.posted:
            received: Array = self.posted.pop(user).wait()
        else:
            received = self.device.recv(self.placement[maker], tag=self.tag(user), axes=self.axis)
        return received

    def expect(self, action: Action) -> None:
        """Posts the receive of an action's input, where the schedule does not say when."""
        number, kind, k = action
        if self.pipeline.schedule.lists_messages or not self.pipeline.schedule.passes_on(kind):
            return
        maker = number - 1 if kind == "F" else number + 1
        if 0 <= maker < self.pipeline.stages and self.placement[maker] != self.here:
            user = _user(number, kind, k)
            self.posted[user] = self.device.irecv(self.placement[maker], tag=self.tag(user), axes=self.axis)

    def give(self, action: Action, y: Array) -> None:
        """Keeps the result of an action for the one that wants it, or sends it there."""
        number, kind, k = action
        user = _user(number + 1 if kind == "F" else number - 1, kind, k)
        if not self.pipeline.schedule.passes_on(kind) or not 0 <= user.stage < self.pipeline.stages:
            return
        if self.placement[user.stage] == self.here or self.pipeline.schedule.lists_messages:
            self.kept[user] = y
        else:
            self.send(user, y)

    def handle(self, message: Action) -> None:
        """Sends what is kept for it, or posts a receive."""
        number, kind, k = message
        forward = kind[-1] == "F"
        if kind[0] == "S":
            user = _user(number + 1 if forward else number - 1, kind[-1], k)
            self.send(user, self.kept.pop(user))
        else:
            maker = number - 1 if forward else number + 1
            user = _user(number, kind[-1], k)
            self.posted[user] = self.device.irecv(self.placement[maker], tag=self.tag(user), axes=self.axis)

    def send(self, user: Action, y: Array) -> None:
        self.sent.append(self.device.isend(y, self.placement[user.stage], tag=self.tag(user), axes=self.axis))

    def close(self) -> None:
        for work in self.sent:
            work.wait()

    def tag(self, user: Action) -> int:
        return message_tag(self.pipeline, user)


def message_tag(pipeline: Pipeline, user: Action) -> int:
    """The tag of the message that an action (F or B) receives; every message of a run has another."""
    return 2 * (user.stage * pipeline.microbatches + user.microbatch) + (user.kind != "F")


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
        found = f"axis {stages!r} of size {extent}" if stages else f"no axis {pipeline.axis!r}"
        raise ValueError(f"{pipeline!r} takes {pipeline.ranks} ranks on axis {pipeline.axis!r}; {mesh!r} has {found}")
    for axis in mesh.axes:
        if axis not in (stages, replicas, *inside) and mesh.shape[axis] > 1:
            raise ValueError(
                f"{pipeline!r} uses axis {pipeline.axis!r} and replicas on 'dp'; {mesh!r} also has {axis!r} "
                f"of size {mesh.shape[axis]}"
            )
    return stages, replicas
