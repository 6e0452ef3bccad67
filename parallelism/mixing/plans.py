"""`MixedPlan`: a training step over two parts; and the best of them, beside what the parts do alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from textwrap import wrap
from typing import Any

from parallelism.display import WIDTH, in_columns
from parallelism.display.quantities import decimal_bytes, plural, seconds
from parallelism.hardware import MixedHardware
from parallelism.ir import Function
from parallelism.mesh import Mesh
from parallelism.mixing.arrangements import Arrangement
from parallelism.planning import Plan
from parallelism.planning.plan import Task
from parallelism.planning.settings import transforms_of
from parallelism.simulation import simulate
from parallelism.trace import Trace
from parallelism.training import Figures, TrainingRun, figures
from parallelism.transforms import Step, Strategy


@dataclass(frozen=True)
class MixedPlan:
    """A training step over two parts: a pipeline from one to the other, or replicas in both."""

    task: Task = field(repr=False)
    """What is planned; its hardware has the part with the first ranks first."""
    settings: Mapping[str, Any]
    """By the names of `parallelism.planning.SETTINGS`."""
    arrangement: Arrangement
    """How the plan lies on the parts."""
    bound_seconds: float
    """A lower bound of the seconds of a step, as in `parallelism.planning.Plan`."""
    peak_bytes: tuple[int, int]
    """The memory of the fullest device of each part, in the order of the hardware."""
    simulated_seconds: float | None = None
    """The seconds by the full simulation; None: it was not made."""

    @property
    def hardware(self) -> MixedHardware:
        """The parts, that with the first ranks first."""
        assert isinstance(self.task.hardware, MixedHardware)
        return self.task.hardware

    @property
    def seconds(self) -> float:
        """The seconds of a step: simulated if there is a simulation, else estimated."""
        return self.bound_seconds if self.simulated_seconds is None else self.simulated_seconds

    @property
    def mesh(self) -> Mesh:
        """The mesh of all devices."""
        return self.task.mesh(self.settings)

    @cached_property
    def strategy(self) -> Strategy:
        """The transforms that make the distributed step of the step on one device."""
        pipeline = self.arrangement.pipeline(self.task, self.settings)
        return Strategy(*transforms_of(self.task.model, self.settings), pipeline)

    @cached_property
    def run(self) -> TrainingRun:
        """The training run, before it is placed on the hardware."""
        return TrainingRun(
            self.task.model.model, self.task.batch, self.strategy, self.mesh, self.task.model.optimizer
        )

    @property
    def microbatches(self) -> int:
        """The microbatches of each replica."""
        return self.run.microbatches

    @property
    def step(self) -> Step | Function:
        """The distributed step: ``cluster.run`` runs it, placed by `parallelism.execution.operation_on`."""
        return self.run.step

    @property
    def split(self) -> str:
        """The settings in a few words, and what lies on each part."""
        return f"{self.settings_text}: {self.parts_text}"

    @property
    def settings_text(self) -> str:
        """The settings in a few words."""
        return self.arrangement.settings_text(self.settings)

    @property
    def parts_text(self) -> str:
        """What lies on each part."""
        return self.arrangement.text(self.hardware)

    @cached_property
    def figures(self) -> Figures:
        """The time and the memory of a step by the full simulation."""
        operation = self.arrangement.operation(self.task, self.settings)
        return figures(self.run, self.hardware, operation=operation)

    def simulated(self) -> MixedPlan:
        """This plan with the seconds of its full simulation; `Unpriceable` if it is not put together from pieces."""
        return replace(self, simulated_seconds=self.figures.seconds)

    def simulate(self, **options: Any) -> Trace:
        """The trace of the program of a step; ``options`` are those of `parallelism.simulation.simulate`.

        ``ValueError`` where the software of the parts runs a program in two ways.
        """
        return simulate(self.run.step, self.hardware, **{**self.run.placed, **options})

    def json(self) -> dict[str, Any]:
        """The figures of the plan as plain values."""
        found = self.figures.json() if self.simulated_seconds is not None else {"seconds": self.seconds}
        each = zip(self.hardware.labels, self.arrangement.json(self.hardware), self.peak_bytes, strict=True)
        return {
            **found,
            "simulated": self.simulated_seconds is not None,
            "split": self.split,
            "strategy": str(self.strategy),
            "mesh": dict(self.mesh.shape),
            "peak_bytes": max(self.peak_bytes),
            "parts_of_hardware": [
                {"hardware": label, **own, "peak_bytes": peak} for label, own, peak in each
            ],
        }

    def __str__(self) -> str:
        return f"{self.strategy.text_on(self.mesh)}"


@dataclass(frozen=True)
class Alone:
    """What a part does without the other: its best plan, or why there is none."""

    name: str
    devices: int
    plan: Plan | None
    reason: str = ""

    @property
    def text(self) -> str:
        """In a line."""
        if self.plan is None:
            return f"{self.name} alone: {self.reason}"
        bound = "" if self.plan.is_simulated else ">= "
        memory = decimal_bytes(self.plan.peak_bytes)
        return f"{self.name} alone: {bound}{seconds(self.plan.seconds)}, {memory}: {self.plan.split}"

    def json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "hardware": self.name,
            "devices": self.devices,
            "seconds": None if self.plan is None else self.plan.seconds,
            "plan": None if self.plan is None else self.plan.split,
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class MixedPlans:
    """The plans over two parts that were kept, the best first, and the best plan of each part alone."""

    found: tuple[MixedPlan, ...]
    alone: tuple[Alone, ...]
    timed: int
    """How many plans were timed: settings, and ways to deal blocks to stages, or rows to replicas."""
    simulated: int
    gap: float
    """By which part of its time the first plan may be slower than the best over both at most; 0: it is the best."""
    refused: Mapping[str, int]
    """Combinations of settings that cannot be, by reason."""

    @property
    def best(self) -> MixedPlan | Plan | None:
        """The fastest of all: over both parts, or in one alone; None if nothing fits."""
        plans: list[MixedPlan | Plan] = [*self.found[:1]]
        plans += [each.plan for each in self.alone if each.plan is not None]
        return min(plans, key=lambda plan: plan.seconds, default=None)

    @property
    def fastest_alone(self) -> Alone | None:
        """The faster part."""
        with_plans = [each for each in self.alone if each.plan is not None]
        return min(with_plans, key=lambda each: each.plan.seconds if each.plan else 0.0, default=None)

    @property
    def verdict(self) -> str:
        """Whether both together are faster than the faster part, in a sentence."""
        alone = self.fastest_alone
        if not self.found:
            one = f"; {alone.name} alone: {seconds(alone.plan.seconds)}" if alone and alone.plan else ""
            return f"no plan fits over both parts{one}"
        both = self.found[0].seconds
        if alone is None or alone.plan is None:
            return f"both together: {seconds(both)}; neither part has a plan alone"
        ratio = both / alone.plan.seconds
        told = f"{1 - ratio:.1%} less" if ratio < 1 else f"{ratio - 1:.1%} more"
        return f"{alone.name} alone: {seconds(alone.plan.seconds)}; both: {seconds(both)}, {told}"

    def json(self, top: int) -> dict[str, Any]:
        """The first plans, and the parts alone, as plain values."""
        return {
            "plans": [plan.json() for plan in self.found[:top]],
            "alone": [part.json() for part in self.alone],
            "verdict": self.verdict,
            "timed": self.timed,
            "simulated": self.simulated,
            "gap": self.gap,
            "refused": dict(self.refused),
        }

    def text(self, top: int = 5) -> str:
        """Two lines for each of the first plans over both parts, then one for each part alone."""
        rows = [("", "seconds", "memory of the two parts", "plan")]
        for place, plan in enumerate(self.found[:top], 1):
            bound = ">= " if plan.simulated_seconds is None else ""
            memory = " and ".join(map(decimal_bytes, plan.peak_bytes))
            rows.append((str(place), f"{bound}{seconds(plan.seconds)}", memory, plan.settings_text))
        lines = []
        for row, line in zip(rows, in_columns([row[:3] for row in rows], 0, "  "), strict=True):
            lines.append(f"{line}  {row[3]}")
        for place, plan in reversed([*enumerate(self.found[:top], 1)]):
            indent = " " * 5
            lines[place + 1 : place + 1] = wrap(
                plan.parts_text, WIDTH, initial_indent=indent, subsequent_indent=indent
            )
        alone = [line for each in self.alone for line in wrap(each.text, WIDTH, subsequent_indent="     ")]
        return "\n".join([*lines, "", *alone, "", *wrap(self.counted, WIDTH)])

    @property
    def counted(self) -> str:
        """How many plans were timed and simulated, and what is proved of the first, in words."""
        told = f"{plural(self.timed, 'plan')} over both parts timed, {self.simulated} simulated"
        if not self.found:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self.refused.items())
            return f"{told}; no plan over both parts: {reasons}."
        if self.gap:
            return f"{told}; the first is within {self.gap:.1%} of the best over both parts."
        return f"{told}; the first is the best over both parts."

    def __str__(self) -> str:
        return f"{self.text()}\n\n{self.verdict}"
