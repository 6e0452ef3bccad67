"""`figures`: what a step of a training run takes on a hardware: seconds, use of the devices, parts, and memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum
from os import PathLike
from typing import Any

import numpy as np

from parallelism.hardware import Hardware, compared_in, sized_hardware, validation_json
from parallelism.models import TransformerSpec
from parallelism.rarely_collected import rarely_collected
from parallelism.simulation import CannotFold, StepParts, simulate, step_parts
from parallelism.simulation.many_microbatches import parts_of_many
from parallelism.simulation.operations import SimulatedOperation
from parallelism.trace import Trace
from parallelism.training.training_run import TrainingRun

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "other")
"""The categories of memory."""
_PRODUCTS = frozenset(
    {
        *(
            "matmul",
            "einsum",
            "scaled_einsum",
            "attention",
            "attention_gradient",
            "context_attention",
            "context_attention_gradient",
        ),
        *("attention_block", "attention_block_gradient", "linear_attention", "linear_attention_gradient"),
    }
)


@dataclass(frozen=True)
class Figures:
    """A step of ``run`` on ``hardware``, simulated."""

    run: TrainingRun
    hardware: Hardware
    step: StepParts

    @property
    def trace(self) -> Trace:
        """The step; one device stands for all equal ones."""
        return self.step.trace

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.trace.makespan_seconds

    @cached_property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of the step on the device that waits least (`parallelism.trace.StepSplit`).

        The parts add up to `seconds`.  Parts that take no time are left out.
        """
        found = self.step.step_split[self.step.slowest]._asdict()
        largest = max(found, key=found.__getitem__)
        found[largest] = self.seconds - fsum(
            value for name, value in found.items() if name != largest
        )  # of rounding
        return {name: value for name, value in found.items() if value}

    @property
    def bubble(self) -> float:
        """The share of the step in which the device of `parts` waits for others."""
        return self.parts.get("bubble", 0.0) / self.seconds

    @cached_property
    def links(self) -> dict[str, dict[str, Any]]:
        """By axis, of the collectives on the device of `parts`: what they cross, and how much in which time.

        ``level`` is the name of the widest links that a group crosses; ``bytes`` are those that the device receives;
        ``seconds`` are those of the collectives, be they exposed or not.
        """
        mesh, rank = self.run.mesh, self.step.slowest
        result: dict[str, dict[str, Any]] = {}
        for operation, total in self.step.by_operation[rank].items():
            axes = [axis for axis in operation.axes or () if mesh.shape[axis] > 1]
            if operation.kind == "collective" and axes and total.seconds:
                seen = result.setdefault(axes[0], {"seconds": 0.0, "bytes": 0})
                seen["seconds"] += total.seconds
                seen["bytes"] += total.bytes_received
                group = mesh.group(rank, tuple(axes))
                level = max(self.hardware.level(group[0], other) for other in group[1:])
                seen["level"] = self.hardware.links[level].name
        return result

    # -- use of the devices --------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int | None:
        """The tokens of a step; None for a model that is no Transformer."""
        model = self.run.model
        return self.run.batch * model.sequence if isinstance(model, TransformerSpec) else None

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens per second of all devices together; None for a model that is no Transformer."""
        return None if self.tokens is None else self.tokens / self.seconds

    @property
    def flops(self) -> float:
        """Floating-point operations of the products of the model, forward and backward, without what runs again.

        Those of all scores count, also where a mask hides them.  For a Transformer they are those of
        `TransformerSpec.flops`.
        """
        model = self.run.model
        if isinstance(model, TransformerSpec):
            return float(model.flops(self.run.batch * model.sequence))
        return self._executed(again=False) + self.run.hidden_flops

    @property
    def tflops_per_device(self) -> float:
        """10^12 `flops` a second and device."""
        return self.flops / self.seconds / self.run.mesh.size / 1e12

    @property
    def mfu(self) -> float:
        """`flops` a second as a share of the peak of all devices, in the dtype of the products."""
        return self.flops / self._peak

    @property
    def hfu(self) -> float:
        """As `mfu`, but of all products that the devices compute: with those that run again, without hidden scores.

        At long context it may be the smaller of the two, where attention is one operator and its mask hides many scores.
        """
        return self._executed(again=True) / self._peak

    @property
    def _peak(self) -> float:
        return self.seconds * self.run.mesh.size * self.hardware.peak(self.run.dtype)

    def _executed(self, *, again: bool) -> float:
        """Floating-point operations of the products on all devices."""
        return float(
            sum(
                self.step.devices[rank] * total.flops
                for rank, operations in self.step.by_operation.items()
                for operation, total in operations.items()
                if operation.name in _PRODUCTS and (again or operation.phase != "R")
            )
        )

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds at any time."""
        return max(sum(held.values()) for held in self.memory)

    @cached_property
    def memory(self) -> list[dict[str, int]]:
        """By position in the pipeline: what the fullest device holds when it holds most, by category.

        The categories (`CATEGORIES`) of a device add up to its peak.
        """
        fullest: dict[int, dict[str, int]] = {}
        pipeline = self.run.pipeline
        for rank, held in _held_at_peak(self.trace).items():
            position = pipeline.position(self.run.mesh, rank) if pipeline else 0
            if sum(held.values()) > sum(fullest.get(position, {"": -1}).values()):
                fullest[position] = held
        return [fullest[position] for position in sorted(fullest)]

    # -- all -----------------------------------------------------------------------------------------------------------

    def json(self) -> dict[str, Any]:
        """All figures by name, as JSON has them."""
        return {
            **{
                name: getattr(self, name)
                for name in (
                    "seconds",
                    "tokens_per_second",
                    "tflops_per_device",
                    "mfu",
                    "hfu",
                    "parts",
                    "bubble",
                    "peak_bytes",
                    "memory",
                )
            },
            "mesh": dict(self.run.mesh.shape),
            "strategy": str(self.run.strategy),
            "hardware": self.hardware.name,
            "stack": getattr(self.hardware, "stack", None),
            "validation": validation_json(
                compared_in(self.run.products, self.hardware.validation, experts=self.run.has_experts)
            ),
        }


