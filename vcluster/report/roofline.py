"""The roofline of a trace: its computes by flops per byte, below the limits of the hardware.

Williams, Waterman and Patterson, *Roofline: An Insightful Visual Performance Model for Multicore Architectures*, 2009:
a compute reaches at most ``min(peak, bandwidth * flops / bytes)``. Flops and bytes are the declared ones, seconds are
virtual. Computes with equal names and nearly equal numbers share a point.
"""

from itertools import starmap

import numpy as np

from parallelism.arrays import Floats
from parallelism.display.quantities import fit
from parallelism.events import Columns
from parallelism.hardware import CALIBRATED, ITEMSIZE, Hardware, rate_name
from parallelism.timeline import priced_scale
from parallelism.trace import PARTS, Trace, part_of
from vcluster.report.naming import LONGEST_NAME, Data, groups, numbered, without_numbers

MOST_POINTS = 1500
MOST_ROOFS = 4
_BINS = 12
"""Number of bins per factor of ten in which computes share a point."""
_LARGEST = 1e100


def roofline(trace: Trace, hardware: Hardware | None) -> Data:
    """The points and the roofs. Empty if no compute has flops, bytes and a duration."""
    events, seconds = _whole(trace.columns)
    flops, nbytes = (events.numbers(field).astype(np.float64) for field in ("flops", "nbytes"))
    nbytes *= _scale(trace, events)
    is_drawn = (flops > 0) & (nbytes > 0) & (seconds > 0)
    x, y = (np.divide(flops, below, out=np.zeros(len(flops)), where=is_drawn) for below in (nbytes, seconds))
    shown = (
        is_drawn
        & (x > 1 / _LARGEST)
        & (x < _LARGEST)
        & (y > 1 / _LARGEST)
        & (y < _LARGEST)
        & (seconds < _LARGEST)
    )
    if not shown.any():
        return {}
    count = int(np.count_nonzero(shown))
    return {
        **_points(events.take(shown), x[shown], y[shown], seconds[shown]),
        **_roofs(trace, events.take(shown), hardware),
        "of": count,
        "without": len(events) - count,
        "compute": trace.compute,
    }


def hardware_named(trace: Trace) -> Hardware | None:
    """The hardware that a trace names, if it is a preset or this machine and calibrated. Otherwise None."""
    try:
        if trace.hardware == CALIBRATED:
            return Hardware.of_host()
        return Hardware.preset(trace.hardware) if trace.hardware in Hardware.presets() else None
    except ValueError:
        return None


def _whole(columns: Columns) -> tuple[Columns, Floats]:
    """The computes and their seconds. If calls divide a compute into pieces, the seconds are the sum of its pieces."""
    computes = columns.take(columns.isin("kind", {"compute"}) & ~columns.present("parent"))
    computes = computes.take(np.argsort(computes.numbers("rank"), kind="stable"))
    begins = np.asarray(computes.numbers("part") == 0)
    begins[:1] = True
    seconds = np.zeros(int(np.count_nonzero(begins)))
    np.add.at(seconds, np.cumsum(begins) - 1, computes.numbers("duration_seconds").astype(np.float64))
    return computes.take(begins), seconds


def _scale(trace: Trace, events: Columns) -> Floats:
    """For each event, the number of bytes as which one of its bytes was priced."""
    priced = trace.priced_dtype if trace.priced_dtype in ITEMSIZE else None  # a file may say anything
    return events.mapped("dtype", lambda dtype: priced_scale(dtype or "float64", priced), np.float64)


def _points(events: Columns, x: Floats, y: Floats, seconds: Floats) -> Data:
    pairs, _, which = groups(events, "name", "phase")
    words, number = numbered(list(starmap(_of_name_or_phase, pairs)))
    name = number[which]
    parts = part_of(events).astype(np.int64)
    key = np.stack([name, parts, np.round(_BINS * np.log10(x)), np.round(_BINS * np.log10(y))], axis=1)
    _, first, place, count = np.unique(
        key, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    spent = np.bincount(place.ravel(), seconds)
    largest = np.argsort(-spent, kind="stable")[:MOST_POINTS]
    largest = largest[np.lexsort((y[first[largest]], x[first[largest]]))]
    return {
        "points": [
            {
                "name": words[name[i]],
                "part": PARTS[parts[i]],
                "x": float(x[i]),
                "y": float(y[i]),
                "seconds": float(spent[j]),
                "count": int(count[j]),
            }
            for i, j in zip(first[largest].tolist(), largest.tolist(), strict=True)
        ],
        "more": len(spent) - len(largest),
    }


def _of_name_or_phase(name: str, phase: str | None) -> str:
    return without_numbers(name) if phase is None else f"phase {phase}"


def _roofs(trace: Trace, events: Columns, hardware: Hardware | None) -> Data:
    if hardware is None:
        name = "this machine" if trace.hardware is None else fit(trace.hardware, LONGEST_NAME)
        return {"hardware": name, "roofs": []}
    roofs = [{"dtype": dtype, "peak": peak} for dtype, peak in hardware.flops_per_second.items()]
    usual = roofs[0]["dtype"]
    dtypes = (
        [trace.priced_dtype] if trace.priced_dtype else [dtype or usual for dtype in events.distinct("dtype")]
    )
    occurring = {rate_name(str(dtype)) for dtype in dtypes}
    shown = [roof for roof in roofs if roof["dtype"] in occurring] or roofs[:1]
    return {
        "hardware": hardware.name,
        "bandwidth": hardware.memory_bytes_per_second,
        "roofs": shown[:MOST_ROOFS],
    }
