"""The timelines of traces as HTML, on one axis of virtual time: for each device its compute, and below it what moves.

It is as wide as the page.  Waits are thin, data that moves is thicker, compute is thickest.  Events too short to be
seen are drawn together, and so is compute without a phase, such as an update, in a trace that has phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite

import numpy as np

from parallelism.arrays import Floats, Ints
from parallelism.display.chart import ticks
from parallelism.display.drawing import kept
from parallelism.display.markup import Markup, note
from parallelism.display.quantities import fit, plural, seconds
from parallelism.trace.breakdown import PARTS, part_of
from parallelism.trace.trace import Trace
from parallelism.trace.transfers import HOLDING, Moving, moving, rounded

_MOST_ROWS, _MOST_BARS = 16, 6000
_SEEN = 1e-3
"""The part of a picture's width that is wide enough to be seen."""
_ROW, _COMPUTE, _MOVES, _WAITS = 34, 17, 8, 2
_FILLS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "other": "other",
    "communication": "communication",
    "wait": "wait",
}
_WAIT, _OTHER = len(PARTS), PARTS.index("other")
"""The numbers of waiting, after those of the parts of a trace, and of compute without a phase."""

_Bar = tuple[float, float, int, str]
"""Start, end, number of the part and tooltip of what is drawn."""


