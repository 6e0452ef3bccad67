"""How a plan lies on two parts: `Stages`, a pipeline from one to the other, or `Replicas` in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from parallelism.display.quantities import plural
from parallelism.hardware import MixedHardware
from parallelism.mixing.uneven_replicas import UnevenReplicas
from parallelism.mixing.uneven_stages import SCHEDULE
from parallelism.mixing.uneven_step import UnevenStep
from parallelism.planning.plan import Task
from parallelism.planning.settings import split_text
from parallelism.planning.trained import BATCH
from parallelism.simulation.operations import SimulatedOperation
from parallelism.training.layer_blocks import EACH_LAYER, LayerBlocks
from parallelism.training.stage_layers import runs_of
from parallelism.transforms import Pipeline


@dataclass(frozen=True)
class Stages:
    """The first stages lie in one part, and the last in the other."""

    counts: tuple[int, ...]
    """The blocks of each stage."""
    layer_blocks: LayerBlocks = EACH_LAYER
    """The layers of a block."""

    def pipeline(self, task: Task, settings: Mapping[str, Any]) -> Pipeline:
        """The stages and their schedule."""
        begin = task.model.begin_of(self.counts)
        return Pipeline("pp", task.microbatches(settings), SCHEDULE, 1, begin, BATCH)

    def operation(self, task: Task, settings: Mapping[str, Any]) -> SimulatedOperation:
        """The step, put together from pieces."""
        return UnevenStep(task, settings, self.counts)

    def settings_text(self, settings: Mapping[str, Any]) -> str:
        """The settings in a few words."""
        return split_text(settings)

    def of_parts(self, hardware: MixedHardware) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The layers of the stages of each part."""
        first = hardware.parts[0].devices * len(self.counts) // hardware.devices
        layers = self.layer_blocks.layers_of(self.counts)
        return layers[:first], layers[first:]

    def text(self, hardware: MixedHardware) -> str:
        """The layers of the stages: ``2x5 on dgx-a100`` are two stages of five."""
        each = zip(self.of_parts(hardware), hardware.labels, strict=True)
        return "layers " + ", then ".join(f"{_runs(counts)} on {label}" for counts, label in each)

    def json(self, hardware: MixedHardware) -> list[dict[str, Any]]:
        """What lies on each part, as plain values."""
        return [{"layers": list(counts)} for counts in self.of_parts(hardware)]


@dataclass(frozen=True)
class Replicas:
    """Some replicas lie in one part, and some in the other; their microbatches have not equally many rows."""

    microbatches: int
    """The microbatches of each replica."""
    counts: tuple[int, int]
    """How many replicas each part has."""
    rows: tuple[int, int]
    """The rows of a microbatch in each part."""

    def pipeline(self, task: Task, settings: Mapping[str, Any]) -> Pipeline:
        """The stages, their schedule, and the share that each replica has of the rows."""
        whole = gcd(*self.rows)
        shares = [
            rows // whole for count, rows in zip(self.counts, self.rows, strict=True) for _ in range(count)
        ]
        begin = task.model.begin(settings["pp"])
        return Pipeline("pp", self.microbatches, SCHEDULE, 1, begin, BATCH, shares=tuple(shares))

    def operation(self, task: Task, settings: Mapping[str, Any]) -> SimulatedOperation:
        """The step, put together from pieces."""
        return UnevenReplicas(task, settings, self.microbatches, self.rows)

    def settings_text(self, settings: Mapping[str, Any]) -> str:
        """The settings in a few words, without the rows of a microbatch."""
        words = split_text(settings).split()
        return " ".join(word for word in words if not word.startswith(("mb=", "order=")))

    def text(self, hardware: MixedHardware) -> str:
        """The replicas of each part."""
        told = [
            f"{plural(count, 'replica')} on {label} with mb={rows}"
            for count, label, rows in zip(self.counts, hardware.labels, self.rows, strict=True)
        ]
        return f"{', '.join(told)}; microbatches: {self.microbatches}"

    def json(self, hardware: MixedHardware) -> list[dict[str, Any]]:
        """What lies on each part, as plain values."""
        return [
            {"replicas": count, "microbatch": rows, "microbatches": self.microbatches}
            for count, rows in zip(self.counts, self.rows, strict=True)
        ]


Arrangement = Stages | Replicas


def _runs(counts: Sequence[int]) -> str:
    """Numbers of blocks in a few characters: ``3x5 4`` for three stages of five and one of four."""
    return " ".join(f"{times}x{count}" if times > 1 else str(count) for count, times in runs_of(counts))
