"""Curves of time and of bandwidth over size, both axes logarithmic: two SVG files for each number of devices.

This is the only module that needs matplotlib, which comes with the ``bench`` extra.  vcluster's curves are thick and
solid with round marks, the peers' thin and broken with other marks, so that they differ without their colours, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks.cases import COLLECTIVES
from benchmarks.results import Measurement, Results
from benchmarks.systems import OURS
from benchmarks.tables import nbytes_text
from benchmarks.traffic import CopyRates

PANELS = (*(operation for operation in COLLECTIVES if operation != "barrier"), "round_trip")
SMALLEST_LEAST = 1 << 16
"""Below, memory traffic is not what bounds an operation."""
_TICKS = tuple(8 << shift for shift in range(0, 40, 5))


@dataclass(frozen=True)
class _Style:
    label: str
    colour: str
    line: Any
    mark: str
    width: float = 1.2
    filled: bool = True


_STYLES = {
    (OURS, "private"): _Style("vcluster", "#0b4f9e", "-", "o", 2.2),
    (OURS, "shared"): _Style("vcluster, arrays in shared memory", "#3f8fdf", "-", "o", 2.2, filled=False),
    ("mpich", "private"): _Style("MPICH (mpi4py)", "#b4441c", (0, (5, 2)), "s"),
    ("jax", "private"): _Style("JAX, host devices", "#2c7a3f", (0, (3, 1.5, 1, 1.5)), "^"),
    ("gloo", "private"): _Style("gloo (torch)", "#7d4aa8", (0, (1.5, 1.5)), "D"),
}
_LEAST = _Style("least memory traffic, at the rate of copies", "#777777", (0, (1, 1)), "")


def draw(results: Results, folder: Path, suffix: str = ".svg") -> list[Path]:
    """Draw what the peers suite found, or else the collectives suite, into ``folder``; the files."""
    found = [m for m in list(results.of("peers")) or list(results.of("collectives")) if not m.fresh]
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for devices in dict.fromkeys(m.devices for m in found):
        mine = [m for m in found if m.devices == devices]
        if not any(m.operation in PANELS for m in mine):
            continue
        for what, title, label, of in (
            ("latency", "time by size of the buffer", "time", lambda nbytes, seconds: seconds),
            ("bandwidth", "size of the buffer by time", "bandwidth", lambda nbytes, seconds: nbytes / seconds),
        ):
            path = folder / f"{what}-{devices}{suffix}"
            _save(_picture(mine, devices, f"{devices} devices: {title}", label, of), path)
            files.append(path)
    return files


Of = Callable[[int, float], float]


def _picture(found: list[Measurement], devices: int, title: str, label: str, of: Of) -> Figure:
    panels = [operation for operation in PANELS if any(m.operation == operation for m in found)]
    rows = -(-len(panels) // 3)
    figure = Figure(figsize=(10, 0.9 + 2.75 * rows), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, min(3, len(panels)), sharex=True, sharey=True, squeeze=False)
    rates = CopyRates(found)
    handles: dict[str, Any] = {}
    for number, (axis, operation) in enumerate(zip(axes.flat, panels, strict=False)):
        _panel(axis, [m for m in found if m.operation == operation], handles, of)
        _least(axis, found, operation, devices, rates, handles, of)
        axis.set_title(operation, fontsize=11, loc="left")
        if number % 3 == 0:
            axis.set_ylabel(label)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    _scales(axes.flat[0], label)
    figure.suptitle(title, fontsize=12)
    order = [style.label for style in (*_STYLES.values(), _LEAST) if style.label in handles]
    figure.legend(
        [handles[name] for name in order], order, loc="outside lower center", ncols=3, frameon=False, fontsize=10,
        handlelength=3.5,
    )
    return figure


def _panel(axis: Any, found: list[Measurement], handles: dict[str, Any], of: Of) -> None:
    for (system, memory), style in _STYLES.items():
        points = sorted(
            ((m.nbytes, m.seconds) for m in found if (m.system, m.memory) == (system, memory)),
            key=lambda point: point[0],
        )
        if not points:
            continue
        sizes = [nbytes for nbytes, _ in points]
        lines = axis.plot(
            sizes, [of(nbytes, seconds.median) for nbytes, seconds in points], color=style.colour, linestyle=style.line,
            linewidth=style.width, marker=style.mark, markersize=5, zorder=3 if system == OURS else 2,
            markerfacecolor=style.colour if style.filled else "white",
        )
        handles.setdefault(style.label, lines[0])
        axis.fill_between(
            sizes, [of(nbytes, seconds.low_quartile) for nbytes, seconds in points],
            [of(nbytes, seconds.high_quartile) for nbytes, seconds in points], color=style.colour, alpha=0.12, lw=0,
        )


def _least(
    axis: Any, found: list[Measurement], operation: str, devices: int, rates: CopyRates, handles: dict[str, Any], of: Of
) -> None:
    sizes = sorted({m.nbytes for m in found if m.operation == operation and m.nbytes >= SMALLEST_LEAST})
    points = [
        (nbytes, of(nbytes, seconds)) for nbytes in sizes
        if (seconds := rates.least_seconds(operation, nbytes, devices)) is not None
    ]
    if len(points) > 1:
        lines = axis.plot(*zip(*points, strict=True), color=_LEAST.colour, linestyle=_LEAST.line, linewidth=1.5)
        handles.setdefault(_LEAST.label, lines[0])


def _scales(axis: Any, label: str) -> None:
    """Of all panels: they share them."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    for panel in axis.figure.axes:
        panel.grid(which="major", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=9, length=3)
    axis.xaxis.set_major_locator(FixedLocator(_TICKS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: nbytes_text(round(nbytes))))
    axis.yaxis.set_major_locator(LogLocator(10, numticks=20))
    axis.yaxis.set_minor_locator(NullLocator())
    units = _TIMES if label == "time" else _RATES
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _with_unit(value, units)))


_TIMES = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_RATES = ((1.0, "B/s"), (1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s"))


def _with_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    """``100 µs``, ``10 GB/s``."""
    factor, unit = next((pair for pair in reversed(units) if value >= 0.999 * pair[0]), units[0])
    return f"{value / factor:.4g} {unit}"


def _save(figure: Figure, path: Path) -> None:
    """The same figures give the same file."""
    with mpl.rc_context({"svg.hashsalt": "vcluster"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=100)
