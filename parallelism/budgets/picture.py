"""The picture of a sweep: the days of each cell against its cost, or against its device hours where there are no prices."""

from __future__ import annotations

from itertools import groupby

from parallelism.budgets.sweep import Cell, Sweep, days_of
from parallelism.budgets.table import described
from parallelism.display.curve_chart import ink_of
from parallelism.display.markup import Markup, broad_or_narrow
from parallelism.display.point_chart import PointChart
from parallelism.display.quantities import count

WIDTH, NARROW, MARGIN = 620.0, 220.0, 76.0


def picture(sweep: Sweep) -> Markup:
    """A picture: a line for each hardware, through its cells; a point tells its plan when it is pointed at.

    Empty if no cell has a plan.
    """
    cells = [cell for cell in sweep.cells if cell.days is not None]
    if not cells:
        return Markup("")
    return broad_or_narrow(_drawn(sweep, cells, WIDTH), _drawn(sweep, cells, NARROW))


def _drawn(sweep: Sweep, cells: list[Cell], width: float) -> str:
    chart = PointChart(
        f"{_up_name(sweep)} over days",
        across="days",
        up=_up_name(sweep),
        furthest=max(*map(days_of, cells), sweep.budget.days or 0.0),
        highest=max(map(_up, cells)),
        width=width,
        margin=MARGIN,
    )
    if sweep.budget.days is not None:
        chart.limit(sweep.budget.days, f"{sweep.budget.days:g} days")
    names = list(dict.fromkeys(cell.hardware for cell in cells))
    for hardware, group in groupby(cells, key=lambda cell: cell.hardware):
        _line(chart, list(group), ink_of(names.index(hardware)))
    chart.legend([(ink_of(number), "", name) for number, name in enumerate(names)])
    return chart.svg(alone=False)


def _up_name(sweep: Sweep) -> str:
    return "device hours" if sweep.budget.prices is None else "cost"


def _line(chart: PointChart, cells: list[Cell], ink: str) -> None:
    """The points of a hardware, joined in their order."""
    chart.line([(days_of(cell), _up(cell)) for cell in cells], ink)
    for cell in cells:
        split = cell.plan["split"] if cell.plan else ""
        chart.point(days_of(cell), _up(cell), ink, f"{described(cell)}: {split}")
        chart.label(days_of(cell), _up(cell), count(cell.devices or 0))


def _up(cell: Cell) -> float:
    found = cell.device_hours if cell.cost is None else cell.cost
    assert found is not None
    return found
