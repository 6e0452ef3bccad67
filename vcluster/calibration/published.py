"""Published runs beside their predictions: a software stack is fitted to a table of them, and told how far it is off.

    python -m vcluster calibrate --published korthikanti-2022

A table (``tables/*.json``) has rows of measured parts: the forward and the backward of a layer, steps, bytes of
memory, collectives.  A refit changes the parameters that the table names, one set for all rows, by least squares of
the relative error.  Errors on rows that were fitted to are told as *fitted*.  What such a fit says of a model that it
did not see is told by leaving out one model at a time.  A table that a stack was fitted on is never told as held out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from parallelism.cost import Costs
from parallelism.display import Told, in_columns
from parallelism.display.quantities import shortened
from parallelism.hardware import Hardware, fitted_on, on_stack, sized_hardware
from parallelism.simulation import simulate
from parallelism.training import MegatronFlags, TrainingRun, figures
from vcluster.calibration.fitting import fitted

FORWARD, BACKWARD, STEP, MEMORY, ALL_REDUCE = (
    "layer forward",
    "layer backward",
    "step",
    "memory",
    "all_reduce",
)
_DETAIL = 1.02
"""The factor of a parameter by which the slopes of predictions are found."""
_TIMES = (FORWARD, BACKWARD, STEP, ALL_REDUCE)


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

    def predicted(self, hardware: Hardware) -> float:
        """The number that the model predicts."""
        if self.part == ALL_REDUCE:
            return Costs(hardware).collective("all_reduce", self.nbytes, range(self.devices)).seconds
        if self.part in (FORWARD, BACKWARD):
            return layer_seconds(self.flags, self.devices, hardware)[self.part == BACKWARD]
        run = _run(self.flags, self.devices)
        if self.part == MEMORY:
            return _memory(figures(run, hardware).memory)
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
    held_out_devices: tuple[int, ...] = ()
    """The sizes of groups whose rows serve only to test."""

    @classmethod
    def of(cls, name: str) -> Table:
        """The table of this name.  ``ValueError`` if there is none."""
        if name not in tables():
            raise ValueError(f"no published table {shortened(name)}; there is {', '.join(tables())}")
        text = files("vcluster.calibration").joinpath("tables", f"{name}.json").read_text(encoding="utf-8")
        told = json.loads(text)
        rows = tuple(row for entry in told["rows"] for row in _rows(entry))
        return cls(
            told["name"],
            told["title"],
            told["source"],
            told["stack"],
            told["hardware"],
            tuple(told["parameters"]),
            rows,
            tuple(told.get("held_out_devices", ())),
        )

    @property
    def fitted_rows(self) -> tuple[Measured, ...]:
        """The times that a fit is made to: memory has no parameters."""
        return tuple(
            row for row in self.rows if row.part in _TIMES and row.devices not in self.held_out_devices
        )


def tables() -> tuple[str, ...]:
    """The names of the published tables."""
    found = (entry.name for entry in files("vcluster.calibration").joinpath("tables").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


@dataclass(frozen=True)
class Line:
    """A measured number beside its prediction."""

    row: Measured
    predicted: float
    held_out: bool
    """Whether the prediction is by constants that were not fitted to it."""

    @property
    def error(self) -> float:
        """The prediction divided by the measurement, minus 1."""
        return self.predicted / self.row.measured - 1


@dataclass(frozen=True)
class Report:
    """A table beside the predictions of a stack."""

    table: Table
    stack: str
    lines: tuple[Line, ...]
    parameters: Mapping[str, float]
    without_model: tuple[Line, ...] = ()
    """Each row of a model, predicted by a fit without that model."""
    best: tuple[Line, ...] = ()
    """The rows that were held out, predicted by a fit of the same form to them too: no fit of this form does better."""

    def __post_init__(self) -> None:
        if self.table.name in fitted_on(self.stack) and any(
            line.held_out and line.row in self.table.fitted_rows for line in self.lines
        ):
            raise ValueError(f"{self.stack} was fitted on {self.table.name}: its rows are not held out")

    def mean(self, part: str, lines: Iterable[Line] | None = None) -> float:
        """The mean error of a part, without signs."""
        lines = self.lines if lines is None else lines
        errors = [abs(line.error) for line in lines if line.row.part == part]
        return float(np.mean(errors)) if errors else 0.0

    def residuals(self, width: int = 25) -> str:
        """A picture of the errors: a bar for each row, to the left where the prediction is too short."""
        half = width // 2
        most = max((abs(line.error) for line in self.lines), default=0.0) or 1.0
        names = [f"{line.row.part}, {_named(line.row)}" for line in self.lines]
        long = max(map(len, names), default=0)
        told = [f"{'':{long}}  {-most:<+{half}.0%}0{most:>+{half}.0%}"]
        for name, line in zip(names, self.lines, strict=True):
            bar = "#" * round(abs(line.error) / most * half)
            left, right = (bar.rjust(half), "") if line.error < 0 else ("".rjust(half), bar)
            told.append(f"{name:{long}}  {left}|{right}".rstrip())
        return "\n".join(told)

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.parameters.items())
        told = [
            f"{self.table.title}",
            f"  {self.table.source}",
            f"  {self.table.hardware}+{self.stack}: {values or 'nothing is fitted to this table'}",
            "",
        ]
        best = {line.row: line for line in self.best}
        without = {line.row: line for line in self.without_model}
        cells = [
            (
                "part",
                "of",
                "measured",
                "predicted",
                "error",
                "",
                "without its model" * bool(without) or "best of this form" * bool(best),
            )
        ]
        for line in self.lines:
            row, other = line.row, without.get(line.row) or best.get(line.row)
            told_as = "counted" if row.part == MEMORY else "held out" if line.held_out else "fitted"
            cells.append(
                (
                    row.part,
                    _named(row),
                    _shown(row, row.measured),
                    _shown(row, line.predicted),
                    f"{line.error:+.1%}",
                    told_as,
                    "" if other is None else f"{other.error:+.1%}",
                )
            )
        told += in_columns(cells, 2)
        for part in dict.fromkeys(line.row.part for line in self.lines):
            lines = [line for line in self.lines if line.row.part == part]
            held_out = [line for line in lines if line.held_out]
            mean = f"{part}: mean error {self.mean(part):.1%}"
            if 0 < len(held_out) < len(lines):
                fit = self.mean(part, [line for line in lines if not line.held_out])
                out = self.mean(part, held_out)
                mean = f"{part}: mean error {fit:.1%} where fitted, {out:.1%} held out, {self.mean(part):.1%} in all"
            if self.without_model and self.mean(part, self.without_model):
                mean += f"; by leaving out one model at a time {self.mean(part, self.without_model):.1%}"
            told.append(mean)
        told += ["", self.residuals()]
        return "\n".join(told)


# -- fitting -----------------------------------------------------------------------------------------------------------


def hardware_of(table: Table, devices: int, parameters: Mapping[str, float] | None = None) -> Hardware:
    """The hardware of a table under its stack, with other values of some parameters."""
    return _with(_on_stack(table.hardware, devices, table.stack), parameters or {})


@lru_cache(maxsize=32)
def _on_stack(hardware: str, devices: int, stack: str) -> Hardware:
    return on_stack(sized_hardware(hardware, devices), stack)


def reported(table: Table, parameters: Mapping[str, float] | None = None) -> Report:
    """The table beside its stack as it is, or with other values of the parameters."""
    used = {**_values(table), **(parameters or {})}
    own = table.name in fitted_on(table.stack)
    lines = tuple(
        Line(
            row,
            row.predicted(hardware_of(table, row.devices, used)),
            not own or (row.part in _TIMES and row not in table.fitted_rows),
        )
        for row in table.rows
    )
    return Report(table, table.stack, lines, used)


def refitted(table: Table, told: Told | None = None) -> Report:
    """The table beside its stack, whose parameters are fitted to it; ``told`` is called as it goes on.

    A table without parameters is only for tests: nothing is fitted to it.

    A prediction is close to linear in the inverse of each parameter.  So its slopes are found once, by a small change,
    and fits with and without each model use them; the fit to all rows is then predicted anew.
    """
    if not table.parameters:
        return reported(table)
    start, say = _values(table), told or (lambda what, done, count: None)
    names = table.parameters
    rows = [row for row in table.rows if row.part in _TIMES]
    slopes: dict[Measured, Callable[[np.ndarray], float]] = {}
    for done, row in enumerate(rows):
        say(f"{row.part} of {_named(row)}", done, len(rows))
        slopes[row] = _linear(table, row, start)
    everything = _fit(table.fitted_rows, slopes, [start[name] for name in names])
    best = _fit(rows, slopes, [start[name] for name in names]) if table.held_out_devices else None
    without: list[Line] = []
    models = [*dict.fromkeys(row.model for row in table.fitted_rows)]
    for model in models if len(models) > 1 else ():
        kept = [row for row in table.fitted_rows if row.model != model]
        values = _fit(kept, slopes, [start[name] for name in names])
        without += [Line(row, slopes[row](values), True) for row in rows if row.model == model]
    say("the fit", len(rows), len(rows))
    report = reported(table, dict(zip(names, everything.tolist(), strict=True)))
    return replace(
        report,
        without_model=tuple(without),
        best=()
        if best is None
        else tuple(
            Line(line.row, slopes[line.row](best), False) for line in report.lines if line.row in slopes
        ),
    )


def _linear(table: Table, row: Measured, start: Mapping[str, float]) -> Callable[[np.ndarray], float]:
    """The prediction of a row as a function of the parameters, linear in the inverse of efficiencies and rates."""
    at = row.predicted(hardware_of(table, row.devices, start))
    if row.part == ALL_REDUCE:  # as quick as its slopes
        return lambda values: row.predicted(
            hardware_of(table, row.devices, dict(zip(table.parameters, values.tolist(), strict=True)))
        )
    gains = []
    for name in table.parameters:
        changed = row.predicted(hardware_of(table, row.devices, {**start, name: start[name] * _DETAIL}))
        gains.append((changed - at) / (1 / _DETAIL - 1))
    first = np.array([start[name] for name in table.parameters])
    return lambda values: float(at + np.array(gains) @ (first / values - 1))


def _fit(
    rows: Sequence[Measured],
    predict: Mapping[Measured, Callable[[np.ndarray], float]],
    start: Sequence[float],
) -> np.ndarray:
    return fitted(
        lambda values: [predict[row](values) for row in rows], [row.measured for row in rows], start
    )


def _values(table: Table) -> dict[str, float]:
    hardware = on_stack(Hardware.preset(table.hardware), table.stack)
    reached = hardware.links[0].reached
    values = {}
    for name in table.parameters:
        values[name] = float(getattr(reached if hasattr(reached, name) else hardware, name))
    return values


def _with(hardware: Hardware, parameters: Mapping[str, float]) -> Hardware:
    link = hardware.links[0]
    of_link: dict[str, Any] = {
        name: value for name, value in parameters.items() if hasattr(link.reached, name)
    }
    if of_link and link.reached is not None:
        link = replace(link, reached=replace(link.reached, **of_link))
    others: dict[str, Any] = {name: value for name, value in parameters.items() if name not in of_link}
    return replace(hardware, links=(link, *hardware.links[1:]), **others)


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


def _named(row: Measured) -> str:
    if row.part == ALL_REDUCE:
        return f"{row.nbytes / 2**20:.0f} MiB on {row.devices}"
    return f"{row.model}, {row.what}"


def _shown(row: Measured, number: float) -> str:
    if row.part == MEMORY:
        return f"{number / 2**30:.2f} GiB"
    if number >= 1:
        return f"{number:.2f} s"
    return f"{number * 1e3:.2f} ms" if number >= 1e-3 else f"{number * 1e6:.0f} us"


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
    """The seconds of the forward and of the backward of a layer: what a model of two takes beyond a model of one."""
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
