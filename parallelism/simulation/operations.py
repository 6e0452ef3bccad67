"""The operations that can be simulated, each with its mesh and the events of its devices.

An `Executable` runs on a `TypedDevice` for each class of its devices.  A `PipelinedStep` is a step of a pipelined
program on a mesh; `simulate(program, hardware, mesh=mesh, batch=rows)` makes one.  The program itself runs on one
`TypedDevice` for each class of devices that have the same events: either op by op, or with each action of a stage as
one compute event, a *piece* (`parallelism.simulation.repeated_stages`).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from itertools import chain
from math import prod
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from parallelism.arrays import Ints
from parallelism.execution import Executable, PipelinedProgram, Share, StagePrograms, TypedArray, operation_on
from parallelism.execution.whole_batch import Beginning
from parallelism.hardware import Software
from parallelism.ir import Function, TensorType
from parallelism.ir.passes import Form
from parallelism.ir.passes.given_arrays import with_numbers, without_number
from parallelism.layouts import localize
from parallelism.layouts.stages import Part
from parallelism.layouts.stages.messages import packed
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.pipelining import MESSAGES, Pipeline as ScheduledPipeline, message_user
from parallelism.sharding import TensorSharding
from parallelism.shared_results import MOST, shared
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.repeated_actions import run_repeated
from parallelism.simulation.repeated_stages import RepeatedEvents, RepeatingStage
from parallelism.simulation.typed_device import TypedDevice
from parallelism.transforms import Pipeline, Step

PriceEvents = Callable[[Ints, DeviceEvents], float | None]
"""Seconds of some events on each of the ranks that have them; None if the events cannot be one piece."""


class SimulatedOperation(Protocol):
    """An operation on a mesh that can make the events of its devices without running on them."""

    @property
    def mesh(self) -> Mesh: ...
    def templates(self, price: PriceEvents | None = None) -> Templates:
        """The events of each class of devices; with a ``price``, repeated work may be one piece of compute."""


@runtime_checkable
class StepOfMany(SimulatedOperation, Protocol):
    """A step of a pipeline that can be made with fewer microbatches."""

    @property
    def software(self) -> Software: ...
    @property
    def pipeline(self) -> ScheduledPipeline: ...
    @property
    def pipeline_axis(self) -> str | None:
        """The mesh axis on which the stages lie."""

    def with_microbatches(self, count: int) -> "StepOfMany | None":
        """The same step with so many microbatches, which holds before its first action what the whole one does.

        None where its schedule is not known for other numbers.
        """


class SimulatedExecutable:
    """An `Executable`, run on a `TypedDevice` for each class of its devices."""

    def __init__(self, executable: Executable) -> None:
        self.executable, self.mesh = executable, executable.mesh

    def templates(self, price: PriceEvents | None = None) -> Templates:
        """The events of each class of devices.  An `Executable` repeats no work, so ``price`` is not used."""
        executable = self.executable
        if executable not in _EVENTS:
            _EVENTS[executable] = [
                _events(executable, number, rank)
                for number, (rank, _) in enumerate(executable.programs.classes)
            ]
        classes = _EVENTS[executable]
        ranks = range(self.mesh.size)
        class_of = (
            [executable.programs.class_of(rank) for rank in ranks] if len(classes) > 1 else [0] * len(ranks)
        )
        return Templates(self.mesh, classes, np.array(class_of, np.int64))


_EVENTS: WeakKeyDictionary[Executable, list[DeviceEvents]] = WeakKeyDictionary()
"""The events of each class of an executable, which are the same on every hardware."""


def _events(executable: Executable, number: int, rank: int) -> DeviceEvents:
    device = TypedDevice(executable.mesh, rank)
    executable(device.device, *(TypedArray.of(x.type) for x in executable.of_class(number).function.inputs))
    return device.events


class PipelinedStep:
    """One step of ``program`` on ``mesh``, for a batch of ``rows``; ``numbers`` are the values of the other symbols.

    >>> from parallelism import Mesh, Pipeline, PipelinedProgram, PipelinedStep, ir, models, simulate
    >>> from parallelism.layouts import partition
    >>> stages = partition(models.mlp((4096,) * 5, ir.symbol("B")), 2, batch="B")
    >>> program = PipelinedProgram(stages, Pipeline(stages=2, microbatches=4))
    >>> trace = simulate(PipelinedStep(program, Mesh(pp=2), rows=8192), "dgx-h100")
    >>> f"{trace.makespan_seconds * 1e3:.2f} ms", trace.count("send")
    ('45.49 ms', 8)

    ``simulate(PipelinedStep(...), hardware)`` is the trace that ``cluster.run(program, inputs)`` would leave.  With
    ``fold=True`` one device stands for all equal ones.  Unless ``op_by_op`` is set, an action of a stage is then one
    compute event where possible, with the flops and bytes of its ops.  The seconds of this event contain those of its
    collectives, which have no events of their own.  The peak of memory, and its parts by category, stay the same.

    ``ValueError`` for symbols without a number, and for a batch or a mesh that does not fit the program.
    """

    def __init__(self, program: PipelinedProgram, mesh: Mesh, rows: int, **numbers: int) -> None:
        self.program, self.mesh, self.rows, self.numbers = program, mesh, rows, numbers
        batch = program.stages.batch
        missing = program.stages.function.symbols - {batch, f"{batch}_whole", f"{batch}_first", *numbers}
        if missing:
            raise without_number(program.stages.function.name, missing)
        self.places = program.places(mesh)
        """For each rank, its position in the pipeline and the number of its replica."""
        self.parts = program.parts(rows, 1 + max(replica for _, replica in self.places))
        self.actions: dict[Any, RepeatedEvents] = self._known_actions()
        """The events of actions, which stages of the same programs share."""
        self._even: dict[StagePrograms, bool] = {}
        """Whether the shards of all tensors in the programs of a stage have equal shapes."""

    @property
    def pipeline_axis(self) -> str | None:
        """The mesh axis on which the stages lie."""
        return self.program.axes(self.mesh)[0]

    def _known_actions(self) -> dict[Any, RepeatedEvents]:
        """The events of actions, those of other steps of the same stages among them.

        On one device an action has no collectives, and is the same on every mesh.  With `parallelism.transforms.Overlap` the
        last one of a stage sums gradients over the replicas of its mesh.
        """
        program = self.program
        if program.overlap is not None:
            return {}
        return shared("actions", dict, program.stages, by=program.mesh_inside and self.mesh, most=2 * MOST)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], Ints]:
        """The first rank of each class of devices that have the same events, and the class of each rank."""
        if self.program.own is not None:
            return tuple(range(self.mesh.size)), np.arange(self.mesh.size)
        first: dict[int, int] = {}
        for position in range(self.program.pipeline.ranks):
            first |= self.classes_at(position)
        of = [first[rank] for rank in range(self.mesh.size)]
        return tuple(dict.fromkeys(of)), np.unique(of, return_inverse=True)[1]

    def classes_at(self, position: int) -> dict[int, int]:
        """For each rank at a position of the pipeline, which has no mesh of its own, the first that has the same events."""
        inside = self._classes_inside(position)
        updates, first, found = self.program.updates, dict[Any, int](), dict[int, int]()
        for rank, (own, replica) in enumerate(self.places):
            if own != position:
                continue
            key = (
                self._dealt[replica],
                inside[self.program.place(self.mesh, rank)] if inside else 0,
                updates and updates.class_in_time(rank, position),
                self._class_at_beginning(rank, position),
            )
            found[rank] = first.setdefault(key, rank)
        return found

    @cached_property
    def _dealt(self) -> list[int]:
        """For each replica, a number that is equal where the parts of the batch are alike."""
        parts: dict[Any, int] = {}
        return [parts.setdefault(each, len(parts)) for each in self._alike]

    def _class_at_beginning(self, rank: int, position: int) -> int:
        """The number of the ranks that compute the same before the first action."""
        beginning = self._beginning(position)
        if beginning is None:
            return 0
        return beginning.localized.class_in_time(self.program.around(self.mesh).place(rank))

    def prepare(self) -> None:
        """Localizes the functions of the stages, those that differ in names alone once.

        If this is not called, the first simulation does it.
        """
        first, _ = self.classes
        for rank in first:
            position, replica = self.places[rank]
            kinds = {work.kind for work in self.program.pipeline.schedule.works[position]} - set(MESSAGES)
            for stage in self.program.stages_on(position):
                programs = self.programs(stage, rank).first
                for part in dict.fromkeys(map(programs.alike, self.parts[replica])):
                    for kind in (*kinds, *(("R",) if programs.functions.recompute else ())):
                        _ = programs.program(kind, part).steps

    def templates(self, price: PriceEvents | None = None) -> Templates:
        """The events of each class; with a ``price``, an action of a stage is one piece of compute where it can be."""
        first, class_of = self.classes
        return Templates(
            self.mesh,
            [
                self.events(rank, price and partial(price, np.flatnonzero(class_of == number)))
                for number, rank in enumerate(first)
            ],
            class_of,
        )

    def events(self, rank: int, price: Callable[[DeviceEvents], float | None] | None) -> DeviceEvents:
        """The events of a rank; with a ``price``, an action of a stage is one piece of compute where it can be."""
        return self.run(rank, price).events

    def run(self, rank: int, price: Callable[[DeviceEvents], float | None] | None) -> TypedDevice:
        """The device of a rank, which has run the step: see `events`."""
        device, position = TypedDevice(self.mesh, rank, self._messages(rank)), self.places[rank][0]
        pipeline = self.program.pipeline
        axis, _ = self.program.axes(self.mesh)

        def run_stages(_: Device, stages: Mapping[int, RepeatingStage]) -> None:
            run_repeated(device, pipeline, axis, stages, pipeline.schedule.works[position])

        # With meshes of its own, an action has groups of one device alone, and several messages.
        apart = self.program.own is not None
        self.program.run(
            device.device,
            self._share(rank),
            partial(RepeatingStage, price=None if apart else price, known={} if apart else self.actions),
            None if apart or self._has_messages(position) else run_stages,
        )
        return device

    def _has_messages(self, position: int) -> bool:
        """Whether an action of a stage has messages of its own, which cannot be repeated with other numbers."""
        return any(
            self.program.stages.functions[number].form in self._with_messages
            for number in self.program.stages_on(position)
        )

    @cached_property
    def _with_messages(self) -> frozenset[Form]:
        """The forms of stages that have sends and recvs among their ops."""
        first = {stage.form: stage for stage in reversed(self.program.stages.functions)}
        return frozenset(form for form, stage in first.items() if _has_messages(stage.functions))

    def _share(self, rank: int) -> Share:
        """The inputs of a rank, as types."""
        position, replica = self.places[rank]
        parts, data, weights = self.parts[replica], dict[str, Any](), dict[str, Any]()
        for stage in self.program.stages_on(position):
            programs = self.programs(stage, rank)
            functions = programs.functions
            alike = programs.all_alike(parts)
            arrays = {part: list(map(TypedArray.of, programs.data(part))) for part in dict.fromkeys(alike)}
            data |= {
                name: tuple([arrays[part][place] for part in alike])
                for place, name in enumerate(functions.data)
            }
            types_of = zip(functions.weights, programs.weight_types, strict=True)
            weights |= {
                name: TypedArray.of(type) for name, type in types_of if name not in self.program.stages.known
            }
        updates = self.program.updates
        types = {} if updates is None else updates.state_types(rank, position)
        state: dict[str, Any] = {name: TypedArray.of(type) for name, type in types.items()}
        beginning = self._beginning(position)
        whole = beginning.types(self.program.around(self.mesh).place(rank)) if beginning else {}
        first: dict[str, Any] = {name: TypedArray.of(type) for name, type in whole.items()}
        return Share(self.numbers, self.rows, parts, data, weights, state, first)

    def _beginning(self, position: int) -> Beginning | None:
        return self.program.beginning(self.mesh, position, self.rows, self.numbers)

    def _messages(self, rank: int) -> Callable[[int], TypedArray]:
        """A function from a tag to an array of the type of the message that the rank receives with this tag."""
        position, replica = self.places[rank]
        pipeline, parts = self.program.pipeline, self.parts[replica]
        programs = {stage: self.programs(stage, rank) for stage in self.program.stages_on(position)}
        cache: dict[Any, TypedArray] = {}

        def incoming(tag: int) -> TypedArray:
            stage, kind, microbatch = message_user(pipeline, tag)
            part = programs[stage].alike(parts[microbatch])
            key = stage, kind, part
            if key not in cache:
                types = programs[stage].message(kind, part, last=stage == pipeline.stages - 1)
                cache[key] = packed([TypedArray.of(type) for type in types])  # type: ignore[assignment, misc]
            return cache[key]

        return incoming

    def programs(self, stage: int, rank: int) -> StagePrograms:
        """The programs of a stage on a rank."""
        return self.program.programs(stage, self.numbers, self.rows, self.mesh, rank)

    @cached_property
    def _alike(self) -> list[tuple[Part, ...]]:
        """The parts of each replica, all from row 0 unless the work of a program depends on its first row."""
        first_row = f"{self.program.stages.batch}_first"
        if any(first_row in stage.symbols_of_work for stage in self.program.stages.functions):
            return list(map(tuple, self.parts))
        return [tuple((0, rows) for _, rows in parts) for parts in self.parts]

    def _even_inside(self, position: int) -> bool:
        """Whether all devices inside the stages of a position have programs of the same shapes."""
        return self.program.mesh_inside is None or all(
            self._is_even(self.programs(stage, 0).first) for stage in self.program.stages_on(position)
        )

    def _classes_inside(self, position: int) -> list[tuple[int, ...]]:
        """For each device inside the stages of a position, what tells those apart that have other shapes in a program.

        Empty if no two devices differ.
        """
        inside = self.program.mesh_inside
        if inside is None or self._even_inside(position):
            return []
        found: list[tuple[int, ...]] = [()] * inside.size
        for stage in self.program.stages_on(position):
            programs = self.programs(stage, 0).first
            kinds = ("F", "B", *(("R",) if programs.functions.recompute else ()))
            for part in dict.fromkeys(map(programs.alike, chain.from_iterable(self._alike))):
                for kind in kinds:
                    localized = localize(programs.function(kind, part), inside)
                    found = [(*before, localized.class_in_time(place)) for place, before in enumerate(found)]
        return found

    def _is_even(self, programs: StagePrograms) -> bool:
        if programs not in self._even:
            inside = self.program.mesh_inside
            assert inside is not None
            values = {
                (id(value.type), id(value.layout)): value
                for function in programs.functions.functions
                if function is not None
                for value in function.values
            }
            tensors = {(value.type, value.layout) for value in values.values() if value.layout is not None}
            numbers = [programs.numbers(part) for part in set(chain.from_iterable(self._alike))]
            self._even[programs] = all(
                _divides(type.specialize(given), layout, inside)
                for type, layout in tensors
                for given in numbers
            )
        return self._even[programs]


def _divides(type: TensorType, layout: TensorSharding, mesh: Mesh) -> bool:
    for extent, dim in zip(type.shape, layout.dims, strict=True):
        parts = prod(mesh.shape[axis] for axis in dim.axes)
        if int(extent) % parts != 0:
            return False
    return True


def _has_messages(functions: Iterable[Function | None]) -> bool:
    """Whether some of the functions have sends or recvs among their ops."""
    ops = (op for function in functions if function is not None for op in function.ops)
    return any(op.kind in ("send", "recv") for op in ops)


def _with_numbers(function: Function, batch: int | None, numbers: Mapping[str, int] | None) -> Function:
    """A function with numbers for its symbols.  ``batch`` is that of its only symbol, or of the usual one for rows."""
    rows = min(function.symbols) if len(function.symbols) == 1 else Pipeline.batch
    given = _numbers(rows, batch, numbers)
    if missing := function.symbols - given.keys():
        raise without_number(function.name, missing)
    return with_numbers(function, given)


def _numbers(rows: str, batch: int | None, numbers: Mapping[str, int] | None) -> dict[str, int]:
    """The numbers of all symbols, where ``rows`` is the one for the rows of the batch."""
    given = dict(numbers or {})
    if batch is not None and given.setdefault(rows, batch) != batch:
        raise ValueError(
            f"{rows} is given twice, as batch={batch} and as numbers={{{rows!r}: {given[rows]}}}"
        )
    return given


Simulable = Executable | PipelinedProgram | PipelinedStep | Function | Step | SimulatedOperation


def _not_simulated(operation: Any) -> TypeError:
    """The error for what is no program, with the way there."""
    hint = ""
    if callable(getattr(operation, "function", None)):  # a model by its figures
        hint = "; its loss is a Function, as function(batch=8)"
    elif callable(operation):
        hint = "; parallelism.recorder.record counts what a kernel does, and .trace.on(hardware) prices it"
    return TypeError(
        "simulate takes an Executable(function, mesh), a PipelinedProgram, a Function or a Step, got "
        f"{type(operation).__name__}{hint}"
    )


def simulated_operation(
    operation: Any,
    mesh: Mesh | None,
    batch: int | None,
    numbers: Mapping[str, int] | None,
    *,
    software: Software,
) -> SimulatedOperation:
    """``operation`` in a form that makes events.

    A `Function` or a `Step` runs as this ``software`` runs it.

    ``TypeError`` for another type or without a mesh, ``ValueError`` for a wrong mesh, and for a symbol without a number.
    """
    if isinstance(operation, Function | Step | PipelinedProgram):
        if mesh is None:
            raise TypeError(
                f"a {type(operation).__name__} is simulated on a mesh: simulate(step, hardware, mesh=Mesh(...)), "
                "with batch=64 for a symbolic number of rows"
            )
        if isinstance(operation, Function) and operation.symbols:
            operation, batch, numbers = _with_numbers(operation, batch, numbers), None, None
        operation = operation_on(operation, mesh, **software._asdict())
    if isinstance(operation, PipelinedProgram):
        assert mesh is not None
        given = _numbers(operation.stages.batch, batch, numbers)
        rows = given.pop(operation.stages.batch, None)
        if rows is None:
            raise without_number(operation.stages.function.name, [operation.stages.batch])
        return PipelinedStep(operation, mesh, rows, **given)
    offers = hasattr(operation, "templates") and isinstance(getattr(operation, "mesh", None), Mesh)
    if not isinstance(operation, Executable) and not offers:
        raise _not_simulated(operation)
    if batch is not None or numbers:
        raise TypeError(
            f"batch= and numbers= are for programs with symbols; the sizes of the {type(operation).__name__} are fixed"
        )
    if mesh not in (None, operation.mesh):
        raise ValueError(f"the {type(operation).__name__} is for {operation.mesh!r}, not for {mesh!r}")
    return SimulatedExecutable(operation) if isinstance(operation, Executable) else operation
