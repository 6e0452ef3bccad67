"""What a step of a pipelined program consists of: the events of each action, messages, and the end, each once.

`parallelism.planning` puts steps together from these pieces, without simulating each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from parallelism.execution import TypedArray
from parallelism.layouts.stages.messages import packed
from parallelism.pipelining import MESSAGES
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.operations import PipelinedStep


class ActionPiece(NamedTuple):
    """An action of a stage for one microbatch."""

    events: DeviceEvents
    kept_more: int
    """Bytes that the stage keeps after the action, minus the bytes that it kept before."""


class Received(NamedTuple):
    """The message that an action takes from another stage."""

    nbytes: int
    dtype: str


@dataclass(frozen=True)
class StagePieces:
    """The work of a stage: the pieces of its actions by kind, with ``R`` for recomputation."""

    actions: Mapping[str, ActionPiece]
    received: Mapping[str, Received]
    """By kind of action; actions that take no message have no entry."""


@dataclass(frozen=True)
class DevicePieces:
    """What a device does, one device for each position in the pipeline."""

    stages: Mapping[int, StagePieces]
    held: Mapping[str, int]
    """Bytes by category that it holds during the whole step."""
    end: DeviceEvents
    """Its events after the last action."""


def step_pieces(step: PipelinedStep) -> list[DevicePieces]:
    """The pieces of a device at each position of the pipeline, in order.

    ``ValueError`` if devices at one position differ, as they do with shards of different sizes, if microbatches do, and
    for actions that have messages of their own.
    """
    first, _ = step.classes
    if len(first) != step.program.pipeline.ranks:
        raise ValueError(f"devices at one position of {step.program.name} differ")
    found: list[DevicePieces] = []
    for rank in first:
        events = step.events(rank, lambda _: 0.0)
        if events.bulk is None:
            raise ValueError(f"actions of {step.program.name} have messages of their own")
        held = {row[1]: int(row[2]) for row in events.rows[:events.bulk_start] if row[0] == "memory"}
        place = events.bulk_start + len(events.bulk.columns)
        end = DeviceEvents(events.rows[events.bulk_start:], [
            each._replace(event=each.event - place) for each in events.collectives if each.event >= place])
        stages = {number: _stage(step, rank, number) for number in step.program.stages_on(step.places[rank][0])}
        found.append(DevicePieces(stages, held, end))
    return sorted(found, key=lambda device: min(device.stages))


def _stage(step: PipelinedStep, rank: int, number: int) -> StagePieces:
    position, replica = step.places[rank]
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
