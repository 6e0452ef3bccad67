"""`PipelinedStep`: a step of a pipelined program on a mesh, with the events of its devices.

`simulate(program, hardware, mesh=mesh, batch=rows)` makes one.  The program itself runs on one `TypedDevice` for each
class of devices that have the same events: either op by op, or with each action of a stage as one compute event, a
*piece* (`parallelism.simulation.repeated_stages`).
"""

from collections.abc import Callable
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.execution import PipelinedProgram, Share, StagePrograms, TypedArray
from parallelism.ir import TensorType
from parallelism.layouts.stages import Part
from parallelism.layouts.stages.messages import packed
from parallelism.mesh import Mesh
from parallelism.pipelining import MESSAGES, message_user
from parallelism.sharding import TensorSharding
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.repeated_stages import RepeatingStage
from parallelism.simulation.typed_device import TypedDevice

Ints = npt.NDArray[np.int64]
PriceEvents = Callable[[DeviceEvents, Ints], float | None]
"""Seconds of some events on each of the ranks that have them; None if the events cannot be one piece."""


class PipelinedStep:
    """One step of ``program`` on ``mesh``, for a batch of ``rows``; ``numbers`` are the values of the other symbols.

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
            raise ValueError(f"{program.name} has symbols without a number: {', '.join(sorted(missing))}")
        self.places = program.places(mesh)
        """For each rank, its position in the pipeline and the number of its replica."""
        self._parts = program.parts(rows, 1 + max(replica for _, replica in self.places))

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], Ints]:
        """The first rank of each class of devices that have the same events, and the class of each rank."""
        uneven = not self._even_inside()
        known: dict[Any, int] = {}
        first: list[int] = []
        class_of = np.zeros(self.mesh.size, np.int64)
        counted = self._counts_places()
        sizes = [tuple(part if counted else part[1] for part in parts) for parts in self._parts]
        for rank, (position, replica) in enumerate(self.places):
            key = position, sizes[replica], self.program.place(self.mesh, rank) if uneven else 0
            if key not in known:
                known[key] = len(first)
                first.append(rank)
            class_of[rank] = known[key]
        return tuple(first), class_of

    def prepare(self) -> None:
        """Localizes the functions of all stages.  If this is not called, the first simulation does it."""
        first, _ = self.classes
        for rank in first:
            position, replica = self.places[rank]
            kinds = {work.kind for work in self.program.pipeline.schedule.works[position]} - set(MESSAGES)
            for stage in self.program.stages_on(position):
                programs = self._programs(stage, rank)
                for part in dict.fromkeys(map(programs.alike, self._parts[replica])):
                    for kind in (*kinds, *(("R",) if programs.functions.recompute else ())):
                        _ = programs.program(kind, part).steps

    def templates(self, price: PriceEvents | None = None) -> Templates:
        """The events of each class; with a ``price``, an action of a stage is one piece of compute where it can be."""
        first, class_of = self.classes
        return Templates(self.mesh, [
            self._events(rank, price and partial(_on, price, np.flatnonzero(class_of == number)))
            for number, rank in enumerate(first)
        ], class_of)

    def _events(self, rank: int, price: Callable[[DeviceEvents], float | None] | None) -> DeviceEvents:
        device = TypedDevice(self.mesh, rank, self._messages(rank))
        self.program.run(device.device, self._share(rank), partial(RepeatingStage, price=price))
        return device.events

    def _share(self, rank: int) -> Share:
        """The inputs of a rank, as types."""
        position, replica = self.places[rank]
        parts, data, weights = self._parts[replica], dict[str, Any](), dict[str, Any]()
        for stage in self.program.stages_on(position):
            programs = self._programs(stage, rank)
            functions = programs.functions
            by_part = [programs.types(programs.of(part).forward.inputs, functions.data) for part in parts]
            for name, *types in zip(functions.data, *by_part, strict=True):
                data[name] = tuple(map(TypedArray.of, types))
            types_of_weights = programs.types(programs.of(parts[0]).forward.inputs, functions.weights)
            weights.update(zip(functions.weights, map(TypedArray.of, types_of_weights), strict=True))
        return Share(self.numbers, self.rows, parts, data, weights)

    def _messages(self, rank: int) -> Callable[[int], TypedArray]:
        """A function from a tag to an array of the type of the message that the rank receives with this tag."""
        position, replica = self.places[rank]
        pipeline, parts = self.program.pipeline, self._parts[replica]
        programs = {stage: self._programs(stage, rank) for stage in self.program.stages_on(position)}
        cache: dict[Any, TypedArray] = {}

        def incoming(tag: int) -> TypedArray:
            stage, kind, microbatch = message_user(pipeline, tag)
            part = programs[stage].alike(parts[microbatch])
            key = stage, kind, part
            if key not in cache:
                types = programs[stage].message(kind, part, last=stage == pipeline.stages - 1)
                message: Any = packed([TypedArray.of(type) for type in types])  # type: ignore[misc]
                cache[key] = message
            return cache[key]

        return incoming

    def _programs(self, stage: int, rank: int) -> StagePrograms:
        return self.program.programs(stage, self.numbers, self.rows, self.mesh, rank)

    def _alike(self, replica: int) -> list[Part]:
        return list(self._parts[replica]) if self._counts_places() else [(0, rows) for _, rows in self._parts[replica]]

    def _counts_places(self) -> bool:
        name = f"{self.program.stages.batch}_first"
        return any(name in stage.symbols for stage in self.program.stages.functions)

    def _even_inside(self) -> bool:
        """Whether all devices inside a stage have programs of the same shapes."""
        inside, stages = self.program.mesh_inside, range(self.program.pipeline.stages)
        if inside is None:
            return True
        parts = {part for replica in range(len(self._parts)) for part in self._alike(replica)}
        for stage in stages:
            programs = self.program.programs(stage, self.numbers, self.rows, self.mesh, 0)
            for part in parts:
                for kind in "FBIW":
                    for value in programs.function(kind, part).values:
                        if value.layout is not None and not _divides(value.type, value.layout, inside):
                            return False
        return True


def _on(price: PriceEvents, ranks: Ints, events: DeviceEvents) -> float | None:
    return price(events, ranks)


def _divides(type: TensorType, layout: TensorSharding, mesh: Mesh) -> bool:
    parts = (prod(mesh.shape[axis] for axis in dim.axes) for dim in layout.dims)
    return all(int(extent) % part == 0 for extent, part in zip(type.shape, parts, strict=True))
