"""Curves over logarithmic axes, as a table of text and as an SVG picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, inf, isfinite, log10

from parallelism.display.chart import LETTER, Chart
from parallelism.display.drawing import Drawing
from parallelism.display.markup import figure, wide
from parallelism.display.quantities import in_columns, plural, shortened

_WHOLE, _HEIGHT = 290.0, 170.0
_MARKS = ("circle", "square", "diamond", "triangle", "cross")


def curves(
    title: str,
    places: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    across: str,
    up: str,
    place_text: Callable[[float], str] = "{:g}".format,
    value_text: Callable[[float], str] = "{:g}".format,
    ratio: int = 10,
) -> Drawing:
    """Curves by name, each with a value at each of ``places``; both axes are logarithmic.

    ``across`` and ``up`` name the axes, ``place_text`` and ``value_text`` write their numbers, and lines are drawn at
    powers of ``ratio``.  The text is a table with a row for each place.  Curves differ in colour and in their marks; a
    mark tells its numbers when it is pointed at.

    ``ValueError`` if places do not grow, if a curve has another number of values than places, and for numbers that have
    no logarithm.

    >>> print(curves("Steps", (2, 4, 8), {"ring": (2, 6, 14), "tree": (2, 4, 6)}, across="ranks", up="steps"))
    Steps
    ranks  ring  tree
        2     2     2
        4     6     4
        8    14     6
    """
    xs = [float(place) for place in places]
    grow = all(low < high for low, high in pairwise(xs))
    if len(xs) < 2 or not series or not grow or xs[0] <= 0 or not isfinite(xs[-1]):
        raise ValueError(
            "curves need two places or more that are above 0 and grow, and one curve at least; got "
            f"{shortened(places)} for {plural(len(series), 'curve')}"
        )
    for name, values in series.items():
        if len(values) != len(xs) or not all(value > 0 and isfinite(value) for value in values):
            raise ValueError(
                f"curve {name!r} needs {len(xs)} values above 0, one for each place; got {shortened(values)}"
            )
    columns = [[across, *map(place_text, xs)]]
    for name, values in series.items():
        columns.append([name, *map(value_text, values)])
    rows = list(zip(*columns, strict=True))
    return Drawing(
        "\n".join([title, *in_columns(rows, 0)]),
        figure(wide(_svg(title, xs, series, across, up, place_text, value_text, ratio)), title=title),
    )


def _svg(
    title: str,
    xs: Sequence[float],
    series: Mapping[str, Sequence[float]],
    across: str,
    up: str,
    place_text: Callable[[float], str],
    value_text: Callable[[float], str],
    ratio: int,
) -> str:
    levels = _levels(min(map(min, series.values())), max(map(max, series.values())), ratio)
    margin = 12 + LETTER * max(len(value_text(level)) for level in levels)
    chart = Chart(
        f"{title}: {up} over {across}",
        begin=log10(xs[0]),
        span=log10(xs[-1] / xs[0]),
        width=_WHOLE - margin,
        margin=margin,
    )
    low, high = log10(levels[0]), log10(levels[-1])
    chart.text(8, chart.y + 12, up, quiet=True)
    top = chart.y + 24
    floor_y = top + _HEIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return chart.at(log10(x)), floor_y - (log10(y) - low) * _HEIGHT / (high - low)

    for level in levels:
        y = at(xs[0], level)[1]
        chart.add(f'<path d="M{margin:.1f} {y:.1f}h{chart.width:.1f}" stroke="var(--line)"/>')
        chart.text(margin - 5, y + 4, value_text(level), anchor="end", quiet=True)
    last = -inf
    for x in xs:
        last = chart.tick(at(x, levels[0])[0], floor_y, place_text(x), last)
    chart.text(margin + chart.width, floor_y + 34, across, anchor="end", quiet=True)
    for number, (name, values) in enumerate(series.items()):
        points = [at(x, value) for x, value in zip(xs, values, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        chart.add(f'<polyline points="{path}" fill="none" stroke="{ink_of(number)}" stroke-width="2"/>')
        for (x, y), place, value in zip(points, xs, values, strict=True):
            tip = f"{name}: {value_text(value)} {up} at {place_text(place)} {across}"
            chart.add(_mark(number, x, y, tip))
    chart.y = floor_y + 44
    x = 8.0
    for number, name in enumerate(series):
        needed = 26 + len(name) * LETTER
        if x > 8 and x + needed > margin + chart.width:
            x, chart.y = 8.0, chart.y + 20
        chart.add(
            f'<path d="M{x:.1f} {chart.y + 8:.1f}h18" stroke="{ink_of(number)}" stroke-width="2"/>',
            _mark(number, x + 9, chart.y + 8, name),
        )
        chart.text(x + 22, chart.y + 12, name)
        x += needed + 8
    chart.y += 20
    return chart.svg(alone=False)


def _levels(low: float, high: float, ratio: int) -> list[float]:
    """Powers of ``ratio`` from ``low`` or below to ``high`` or above, at most eight."""
    first, last = (log10(value) / log10(ratio) for value in (low, high))
    first = floor(first + 1e-9)
    step = max(1, ceil((last - first - 1e-9) / 6))
    return [
        float(ratio) ** power
        for power in range(first, max(ceil(last - 1e-9), first + 1) + step, step)
        if power < last + step - 1e-9 or power == first + step
    ]


def ink_of(number: int) -> str:
    """The colour of a curve: curves that follow each other differ most."""
    hue = (210 + number * 137) % 360
    return f"light-dark(hsl({hue},75%,36%),hsl({hue},75%,70%))"


def _mark(number: int, x: float, y: float, tip: str) -> str:
    """A mark with a tooltip: curves that lie on each other can still be told apart."""
    paths = {
        "square": f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z",
        "diamond": f"M{x - 5:.1f} {y:.1f}l5 -5l5 5l-5 5z",
        "triangle": f"M{x - 5:.1f} {y + 4:.1f}h10l-5 -9z",
        "cross": f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8",
    }
    kind, ink = _MARKS[number % len(_MARKS)], ink_of(number)
    style = f'fill="var(--paper)" stroke="{ink}" stroke-width="1.5"'
    tip = f"<title>{escape(tip)}</title>"
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}>{tip}</circle>'
    return f'<path d="{paths[kind]}" {style}>{tip}</path>'
