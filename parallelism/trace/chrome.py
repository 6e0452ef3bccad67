"""Traces for Perfetto, ``chrome://tracing`` and HolisticTraceAnalysis: a process per device, virtual microseconds.

The format is Google's "Trace Event Format": X a slice, b and e the ends of one that may overlap others, s and f the
ends of an arrow, C a counter, M a name.  Perfetto sorts by time and binds an end of an arrow to the slice that was
begun last on that track; so among records of one time those stand first that an arrow needs, its end right behind.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from parallelism.events import DEFAULTS, Event
from parallelism.timeline import sends_of_recvs
from parallelism.trace.trace import Trace
from parallelism.whole_files import written_whole

Record = dict[str, Any]

_LATE = 2.0**20
"""Microseconds by which all is later for HolisticTraceAnalysis: it keeps starts in the smallest integers that hold
them, and the ends of a short trace would not fit."""

TRACKS = ("compute", "collective", "send", "receive")
_COMPUTE, _COLLECTIVE, _SEND, _RECEIVE = range(4)
_TRACK_OF = {"compute": _COMPUTE, "send": _SEND, "d2h": _SEND, "recv": _RECEIVE, "h2d": _RECEIVE}
_PLACED = frozenset(("rank", "kind", "name", "start_seconds", "duration_seconds"))
_OPTIONAL = [(name, default) for name, default in DEFAULTS.items() if name not in _PLACED]


def save_chrome(path: str | PathLike[str], trace: Trace) -> None:
    """Writes ``trace`` as JSON in which every device is a process with a track for each of `TRACKS`.

    Asynchronous operations are drawn beside the tracks, because they overlap; an arrow joins a message's send and
    recv; what is held of each category of memory is a counter.  What happened inside a collective is left out.  All
    other fields of an event, wall time too, are its args.
    """
    _write(path, trace, _records(trace))


def holistic(trace: Trace, directory: str | PathLike[str]) -> tuple[Path, ...]:
    """Writes a file for each rank, as HolisticTraceAnalysis wants them: ``TraceAnalysis(trace_dir=directory)``.

    It takes for communication what is named like a kernel of NCCL, and needs a stream for each slice; so a collective
    is called ``ncclDevKernel_all_reduce`` here, and asynchronous operations are slices of a stream of their own.  The
    directory is made if it is not there; the result is the files.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {rank: directory / f"rank{rank}.json" for rank in trace.ranks}
    for rank, path in paths.items():
        _write(path, trace, _kernels(trace.filter(rank=rank)), rank)
    return tuple(paths.values())


def _write(
    path: str | PathLike[str], trace: Trace, records: Iterable[Record], rank: int | None = None
) -> None:
    rank = next(iter(trace.ranks), 0) if rank is None else rank
    about = {"backend": "vcluster", "rank": rank, "world_size": trace.size}
    with written_whole(path) as file:
        file.write('{"schemaVersion":1,"displayTimeUnit":"ms",\n')
        # With a space after each colon, and before any name: HolisticTraceAnalysis looks for the first "rank": 0.
        file.write(f'"distributedInfo":{json.dumps(about)},\n"traceEvents":[\n')
        comma = ""
        for record in records:
            file.write(comma + json.dumps(record, separators=(",", ":")))
            comma = ",\n"
        file.write("\n]}\n")


def _records(trace: Trace) -> Iterator[Record]:
    for rank in trace.ranks:
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        yield from (
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
            for track, name in enumerate(TRACKS)
        )
    arrows = {
        place: number
        for places in sends_of_recvs(trace.columns)
        for number, place in enumerate(places.tolist())
    }
    ends = list[Record]()  # of arrows to recvs that took time: their slices are begun before
    others, arrivals = list[Record](), list[Record]()
    for place, event in enumerate(trace):
        if event.parent is not None or event.kind == "memory":
            continue
        slices = list(_slices(event))
        if place not in arrows:
            others += slices
            continue
        start, end = event.start_seconds * 1e6, _end(event)
        arrow = {
            "name": "message",
            "cat": "message",
            "id": arrows[place],
            "pid": event.rank,
            "tid": _track(event),
        }
        if event.work is not None:  # no slice of a track: the arrow gets a point to hold on to
            others += slices
            slices = [
                _base(event)
                | {"ph": "X", "ts": start if event.kind == "send" else end, "dur": 0, "args": _args(event)}
            ]
        if event.kind == "send":
            yield from slices
            yield arrow | {"ph": "s", "ts": start}
        elif event.work is None and end > start:
            others += slices
            ends.append(arrow | {"ph": "f", "bp": "e", "ts": end})
        else:
            arrivals += [*slices, arrow | {"ph": "f", "bp": "e", "ts": end}]
    yield from chain(ends, arrivals, others, _counters(trace))


def _slices(event: Event) -> Iterator[Record]:
    start, end = event.start_seconds * 1e6, _end(event)
    base = _base(event)
    if event.work is None or event.kind == "wait":
        yield base | {"ph": "X", "ts": start, "dur": event.duration_seconds * 1e6, "args": _args(event)}
    else:
        base["id"] = f"{event.rank}.{event.work}"
        yield from (base | {"ph": "b", "ts": start, "args": _args(event)}, base | {"ph": "e", "ts": end})


def _base(event: Event) -> Record:
    return {"name": event.name, "cat": event.kind, "pid": event.rank, "tid": _track(event)}


def _args(event: Event) -> Record:
    """All fields that are not at their default, and the two keys without which HolisticTraceAnalysis reads no slice."""
    fields = {name: value for name, default in _OPTIONAL if (value := getattr(event, name)) != default}
    return fields | {"stream": _track(event), "correlation": event.serial}


def _end(event: Event) -> float:
    return event.start_seconds * 1e6 + event.duration_seconds * 1e6


def _track(event: Event) -> int:
    # A wait is called after what it waits for.
    return _TRACK_OF.get(event.name if event.kind == "wait" else event.kind, _COLLECTIVE)


def _counters(trace: Trace) -> Iterator[Record]:
    """The bytes that each rank holds of each category, after each event that changes them."""
    held: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for event in trace.filter(kind="memory"):
        now = held[event.rank]
        now[event.name] = now.get(event.name, 0) + event.nbytes
        yield {
            "ph": "C",
            "name": "memory",
            "pid": event.rank,
            "ts": event.start_seconds * 1e6,
            "args": dict(now),
        }


def _stream_of(event: Event) -> int:
    """The stream of an event: 1 is compute, 2 collectives and messages, 3 asynchronous ones."""
    if event.kind == "compute":
        return 1
    return 2 if event.work is None else 3


def _kernels(trace: Trace) -> Iterator[Record]:
    """The events that took time, as slices, each on its stream."""
    for event in trace:
        if event.parent is not None or event.kind in ("memory", "wait") or not event.duration_seconds > 0:
            continue
        stream = _stream_of(event)
        kernel = {"compute": "", "h2d": "Memcpy HtoD ", "d2h": "Memcpy DtoH "}.get(
            event.kind, "ncclDevKernel_"
        )
        yield {
            "ph": "X",
            "cat": "kernel",
            "name": kernel + event.name,
            "pid": event.rank,
            "tid": stream,
            "ts": _LATE + event.start_seconds * 1e6,
            "dur": event.duration_seconds * 1e6,
            "args": _args(event) | {"stream": stream, "device": event.rank},
        }
