"""What a budget needs to know of a plan besides its seconds: its energy, and the bytes of a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

from parallelism.dtypes import as_dtype
from parallelism.hardware import Power
from parallelism.models import TransformerSpec
from parallelism.planning import Plan
from parallelism.planning.trained import TrainedModel
from parallelism.training import Figures
from parallelism.transforms import SGD
from parallelism.transforms.parts import first_argument

BUSY = ("products", "attention", "elementwise", "recompute", "update")
"""The parts of a step in which a device computes."""


class Measures(NamedTuple):
    """The power that a plan draws, and the checkpoints that it writes."""

    watts: float | None
    """The power of all devices and their nodes, on average over a step; None: the hardware has no power figures."""
    checkpoint_bytes: float
    """The size of a checkpoint, from which a run is resumed."""
    stall_seconds: float
    """How long each device copies its part of a checkpoint to its host."""

    @classmethod
    def of(cls, plan: Plan) -> Measures:
        """The measures of a plan."""
        task = plan.task
        power, kept = task.hardware.power, checkpoint_bytes(task.model)
        return cls(
            None if power is None else watts(plan.figures, power),
            kept,
            kept / task.devices / task.hardware.host.bytes_per_second,
        )


def watts(figures: Figures, power: Power) -> float:
    """The power of all devices of a step, with their shares of the nodes, on average."""
    found = 0.0
    for rank, count in figures.step.devices.items():
        busy = sum(getattr(figures.step.step_split[rank], part) for part in BUSY)
        found += count * power.watts(busy / figures.seconds)
    return found


def checkpoint_bytes(model: TrainedModel) -> float:
    """The bytes of the trained weights, in their most exact copy, and of what the optimizer keeps of each."""
    if not isinstance(model.model, TransformerSpec):
        weights = [
            (float(value.type.size), value.type.dtype.itemsize) for value in first_argument(model.model)
        ]
        return sum(count * itemsize * (1 + moments(model)) for count, itemsize in weights)
    kept = [model.dtype] * (1 + moments(model))
    if model.precision is not None:
        names = ("main", "mean", "square")[: 1 + moments(model)]
        kept = [str(getattr(model.precision, name) or "float32") for name in names]
    return float(model.model.trained_parameters) * sum(as_dtype(each).itemsize for each in kept)


def moments(model: TrainedModel) -> int:
    """How many numbers the optimizer keeps of each weight."""
    if isinstance(model.optimizer, SGD):
        return int(model.optimizer.momentum != 0)
    return 2
