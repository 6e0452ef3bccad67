"""Assert the communication of a run: the number of operations and the bytes.

run = cluster.run(kernel, x)
assert_communication(run.trace, all_reduce=2, bytes_received=48)
assert_communication(run.trace.filter(rank=0, axes="tp"), all_reduce=1, others=0)
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from parallelism.algorithms import KINDS, NAMED_OTHERWISE
from parallelism.display import in_columns
from parallelism.operation import ranks_in_words
from parallelism.spelling import did_you_mean

if TYPE_CHECKING:
    from parallelism.trace import Event, Trace

TOTALS = ("bytes_received", "bytes_sent", "messages")
OTHER_OPERATIONS = ("reshard", "send", "recv")
"""Names of events besides the kinds of collectives. ``shift`` is a permute, and ``sendrecv`` is a send and a recv."""

MOST_LINES = 40

Expected = int | Sequence[int] | Mapping[int, int]


def assert_communication(trace: Trace, *, others: int | None = None, **expected: Expected) -> None:
    """Fail unless the trace has exactly the expected operations and bytes. The error shows both as a table.

    >>> from vcluster import VirtualCluster, assert_communication
    >>> with VirtualCluster(4, backend="thread") as cluster:
    ...     run = cluster.run(lambda device: device.all_reduce(1.0))
    >>> assert_communication(run.trace, all_reduce=1, others=0)

    ``expected``
        names of operations with their counts, as ``trace.count`` counts them (``all_reduce=2``: one for each group that
        took part), or ``bytes_received``, ``bytes_sent``, ``messages``: totals over all ranks, between devices only. A
        value may also be a sequence of numbers by rank, or a dict with the numbers of some ranks.
    ``others``
        the allowed number of operations with other names. None allows any number.

    Raises ``AssertionError``, or ``ValueError`` for a name that is neither an operation nor one of those totals.
    """
    __tracebackhide__ = True
    from parallelism.trace import Trace
    from parallelism.trace.trace import RECORDED_AS

    if not isinstance(trace, Trace):
        raise TypeError(
            f"assert_communication takes a trace, such as run.trace; got a {type(trace).__name__}"
        )
    known = (*TOTALS, *KINDS.records, *NAMED_OTHERWISE, *OTHER_OPERATIONS, "others")
    occurring = {event.name for event in trace if event.parent is None}
    for name in expected:
        if name not in known and name not in occurring:
            recorded = f"; it is recorded as {RECORDED_AS[name]!r}" if name in RECORDED_AS else ""
            hint = recorded or did_you_mean(name, known) or f"; the names are {', '.join(known)}"
            raise ValueError(f"a trace has no operation and no total {name!r}{hint}")
    rows = [row for name, numbers in expected.items() for row in _rows(trace, name, numbers)]
    if others is not None:
        names = {event.name for event in trace if _is_communication(event)} - expected.keys()
        extra = {name: trace.count(name) for name in sorted(names)}
        got = sum(extra.values())
        text = f"{got}: {', '.join(f'{count} {name}' for name, count in extra.items())}" if extra else "0"
        rows.append(("others", str(others), text, got == others))
    if not all(fits for *_, fits in rows):
        raise AssertionError(f"{_table(rows)}\n\nwhat took place:\n{_operations(trace)}")


def _rows(trace: Trace, name: str, expected: Expected) -> list[tuple[str, str, str, bool]]:
    if not isinstance(expected, Sequence | Mapping):
        got = _got(trace, name, None)
        text = str(got)
        if name in TOTALS and got != expected and len(trace.ranks) > 1:
            text += f": {_by_rank({rank: _got(trace, name, rank) for rank in trace.ranks})}"
        return [(name, str(expected), text, got == expected)]
    by_rank = dict(expected) if isinstance(expected, Mapping) else dict(enumerate(expected))
    if isinstance(expected, Sequence) and len(by_rank) != trace.size:
        raise ValueError(
            f"{name} must have one number for each of the {trace.size} ranks, got {len(by_rank)} numbers"
        )
    gots = {rank: _got(trace, name, rank) for rank in by_rank}
    return [
        (f"{name}, rank {rank}", str(number), str(gots[rank]), gots[rank] == number)
        for rank, number in by_rank.items()
    ]


def _got(trace: Trace, name: str, rank: int | None) -> int:
    return int(getattr(trace, name)(rank)) if name in TOTALS else trace.count(name, rank)


def _by_rank(numbers: Mapping[int, int]) -> str:
    if len(set(numbers.values())) == 1:
        return f"{next(iter(numbers.values()))} on every rank"
    return ", ".join(f"{number} on rank {rank}" for rank, number in numbers.items())


def _table(rows: Sequence[tuple[str, str, str, bool]]) -> str:
    lines = [("", "expected", "got", True), *rows]
    names, middles = max(len(line[0]) for line in lines), max(len(line[1]) for line in lines)
    told = ["the communication differs from what was expected"]
    for name, expected, got, fits in lines:
        mark = "" if fits else ">"
        told.append(f"{mark:2}{name:<{names}}  {expected:>{middles}}  {got}".rstrip())
    return "\n".join(told)


def _is_communication(event: Event) -> bool:
    """Whether the event is an operation of its own between devices."""
    return event.parent is None and (
        event.kind == "collective"
        or (event.kind in ("send", "recv") and event.peer is not None and event.peer >= 0)
    )


def _operations(trace: Trace) -> str:
    """One line for each operation and line of code. Ranks with equal operations share a line, in order of the first."""
    operations: defaultdict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
    for event in filter(_is_communication, trace):
        over = ""
        if event.axes:
            over = f" over {', '.join(event.axes)}"
        elif event.group:
            over = f" in {list(event.group)}"
        if event.peer is not None:
            over = f" {'to' if event.kind == 'send' else 'from'} rank {event.peer}"
        moved = f"sent {event.bytes_sent}" if event.kind == "send" else f"received {event.bytes_received}"
        operations[f"{event.name}{over}", f"{moved} B each", _short(event.location or "?")][event.rank] += 1
    rows = []
    for (operation, moved, where), counts in operations.items():
        least, most = min(counts.values()), max(counts.values())
        often = f"{least}" if least == most else f"{least} to {most}"
        rows.append(("", ranks_in_words(sorted(counts)), f"{often} x {operation}", moved, where))
    lines = in_columns(rows, 5)[:MOST_LINES] or ["  nothing"]
    return "\n".join(
        [*lines, *([f"  ... and {len(rows) - MOST_LINES} more"] if len(rows) > MOST_LINES else [])]
    )


def _short(location: str) -> str:
    """``file:line``, relative to the current directory if the file lies below it."""
    filename, colon, line = location.rpartition(":")
    try:
        near = os.path.relpath(filename)
    except (ValueError, OSError):
        return location
    return location if near.startswith(os.pardir) else f"{near}{colon}{line}"
