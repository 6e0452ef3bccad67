"""The content of the page as plain data: numbers as packed arrays, each word once, and nothing executable.

Each key of the payload is a section of the page. The page shows the sections that are present.
"""

from base64 import b64encode
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from parallelism.arrays import Array, Floats, Ints
from parallelism.display.quantities import fit, given, nbytes, rate, seconds
from parallelism.events import ABSENT, Columns, Table
from parallelism.hardware import Hardware
from parallelism.trace import HOLDING, PARTS, Moving, PathStep, Trace, part_of
from parallelism.trace.breakdown import MOST_RANKS, extremes, split
from parallelism.trace.collectives import collectives
from parallelism.trace.critical_path import critical_path
from parallelism.trace.transfers import asynchronous, moving, rounded
from vcluster.report.measured import measured
from vcluster.report.naming import Data
from vcluster.report.roofline import roofline
from vcluster.report.verdict import LONGEST, verdict

MOST_BARS = 1_000_000
"""Of a longer trace, the shortest events are left out of the timeline, and the page says so."""
MOST_STEPS = 200_000
MOST_MATRIX = 256
MOST_DEVICES = 1024
MOST_ROWS = 200
LONGEST_NAME = 120
_ASYNCHRONOUS_LANES = 3
_DETAILS = (
    "name",
    "kind",
    "stage",
    "microbatch",
    "phase",
    "peer",
    "axes",
    "algorithm",
    "priced_algorithm",
    "bytes_sent",
    "bytes_received",
    "flops",
    "location",
)


@np.errstate(all="ignore")
def payload(trace: Trace, *, most_bars: int = MOST_BARS, hardware: Hardware | None = None) -> Data:
    """The content of the page. ``hardware`` gives the roof of the roofline.

    The times of a forged trace may add up to more than a float holds; they are not drawn.
    """
    moved = moving(trace)
    by_rank = split(trace, moved)
    path = critical_path(trace, moved)
    rows = collectives(trace, moved)
    left_out: list[str] = []
    shown = trace.ranks[:MOST_DEVICES]
    if len(shown) < len(trace.ranks):
        left_out.append(
            f"The first {len(shown):,} of {len(trace.ranks):,} devices are shown; "
            "the verdict and the tables of collectives count all."
        )
    makespan = trace.makespan_seconds if trace.makespan_seconds < LONGEST else 0.0
    data: Data = {
        "title": f"Trace of {trace.devices_in_words}",
        "facts": _facts(trace),
        "verdict": [_clean(sentence, 400) for sentence in verdict(trace, by_rank, path, rows)],
        "parts": PARTS,
        "makespan": makespan,
        "ranks": [{"rank": rank, "place": _clean(_place(trace, rank), 60)} for rank in shown],
    }
    if makespan > 0:
        data["timeline"] = _timeline(trace, moved, path, shown, most_bars, left_out)
        data["split"] = {
            "rows": [by_rank[rank] for rank in shown],
            "folds": len(shown) > MOST_RANKS,
            "outside": [
                (word, shown.index(rank))
                for word, rank in extremes(by_rank, trace.peaks()).items()
                if rank in shown
            ],
            "whole": makespan * len(by_rank),
            "total": [sum(column) for column in zip(*by_rank.values(), strict=True)],
        }
        data["measured"] = measured(trace)
        found = roofline(trace, hardware)
        data["roofline"] = found if found.get("roofs") else {}
        if found and not found["roofs"]:
            data["facts"].append(("roofline", f"none, as the peak of {found['hardware']} is not known"))
    if rows:
        data["collectives"] = [
            [
                _clean(row.name),
                _clean(row.algorithm),
                _clean(", ".join(row.axes or "-")),
                f"{row.operations:,}",
                nbytes(row.bytes_received),
                seconds(row.seconds),
                rate(row.bus_bytes_per_second),
            ]
            for row in rows[:MOST_ROWS]
        ]
        if len(rows) > MOST_ROWS:
            left_out.append(f"The table shows the first {MOST_ROWS} of {len(rows):,} sorts of collectives.")
    if matrices := _matrices(trace, left_out):
        data["matrix"] = {"size": trace.size, "of": matrices}
    data |= {"memory": _memory(trace, shown), "left_out": left_out}
    return {
        key: value for key, value in data.items() if value or key not in ("measured", "roofline", "memory")
    }


