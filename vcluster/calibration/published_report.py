"""A table of published runs beside the predictions of a stack, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from parallelism.display import in_columns
from parallelism.hardware import fitted_on
from vcluster.calibration.published_tables import ALL_REDUCE, MEMORY, Measured, Table


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

    @property
    def work(self) -> float:
        """Of a run of training, the model's floating-point operations of a device in a step."""
        assert self.row.published is not None
        return self.row.published.flops


@dataclass(frozen=True)
class Comparison:
    """The runs of one set beside their predictions, and beside those of one constant.

    The constant is the MFU of the set's median run, as if all its runs reached it.  It is taken from the very rows that
    it predicts, which favours it.
    """

    name: str
    lines: tuple[Line, ...]

    @property
    def error(self) -> float:
        """The mean error of the predictions, without signs."""
        return float(np.mean([abs(line.error) for line in self.lines]))

    @property
    def constant_errors(self) -> list[float]:
        """By line, the relative error of the seconds that the constant MFU predicts."""
        work = np.array([line.work for line in self.lines])
        measured = np.array([line.row.measured for line in self.lines])
        found: list[float] = (work / np.median(work / measured) / measured - 1).tolist()
        return found

    @property
    def order(self) -> float:
        """The rank correlation (Spearman) of predicted and measured seconds for each unit of work."""
        predicted = [line.predicted / line.work for line in self.lines]
        measured = [line.row.measured / line.work for line in self.lines]
        ranks = [np.argsort(np.argsort(each)) for each in (predicted, measured)]
        return float(np.corrcoef(ranks[0], ranks[1])[0, 1])

    def __str__(self) -> str:
        told = f"{self.name}, {len(self.lines)} runs: mean error {self.error:.1%}"
        constant = float(np.mean(np.abs(self.constant_errors)))
        told += f", of one constant MFU {constant:.1%}"
        return told + (
            f"; order of seconds for each unit of work {self.order:.2f}" if len(self.lines) > 2 else ""
        )


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

    def comparisons(self) -> list[Comparison]:
        """The runs of training by set, those that were held out apart, and those with context parallelism."""
        sets: dict[str, list[Line]] = {}
        for line in self.lines:
            published = line.row.published
            if published is not None:
                split = ", cp > 1" if published.columns["cp"] != "1" else ""
                told = "held out" if line.held_out else "fitted"
                sets.setdefault(f"{published.columns['set']}{split}, {told}", []).append(line)
        return [Comparison(name, tuple(lines)) for name, lines in sorted(sets.items())]

    def _constant_errors(self) -> dict[Measured, float]:
        """By row of a run of training, the error of the constant of its set (`Comparison`)."""
        found: dict[Measured, float] = {}
        for each in self.comparisons():
            rows = [line.row for line in each.lines]
            found.update(zip(rows, each.constant_errors, strict=True))
        return found

    def residuals(self, width: int = 25) -> str:
        """A picture of the errors: a bar for each row, to the left where the prediction is too short."""
        half = width // 2
        most = max((abs(line.error) for line in self.lines), default=0.0) or 1.0
        names = [f"{line.row.part}, {named(line.row)}" for line in self.lines]
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
        constant = self._constant_errors()
        other_fit = "without its model" * bool(without) or "best of this form" * bool(best)
        heads = ["part", "of", "measured", "predicted", "error", "", other_fit]
        cells = [tuple(heads + ["constant MFU"] * bool(constant))]
        for line in self.lines:
            row, other = line.row, without.get(line.row) or best.get(line.row)
            told_as = "held out" if line.held_out else "fitted"
            if row.part == MEMORY:
                told_as = "counted"
            shown = [row.part, named(row), _shown(row, row.measured), _shown(row, line.predicted)]
            shown += [f"{line.error:+.1%}", told_as, "" if other is None else f"{other.error:+.1%}"]
            shown += [f"{constant[row]:+.1%}" if row in constant else ""] * bool(constant)
            cells.append(tuple(shown))
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
        told += map(str, self.comparisons())
        told += ["", self.residuals()]
        return "\n".join(told)


def named(row: Measured) -> str:
    if row.part == ALL_REDUCE:
        return f"{row.nbytes / 2**20:.0f} MiB on {row.devices}"
    return f"{row.model}, {row.what}"


def _shown(row: Measured, number: float) -> str:
    if row.part == MEMORY:
        return f"{number / 2**30:.2f} GiB"
    if number >= 1:
        return f"{number:.2f} s"
    return f"{number * 1e3:.2f} ms" if number >= 1e-3 else f"{number * 1e6:.0f} us"
