"""Published runs beside their predictions: a software stack is fitted to a table of them, and told how far it is off.

    python -m vcluster calibrate --published korthikanti-2022

A refit changes the parameters that the table names, one set for all rows, by least squares of the relative error.
Errors on rows that were fitted to are told as *fitted*.  What such a fit says of a model that it did not see is told by
leaving out one model at a time.  A row that a stack was fitted to is never told as held out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

import numpy as np

from parallelism.display import Told
from parallelism.hardware import Hardware, fitted_on, on_stack, sized_hardware
from vcluster.calibration.fitting import fitted
from vcluster.calibration.parameters import parameter, with_parameter
from vcluster.calibration.published_report import Line, Report, named
from vcluster.calibration.published_tables import ALL_REDUCE, TIMES, Measured, Table

_OUTLIERS = 0.03
"""The error of a run of training above which it does not count as a square."""
_DETAIL = 1.02
"""The factor of a parameter by which the slopes of predictions are found."""


def hardware_of(table: Table, row: Measured, parameters: Mapping[str, float] | None = None) -> Hardware:
    """The hardware of a row under the stack of its table, with other values of some parameters."""
    hardware = _on_stack(row.hardware or table.hardware, row.devices, table.stack)
    for name, value in (parameters or {}).items():
        hardware = with_parameter(hardware, name, value)
    return hardware


@lru_cache(maxsize=32)
def _on_stack(hardware: str, devices: int, stack: str) -> Hardware:
    return on_stack(sized_hardware(hardware, devices), stack)


def reported(
    table: Table,
    parameters: Mapping[str, float] | None = None,
    known: Mapping[Measured, float] | None = None,
) -> Report:
    """The table beside its stack as it is, or with other values of the parameters; ``known`` has predictions by them."""
    used = {**_values(table), **(parameters or {})}
    known = known or {}
    own = table.name in fitted_on(table.stack)
    lines = []
    for row in table.rows:
        seconds = known[row] if row in known else row.predicted(hardware_of(table, row, used))
        is_held_out = not own or (row.part in TIMES and row not in table.fitted_rows)
        lines.append(Line(row, seconds, is_held_out))
    return Report(table, table.stack, tuple(lines), used)


def refitted(table: Table, told: Told | None = None) -> Report:
    """The table beside its stack, whose parameters are fitted to it; ``told`` is called as it goes on.

    A table without parameters is only for tests: nothing is fitted to it.

    A prediction is close to linear in the inverse of each parameter.  So its slopes are found once, by a small change,
    and fits with and without each model use them; those of runs that differ in the number of replicas alone are those of
    the smallest one, for the work of a device.  The fit to all rows is then predicted anew, unless it is the stack as it is.
    """
    if not table.parameters:
        return reported(table)
    start = _values(table)
    say = told or (lambda what, done, count: None)
    names = table.parameters
    rows = [row for row in table.rows if row.part in TIMES]
    slopes: dict[Measured, Callable[[np.ndarray], float]] = {}
    at: dict[Measured, float] = {}
    gains: dict[Hashable, np.ndarray] = {}
    for done, row in enumerate(sorted(rows, key=lambda row: row.devices)):
        say(f"{row.part} of {named(row)}", done, len(rows))
        at[row] = row.predicted(hardware_of(table, row, start))
        slopes[row] = _linear(table, row, start, at[row], gains)
    everything = _fit(table.fitted_rows, slopes, [start[name] for name in names])
    has_test = len(table.fitted_rows) < len(rows)
    best = _fit(rows, slopes, [start[name] for name in names]) if has_test else None
    without: list[Line] = []
    models = [*dict.fromkeys(row.model for row in table.fitted_rows)]
    for model in models if len(models) > 1 else ():
        kept = [row for row in table.fitted_rows if row.model != model]
        values = _fit(kept, slopes, [start[name] for name in names])
        without += [Line(row, slopes[row](values), True) for row in rows if row.model == model]
    say("the fit", len(rows), len(rows))
    found = dict(zip(names, everything.tolist(), strict=True))
    is_as_it_is = all(f"{found[name]:.3g}" == f"{start[name]:.3g}" for name in names)
    report = reported(table, start, at) if is_as_it_is else reported(table, found)
    best_lines: list[Line] = []
    if best is not None:
        timed = (line.row for line in report.lines if line.row in slopes)
        best_lines = [Line(row, slopes[row](best), False) for row in timed]
    return replace(report, without_model=tuple(without), best=tuple(best_lines))


def _linear(
    table: Table, row: Measured, start: Mapping[str, float], at: float, known: dict[Hashable, np.ndarray]
) -> Callable[[np.ndarray], float]:
    """The prediction of a row as a function of the parameters, linear in seconds and in the inverse of all others.

    ``at`` is the prediction at the ``start``.  ``known`` has the slopes of rows before, by what is alike.
    """
    if row.part == ALL_REDUCE:  # as quick as its slopes
        return lambda values: row.predicted(
            hardware_of(table, row, dict(zip(table.parameters, values.tolist(), strict=True)))
        )
    alike, work = (row, 1.0) if row.published is None else (row.published.alike, row.published.flops)
    if alike not in known:
        known[alike] = _gains(table, row, start, at) / work
    gains = known[alike] * work
    first = np.array([start[name] for name in table.parameters])
    times = np.array([_is_time(name) for name in table.parameters])
    return lambda values: float(at + gains @ (np.where(times, values / first, first / values) - 1))


def _gains(table: Table, row: Measured, start: Mapping[str, float], at: float) -> np.ndarray:
    """By parameter, what the prediction of a row changes by, divided by the change of the parameter or of its inverse."""
    found = []
    for name in table.parameters:
        changed = row.predicted(hardware_of(table, row, {**start, name: start[name] * _DETAIL}))
        found.append((changed - at) / (_DETAIL - 1 if _is_time(name) else 1 / _DETAIL - 1))
    return np.array(found)


def _is_time(parameter: str) -> bool:
    """Whether predictions are linear in the parameter itself, not in its inverse."""
    return parameter.endswith(("_seconds", ".accumulated"))


def _fit(
    rows: Sequence[Measured],
    predict: Mapping[Measured, Callable[[np.ndarray], float]],
    start: Sequence[float],
) -> np.ndarray:
    trains = any(row.published is not None for row in rows)
    return fitted(
        lambda values: [predict[row](values) for row in rows],
        [row.measured for row in rows],
        start,
        outliers=_OUTLIERS if trains else inf,
    )


def _values(table: Table) -> dict[str, float]:
    hardware = on_stack(Hardware.preset(table.hardware), table.stack)
    return {name: parameter(hardware, name) for name in table.parameters}
