"""Predicted against measured: the virtual seconds of a trace's events next to their wall seconds.

The two are shown side by side and never mixed. A few sentences say how they may differ: virtual time may be that of
other hardware, and wall time includes waiting for a core if devices took turns on the cores.
"""

import numpy as np

from parallelism.display.quantities import fit
from parallelism.events import Columns, Table
from parallelism.hardware import CALIBRATED
from parallelism.trace import HOLDING, Trace
from vcluster.report.naming import LONGEST_NAME, Data, groups, numbered, without_numbers

MOST_ROWS = 24
TURNS = 0.9
"""Fraction of the wall time of compute in which a device has a core. Below it, devices took turns."""
_LONGEST = 1e100


def measured(trace: Trace) -> Data:
    """Both times of the events, by kind and name. Empty if the trace lacks one of them."""
    columns = trace.columns
    wall = columns.numbers("wall_duration_seconds").astype(np.float64)
    both = ~columns.present("parent") & columns.isin("kind", HOLDING) & (wall > 0) & (wall < _LONGEST)
    both &= (columns.numbers("duration_seconds") < _LONGEST) & (
        abs(columns.numbers("wall_start_seconds")) < _LONGEST
    )
    events, wall = columns.take(both), wall[both]
    virtual = events.numbers("duration_seconds").astype(np.float64)
    if not len(events) or not virtual.any():
        return {}
    names, place = _names(events)
    count, walls, virtuals = (np.bincount(place, weights, len(names)) for weights in (None, wall, virtual))
    rows = [
        {"name": names[i], "count": int(count[i]), "virtual": float(virtuals[i]), "wall": float(walls[i])}
        for i in np.argsort(-walls, kind="stable")[:MOST_ROWS].tolist()
    ]
    more = len(names) - len(rows)
    if trace.makespan_seconds < _LONGEST:
        begin = events.numbers("wall_start_seconds").astype(np.float64)
        rows.insert(
            0,
            {
                "name": "the whole run",
                "count": len(events),
                "virtual": trace.makespan_seconds,
                "wall": float((begin + wall).max() - begin.min()),
            },
        )
    return {"rows": rows, "more": more, "words": _words(trace, events, wall)}


def _names(events: Columns) -> tuple[list[str], np.ndarray]:
    """A name for each group of equal events: compute by its phase or its name without numbers, others by kind."""
    descriptions, _, place = groups(events, "kind", "name", "phase")
    labels = []
    for kind, name, phase in descriptions:
        words = (
            f"compute, phase {phase}" if phase is not None and kind == "compute" else without_numbers(name)
        )
        labels.append(
            words if kind in ("collective", words) or words.startswith("compute") else f"{kind} {words}"
        )
    names, number = numbered(labels)
    return names, number[place]


def _words(trace: Trace, events: Columns, wall: np.ndarray) -> list[str]:
    """Sentences that say what the two times measure and why they may differ."""
    if trace.hardware in (None, CALIBRATED):
        sentences = [
            "Both times are of the machine that ran it: their ratio is the error of the virtual time."
        ]
        if trace.hardware is None:
            sentences.append(
                "The machine was not calibrated, so messages and collectives take no virtual time."
            )
    else:
        sentences = [
            f"Virtual time is that of {fit(trace.hardware or '', LONGEST_NAME)}, wall time that of the "
            "machine which ran it: their ratio says how much faster that hardware is. It is not an error."
        ]
    sentences.append(
        "Both include waiting for other devices."
        + (" Virtual time follows from declared flops and bytes." if trace.compute == "modelled" else "")
    )
    own = events.isin("kind", {"compute"}) & ~_declared(events)
    spent = float(wall[own].sum())
    cpu = float(events.numbers("cpu_seconds")[own].astype(np.float64).sum())
    if 0 < spent < _LONGEST and 0 < cpu < _LONGEST:
        share = min(1.0, cpu / spent)
        sentences.append(
            f"Compute had a core for {share:.0%} of its wall time"
            + (
                ": devices took turns, because there were more of them than free cores. Wall time then depends on how "
                "crowded the machine was; compare runs with no more devices than cores."
                if share < TURNS
                else "."
            )
        )
    return sentences


def _declared(events: Columns) -> np.ndarray:
    """Whether the seconds of each event were declared, not measured."""
    column = events["seconds"]
    if isinstance(column, Table):
        return np.array([value is not None for value in column.values], bool)[column.index]
    return np.ones(len(events), bool)
