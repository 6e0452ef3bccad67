"""`AssembledStep`: the step of a plan as an operation that can be simulated, put together from the pieces of a search.

Its devices have the events of `parallelism.simulation.PipelinedStep`: the same kinds, groups, bytes and flops, in the same
order, but for the calls of gradients that end a step.  No program of the whole model is made: the events of each
further block are those of the second of two blocks (`parallelism.planning.two_block_steps`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import compress
from math import prod
from os import PathLike
from types import SimpleNamespace
from typing import Any

import numpy as np

from parallelism.arrays import Ints
from parallelism.dtypes import as_dtype
from parallelism.execution import ACTIVATIONS, TypedArray
from parallelism.execution.device_program import RECOMPUTED
from parallelism.hardware import Hardware, Software, sized_hardware
from parallelism.layouts.localization.rank_classes import coordinates_of
from parallelism.layouts.stages import Part
from parallelism.memoized import memoized
from parallelism.mesh.uneven import split_sizes
from parallelism.models import TransformerSpec
from parallelism.pipelining import Pipeline, free_tag, message_user
from parallelism.planning.plan import Task, plan_of
from parallelism.planning.plan_costs import PlanCosts, laid_out_as
from parallelism.planning.space import Choices
from parallelism.planning.two_block_steps import Uneven
from parallelism.rarely_collected import rarely_collected
from parallelism.side_by_side import first_come
from parallelism.simulation.device_events import DeviceEvents, EventRow
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.operations import PriceEvents, SimulatedOperation, simulated_operation
from parallelism.simulation.repeated_actions import run_repeated
from parallelism.simulation.repeated_stages import RepeatedEvents, RepeatingStage
from parallelism.simulation.typed_device import TypedDevice
from parallelism.symbolic.events import (
    COLLECTIVE,
    COMPUTE,
    LEFT,
    MEMORY,
    MESSAGE,
    WAIT,
    EventKind,
    Unpriceable,
)
from parallelism.symbolic.orders import place_of
from parallelism.symbolic.stage_costs import StageCosts
from parallelism.training import Figures, TrainingRun, figures
from parallelism.training.few_layers import layered_step
from parallelism.training.run_figures import FiguresWithoutTrace

AXIS = "pp"


@rarely_collected()
def figures_of(task: Task, settings: Mapping[str, Any]) -> Figures:
    """The figures of a plan, as `parallelism.training.figures`: of its `AssembledStep`; where there is none,
    of its `parallelism.training.few_layers.layered_step`, or of the program of the whole model."""
    run = task.run(settings)
    try:
        return figures(run, task.hardware, operation=AssembledStep(task, settings))
    except Unpriceable:
        return _figures_of_layers(run, task.hardware)


def figures_of_several(
    task: Task,
    plans: Sequence[Mapping[str, Any]],
    told: Callable[[int, int], object],
    took: Callable[[int, Figures], object],
) -> None:
    """`figures_of` plans, given their settings, on all cores; ``told`` and ``took`` are those of `first_come`."""
    here = os.getpid()

    def figures_here_or_there(settings: Mapping[str, Any]) -> Figures:
        found = figures_of(task, settings)
        return found if os.getpid() == here else FiguresWithoutTrace.of(found)

    def take(place: int, found: Figures) -> None:
        if isinstance(found, FiguresWithoutTrace):
            found = replace(found, again=lambda: figures_of(task, plans[place]).trace)
        took(place, found)

    first_come([partial(figures_here_or_there, settings) for settings in plans], told=told, took=take)


@rarely_collected()
def figures_of_run(run: TrainingRun, hardware: Hardware | str | PathLike[str]) -> Figures:
    """`parallelism.training.figures` of a run: as `figures_of` where a plan is this run."""
    found = sized_hardware(hardware, run.mesh.size)
    if found.ranks < run.mesh.size:
        return figures(run, found)  # refuses it
    plan = plan_of(run, found)
    return _figures_of_layers(run, found) if plan is None else figures_of(*plan)


def _figures_of_layers(run: TrainingRun, hardware: Hardware) -> Figures:
    """The figures of a run, of few layers where those of all follow from them."""
    return figures(run, hardware, operation=layered_step(run, Software.of(hardware)))


class AssembledStep:
    """The step of a plan of a `TransformerSpec`.

    `Unpriceable` for a plan that is not put together from pieces, and where replicas have parts of unequal sizes of what a
    collective takes.
    """

    pipeline_axis = AXIS

    def __init__(self, task: Task, settings: Mapping[str, Any]) -> None:
        task = task.at(settings)
        if not isinstance(task.model.model, TransformerSpec):
            raise Unpriceable("a program may compute of the whole batch before the first action")
        self.task, self.settings = task, settings
        self.mesh, self.software = task.mesh(settings), Software.of(task.hardware)
        self.costs = PlanCosts(task, alone(settings))
        self.costs.prepare(0)
        self.shape = self.costs.shape(0)
        schedule, _, microbatches, chunks, *_ = self.shape
        self.pipeline = Pipeline(self.shape.stages, microbatches, schedule, chunks, AXIS)
        rows = task.batch // (settings["dp"] * microbatches)
        self.parts: tuple[Part, ...] = tuple((number * rows, rows) for number in range(microbatches))
        """The microbatches of a replica."""
        self.positions = self._coordinates[AXIS]
        """By rank, its position in the pipeline."""
        self.smaller, of_replica = self._smaller()
        self.class_of = self.positions * len(self.smaller) + of_replica
        """By rank, the number of those that have the same events; some numbers may have no rank."""
        self._known: dict[Any, RepeatedEvents] = {}
        self._ends: dict[Any, DeviceEvents] = {}
        """The events of ends without messages, which several positions may have."""

    def under(self, software: Software) -> SimulatedOperation:
        """The step as this software runs it: this one, or, of other software, the program of the whole model."""
        if software == self.software:
            return self
        run = self.task.run(self.settings)
        return simulated_operation(run.step, run.mesh, run.batch, None, software=software)

    def with_microbatches(self, count: int) -> AssembledStep | None:
        """The step with so many microbatches: see `parallelism.simulation.operations.StepOfMany`."""
        pipeline = self.pipeline.with_microbatches(count)
        if pipeline is None:
            return None
        fewer = copy(self)  # what is known of stages and their actions is of any number of microbatches
        fewer.pipeline, fewer.parts = pipeline, self.parts[:count]
        return fewer

    def templates(self, price: PriceEvents | None = None) -> Templates:
        """The events of the devices of each class: see `parallelism.simulation.PipelinedStep`."""
        found, class_of = np.unique(self.class_of, return_inverse=True)
        events = []
        for number in found:
            ranks = np.flatnonzero(self.class_of == number)
            events.append(self.events(ranks, price and partial(price, ranks)))
        return Templates(self.mesh, events, class_of)

    @cached_property
    def _coordinates(self) -> dict[str, Ints]:
        return coordinates_of(self.mesh)

    def _smaller(self) -> tuple[list[frozenset[Uneven]], Ints]:
        """What replicas have no larger part of, for each kind of replicas; and by rank the number of its kind."""
        at, uneven = self._coordinates, self.costs.uneven(0)
        has_smaller = np.zeros((len(uneven), self.mesh.size), np.bool_)
        for number, (_, axes, whole) in enumerate(uneven):
            own = [axis for axis in axes if axis in at]
            shape = tuple(self.mesh.shape[axis] for axis in own)
            sizes = np.array(split_sizes(whole, shape))
            pieces = np.ravel_multi_index([at[axis] for axis in own], shape)
            has_smaller[number] = sizes[pieces] < sizes.max()
        kinds, of_replica = np.unique(has_smaller, axis=1, return_inverse=True)
        smaller = [frozenset(compress(uneven, kind)) for kind in kinds.T.tolist()]
        return smaller, np.ravel(of_replica)

    def events(self, ranks: Ints, price: Any) -> DeviceEvents:
        """The events of each of these ranks, which are of one class."""
        device = TypedDevice(self.mesh, int(ranks[0]), self._incoming)
        position, kind = divmod(int(self.class_of[ranks[0]]), len(self.smaller))
        schedule, last = self.pipeline.schedule, self.shape.stages - 1
        costs, end = self._costs_at(position), self._end_at(position, self.smaller[kind])
        with device.compute(f"@{costs.steps.name}", seconds=0.0):
            pass
        held = costs.held_by_category(0, *end)
        if not costs.adds_up(self.shape):
            held["gradients"] = 0  # those of the only microbatch are there as soon as they are computed
        for category, nbytes in held.items():
            if nbytes or category != "optimizer":
                device.hold(category, nbytes)
        stages = {
            number: RepeatingStage(
                device,
                number,
                self._stage_at(number),
                self.parts,
                {},
                {},
                last=number == last,
                known=self._known,
                price=price,
            )
            for number, at in enumerate(schedule.placement)
            if at == position
        }
        for stage in stages.values():
            self._know(stage)
        run_repeated(device, self.pipeline, AXIS, stages, schedule.works[position])
        self._end(device, position, *end)
        return device.events

    def _incoming(self, tag: int) -> TypedArray:
        """The message with this tag."""
        stage, kind, _ = message_user(self.pipeline, tag)
        return self._stage_at(stage).received(kind)

    def _costs_at(self, position: int) -> PlanCosts:
        """The costs of the stages at a position."""
        return self.costs

    def _end_at(self, position: int, smaller: frozenset[Uneven]) -> tuple[StageCosts, int, int]:
        """The costs of the end of the devices at a position, their place, and their blocks: see `PlanCosts.devices`."""
        return self.costs.devices(0, smaller)[int(self.costs.number_of(self.shape)[position])]

    def _stage_at(self, number: int) -> AssembledStage:
        """A stage by its number."""
        return self._stage(place_of(number, self.shape.stages, self.shape.longer))

    @memoized
    def _stage(self, place: int) -> AssembledStage:
        """A stage at a place of the pipeline."""
        return AssembledStage(self.costs, self.shape.blocks_of(place), place)

    def _know(self, stage: RepeatingStage) -> None:
        """Lets a stage repeat the events of all its actions, none of which it runs."""
        programs: Any = stage.programs
        for kind in programs.kinds:
            key = programs, kind, programs.alike(self.parts[0]), stage.last
            if key not in self._known:
                self._known[key] = RepeatedEvents(
                    {} if kind in "FRI" else None,
                    programs.kept(kind),
                    programs.freed(kind, self.parts[0]),
                    self._result(stage, kind),
                    None,
                    self._action(programs, kind),
                )

    def _result(self, stage: RepeatingStage, kind: str) -> TypedArray | None:
        """The message that an action of a stage sends, which is what the stage that takes it receives."""
        if kind in "RW":
            return None
        other = stage.number + (1 if kind == "F" else -1)
        if other not in range(self.shape.stages):
            return TypedArray((), np.float32)  # goes nowhere
        return self._stage_at(other).received(kind)

    def _action(self, stage: AssembledStage, kind: str) -> DeviceEvents:
        """The events of an action, those of microbatch 0."""
        device = TypedDevice(self.mesh, 0)
        costs = stage.costs_of(kind)
        marks = {"stage": 0, "microbatch": 0}
        received = stage.bytes_received(kind)
        held: Counter[str] = Counter({ACTIVATIONS: stage.freed(kind, self.parts[0]) - received})
        recorder = _Recorder(device, costs, marks, kind)
        for event in events_of(costs, stage.place, kind, stage.blocks):
            what: Any = costs.symbolic.kinds[event]
            if what.what == LEFT:
                device.hold(what.name, -held[what.name], **marks)
                continue
            if what.what == MEMORY:
                held[what.name] += recorder.nbytes(event)
            recorder.record(event)
        return device.events

    def _end(self, device: TypedDevice, position: int, costs: StageCosts, place: int, blocks: int) -> None:
        """Records what a device does after its last action, once for all positions at which it does the same."""
        if costs.exchanged(place):
            self._record_end(device, position, costs, place, blocks)
            return
        key = id(costs), place, blocks  # the costs are kept by `self.costs`
        if key not in self._ends:
            alone = TypedDevice(self.mesh, 0)
            self._record_end(alone, position, costs, place, blocks)
            self._ends[key] = alone.events
        device.events.repeat(self._ends[key])

    def _record_end(
        self, device: TypedDevice, position: int, costs: StageCosts, place: int, blocks: int
    ) -> None:
        recorder = _Recorder(device, costs)
        events = list(events_of(costs, place, "end", blocks))
        largest = self._end_at(position, frozenset())[0]
        joined: Counter[EventKind] = Counter()
        for event in events:
            kind: Any = costs.symbolic.kinds[event]
            if kind.joined:  # its members give and get as much as that with the largest parts; of an all_reduce all are alike
                joined[kind] += (costs if kind.name == "all_reduce" else largest).numbers(event)[0]
        for event in events:
            kind = costs.symbolic.kinds[event]
            if kind.what == MESSAGE:
                other = self.shape.ranks - 1 if position == 0 else 0
                array = TypedArray((recorder.nbytes(event) // as_dtype(kind.dtype).itemsize,), kind.dtype)
                device.sendrecv(array, other, other, tag=free_tag(self.pipeline), axes=AXIS)
            elif not kind.joined:
                recorder.record(event)
            elif kind in joined:
                recorder.call(kind, joined.pop(kind))


class AssembledStage:
    """The programs of a stage, as far as a stage of known events asks for them: sizes, and whether something runs again."""

    like = None
    adds_up = False
    sum_types = ()

    def __init__(self, costs: PlanCosts, blocks: int, place: int) -> None:
        self.costs, self.place = costs, laid_out_as(place)
        self.blocks = costs.alike(blocks, place)
        works = costs.kinds_at(0, place)
        self.backward = "I" if "I" in works else "B"
        again = ((self.place, 1), "R") in self.costs_of("R").symbolic.sections
        self.kinds = (*works, *(("R",) if again else ()))
        outputs: Sequence[None] = (None,) if again else ()
        self.functions = SimpleNamespace(recompute=SimpleNamespace(outputs=outputs) if again else None)

    @property
    def first(self) -> AssembledStage:
        """This."""
        return self

    def costs_of(self, kind: str) -> StageCosts:
        """The costs of an action of a kind; what runs again is with the backwards."""
        return self.costs.actions(0, self.backward if kind == "R" else kind)

    def alike(self, part: Part) -> Part:
        """All parts of one size are alike."""
        return 0, part[1]

    def all_alike(self, parts: Sequence[Part]) -> list[Part]:
        """`alike` for each of the parts."""
        return list(map(self.alike, parts))

    def kept(self, kind: str) -> int:
        """The bytes that a microbatch keeps more after an action."""
        return self.costs_of(kind).size(self.place, (kind, "kept"), "kept", self.blocks)

    def freed(self, kind: str, part: Part) -> int:
        """The bytes of what a microbatch kept that an action frees itself."""
        return self.costs_of(kind).size(self.place, (kind, "kept"), "freed", self.blocks)

    def held(self, kind: str | None, part: Part) -> int:
        """The bytes that a microbatch keeps after an action; None: before the first."""
        before = {"F": (), "R": ("F",), "I": ("F", "R") if "R" in self.kinds else ("F",)}
        if kind not in before:
            return 0
        return sum(map(self.kept, (*before[kind], kind)))

    def bytes_received(self, kind: str) -> int:
        """The bytes of the message that an action takes; 0 if it takes none."""
        array = self._received(kind)
        return 0 if array is None else int(array.nbytes)

    def received(self, kind: str) -> TypedArray:
        """The message that an action takes."""
        return next(found for each in (kind, "B", "I") if (found := self._received(each)) is not None)

    @memoized
    def _received(self, kind: str) -> TypedArray | None:
        if kind not in self.kinds:
            return None
        costs = self.costs_of(kind)
        events = costs.symbolic.sections[(self.place, 1), "received"]
        for event in range(events.start, events.stop):
            of: Any = costs.symbolic.kinds[event]
            if of.name == kind:
                nbytes = int(costs.events.nbytes(slice(event, event + 1))[0])
                return TypedArray((nbytes // as_dtype(of.dtype).itemsize,), of.dtype)
        return None


class _Recorder:
    """Records events of pieces on a device.  Those of computes and of memory that are alike are made once."""

    def __init__(
        self,
        device: TypedDevice,
        costs: StageCosts,
        marks: Mapping[str, int] | None = None,
        phase: str | None = None,
    ) -> None:
        self.device, self.costs, self.marks, self.phase = device, costs, marks or {}, phase
        self.started: list[Any] = []
        self._alike: list[int] = costs.symbolic.alike.tolist()
        self._made: dict[int, list[EventRow]] = {}
        """What was recorded for the first of events that are alike: one event, or none."""

    def nbytes(self, event: int) -> int:
        """The first number of an event."""
        return self.costs.numbers(event)[0]

    def record(self, event: int) -> None:
        """Records a compute, a change of memory, a collective or a wait."""
        rows, first = self.device.events.rows, self._alike[event]
        if (made := self._made.get(first)) is not None:
            rows += made
            return
        kind = self.costs.symbolic.kinds[event]
        if kind.what in (COMPUTE, MEMORY):
            start = len(rows)
            self._work(kind, event)
            self._made[first] = rows[start:]
        elif kind.what == COLLECTIVE:
            self.call(kind, self.nbytes(event))
        elif kind.what == WAIT:
            self.device.wait(self.started[-kind.later])

    def _work(self, kind: EventKind, event: int) -> None:
        nbytes, flops, *more = self.costs.numbers(event)
        if kind.what == MEMORY:
            if nbytes:
                self.device.hold(str(kind.name), nbytes, **self.marks)
            return
        end = len(kind.others)
        if not any((nbytes, flops, *more[:end])) and kind.seconds is None:
            return  # an op on a part without elements
        self.device.compute(
            kind.name or COMPUTE,
            flops=float(flops),
            nbytes=float(nbytes),
            dtype=kind.dtype,
            seconds=kind.seconds,
            other_bytes=tuple(zip(kind.others, more[:end], strict=True)),
            shape=tuple(more[end : end + kind.extents]) or None,
            phase=RECOMPUTED if kind.again else self.phase,
            **self.marks,
        )

    def call(self, kind: Any, payload: int) -> None:
        """Records a collective of an array of one dim, in which a device gives, or of an all_gather gets, the payload."""
        mesh, dtype = self.device.mesh, as_dtype(kind.dtype)
        factors = tuple(mesh.shape[axis] for axis in kind.axes)
        size = payload // dtype.itemsize // (prod(factors) if kind.name == "all_gather" else 1)
        options: dict[str, Any] = {"pairs": kind.pairs} if kind.pairs else {}
        if kind.algorithm is not None:
            options["algorithm"] = kind.algorithm
        x = TypedArray((size,), dtype)
        work = self.device.collective(kind.name, x, kind.axes, async_op=bool(kind.later), **options)
        if kind.later:
            self.started.append(work)


def events_of(costs: StageCosts, place: int, action: str, blocks: int) -> Iterator[int]:
    """The events of an action, or of the end, of a stage of so many blocks, in their order."""
    for events, is_repeated in costs.symbolic.runs(((place, 2), action)):
        for _ in range(blocks - 1 if is_repeated else 1):
            yield from range(events.start, events.stop)


def alone(settings: Mapping[str, Any]) -> Choices:
    """The space of one plan."""
    columns, words = {}, {}
    for name, value in settings.items():
        number = value
        if isinstance(value, str):  # a column has the number of the word
            words[name] = (value,)
            number = 0
        columns[name] = np.array([int(number)])
    return Choices(columns, words)
