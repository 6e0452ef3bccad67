"""A step of a pipelined program on a mesh, to be simulated: `simulate(PipelinedStep(program, mesh, rows), hardware)`.

Either op by op, or with the ops of a stage priced once for each kind of action and size of microbatch, however many
microbatches there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.execution import PipelinedProgram, StagePrograms
from parallelism.ir import TensorType
from parallelism.layouts.stages import Part
from parallelism.layouts.stages.batches import dealt
from parallelism.mesh import Mesh
from parallelism.pipelining import MESSAGES
from parallelism.sharding import TensorSharding
from parallelism.simulation.device_events import Rows
from parallelism.simulation.event_classes import Templates
from parallelism.simulation.pipelined_events import PipelinedEvents

Ints = npt.NDArray[np.int64]
Price = Callable[[Rows, Ints], float | None]
"""Seconds of some events on the devices that have them; None where these cannot be one piece."""


class PipelinedStep:
    """One step of ``program`` on ``mesh``, for a batch of so many ``rows``; ``numbers`` stand for the other symbols.

    ``simulate(PipelinedStep(...), hardware)`` is the trace that ``cluster.run(program, inputs)`` would leave.  With
    ``fold=True`` equal devices are one, and so is all that a stage does for a microbatch: one piece of compute, with
    the flops and bytes of its ops, whose collectives are part of what it takes and no events of their own.  The most
    that is held at a time is the same, and so are the categories at that moment.

    ``ValueError`` for symbols that have no number, and as `PipelinedProgram`.
    """

    def __init__(self, program: PipelinedProgram, mesh: Mesh, rows: int, **numbers: int) -> None:
        self.program, self.mesh, self.rows, self.numbers = program, mesh, rows, numbers
        batch = program.stages.batch
        missing = program.stages.function.symbols - {batch, f"{batch}_whole", f"{batch}_first", *numbers}
        if missing:
            raise ValueError(f"{program.name} has symbols without a number: {', '.join(sorted(missing))}")
        self.places = program.places(mesh)
        """By rank, its position in the pipeline and the number of its replica."""
        microbatches, replicas = program.pipeline.microbatches, 1 + max(replica for _, replica in self.places)
        self._parts = [dealt(first, count, microbatches) for first, count in dealt(0, rows, replicas)]
        if not all(count for parts in self._parts for _, count in parts):
            raise ValueError(f"a batch of {rows} rows cannot be dealt to {replicas} x {microbatches} microbatches: "
                             "some would have none")

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], Ints]:
        """The first rank of each class of devices that record the same, and the class of each rank."""
        uneven = not self._even_inside()
        known: dict[Any, int] = {}
        first: list[int] = []
        class_of = np.zeros(self.mesh.size, np.int64)
        counted = self._counts_places()
        sizes = [tuple(part if counted else part[1] for part in parts) for parts in self._parts]
        for rank, (position, replica) in enumerate(self.places):
            key = position, sizes[replica], self._place(rank) if uneven else 0
            if key not in known:
                known[key] = len(first)
                first.append(rank)
            class_of[rank] = known[key]
        return tuple(first), class_of

    @cached_property
    def stages(self) -> Mapping[tuple[int, int], StagePrograms]:
        """What the first rank of each class runs, by class and stage."""
        first, _ = self.classes
        found: dict[tuple[int, int], StagePrograms] = {}
        known: dict[tuple[int, int], StagePrograms] = {}
        for number, rank in enumerate(first):
            inside = self._place(rank)
            for stage in range(self.program.pipeline.stages):
                if (stage, inside) not in known:
                    known[stage, inside] = self.program.programs(stage, self.numbers, self.rows, self.mesh, rank)
                found[number, stage] = known[stage, inside]
        return found

    def prepare(self) -> None:
        """Localizes the functions of all stages, which is done once, before the first simulation if not here."""
        first, _ = self.classes
        for number, rank in enumerate(first):
            position, replica = self.places[rank]
            kinds = {work.kind for work in self.program.pipeline.schedule.works[position]} - set(MESSAGES)
            for stage in self.program.stages_on(position):
                programs = self.stages[number, stage]
                for part in dict.fromkeys(self._alike(replica)):
                    for kind in (*kinds, *(("R",) if programs.functions.recompute else ())):
                        _ = programs.program(kind, part).steps

    def templates(self, price: Price | None = None) -> Templates:
        """What its devices would record, each class of them once."""
        first, class_of = self.classes
        rows = []
        for number, rank in enumerate(first):
            ranks = np.flatnonzero(class_of == number)
            stages = [self.stages[number, stage] for stage in range(self.program.pipeline.stages)]
            parts = self._parts[self.places[rank][1]]
            own = None if price is None else partial(_on, price, ranks)
            rows.append(PipelinedEvents(self.program, self.mesh, rank, parts, stages, own).rows)
        return Templates(self.mesh, rows, class_of)

    def _alike(self, replica: int) -> list[Part]:
        return list(self._parts[replica]) if self._counts_places() else [(0, rows) for _, rows in self._parts[replica]]

    def _place(self, rank: int) -> int:
        """The rank on the mesh inside its stage."""
        inside = self.program.mesh_inside
        if inside is None:
            return 0
        index = self.mesh.index(rank)
        return inside.rank(**{axis: index[axis] for axis in inside.axes})

    def _counts_places(self) -> bool:
        name = f"{self.program.stages.batch}_first"
        return any(name in stage.symbols for stage in self.program.stages.functions)

    def _even_inside(self) -> bool:
        """Whether all devices inside a stage have programs alike."""
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


def _on(price: Price, ranks: Ints, rows: Rows) -> float | None:
    return price(rows, ranks)


def _divides(type: TensorType, layout: TensorSharding, mesh: Mesh) -> bool:
    parts = (prod(mesh.shape[axis] for axis in dim.axes) for dim in layout.dims)
    return all(int(extent) % part == 0 for extent, part in zip(type.shape, parts, strict=True))
