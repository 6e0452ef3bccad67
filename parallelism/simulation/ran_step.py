"""`ran`: what the devices of a step do, as values that can be repeated; its programs are run once, and asked for no more.

Devices at two positions of a pipeline have programs of their own, so positions are run side by side, on all cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Ints
from parallelism.execution import StagePrograms, TypedArray
from parallelism.layouts.stages import Part
from parallelism.layouts.stages.messages import packed
from parallelism.mesh import Mesh
from parallelism.pipelining import MESSAGES, Pipeline
from parallelism.side_by_side import side_by_side
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.operations import PipelinedStep
from parallelism.simulation.repeated_stages import RepeatedEvents
from parallelism.simulation.step_tails import head_of, tail_of
from parallelism.transforms import Overlap

Actions = Mapping[tuple[str, Part, bool], RepeatedEvents]
"""The events of actions by kind and part of the batch, and whether they are those of the last stage."""


@dataclass(frozen=True, eq=False)
class StageActions:
    """The actions of a stage, in place of its programs: what a stage of known events asks them for."""

    like = None
    adds_up = False
    sum_types = ()

    actions: Actions
    held_after: Mapping[str | None, int]
    """The bytes that a microbatch keeps after an action of a kind; None: before the first."""
    freed_by: Mapping[str, int]
    """The bytes of what it kept before that an action of a kind frees."""
    received: Mapping[str, TypedArray]
    """The message that an action of a kind takes."""
    dropped: int | None
    """So many values are computed again before a backward; None where nothing is."""

    @property
    def first(self) -> StageActions:
        """This."""
        return self

    @property
    def functions(self) -> Any:
        """What is asked for of the functions of the stage: what runs again."""
        again = None if self.dropped is None else SimpleNamespace(outputs=range(self.dropped))
        return SimpleNamespace(recompute=again)

    def alike(self, part: Part) -> Part:
        """All parts of one size are alike."""
        return 0, part[1]

    def all_alike(self, parts: Sequence[Part]) -> list[Part]:
        """`alike` for each of the parts."""
        return list(map(self.alike, parts))

    def held(self, kind: str | None, part: Part) -> int:
        """As `StagePrograms.held`."""
        return self.held_after[kind]

    def freed(self, kind: str, part: Part) -> int:
        """As `StagePrograms.freed`."""
        return self.freed_by[kind]


class DeviceRun(NamedTuple):
    """What a device does in a step."""

    head: DeviceEvents
    """What it does before the first action: see `head_of`."""
    tail: DeviceEvents
    """What it does in the last backwards, and behind the last action: see `tail_of`."""
    results: Mapping[int, Any]
    """By stage, what its last backward returns."""
    stages: Mapping[int, StageActions]
    """By the number of the stage."""
    gathered_first: int
    """The most bytes that a bucket of gathered parameters has before its last part."""


class RanStep(NamedTuple):
    """What the devices of a step do: those at one position of its pipeline, or at all."""

    mesh: Mesh
    pipeline: Pipeline
    axis: str | None
    """The mesh axis on which the stages lie."""
    overlap: Overlap | None
    places: Sequence[tuple[int, int]]
    """For each rank, its position in the pipeline and the number of its replica."""
    parts: Sequence[Sequence[Part]]
    """The microbatches of each replica."""
    first: Ints
    """By rank, the first of those that do the same."""
    devices: Mapping[int, DeviceRun]
    """By the first rank of those that do the same."""


def ran(step: PipelinedStep) -> RanStep:
    """What the devices of a step do.  ``UnequalLayers`` where actions have messages of their own."""
    # The first position has a stage like no other.  A copy of this process begins with it, as this does with the second.
    positions = sorted(range(step.program.pipeline.ranks), key=lambda position: (position > 1, position != 1))
    found = side_by_side([partial(_ran_at, step, position) for position in positions])
    first = np.zeros(step.mesh.size, np.int64)
    devices, known = dict[int, DeviceRun](), dict[tuple[StagePrograms, bool], StageActions]()
    last = step.program.pipeline.stages - 1
    for own, runs in found:
        ranks = list(own)
        first[ranks] = [own[rank] for rank in ranks]
        for rank, run in runs.items():
            # Stages of the same programs have the same actions, whichever process has run them.
            same = {
                number: known.setdefault((step.programs(number, rank).first, number == last), actions)
                for number, actions in run.stages.items()
            }
            devices[rank] = run._replace(stages=same)
    program = step.program
    axis, _ = program.axes(step.mesh)
    return RanStep(
        step.mesh, program.pipeline, axis, program.overlap, step.places, step.parts, first, devices
    )


def _ran_at(step: PipelinedStep, position: int) -> tuple[dict[int, int], dict[int, DeviceRun]]:
    """For each rank at a position the first of those that do the same; and what these do."""
    first = step.classes_at(position)
    return first, {rank: _run(step, rank) for rank in dict.fromkeys(first.values())}


def _run(step: PipelinedStep, rank: int) -> DeviceRun:
    device = step.run(rank, None)
    position, replica = step.places[rank]
    return DeviceRun(
        head_of(device),
        tail_of(device, step.program.pipeline),
        {closing.stage: closing.result for closing in device.closings},
        {number: _actions(step, number, rank, replica) for number in step.program.stages_on(position)},
        _gathered_first(step, rank, position),
    )


def _actions(step: PipelinedStep, number: int, rank: int, replica: int) -> StageActions:
    """The actions of a stage on a rank, which has run them."""
    pipeline, programs = step.program.pipeline, step.programs(number, rank).first
    part: Part = (0, step.parts[replica][0][1])
    again, last = programs.functions.recompute, number == pipeline.stages - 1
    works = pipeline.schedule.works[pipeline.schedule.placement[number]]
    kinds = {work.kind for work in works if work.stage == number} - {*MESSAGES}
    messages = {kind: programs.message(kind, part, last=last) for kind in sorted(kinds & {*"FBI"})}
    kinds |= {"R"} if again else set()
    return StageActions(
        {
            (kind, own, is_last): _without_values(events)
            for (of, kind, own, is_last), events in step.actions.items()
            if of is programs and is_last == last
        },
        {kind: programs.held(kind, part) for kind in (None, *sorted(kinds))},
        {kind: programs.freed(kind, part) for kind in sorted(kinds)},
        {kind: _message(types) for kind, types in messages.items() if types},
        None if again is None else len(again.outputs),
    )


def _without_values(events: RepeatedEvents) -> RepeatedEvents:
    """An action without the values that it keeps: only programs ask for them."""
    return events if events.kept is None else replace(events, kept={})


def _message(types: Sequence[Any]) -> Any:
    return packed([TypedArray.of(type) for type in types])  # type: ignore[misc]


def _gathered_first(step: PipelinedStep, rank: int, position: int) -> int:
    """The most bytes that a bucket of gathered parameters has before its last part, in the update of a rank."""
    updates = step.program.updates
    if updates is None or step.program.overlap is None:
        return 0
    program, found = updates.program(rank, position), [0]
    for call in program.calls:
        ops = [program.function.ops[number] for number in call]
        if ops[0].kind == "all_gather":
            found.append(sum(int(op.outputs[0].type.nbytes) for op in ops[:-1]))
    return max(found)
