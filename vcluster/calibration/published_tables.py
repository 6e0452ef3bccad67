"""Tables of published runs: measured numbers, each with what the model predicts for it.

A table (``tables/*.json``) has rows of measured parts: the forward and the backward of a layer, steps, bytes of
memory, collectives, and runs of training (`vcluster.calibration.training_runs`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from parallelism.cost import Costs
from parallelism.display.quantities import shortened
from parallelism.hardware import Hardware
from parallelism.planning.assembled_steps import figures_of_run
from parallelism.simulation import simulate
from parallelism.training import MegatronFlags, TrainingRun
from vcluster.calibration.training_runs import PublishedRun, published_runs, training_seconds

FORWARD = "layer forward"
BACKWARD = "layer backward"
STEP = "step"
TRAINING = "training"
MEMORY = "memory"
ALL_REDUCE = "all_reduce"
TIMES = (FORWARD, BACKWARD, STEP, TRAINING, ALL_REDUCE)


Flags = tuple[tuple[str, Any], ...]
"""Flags of Megatron-LM, with their values."""


@dataclass(frozen=True)
class Measured:
    """One measured number of a published table."""

    part: str
    model: str
    what: str
    devices: int
    measured: float
    """Seconds, or bytes of memory."""
    flags: Flags = ()
    """The flags of Megatron-LM of the run."""
    nbytes: float = 0.0
    """The bytes of a collective."""
    published: PublishedRun | None = None
    """The run of training whose step this is."""
    held_out: bool = False
    """Whether the row serves only to test."""

    @property
    def hardware(self) -> str:
        """The hardware of the row; empty: that of its table."""
        return "" if self.published is None else self.published.columns["hw"]

    def predicted(self, hardware: Hardware) -> float:
        """The number that the model predicts."""
        if self.part == ALL_REDUCE:
            return Costs(hardware).collective("all_reduce", self.nbytes, range(self.devices)).seconds
        if self.part in (FORWARD, BACKWARD):
            return layer_seconds(self.flags, self.devices, hardware)[self.part == BACKWARD]
        if self.published is not None:
            return training_seconds(self.published, hardware)
        run = _run(self.flags, self.devices)
        if self.part == MEMORY:
            return _memory(figures_of_run(run, hardware).memory)
        return simulate(run.step, hardware, mesh=run.mesh, batch=run.batch, fold=True).makespan_seconds


@dataclass(frozen=True)
class Table:
    """Published measurements, and what may be fitted to them."""

    name: str
    title: str
    source: str
    stack: str
    hardware: str
    parameters: tuple[str, ...]
    rows: tuple[Measured, ...]

    @classmethod
    def of(cls, name: str) -> Table:
        """The table of this name.  ``ValueError`` if there is none."""
        if name not in tables():
            raise ValueError(f"no published table {shortened(name)}; there is {', '.join(tables())}")
        text = files("vcluster.calibration").joinpath("tables", f"{name}.json").read_text(encoding="utf-8")
        told = json.loads(text)
        rows = [row for entry in told.get("rows", ()) for row in _rows(entry)]
        tested = told.get("held_out_devices", ())
        rows = [replace(row, held_out=row.devices in tested) for row in rows]
        for name in told.get("runs", ()):
            rows += _training_rows(name, told.get("where", {}))
        return cls(
            told["name"],
            told["title"],
            told["source"],
            told["stack"],
            told["hardware"],
            tuple(told["parameters"]),
            tuple(rows),
        )

    @property
    def fitted_rows(self) -> tuple[Measured, ...]:
        """The times that a fit is made to: memory has no parameters."""
        return tuple(row for row in self.rows if row.part in TIMES and not row.held_out)


def tables() -> tuple[str, ...]:
    """The names of the published tables."""
    found = (entry.name for entry in files("vcluster.calibration").joinpath("tables").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(entry: Mapping[str, Any]) -> Iterable[Measured]:
    flags = tuple(sorted(entry.get("flags", {}).items()))
    common = (entry.get("model", ""), entry.get("what", ""), entry["devices"])
    if entry["part"] == "layer":
        yield Measured(FORWARD, *common, entry["forward_seconds"], flags)
        yield Measured(BACKWARD, *common, entry["backward_seconds"], flags)
    elif entry["part"] == MEMORY:
        yield Measured(MEMORY, *common, entry["nbytes"], flags)
    else:
        yield Measured(entry["part"], *common, entry["seconds"], flags, entry.get("nbytes", 0.0))


def _training_rows(name: str, where: Mapping[str, str]) -> list[Measured]:
    """The rows of a set of published runs that have these values in these columns.  Every second one of the set serves
    only to test."""
    runs = [run for run in published_runs() if run.columns["set"] == name]
    return [
        Measured(
            TRAINING,
            run.columns["model"],
            run.what,
            run.devices,
            run.measured_seconds,
            published=run,
            held_out=bool(place % 2),
        )
        for place, run in enumerate(runs)
        if where.items() <= run.columns.items()
    ]


def _memory(stages: Sequence[Mapping[str, int]]) -> float:
    """The bytes as papers count them: weights, gradients and state of the mean device, and the most activations of any."""
    states, activations = [], []
    for held in stages:
        states.append(sum(held.get(name, 0) for name in ("weights", "gradients", "optimizer")))
        activations.append(sum(held.values()) - states[-1])
    return float(np.mean(states)) + max(activations)


@lru_cache(maxsize=32)
def _run(flags: Flags, devices: int) -> TrainingRun:
    return MegatronFlags(**dict(flags)).run(devices)


def layer_seconds(flags: Flags, devices: int, hardware: Hardware) -> tuple[float, float]:
    """The seconds of the forward and of the backward of a layer: a model of two layers less a model of one."""
    one, two = (
        _phases(tuple(sorted({**dict(flags), "num_layers": layers}.items())), devices, hardware)
        for layers in (1, 2)
    )
    return two[0] - one[0], two[1] - one[1]


@lru_cache(maxsize=64)
def _phases(flags: Flags, devices: int, hardware: Hardware) -> tuple[float, float]:
    """The seconds of the forward and of the backward of a microbatch on one stage.

    Megatron-LM adds the gradients of every microbatch into one buffer, also those of the only one.  So there are two.
    """
    flags = tuple(sorted({**dict(flags), "global_batch_size": 2 * dict(flags)["global_batch_size"]}.items()))
    run = _run(flags, devices)
    trace = simulate(run.step, hardware, mesh=run.mesh, batch=run.batch, fold=True, op_by_op=True)
    columns = trace.columns
    back = columns.isin("phase", {"B", "R"}) & columns.isin("kind", {"compute"})
    back &= columns.isin("microbatch", {0})
    starts, lengths = columns.numbers("start_seconds"), columns.numbers("duration_seconds")
    first = float(starts[back].min())
    return first, float((starts + lengths)[back].max()) - first
