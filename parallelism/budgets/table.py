"""A `Sweep` as a table in 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from parallelism.display import WIDTH, in_columns
from parallelism.display.quantities import count, decimal_bytes, duration, fit, measured, seconds

if TYPE_CHECKING:
    from parallelism.budgets.sweep import Cell, Sweep

_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "seconds": ("step", seconds),
    "tokens_per_second": ("tokens/s", count),
    "mfu": ("MFU", "{:.1%}".format),
    "slower": ("slower", "{:.1%}".format),
    "days": ("days", measured),
    "device_hours": ("device h", count),
    "cost": ("cost", count),
    "energy_kwh": ("kWh", count),
    "carbon_kg": ("CO2 kg", count),
    "goodput": ("goodput", "{:.1%}".format),
}
"""The head of a column, and how its numbers are written, by the name of a figure."""
ANOTHER_BATCH = (
    "another batch changes what is trained, not only how fast: its rates of learning and the number of steps"
)
_ALWAYS = ("seconds", "tokens_per_second", "mfu", "days", "device_hours")


def lines(sweep: Sweep) -> list[str]:
    """The table: a line for each cell, under its hardware; then the plans, and what is best."""
    shown = [name for name in _COLUMNS if name in _ALWAYS or _is_told(sweep, name)]
    several = _has_batches(sweep)
    head = ["", "devices", *(["batch"] if several else []), *(_COLUMNS[name][0] for name in shown)]
    rows = [head, *(_row(sweep, cell, shown, several) for cell in sweep.cells)]
    first, *others = in_columns(rows, 0, gap=" " if sum(map(len, head)) > WIDTH - 24 else "  ")
    found, before = [first], ""
    for cell, row in zip(sweep.cells, others, strict=True):
        if cell.hardware != before:
            found.append(fit(cell.hardware))
            before = cell.hardware
        found += [row] if cell.plan is not None else _reason(row, cell)
    return [*found, *_legend(sweep), "", *_plans(sweep), *_failures(sweep), *_verdict(sweep)]


def _has_batches(sweep: Sweep) -> bool:
    """Whether cells differ in their batches."""
    return len({cell.batch for cell in sweep.cells}) > 1


def _is_told(sweep: Sweep, name: str) -> bool:
    """Whether any cell has the figure, and it says something."""
    return any(getattr(cell, name) not in (None, 1.0) for cell in sweep.cells)


def _row(sweep: Sweep, cell: Cell, shown: Sequence[str], several: bool) -> list[str]:
    row = ["*" if cell.meets and sweep.budget.days is not None else ""]
    row.append("" if cell.devices is None else str(cell.devices))
    if several:
        row.append(str(cell.batch))
    for name in shown:
        value, written = getattr(cell, name), _COLUMNS[name][1]
        row.append("" if value is None else written(value).strip())
    return row


def _reason(row: str, cell: Cell) -> list[str]:
    start = f"{row}  "
    return wrap(
        fit(cell.reason, max(len(cell.reason), 3)),
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
    )


def _legend(sweep: Sweep) -> list[str]:
    found = [] if sweep.budget.days is None else [f"(* in {sweep.budget.days:g} days)"]
    if _has_batches(sweep):
        found += wrap(f"({ANOTHER_BATCH})", WIDTH)
    hints = dict.fromkeys(cell.hint for cell in sweep.cells if cell.hint is not None)
    return found + [line for hint in hints for line in wrap(f"({hint})", WIDTH)]


def _plans(sweep: Sweep) -> list[str]:
    """The plans of the cells."""
    with_plans = [cell for cell in sweep.cells if cell.plan is not None]
    if not with_plans:
        return []
    names = [[fit(cell.hardware, 40), str(cell.devices)] for cell in with_plans]
    if _has_batches(sweep):
        for name, cell in zip(names, with_plans, strict=True):
            name.append(str(cell.batch))
    starts = in_columns(names, 1)
    found = ["the best plans:"]
    for start, cell in zip(starts, with_plans, strict=True):
        found += wrap(
            cell.plan["split"] if cell.plan else "",
            WIDTH,
            initial_indent=f"  {start}  ",
            subsequent_indent=" " * (len(start) + 4),
            break_on_hyphens=False,
        )
    return [*found, ""]


def _failures(sweep: Sweep) -> list[str]:
    """How often each cell is interrupted, and how often it saves what it has."""
    rows = [["", "devices", "fails each", "times", "checkpoint", "in", "saved each", "goodput", "async"]]
    for cell in sweep.cells:
        found, told = cell.survival, cell.failures
        if found is not None:
            rows.append(
                [
                    fit(cell.hardware, 24),
                    str(cell.devices),
                    duration(found.between_seconds),
                    "" if told is None else count(told["interruptions"]),
                    decimal_bytes(found.checkpoint_bytes),
                    duration(found.checkpoint_seconds),
                    duration(found.interval_seconds),
                    f"{found.goodput:.1%}",
                    f"{found.asynchronous_goodput:.1%}",
                ]
            )
    if len(rows) == 1:
        return []
    note = "(async: the goodput where checkpoints are written beside the next steps)"
    return ["failures and checkpoints:", *in_columns(rows, 1, gap=" "), note, ""]


def _verdict(sweep: Sweep) -> list[str]:
    """Which cell is the fastest, and which the cheapest."""
    fastest, cheapest = sweep.fastest, sweep.cheapest
    texts = []
    if fastest is not None:
        texts.append(f"The fastest: {described(fastest)}.")
    if cheapest is not None:
        among = "" if sweep.budget.days is None else f" in {sweep.budget.days:g} days"
        texts.append(f"The cheapest{among}: {described(cheapest)}.")
    return [line for text in texts for line in wrap(text, WIDTH, break_on_hyphens=False)]


def described(cell: Cell) -> str:
    """A cell in words: ``64 devices of dgx-h100, 31.2 days, at a cost of 120 k``."""
    cost = "" if cell.cost is None else f", at a cost of {count(cell.cost)}"
    days = "" if cell.days is None else f", {measured(cell.days)} days"
    return f"{cell.devices} devices of {fit(cell.hardware, 40)} with batches of {cell.batch}{days}{cost}"
