"""Traces for Perfetto and ``chrome://tracing``: a process per device, virtual time in microseconds.

The format is Google's "Trace Event Format": X a slice, b and e the ends of one that may overlap others, s and f
the ends of an arrow, M a name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelism.columns import DEFAULTS
from parallelism.event import Event

if TYPE_CHECKING:
    from parallelism.trace import Trace

_TRACKS = ("compute", "communication")
_COMMUNICATION = frozenset(("collective", "send", "recv", "wait", "h2d", "d2h"))
_PLACED = frozenset(("rank", "kind", "name", "start_seconds", "duration_seconds"))


def save_chrome(path: str | PathLike[str], trace: Trace) -> None:
    """Writes ``trace`` as JSON in which every device is a process with two tracks, compute and communication.

    Asynchronous operations are drawn beside the tracks, because they overlap; an arrow joins a message's send and
    recv.  What happened inside a collective is left out.  All other fields of an event, wall time too, are its args.
    """
    with Path(path).open("w", encoding="ascii") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for record in _records(trace):
            file.write(separator + json.dumps(record, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def _records(trace: Trace) -> Iterator[dict[str, Any]]:
    for rank in trace.ranks:
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for track, name in enumerate(_TRACKS):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
    optional = [(name, default) for name, default in DEFAULTS.items() if name not in _PLACED]
    sent = {_message(event) for event in trace.filter(kind="send") if _is_message(event)}
    received = {_message(event) for event in trace.filter(kind="recv") if _is_message(event)}
    arrows = {message: number for number, message in enumerate(sorted(sent & received, key=repr))}
    for event in trace:
        if event.parent is not None or event.kind == "memory":
            continue
        start, duration = event.start_seconds * 1e6, event.duration_seconds * 1e6
        track = int(event.kind in _COMMUNICATION)
        base: dict[str, Any] = {"name": event.name, "cat": event.kind, "pid": event.rank, "tid": track}
        args = {name: value for name, default in optional if (value := getattr(event, name)) != default}
        if event.work is None or event.kind == "wait":
            yield base | {"ph": "X", "ts": start, "dur": duration, "args": args}
        else:
            base["id"] = f"{event.rank}.{event.work}"
            yield base | {"ph": "b", "ts": start, "args": args}
            yield base | {"ph": "e", "ts": start + duration}
        if event.kind in ("send", "recv") and (number := arrows.get(_message(event))) is not None:
            arrow = {"name": "message", "cat": "message", "id": number, "pid": event.rank, "tid": track}
            yield arrow | ({"ph": "s", "ts": start} if event.kind == "send" else
                           {"ph": "f", "bp": "e", "ts": start + duration})


def _is_message(event: Event) -> bool:
    return event.parent is None and event.peer is not None and event.peer >= 0


def _message(event: Event) -> tuple[Any, ...]:
    """What a send and its recv have in common: source, destination, tag and number."""
    ends = (event.rank, event.peer) if event.kind == "send" else (event.peer, event.rank)
    return (*ends, event.tag, event.sequence)
