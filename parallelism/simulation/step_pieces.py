"""What a step of a pipelined program consists of: the events of each action, messages, and the end, each once.

`parallelism.planning` puts steps together from these pieces, without simulating each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from parallelism.execution import Share, TrainedPipeline, TypedArray
from parallelism.execution.pipelined_program import MakeStage
from parallelism.ir import TensorType
from parallelism.layouts.stages.messages import packed
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import MESSAGES
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.operations import PipelinedStep
from parallelism.transforms import Step


class ActionPiece(NamedTuple):
    """An action of a stage for one microbatch."""

    events: DeviceEvents
    kept_more: int
    """Bytes that the stage keeps after the action, minus the bytes that it kept before."""


class Received(NamedTuple):
    """The message that an action takes from another stage."""

    nbytes: int
    dtype: str


class StagePieces(NamedTuple):
    """The work of a stage: the pieces of its actions by kind, with ``R`` for recomputation."""

    actions: Mapping[str, ActionPiece]
    received: Mapping[str, Received]
    """By kind of action; actions that take no message have no entry."""


class EndPieces(NamedTuple):
    """What a device holds during a step, and what it does at the end."""

    held: Mapping[str, int]
    """Bytes by category."""
    events: DeviceEvents
    """Its events after the last action."""


class _ActionsOnly(TrainedPipeline):
    """A pipeline whose step ends with the last action."""

    def class_of_update(self, mesh: Mesh, rank: int, position: int) -> int:
        return 0

    def state_types(self, mesh: Mesh, rank: int, position: int) -> Mapping[str, TensorType]:
        return {}

    def finish(self, device: Device, stages: Mapping[int, Any], share: Share) -> dict[str, Any]:
        return {}


class _EndOnly(TrainedPipeline):
    """A pipeline whose step begins after the last action."""

    begun = 0
    """The number of events before."""

    def run(
        self, device: Device, share: Share, make_stage: MakeStage,
        run_stages: Callable[[Device, Mapping[int, Any]], None] | None = None,
    ) -> dict[str, Any]:
        def skip(_: Device, stages: Mapping[int, Any]) -> None:
            for stage in stages.values():
                self.begun = len(stage.events.rows)
                if stage.last:
                    outputs = stage.programs.functions.forward.outputs
                    loss, = stage.programs.types(outputs, stage.programs.functions.sent, stage.parts[0])
                    stage.outputs[0] = TypedArray.of(loss)

        return super().run(device, share, make_stage, skip)


def action_pieces(step: Step, mesh: Mesh, rows: int, *, fused: bool = False) -> list[StagePieces]:
    """The actions of a step with one stage at each position of the pipeline, in order; without replicas.

    ``ValueError`` if devices at one position differ, as they do with shards of different sizes, if microbatches do, and
    for actions that have messages of their own.
    """
    placed = PipelinedStep(_ActionsOnly(step, mesh, fused=fused), mesh, rows)
    found = []
    for rank in _representatives(placed):
        if placed.events(rank, lambda _: 0.0).bulk is None:
            raise ValueError(f"actions of {placed.program.name} have messages of their own")
        found.append(_stage(placed, rank))
    return found


def end_pieces(step: Step, mesh: Mesh, rows: int, *, fused: bool = False) -> list[EndPieces]:
    """What a device at each position of the pipeline holds, and does at the end.  ``ValueError`` if they differ."""
    program = _EndOnly(step, mesh, fused=fused)
    placed = PipelinedStep(program, mesh, rows)
    found = []
    for rank in _representatives(placed):
        events = placed.events(rank, None)
        held = {row[1]: int(row[2]) for row in events.rows[:program.begun] if row[0] == "memory"}
        found.append(EndPieces(held, events.since(program.begun)))
    return found


def _representatives(step: PipelinedStep) -> list[int]:
    """A rank at each position."""
    first, _ = step.classes
    if len(first) != step.program.pipeline.ranks:
        raise ValueError(f"devices at one position of {step.program.name} differ")
    return sorted(first, key=lambda rank: step.places[rank][0])


def _stage(step: PipelinedStep, rank: int) -> StagePieces:
    position, replica = step.places[rank]
    number, = step.program.stages_on(position)
    programs = step.programs(number, rank)
    parts = {programs.alike(part) for part in step.parts[replica]}
    if len(parts) > 1:
        raise ValueError(f"microbatches of {step.program.name} differ")
    part, last = parts.pop(), number == step.program.pipeline.stages - 1
    kinds = {work.kind for work in step.program.pipeline.schedule.works[position]} - set(MESSAGES)
    actions = {}
    for kind in sorted(kinds | {"R"}):
        known = step.actions.get((programs.first, kind, part, last))
        if known is not None:
            actions[kind] = ActionPiece(known.events, known.kept_more)
    received = {}
    for kind in sorted(kinds):
        if types := programs.message(kind, part, last=last):
            message: Any = packed([TypedArray.of(type) for type in types])  # type: ignore[misc]
            received[kind] = Received(message.nbytes, message.dtype.name)
    return StagePieces(actions, received)
