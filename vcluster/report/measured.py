"""Predicted against measured: the virtual seconds of what a trace did, and those that the clock on the wall said.

The two are never added up or mixed: they stand side by side.  How far apart they may be is said with them: virtual time
may be that of other hardware; and where devices took turns on the cores, the wall says how crowded the machine was.
"""

from __future__ import annotations

import numpy as np

from parallelism.display.quantities import fit
from parallelism.events import Columns, Table
from parallelism.hardware import CALIBRATED
from parallelism.trace import HOLDING, Trace
from vcluster.report.naming import LONGEST_NAME, Data, numbered, without_numbers

MOST_ROWS = 24
TURNS = 0.9
"""Of the wall time of its compute, what a device has a core for; with less, devices took turns."""
_LONGEST = 1e100


def measured(trace: Trace) -> Data:
    """What was done, by kind and name, with both its times; nothing where one of them is not there."""
    columns = trace.columns
    wall = columns.numbers("wall_duration_seconds").astype(np.float64)
    both = ~columns.present("parent") & columns.isin("kind", HOLDING) & (wall > 0) & (wall < _LONGEST)
    both &= (columns.numbers("duration_seconds") < _LONGEST) & (abs(columns.numbers("wall_start_seconds")) < _LONGEST)
    events, wall = columns.take(both), wall[both]
    virtual = events.numbers("duration_seconds").astype(np.float64)
    if not len(events) or not virtual.any():
        return {}
    names, place = _names(events)
    count, walls, virtuals = (np.bincount(place, weights, len(names)) for weights in (None, wall, virtual))
    longest = np.argsort(-walls, kind="stable")
    rows = [{"name": names[i], "count": int(count[i]), "virtual": float(virtuals[i]), "wall": float(walls[i])}
            for i in longest[:MOST_ROWS].tolist()]
    begin = columns.numbers("wall_start_seconds")[both].astype(np.float64)
    whole = {"name": "the whole run", "count": len(events), "virtual": trace.makespan_seconds,
             "wall": float((begin + wall).max() - begin.min())}
    return {"rows": [whole, *rows] if trace.makespan_seconds < _LONGEST else rows, "more": len(names) - len(rows),
            "words": _words(trace, events, wall)}


def _names(events: Columns) -> tuple[list[str], np.ndarray]:
    """What is alike has one name: of compute its own or its phase, without numbers; else its kind or collective."""
    fields = ("kind", "name", "phase")
    _, first, place = np.unique(events.key(*fields), return_index=True, return_inverse=True)
    looks = zip(*(events.take(first).values(field) for field in fields), strict=True)
    told = []
    for kind, name, phase in looks:
        words = f"compute, phase {phase}" if phase is not None and kind == "compute" else without_numbers(name)
        told.append(words if kind in ("collective", words) or words.startswith("compute") else f"{kind} {words}")
    names, number = numbered(told)
    return names, number[place.ravel()]


def _words(trace: Trace, events: Columns, wall: np.ndarray) -> list[str]:
    """What the two times are of, and what may lie between them."""
    if trace.hardware in (None, CALIBRATED):
        said = ["Both times are of the machine that ran it: their ratio says how far off the virtual one is."]
        if trace.hardware is None:
            said.append("Messages and collectives are free in the virtual time of a machine that was not calibrated.")
    else:
        said = [f"Virtual time is that of {fit(trace.hardware or '', LONGEST_NAME)}, wall time that of the machine "
                "which ran it: their ratio says how much faster the one is, not how far off."]
    said.append("Both count waiting for others." + (
        " Virtual time is of what was declared." if trace.compute == "modelled" else ""))
    own = events.isin("kind", {"compute"}) & ~_told(events)
    spent, cpu = float(wall[own].sum()), float(events.numbers("cpu_seconds")[own].astype(np.float64).sum())
    if 0 < spent < _LONGEST and 0 < cpu < _LONGEST:
        share = min(1.0, cpu / spent)
        said.append(f"Compute had a core for {share:.0%} of its wall time" + (
            ": devices took turns, there were more of them than free cores, and so the wall says how crowded the "
            "machine was; compare runs with no more devices than cores." if share < TURNS else "."))
    return said


def _told(events: Columns) -> np.ndarray:
    """Whose seconds were declared, not taken."""
    column = events["seconds"]
    if isinstance(column, Table):
        return np.array([value is not None for value in column.values], bool)[column.index]
    return np.ones(len(events), bool)
