"""The picture of a sweep: the days of each cell against its cost, or against its device hours where there are no prices."""

from __future__ import annotations

from html import escape
from itertools import groupby

from parallelism.budgets.sweep import Cell, Sweep
from parallelism.budgets.table import described
from parallelism.display.chart import LETTER, Chart, ticks
from parallelism.display.quantities import count, given

WIDTH, HEIGHT, MARGIN = 620.0, 300.0, 76.0
ROOM = 1.08
"""The axes end so many times as far as the last point."""


def picture(sweep: Sweep) -> str:
    """An SVG picture: a line for each hardware, through its cells; a point tells its plan when it is pointed at.

    Empty if no cell has a plan.
    """
    cells = [cell for cell in sweep.cells if cell.days is not None]
    if not cells:
        return ""
    has_prices = sweep.budget.prices is not None
    up = "cost" if has_prices else "device hours"
    most = ROOM * max(_up(cell) for cell in cells)
    days = ROOM * max(*(_across(cell) for cell in cells), sweep.budget.days or 0.0)
    chart = Chart(f"{up} over days", begin=0.0, span=days, width=WIDTH, margin=MARGIN)
    chart.text(8, chart.y + 12, up, quiet=True)
    floor = chart.y + 24 + HEIGHT
    for tick in ticks(most, 5):
        y = floor - tick / most * HEIGHT
        chart.add(f'<path d="M{MARGIN} {y:.1f}h{WIDTH}" stroke="var(--line)"/>')
        chart.text(MARGIN - 6, y + 4, given(tick).strip(), anchor="end", quiet=True)
    last = -1e9
    for tick in ticks(days, 7):
        last = chart.tick(chart.at(tick), floor, f"{tick:g}", last)
    chart.text(MARGIN + WIDTH, floor + 34, "days", anchor="end", quiet=True)
    if sweep.budget.days is not None:
        _deadline(chart, sweep.budget.days, floor)
    names = list(dict.fromkeys(cell.hardware for cell in cells))
    for hardware, group in groupby(cells, key=lambda cell: cell.hardware):
        _line(chart, list(group), _ink(names.index(hardware)), floor, most)
    chart.y = floor + 46
    chart.legend([(_ink(number), "", name) for number, name in enumerate(names)])
    return chart.svg(alone=False)


def _deadline(chart: Chart, days: float, floor: float) -> None:
    x = chart.at(days)
    chart.add(f'<path d="M{x:.1f} {floor:.1f}v{-HEIGHT:.1f}" stroke="var(--quiet)" stroke-dasharray="4 3"/>')
    words = f"{days:g} days"
    chart.text(max(x - 4, MARGIN + len(words) * LETTER), floor - HEIGHT + 10, words, anchor="end", quiet=True)


def _line(chart: Chart, cells: list[Cell], ink: str, floor: float, most: float) -> None:
    """The points of a hardware, joined in their order."""
    points = [(chart.at(_across(cell)), floor - _up(cell) / most * HEIGHT) for cell in cells]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    chart.add(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="1.5"/>')
    for (x, y), cell in zip(points, cells, strict=True):
        split = cell.plan["split"] if cell.plan else ""
        tip = escape(f"{described(cell)}: {split}")
        chart.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{ink}"><title>{tip}</title></circle>')
        chart.text(x + 8, y - 6, count(cell.devices or 0), size=11)


def _across(cell: Cell) -> float:
    assert cell.days is not None
    return cell.days


def _up(cell: Cell) -> float:
    found = cell.device_hours if cell.cost is None else cell.cost
    assert found is not None
    return found


def _ink(number: int) -> str:
    hue = (210 + number * 137) % 360
    return f"light-dark(hsl({hue},75%,36%),hsl({hue},75%,70%))"