def timelines(traces: Sequence[tuple[str, Trace]], moved: Sequence[Moving] | None = None) -> Markup:
    """The timelines of traces below each other, each under its title if it has one."""
    moved = [moving(trace) for _, trace in traces] if moved is None else moved
    span = max((trace.makespan_seconds for _, trace in traces), default=0.0)
    if not (span > 0 and isfinite(span)):
        return Markup("")
    parts, present = [], set[int]()
    for (title, trace), since in zip(traces, moved, strict=True):
        places = kept(len(trace.ranks), _MOST_ROWS)  # None where some are left out
        shown = [trace.ranks[place] for place in places if place is not None]
        bars = _bars(trace, since, shown, span, _MOST_BARS // max(1, len(shown) * len(traces)))
        present |= {part for row in bars.values() for _, _, part, _ in row}
        if _of_several(present):
            bars = {rank: _joined(row, span) for rank, row in bars.items()}
        labels, height = "", 0
        lines: list[str] = []
        for place in places:
            word = "…" if place is None else f"rank {trace.ranks[place]}"
            labels += f'<div style="height:{_ROW}px;line-height:20px">{word}</div>'
            lines += _row([] if place is None else bars[trace.ranks[place]], height, span)
            height += _ROW
        parts.append(
            (f'<div class="title" style="margin-top:12px">{escape(title)}</div>' if title else "")
            + f'<div style="display:flex;gap:8px"><div style="flex:none">{labels}</div>'
            f'<svg style="flex:1;min-width:0" width="100%" height="{height + 22}" role="img" font-size="12" '
            f'fill="var(--quiet)" aria-label="timeline of {plural(len(shown), "device")}">{"".join(lines)}'
            f"{''.join(_axis(span, height))}</svg></div>"
        )
        if len(shown) < len(trace.ranks):
            parts.append(note(f"{len(shown)} of {len(trace.ranks)} devices are drawn"))
    return Markup("".join(parts) + _legend(present, _moved_names([trace for _, trace in traces])))


def _moved_names(traces: Sequence[Trace]) -> list[str]:
    """What moves data, by name: collectives, and messages together."""
    names, messages = set[str](), False
    for trace in traces:
        columns = trace.columns
        whole = ~columns.present("parent")
        names |= {
            *columns.take(np.flatnonzero(whole & columns.isin("kind", {"collective"}))).distinct("name")
        }
        messages = messages or bool(np.any(columns.isin("kind", {"send", "recv"})))
    return [*sorted(names), *["messages"] * messages]


def _of_several(parts: set[int]) -> bool:
    """Whether there is compute of a phase."""
    return any(part < _OTHER for part in parts)


def _joined(bars: Sequence[_Bar], span: float) -> list[_Bar]:
    """The bars, of which those of compute without a phase that directly follow each other are one."""
    joined = [bar for bar in bars if bar[2] != _OTHER]
    row = sorted(bar for bar in bars if bar[2] == _OTHER)
    while row:
        count = 1
        while count < len(row) and row[count][0] - row[count - 1][1] < _SEEN * span:
            count += 1
        low = row[0][0]
        high = row[count - 1][1]
        together = f"{count} bars without a phase"
        tip = row[0][3] if count == 1 else f"{together}, {seconds(high - low)}"
        joined.append((low, high, _OTHER, tip))
        row = row[count:]
    return joined


def _bars(
    trace: Trace,
    moved: Moving,
    ranks: Sequence[int],
    span: float,
    most: int,
) -> dict[int, list[_Bar]]:
    """By rank what is drawn: about ``most`` bars for each part of a rank."""
    columns = trace.columns
    start = columns.numbers("start_seconds").astype(np.float64)
    end = start + columns.numbers("duration_seconds")
    begin = float(start.min())
    rank = columns.numbers("rank")
    part = part_of(columns).astype(np.int64)
    drawn = ~columns.present("parent") & columns.isin("kind", HOLDING) & (end > start) & np.isin(rank, ranks)
    blocking = columns.isin("kind", {"collective", "recv", "wait"})
    since = np.where(blocking, np.clip(rounded(moved.since, end), start, end), start)
    since = np.where(columns.isin("kind", {"wait"}), end, since)  # its operation has the transfer
    names = columns.values("name")
    bars: dict[int, list[_Bar]] = {rank: [] for rank in ranks}
    least = span / max(50, most)
    for first, last, parts in ((start, since, np.full(len(part), _WAIT)), (since, end, part)):
        here = drawn & (last > first)
        for at in np.flatnonzero(here & (last - first >= least)).tolist():
            waiting = " waiting" if parts[at] == _WAIT else ""
            told = f"{names[at]}, {seconds(float(last[at] - first[at]))}{waiting}"
            bar = float(first[at]) - begin, float(last[at]) - begin, int(parts[at]), told
            bars[int(rank[at])].append(bar)
        short = np.flatnonzero(here & (last - first < least))
        for own_rank, bar in _short(
            rank[short], parts[short], first[short] - begin, last[short] - begin, least
        ):
            bars[own_rank].append(bar)
    return bars


def _short(
    ranks: Ints, parts: Ints, starts: Floats, ends: Floats, least: float
) -> Iterator[tuple[int, _Bar]]:
    """Events that are too short to be seen: those of a rank and part that begin in the same ``least`` seconds are one bar.
    It comes with its rank."""
    places = (starts / least).astype(np.int64)
    keys, inverse, counts = np.unique(
        np.stack([ranks, parts, places]), axis=1, return_inverse=True, return_counts=True
    )
    lows, highs = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(lows, inverse.ravel(), starts)
    np.maximum.at(highs, inverse.ravel(), ends)
    joined = zip(keys.T.tolist(), lows.tolist(), highs.tolist(), counts.tolist(), strict=True)
    for (rank, part, _), low, high, count in joined:
        yield rank, (low, high, part, plural(count, "short event"))


def _row(bars: Sequence[_Bar], y: int, span: float) -> Iterator[str]:
    yield f'<rect x="0" y="{y}" width="100%" height="{_COMPUTE + _MOVES + 1}" fill="var(--panel)"/>'
    for low, high, part, tip in bars:
        name = _name(part)
        top, height = {"communication": (y + _COMPUTE + 1, _MOVES), "wait": (y + _COMPUTE + 4, _WAITS)}.get(
            name, (y, _COMPUTE)
        )
        yield (
            f'<rect x="{100 * low / span:.3f}%" y="{top}" width="{max(100 * (high - low) / span, 0.05):.3f}%" '
            f'height="{height}" fill="var(--{_FILLS[name]})" stroke="var(--quiet)" stroke-width=".4">'
            f"<title>{escape(fit(tip, 90))}</title></rect>"
        )


def _anchor(share: float) -> str:
    """Where a label stands beside its tick, so that those at the ends of the axis stay inside the picture."""
    if share < 5:
        return "start"
    return "end" if share > 93 else "middle"


def _axis(span: float, y: int) -> Iterator[str]:
    for tick in ticks(span, 5):
        share = 100 * tick / span
        anchor = _anchor(share)
        yield f'<rect x="{min(share, 99.8):.2f}%" y="{y - 2}" width="1" height="5" fill="var(--quiet)"/>'
        yield f'<text x="{share:.2f}%" y="{y + 16}" text-anchor="{anchor}">{seconds(tick)}</text>'


def _name(part: int) -> str:
    return "wait" if part == _WAIT else PARTS[part]


def _legend(parts: set[int], moved: Sequence[str]) -> str:
    """What the colours are; ``moved`` are the names of what moves data."""
    names = [*map(_name, sorted(parts))]
    told = fit(": ".join(["data moves", *filter(None, [", ".join(moved)])]), 60)
    words = {
        "communication": told,
        "wait": "waits",
        "other": "compute without a phase, such as an update" if _of_several(parts) else "compute",
    }
    swatch = (
        '<span style="display:inline-block;width:22px;height:{}px;background:var(--{});border:1px solid '
        'var(--line);margin-right:6px;vertical-align:middle"></span>{}'
    )
    heights = {"communication": 8, "wait": 3}
    entries = "".join(
        f"<span>{swatch.format(heights.get(name, 12), _FILLS[name], escape(words.get(name, name)))}</span>"
        for name in names
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:2px 18px;font-size:13px;margin:2px 0 6px">{entries}</div>'
