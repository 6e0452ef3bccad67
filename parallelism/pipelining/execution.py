"""Runs a schedule on one device: for each action it takes the input, runs the action, and passes on the result.

The loop does not know layers: a `Stage` computes.  Of the schedule it uses only the actions and the placement of
stages, so it runs any valid order, also with several stages on a device.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.operation import Device, Work
from parallelism.pipelining.actions import MESSAGES, Action
from parallelism.pipelining.messages import NOBODY, Passed, passed
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

    def freed(self, microbatch: int) -> int:
        """The bytes of what was kept before the last action of this microbatch that the action itself said it freed."""
        return 0


def run_actions(
    device: Device,
    pipeline: Pipeline,
    axis: str | None,
    stages: Mapping[int, Stage],
    actions: Iterable[Action],
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
    order = list(actions)
    moves = passed(pipeline, order)
    messages = _Messages(device, axis, listed=pipeline.schedule.lists_messages)
    for action, move, following in zip(order, moves, [*moves[1:], None], strict=True):
        number, kind, k = action
        if kind in MESSAGES:
            messages.run(move)
            continue
        x = messages.take(move)
        if following is not None and not messages.listed and following.source not in (NOBODY, messages.here):
            messages.post(following)
        y = run_action(device, stages[number], action, x)
        if y is not None:
            messages.give(move, y)
        if done is not None and kind in ("B", "W"):
            done(number, k)
    for work in messages.sent:
        work.wait()


class _Messages:
    """The messages of a device, and the results that pass between its own actions, all by their tags."""

    def __init__(self, device: Device, axis: str | None, *, listed: bool) -> None:
        self.device, self.axis, self.listed = device, axis, listed
        self.here = device.position(axis) if axis is not None else 0
        self.kept: dict[int, Array] = {}
        self.posted: dict[int, Work[Array]] = {}
        self.sent: list[Work[None]] = []

    def run(self, move: Passed) -> None:
        """Posts the receive, or starts the send, of a message that the schedule lists."""
        if move.source != NOBODY:
            self.post(move)
        else:
            self._send(move, self.kept.pop(move.given))

    def post(self, move: Passed) -> None:
        """Posts the receive of what an action takes from another device."""
        self.posted[move.taken] = self.device.irecv(move.source, tag=move.taken, axes=self.axis)

    def take(self, move: Passed) -> Array | None:
        """What an action takes; None if it takes nothing."""
        if move.source == self.here:
            return self.kept.pop(move.taken)
        if move.source == NOBODY:
            return None
        work = self.posted.pop(move.taken, None)
        return self.device.recv(move.source, tag=move.taken, axes=self.axis) if work is None else work.wait()

    def give(self, move: Passed, y: Array) -> None:
        """Passes on the result of an action, or keeps it: for this device, or for its listed ``SEND``."""
        if move.target == NOBODY:
            return
        if self.listed or move.target == self.here:
            self.kept[move.given] = y
        else:
            self._send(move, y)

    def _send(self, move: Passed, y: Array) -> None:
        self.sent.append(self.device.isend(y, move.target, tag=move.given, axes=self.axis))


def run_action(device: Device, stage: Stage, action: Action, x: Array | None) -> Array | None:
    """Runs one action on ``x`` and returns its result, or None.  Values that were dropped are computed again first."""
    number, kind, k = action
    y: Array | None = None
    for part in parts_of(stage, kind):
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
        change = stage.held(k) - before + stage.freed(k)
        device.hold("activations", change, stage=number, microbatch=k)
    return y


def parts_of(stage: Stage, kind: str) -> tuple[str, ...]:
    """The parts of an action of this kind: itself, and before it ``R`` if it needs values that were dropped."""
    return ("R", kind) if kind in ("B", "I") and stage.dropped else (kind,)


def event_name(number: int, part: str, microbatch: int) -> str:
    """The name of the compute event of a part of an action of stage ``number``."""
    return f"recompute {number}F{microbatch}" if part == "R" else f"{number}{part}{microbatch}"


def _priced(
    device: Device, stage: Stage, number: int, kind: str, microbatch: int
) -> AbstractContextManager[None]:
    """The compute event of an action, with the cost that the stage declares."""
    flops, nbytes = stage.cost(kind, microbatch)
    return device.compute(
        event_name(number, kind, microbatch),
        flops=flops,
        nbytes=nbytes,
        seconds=stage.seconds(kind, microbatch),
        phase=None if kind == "R" else kind,
        stage=number,
        microbatch=microbatch,
        dtype=stage.dtype,
    )


def pipeline_axes(
    pipeline: Pipeline, mesh: Mesh, inside: Collection[str] = (), replicas: Sequence[str] = ("dp",)
) -> tuple[str | None, tuple[str, ...]]:
    """The mesh axis on which the stages lie, None without one; and those on which the pipeline is replicated.

    Stages lie on ``pipeline.axis``, replicas on the axes of ``replicas`` that the mesh has.  A mesh of one axis serves
    for the stages, whatever its name, unless it is for replicas or ``inside`` a stage and the pipeline needs one rank
    only.  Axes that are ``inside`` a stage may have any size.  ``ValueError`` if the mesh does not fit.
    """
    stages: str | None = pipeline.axis
    if stages not in mesh.axes:
        alone = len(mesh.axes) == 1 and not (mesh.axes[0] in (*replicas, *inside) and pipeline.ranks == 1)
        stages = mesh.axes[0] if alone else None
    around = tuple(axis for axis in replicas if axis in mesh.axes and axis != stages)
    extent = 1 if stages is None else mesh.shape[stages]
    if extent != pipeline.ranks:
        actual = f"axis {stages!r} of size {extent}" if stages else f"no axis {pipeline.axis!r}"
        raise ValueError(
            f"{pipeline!r} takes {pipeline.ranks} ranks on axis {pipeline.axis!r}; {mesh!r} has {actual}"
        )
    for axis in mesh.axes:
        if axis not in (stages, *around, *inside) and mesh.shape[axis] > 1:
            raise ValueError(
                f"{pipeline!r} uses axis {pipeline.axis!r} and replicas on {' and '.join(map(repr, replicas))}; "
                f"{mesh!r} also has {axis!r} of size {mesh.shape[axis]}"
            )
    return stages, around