def packed(numbers: Array) -> Data:
    """An array as base64 of its little-endian bytes. Integers use the smallest type that holds them."""
    kind = "f8"
    if numbers.dtype.kind in "iub":
        low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
        kind = next(
            (
                kind
                for kind in ("u1", "i1", "u2", "i2", "u4", "i4")
                if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max
            ),
            kind,
        )
    return {
        "type": kind,
        "data": b64encode(np.ascontiguousarray(numbers, f"<{kind}").tobytes()).decode("ascii"),
    }


def _clean(text: str, longest: int = LONGEST_NAME) -> str:
    return fit(text, longest)


def _place(trace: Trace, rank: int) -> str:
    return " ".join(f"{axis}={i}" for axis, i in _index(trace, rank))


def _index(trace: Trace, rank: int) -> tuple[tuple[str, int], ...]:
    """The rank's index on the mesh. A mesh from a file may have axes of any name, so it is not a `Mesh`."""
    axes, extents = zip(*trace.mesh_shape or (("", trace.size),), strict=True)
    return tuple(
        (axis, int(i)) for axis, i in zip(axes, np.unravel_index(rank, extents), strict=True) if axis
    )


def _facts(trace: Trace) -> list[tuple[str, str]]:
    facts = [
        ("hardware", _clean(trace.hardware or "")),
        ("mesh", _clean(", ".join(f"{axis}={n}" for axis, n in trace.mesh_shape or ()))),
        ("makespan, in virtual time", seconds(trace.makespan_seconds)),
        ("without compute, of the makespan", f"{trace.bubble_fraction:.1%}"),
        ("without compute, of the longest span", f"{trace.span_bubble_fraction:.1%}"),
        ("events", f"{len(trace):,}"),
        (
            "received from devices" if not trace.host_traffic else "received from the host",
            nbytes(trace.bytes_received()),
        ),
        ("declared", f"{given(trace.flops())}flop"),
    ]
    return [(name, fact) for name, fact in facts if fact]


def _timeline(
    trace: Trace,
    moved: Moving,
    path: Sequence[PathStep],
    shown: Sequence[int],
    most: int,
    left_out: list[str],
) -> Data:
    columns = trace.columns
    start, duration = (
        columns.numbers(name).astype(np.float64) for name in ("start_seconds", "duration_seconds")
    )
    begin, end = float(start.min()), start + duration
    drawn = ~columns.present("parent") & columns.isin("kind", HOLDING)
    long = drawn & (duration > 0)
    at = np.flatnonzero(long & (columns.numbers("rank") <= shown[-1]))
    if len(at) > most:
        at = at[np.sort(np.argsort(-duration[at], kind="stable")[:most])]
        left_out.append(
            f"The timeline shows the {most:,} longest of {np.count_nonzero(long):,} events that take time, "
            f"{duration[at].sum() / duration[drawn].sum():.1%} of all their time; the figures count every "
            "event."
        )
    lanes = _lanes(columns.take(at), start[at], end[at])
    ranks = np.searchsorted(np.array(shown), columns.numbers("rank")[at])
    order = np.lexsort((start[at], lanes, ranks))
    at, lanes, ranks = at[order], lanes[order], ranks[order]
    since = np.where(columns.isin("kind", {"collective", "recv", "wait"})[at], moved.since[at], start[at])
    since = np.clip(rounded(since, end[at]), start[at], end[at])
    if len(path) > MOST_STEPS:
        left_out.append(f"The last {MOST_STEPS:,} of the {len(path):,} steps of the critical path are drawn.")
    steps = np.array(path[-MOST_STEPS:], np.float64).reshape(-1, 3)
    of_path = columns.numbers("rank")[steps[:, 0].astype(np.int64)]
    return {
        "count": len(at),
        "points": int(np.count_nonzero(drawn & ~long)),
        "rank": packed(ranks),
        "lane": packed(lanes),
        "part": packed(part_of(columns)[at]),
        "start": packed(start[at] - begin),
        "duration": packed(duration[at]),
        "waited": packed(since - start[at]),
        "details": {name: _detail(columns, name, at) for name in _DETAILS if name in columns.columns},
        "path": {
            "rank": packed(np.searchsorted(np.array(shown), of_path)),
            "start": packed(steps[:, 1] - begin),
            "end": packed(steps[:, 2] - begin),
        },
    }


