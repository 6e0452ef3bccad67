"""`SlicedPlan`: a slicing of a training step, whose stages lie on meshes of their own; and the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

from parallelism.display import in_columns
from parallelism.display.quantities import decimal_bytes, plural, seconds
from parallelism.hardware import Hardware
from parallelism.ir import Function
from parallelism.mesh import Mesh
from parallelism.simulation import simulate
from parallelism.slicing.slices import Slicing
from parallelism.slicing.submeshes import placed
from parallelism.trace import Trace
from parallelism.transforms import Pipeline, Step, Strategy


@dataclass(frozen=True)
class SlicingTask:
    """What is sliced: a training step in blocks, on batches of so many rows, over a hardware."""

    step: Function = field(repr=False)
    """On one device, with a symbol for the rows."""
    strategy: Strategy
    """What splits the step inside a stage."""
    begin: tuple[str, ...]
    """The regions at which the blocks after the first begin."""
    symbol: str
    """The symbol that stands for the rows."""
    batch: int
    microbatches: int
    hardware: Hardware
    devices: int
    priced_dtype: str | None = None

    @property
    def rows(self) -> int:
        """The rows of a microbatch."""
        return self.batch // self.microbatches


@dataclass(frozen=True)
class SlicedPlan:
    """A training step cut into stages of consecutive blocks, each on a mesh of its own."""

    task: SlicingTask = field(repr=False)
    slicing: Slicing
    """The slices, and the time that they were chosen by."""
    meshes: tuple[Mesh, ...]
    """The mesh of each stage."""
    timeline_seconds: float
    """The seconds of a step by the timeline of the schedule, with the messages between stages and the update."""
    simulated_seconds: float | None = None
    """The seconds of a step by its simulation; None: it was not simulated."""
    peak_bytes: int | None = None
    """The most bytes that a device holds, by this simulation."""

    @property
    def seconds(self) -> float:
        """The seconds of a step: by its simulation if there is one, else by the timeline."""
        return self.timeline_seconds if self.simulated_seconds is None else self.simulated_seconds

    @property
    def strategy(self) -> Strategy:
        """The transforms that make the distributed step of the step on one device."""
        begin = tuple(self.task.begin[each.first - 1] for each in self.slicing.slices[1:])
        return Strategy(
            self.task.strategy,
            Pipeline(
                microbatches=self.task.microbatches, begin=begin, batch=self.task.symbol, meshes=self.meshes
            ),
        )

    @cached_property
    def step(self) -> Step:
        """The distributed step: ``cluster.run(TrainedPipeline(step, mesh), inputs)`` runs it."""
        step = self.strategy(self.task.step)
        assert isinstance(step, Step)
        return step

    @property
    def mesh(self) -> Mesh:
        """The mesh of all devices, on which the step runs."""
        return Mesh(devices=sum(mesh.size for mesh in self.meshes))

    @property
    def hardware(self) -> Hardware:
        """The hardware, with the stages laid on its nodes."""
        return placed(self.task.hardware, [mesh.size for mesh in self.meshes])

    def simulate(self, **options: Any) -> Trace:
        """The trace of a step; ``options`` are those of `parallelism.simulation.simulate`."""
        given: dict[str, Any] = {
            "mesh": self.mesh,
            "batch": self.task.batch,
            "priced_dtype": self.task.priced_dtype,
        }
        return simulate(self.step, self.hardware, **given | options)

    def simulated(self) -> SlicedPlan:
        """This plan with the time and the memory of its simulation."""
        trace = self.simulate(fold=False)
        return replace(self, simulated_seconds=trace.makespan_seconds, peak_bytes=max(trace.peaks().values()))

    def __str__(self) -> str:
        return self.strategy.text_on(self.mesh)


MOST_SHOWN = 10
"""The most plans that the text shows."""


@dataclass(frozen=True)
class SlicedPlans(Sequence[SlicedPlan]):
    """The slicings of a training step that were found, the best first."""

    task: SlicingTask
    found: tuple[SlicedPlan, ...]
    """First those that were simulated, and fit; then others, which were timed alone."""
    memory_bytes: float
    """The bytes that a device may hold."""
    refused: Mapping[Mesh, str] = field(default_factory=dict)
    """The meshes that no stage can have, with the reason."""

    @property
    def best(self) -> SlicedPlan:
        """The fastest of those that were simulated, if any were."""
        return self.found[0]

    def __len__(self) -> int:
        return len(self.found)

    @overload
    def __getitem__(self, place: int) -> SlicedPlan: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[SlicedPlan, ...]: ...
    def __getitem__(self, place: int | slice) -> SlicedPlan | tuple[SlicedPlan, ...]:
        return self.found[place]

    def __str__(self) -> str:
        task = self.task
        rows = [["step", "chosen by", "memory"]]
        shown = self.found[:MOST_SHOWN]
        for each in shown:
            memory = "-" if each.peak_bytes is None else decimal_bytes(each.peak_bytes)
            rows.append([seconds(each.seconds), seconds(each.slicing.seconds), memory])
        stages = ["stages", *(" | ".join(map(_stage, each.slicing.slices, each.meshes)) for each in shown)]
        more = [f"and {len(self) - len(shown)} more"] * (len(self) > len(shown))
        return "\n".join(
            [
                f"@{task.step.name} on {plural(task.devices, 'device')} of {task.hardware.name}, "
                f"{plural(task.batch, 'row')} in {task.microbatches} microbatches",
                "",
                *map("   ".join, zip(in_columns(rows, 0, "   "), stages, strict=True)),
                *more,
            ]
        )


def _stage(each: Any, mesh: Mesh) -> str:
    return f"{each.blocks}: {'.'.join(f'{axis}={n}' for axis, n in mesh.shape.items() if n > 1) or 'one'}"