@dataclass(frozen=True)
class FiguresWithoutTrace(Figures):
    """Figures whose trace is made where it is asked for: another process, or a step of few microbatches, has told them."""

    duration: float
    held: list[dict[str, int]]
    again: Callable[[], Trace] | None = None
    """What makes the trace; None on the way between processes."""

    @classmethod
    def of(cls, found: Figures) -> FiguresWithoutTrace:
        """These figures."""
        if isinstance(found, FiguresWithoutTrace):
            return replace(found, again=None)
        step = replace(found.step, trace=found.trace.filter(rank=()))
        return cls(found.run, found.hardware, step, found.seconds, found.memory)

    @cached_property
    def trace(self) -> Trace:
        """The trace of the step, as `Figures.trace`."""
        assert self.again is not None
        return self.again()

    @property
    def seconds(self) -> float:
        """The seconds of the step, as `Figures.seconds`."""
        return self.duration

    @property
    def memory(self) -> list[dict[str, int]]:
        """The memory of the devices, as `Figures.memory`."""
        return self.held


@rarely_collected()
def figures(
    run: TrainingRun,
    hardware: Hardware | str | PathLike[str],
    *,
    operation: SimulatedOperation | None = None,
    **options: Any,
) -> Figures:
    """The figures of a step, simulated with one representative of all equal devices.

    ``hardware`` is as `parallelism.hardware.sized_hardware` takes it; a preset gets as many nodes as the run needs.
    Where equal devices share links, every device is simulated.  ``operation`` has the events of the step on the
    hardware, where they are known without its program.  ``options`` are those of `parallelism.step_parts`, such
    as ``link_sharing=False``.  ``ValueError`` for a hardware with too few devices, or without a rate for the dtype of
    the run.
    """
    found = sized_hardware(hardware, run.mesh.size)
    found.peak(run.dtype)  # refuses before the work
    step: Any = run.step if operation is None else operation
    if operation is None:
        options |= run.placed
    with suppress(CannotFold):
        many = None if operation is None or options else parts_of_many(operation, found)
        if many is None:
            return Figures(run, found, step_parts(step, found, **options))
        fewer = FiguresWithoutTrace.of(Figures(run, found, many.parts))
        return replace(fewer, duration=many.seconds, again=lambda: step_parts(step, found).trace)
    return Figures(run, found, StepParts.of_all(simulate(step, found, **options)))


def _held_at_peak(trace: Trace) -> dict[int, dict[str, int]]:
    """For each rank, the bytes by category at the first moment at which it holds most."""
    columns = trace.columns
    columns = columns.take(columns.isin("kind", {"memory"}))
    names = columns.values("name")
    ranks = columns.numbers("rank")
    sizes = columns.numbers("nbytes")
    place = {name: number for number, name in enumerate(CATEGORIES)}
    number = np.array([place.get(name, place["other"]) for name in names], np.int64)
    found = {}
    for rank in trace.ranks:
        own = np.flatnonzero(ranks == rank)
        peak = 1 + int(np.argmax(np.cumsum(sizes[own]))) if len(own) else 0
        held = np.bincount(number[own[:peak]], sizes[own[:peak]], len(CATEGORIES))
        found[rank] = dict(zip(CATEGORIES, map(int, held.tolist()), strict=True))
    return found
