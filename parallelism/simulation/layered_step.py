"""`LayeredStep`: a step of a model with many equal layers as an operation, from steps of two models with few.

It has the events of a `PipelinedStep` of the whole model, whose program is never made.  The two have either fewer layers
in one stage, or fewer stages with as many layers each: at those positions of a pipeline that stand for all, such as the
first, the last, and one of those between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Ints
from parallelism.collectives import MemberCall
from parallelism.execution import TypedArray
from parallelism.execution.last_backward import LastBackward
from parallelism.hardware import Software
from parallelism.layouts.localization.rank_classes import coordinates_of
from parallelism.layouts.stages import Part
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline, message_user
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.equal_layers import MARK, MayGrow, UnequalLayers, with_layers
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.operations import PriceEvents, SimulatedOperation
from parallelism.simulation.ran_step import DeviceRun, RanStep, StageActions
from parallelism.simulation.repeated_actions import run_repeated
from parallelism.simulation.repeated_stages import RepeatedEvents, RepeatingStage
from parallelism.simulation.step_tails import Tail
from parallelism.simulation.typed_device import TypedDevice

FEWEST = 3
"""With fewer layers none is between the first and the last: what is done once a layer, one layer ahead, is not told from
what is done for all layers at first."""


class Whole(NamedTuple):
    """The step of which a `LayeredStep` has the events."""

    mesh: Mesh
    pipeline: Pipeline
    few: int
    """The layers of the smaller step of few, or its stages at each position."""
    more: int
    """So many layers, or stages at each position, more than that has."""
    software: Software
    made: Callable[[Software], SimulatedOperation]
    """Makes the step for other software."""
    stand_for: tuple[int, ...] = (0,)
    """By position in the pipeline, the position in the steps of few layers that does the same."""


class LayeredStep:
    """The step that is ``whole``, from one of ``few`` layers, or stages at each position, and from one with one ``more``.

    `UnequalLayers` where its events do not follow from those of the two.
    """

    def __init__(self, few: RanStep, more: RanStep, whole: Whole) -> None:
        self.few, self.more, self.whole, self.software = few, more, whole, whole.software
        self.mesh, self.pipeline = whole.mesh, whole.pipeline
        small = few.pipeline
        self.axis, self.stages = few.axis, small.stages
        if self.stages == 1 and whole.few < FEWEST:
            raise UnequalLayers("one or two layers have none between the first and the last")
        if any(each != number % small.ranks for number, each in enumerate(small.schedule.placement)):
            raise UnequalLayers("stages lie on the ranks in another order than one round after the other")
        if not np.array_equal(few.first, more.first):
            raise UnequalLayers("other devices are equal with a layer more")
        self.places = self._small_places()
        self.first, self.class_of = self._classes()
        self._known: dict[Any, RepeatedEvents] = {}
        self._around = {
            rank: self._around_actions(device, more.devices[rank]) for rank, device in few.devices.items()
        }
        for number, rank in enumerate(self.first):
            self._check(len(self._stages_of(number)), self._small_rank(rank))

    def _check(self, stages: int, small: int) -> None:
        """`UnequalLayers` if the events of so many stages do not follow from those of a rank in the steps of few layers."""
        _, tail = self._around[small]
        if sum(row.kind == MARK.kind for row in tail.rows) not in (1, 1 + stages):
            raise UnequalLayers("some stages have no last backward")
        if len({rows for _, rows in self.few.parts[self.few.places[small][1]]}) > 1:
            raise UnequalLayers("microbatches have not equally many rows")

    @property
    def pipeline_axis(self) -> str | None:
        """The mesh axis on which the stages lie."""
        return self.axis

    def under(self, software: Software) -> SimulatedOperation:
        """The step as this software runs it."""
        return self if software == self.software else self.whole.made(software)

    def with_microbatches(self, count: int) -> LayeredStep | None:
        """The step with so many microbatches: see `parallelism.simulation.operations.StepOfMany`."""
        pipeline = self.pipeline.with_microbatches(count)
        if pipeline is None:
            return None
        fewer = copy(self)
        fewer.pipeline = pipeline
        return fewer

    def templates(self, price: PriceEvents | None = None) -> Templates:
        """The events of the devices of each class: see `parallelism.simulation.PipelinedStep`."""
        events = [
            self._events(number, price and partial(price, np.flatnonzero(self.class_of == number)))
            for number in range(len(self.first))
        ]
        return Templates(self.mesh, events, self.class_of)

    # -- devices and stages --------------------------------------------------------------------------------------------

    def _small_places(self) -> Ints:
        """By rank, the rank on the mesh of the steps of few layers that does the same."""
        places = coordinates_of(self.mesh)
        if self.axis is not None:
            places[self.axis] = np.array(self.whole.stand_for)[places[self.axis]]
        return np.ravel_multi_index(tuple(places.values()), tuple(self.few.mesh.shape.values()))

    def _classes(self) -> tuple[list[int], Ints]:
        """The first rank of each class of devices that have the same events, and the class of each rank."""
        positions = self._positions
        keys = zip(positions, self.few.first[self.places].tolist(), strict=True)
        first: dict[Any, int] = {}
        of = [first.setdefault(key, rank) for rank, key in enumerate(keys)]
        return list(first.values()), np.unique(of, return_inverse=True)[1]

    @cached_property
    def _positions(self) -> list[int]:
        """By rank, its position in the pipeline."""
        if self.axis is None:
            return [0] * self.mesh.size
        before = self.mesh.axes.index(self.axis)
        inner = int(np.prod([*self.mesh.shape.values()][before + 1 :], dtype=np.int64))
        return (np.arange(self.mesh.size) // inner % self.mesh.shape[self.axis]).tolist()

    def _small_stage(self, number: int, position: int) -> int:
        """The stage of the step of few layers that does what a stage does, on the device that stands for its position."""
        if number in (0, self.pipeline.stages - 1):
            return 0 if number == 0 else self.stages - 1
        small = self.few.pipeline
        chunk = number // self.pipeline.ranks if small.chunks == self.pipeline.chunks else int(position == 0)
        return chunk * small.ranks + self.whole.stand_for[position]

    def _stages_of(self, number: int) -> dict[int, Any]:
        """The programs of the stages of a class of devices."""
        rank = self.first[number]
        position, small = self._positions[rank], self._small_rank(rank)
        return {
            stage: self._programs_of(self._small_stage(stage, position), small)
            for stage, at in enumerate(self.pipeline.schedule.placement)
            if at == position
        }

    def _small_rank(self, rank: int) -> int:
        """The representative of the devices that do what this one does, in the steps of few layers."""
        return int(self.few.first[self.places[rank]])

    # -- events --------------------------------------------------------------------------------------------------------

    def _events(self, number: int, price: Any) -> DeviceEvents:
        """The events of each device of a class."""
        rank, programs = self.first[number], self._stages_of(number)
        position, small = self._positions[rank], self._small_rank(rank)
        head, behind = self._around[small]
        device = TypedDevice(self.mesh, rank, self._messages(rank))
        device.events.repeat(head)
        tail = Tail(behind, device, self.pipeline)
        works = self.pipeline.schedule.works[position]
        results = self.few.devices[small].results
        parts = self._parts(self.few.places[small][1])
        stages = {}
        for stage, own in programs.items():
            stages[stage] = _LayeredStage(
                device,
                stage,
                own,
                parts,
                {},
                {},
                last=stage == self.pipeline.stages - 1,
                closing=self._closing(stage, works) if tail.closings else None,
                known=self._known,
                price=price,
                tail=tail,
                result=results.get(self._small_stage(stage, position)),
            )
        run_repeated(device, self.pipeline, self.axis, stages, works)
        tail.end()
        return device.events

    def _parts(self, replica: int) -> tuple[Part, ...]:
        """The microbatches of a replica."""
        rows = self.few.parts[replica][0][1]
        return tuple((number * rows, rows) for number in range(self.pipeline.microbatches))

    def _closing(self, stage: int, works: Sequence[Any]) -> LastBackward:
        """The last backward of a stage, whose program is not asked for."""
        last = next(each for each in reversed(works) if each.stage == stage and each.kind in ("B", "W"))
        return LastBackward(last.microbatch, frozenset(), _no_program)

    def _around_actions(self, few: DeviceRun, more: DeviceRun) -> tuple[DeviceEvents, DeviceEvents]:
        """The events of a device before the first action; and those of its last backwards and behind the last action."""
        heads = self._with_all_inputs(few.head, self.few), self._with_all_inputs(more.head, self.more)
        if few is more:
            return heads[0], few.tail
        further = self.whole.more
        return with_layers(*heads, further), with_layers(few.tail, more.tail, further, self._is_one_call)

    def _is_one_call(self, axes: Any, few: MemberCall, call: MemberCall) -> bool:
        """Whether a call for all layers is one: it is smaller than the buckets into which a program with overlap cuts calls.
        Or its last part fills the bucket, as in that of few layers, and those before do not."""
        overlap = self.few.overlap
        if overlap is None:
            return True
        group = prod(self.mesh.shape[axis] for axis in axes) if call.kind == "all_gather" else 1
        if call.nbytes * group < overlap.bucket_bytes:
            return True
        is_filled = call.kind == "all_gather" and few.nbytes * group >= overlap.bucket_bytes
        return is_filled and self._gathered_first + (call.nbytes - few.nbytes) * group < overlap.bucket_bytes

    def _is_one_bucket(self, axes: Any, few: MemberCall, call: MemberCall) -> bool:
        """Whether a call for all layers in an action is one: only sums of gradients beside the backward are joined there."""
        return self.few.overlap is not None and self._is_one_call(axes, few, call)

    @cached_property
    def _gathered_first(self) -> int:
        """The most bytes that a bucket of gathered parameters has before its last part, in the larger step of few layers."""
        return max(device.gathered_first for device in self.more.devices.values())

    def _with_all_inputs(self, head: DeviceEvents, step: RanStep) -> DeviceEvents:
        """The events before the first action, with the inputs of as many microbatches as the whole step has."""
        own, wanted = step.pipeline.microbatches, self.pipeline.microbatches
        if own != wanted and (head.collectives or len(head.rows) > _HEAD):
            raise UnequalLayers("something is computed of all microbatches before the first action")
        rows = [
            row._replace(nbytes=row.nbytes / own * wanted) if row.name == "inputs" else row
            for row in head.rows
        ]
        return DeviceEvents(rows, head.collectives)

    def _messages(self, rank: int) -> Callable[[int], TypedArray]:
        """A function from a tag to an array of the type of the message that a rank receives with this tag."""
        small, position = self._small_rank(rank), self._positions[rank]
        stages = self.few.devices[small].stages

        def incoming(tag: int) -> TypedArray:
            stage, kind, _ = message_user(self.pipeline, tag)
            return stages[self._small_stage(stage, position)].received[kind]

        return incoming

    @memoized
    def _programs_of(self, stage: int, rank: int) -> StageActions:
        """The actions of a stage of the steps of few layers on one of their ranks, with all layers."""
        few = self.few.devices[rank].stages[stage]
        is_whole = self.stages > 1
        more = few if is_whole else self.more.devices[rank].stages[stage]
        return self._programs_with(few, more)

    @memoized
    def _programs_with(self, few: StageActions, more: StageActions) -> StageActions:
        """The actions of a stage with all layers, which are known."""
        further = partial(_further, layers=self.whole.more)
        programs = replace(
            few,
            held_after={
                kind: further(few.held_after[kind], more.held_after[kind]) for kind in few.held_after
            },
            freed_by={kind: further(few.freed_by[kind], more.freed_by[kind]) for kind in few.freed_by},
        )
        for key in few.actions:
            self._known[(programs, *key)] = _repeated(
                few.actions[key], more.actions[key], self.whole.more, self._is_one_bucket
            )
        return programs


_HEAD = 5
"""The events before the first action where nothing is computed there: the begin of the program, and what it holds."""


def _no_program(kind: str, part: Part) -> Any:
    raise AssertionError(f"the events of a last {kind} are known")


class _LayeredStage(RepeatingStage):
    """A stage of known events, whose last backward is in the tail of the device."""

    def __init__(self, *arguments: Any, tail: Tail, result: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tail, self.result = tail, result

    def close(self, kind: str, microbatch: int, message: Any) -> Any:
        """The last backward."""
        self.tail.close(self.number, microbatch)
        self._last[microbatch] = kind
        self._kept.pop(microbatch, None)
        return self.result


def _repeated(few: RepeatedEvents, more: RepeatedEvents, layers: int, may_grow: MayGrow) -> RepeatedEvents:
    """An action of a stage with further layers."""
    if few is more:
        return few
    return replace(
        few,
        kept_more=_further(few.kept_more, more.kept_more, layers),
        freed=_further(few.freed, more.freed, layers),
        events=with_layers(few.events, more.events, layers, may_grow),
    )


def _further(few: int, more: int, layers: int) -> int:
    """A number of bytes that grows with each layer."""
    return few + layers * (more - few)