def _lanes(columns: Columns, start: Floats, end: Floats) -> Ints:
    """The lane of each event: 0 for compute, 1 for events that block the device, higher for asynchronous events."""
    lanes = np.where(columns.isin("kind", {"compute"}), 0, 1)
    at = np.flatnonzero(asynchronous(columns))
    ranks = columns.numbers("rank")
    free: dict[int, list[float]] = {}
    for i in at[np.lexsort((start[at], ranks[at]))].tolist():
        ends = free.setdefault(int(ranks[i]), [])
        lane = next((k for k, time in enumerate(ends) if time <= start[i]), len(ends))
        if lane == len(ends) and lane < _ASYNCHRONOUS_LANES:
            ends.append(0.0)
        lane = min(lane, _ASYNCHRONOUS_LANES - 1)  # further ones share the last lane
        ends[lane] = max(float(end[i]), ends[lane])
        lanes[i] = 2 + lane
    return lanes


def _detail(columns: Columns, name: str, at: Ints) -> Data:
    column = columns[name]
    if not isinstance(column, Table):
        numbers = column[at]
        if numbers.dtype.kind == "i" and np.any(numbers == ABSENT):
            numbers = np.where(numbers == ABSENT, np.nan, numbers)
        return packed(numbers)
    used, index = np.unique(column.index[at], return_inverse=True)
    return {"values": [_word(column.values[i]) for i in used], "index": packed(index)}


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return _clean(", ".join(map(str, value)))
    return _clean("" if value is None else str(value))


def _matrices(trace: Trace, left_out: list[str]) -> list[Data]:
    """The communication matrices: of everything, and by the axes of a collective or of a message's direction."""
    if trace.host_traffic or not trace.bytes_received():
        return []
    if trace.size > MOST_MATRIX:
        left_out.append(f"The communication matrix is shown for up to {MOST_MATRIX} devices.")
        return []
    columns = trace.columns
    by_axes = defaultdict(
        lambda: np.zeros((trace.size, trace.size), np.int64), all=trace.communication_matrix()
    )
    collectives = columns.isin("kind", {"collective"})
    for axes in sorted(
        columns.take(collectives).distinct("axes"), key=lambda axes: (axes is None, axes or ())
    ):
        some = trace._of(columns.take(collectives & columns.isin("axes", {axes})))
        by_axes["groups without axes" if axes is None else ", ".join(axes)] += some.communication_matrix()
    for source, target, amount in _cells(trace.filter(kind=("send", "recv")).communication_matrix()):
        ends = zip(_index(trace, source), _index(trace, target), strict=True)
        label = ", ".join(one[0] for one, other in ends if one != other) or "messages"
        by_axes[label][source, target] += amount
    return [
        {"label": _clean(label, 60), "cells": _cells(matrix), "total": nbytes(int(matrix.sum()))}
        for label, matrix in by_axes.items()
        if matrix.any()
    ]


def _cells(matrix: Ints) -> list[tuple[int, int, int]]:
    return [(source, target, int(matrix[source, target])) for source, target in np.argwhere(matrix).tolist()]


def _memory(trace: Trace, shown: Sequence[int]) -> Data:
    columns = trace.columns
    events = columns.take(
        columns.isin("kind", {"memory"}) & (columns.numbers("rank") <= max(shown, default=-1))
    )
    if not len(events):
        return {}
    events = events.take(np.argsort(events.numbers("rank"), kind="stable"))
    bounds = np.searchsorted(events.numbers("rank"), np.arange(trace.size + 1)).tolist()
    ranks = [rank for rank in shown if bounds[rank + 1] > bounds[rank]]
    names = _detail(events, "name", np.arange(len(events)))
    return {
        "categories": names["values"],
        "category": names["index"],
        "ranks": ranks,
        "bounds": [bounds[rank : rank + 2] for rank in ranks],
        "time": packed(events.numbers("start_seconds") - float(columns.numbers("start_seconds").min())),
        "nbytes": packed(events.numbers("nbytes").astype(np.float64)),
    }
