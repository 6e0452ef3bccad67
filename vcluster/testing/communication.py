"""Assert the communication of a run: the number of operations and the bytes.

    run = cluster.run(kernel, x)
    assert_communication(run.trace, all_reduce=2, bytes_received=48)
    assert_communication(run.trace.filter(rank=0, axes="tp"), all_reduce=1, others=0)
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from parallelism.algorithms import KINDS, NAMED_OTHERWISE
from parallelism.operation import ranks_in_words

if TYPE_CHECKING:
    from parallelism.trace import Event, Trace

TOTALS = ("bytes_received", "bytes_sent", "messages")
OTHER_OPERATIONS = ("reshard", "send", "recv")
"""Names of events besides the kinds of collectives. ``shift`` is a permute, and ``sendrecv`` is a send and a recv."""

MOST_LINES = 40

Expected = int | Sequence[int] | Mapping[int, int]


def assert_communication(trace: Trace, *, others: int | None = None, **expected: Expected) -> None:
    """Fail unless the trace has exactly the expected operations and bytes. The error shows both as a table.

    ``expected``
        names of operations with their counts, as ``trace.count`` counts them (``all_reduce=2``: one for each group that
        took part), or ``bytes_received``, ``bytes_sent``, ``messages``: totals over all ranks, between devices only. A
        value may also be a sequence of numbers by rank, or a dict with the numbers of some ranks.
    ``others``
        the allowed number of operations with other names. None allows any number.

    Raises ``AssertionError``, or ``ValueError`` for a name that is neither an operation nor one of those totals.
    """
    __tracebackhide__ = True
    operations = (*KINDS.records, *NAMED_OTHERWISE, *OTHER_OPERATIONS)
    occurring = {event.name for event in trace if event.parent is None}
    for name in expected:
        if name not in TOTALS and name not in operations and name not in occurring:
            known = (*TOTALS, *operations, "others")
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; the names are {', '.join(known)}"
            raise ValueError(f"a trace has no operation and no total {name!r}{hint}")
    rows: list[tuple[str, str, str, bool]] = []
    for name, numbers in expected.items():
        rows += _rows(trace, name, numbers)
    if others is not None:
        extra = Counter({name: trace.count(name) for name in _communicating(trace) - expected.keys()})
        got = extra.total()
        text = f"{got}: {', '.join(f'{count} {name}' for name, count in sorted(extra.items()))}" if extra else "0"
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
        raise ValueError(f"{name} must have one number for each of the {trace.size} ranks, got {len(by_rank)} numbers")
    rows = []
    for rank, number in by_rank.items():
        got = _got(trace, name, rank)
        rows.append((f"{name}, rank {rank}", str(number), str(got), got == number))
    return rows


def _got(trace: Trace, name: str, rank: int | None) -> int:
    return int(getattr(trace, name)(rank)) if name in TOTALS else trace.count(name, rank)


def _by_rank(numbers: Mapping[int, int]) -> str:
    if len(set(numbers.values())) == 1:
        return f"{next(iter(numbers.values()))} on every rank"
    return ", ".join(f"{number} on rank {rank}" for rank, number in numbers.items())


def _table(rows: Sequence[tuple[str, str, str, bool]]) -> str:
    lines = [("", "expected", "got", True), *rows]
    names, middles = max(len(line[0]) for line in lines), max(len(line[1]) for line in lines)
    return "\n".join(["the communication differs from what was expected", *(
        f"{'' if fits else '>':2}{name:<{names}}  {expected:>{middles}}  {got}".rstrip()
        for name, expected, got, fits in lines
    )])


def _communicating(trace: Trace) -> set[str]:
    return {event.name for event in trace if _is_communication(event)}


def _is_communication(event: Event) -> bool:
    """Whether the event is an operation of its own between devices."""
    return event.parent is None and (
        event.kind == "collective" or (event.kind in ("send", "recv") and event.peer is not None and event.peer >= 0)
    )


def _operations(trace: Trace) -> str:
    """One line for each operation and line of code. Ranks with equal operations share a line, in order of the first."""
    operations: dict[tuple[str, str, int], dict[int, int]] = {}
    for event in trace:
        if _is_communication(event):
            where = event.location or "?"
            over = f" over {', '.join(event.axes)}" if event.axes else f" in {list(event.group)}" if event.group else ""
            if event.peer is not None:
                over = f" {'to' if event.kind == 'send' else 'from'} rank {event.peer}"
            nbytes = event.bytes_received if event.kind != "send" else event.bytes_sent
            counts = operations.setdefault((f"{event.name}{over}", _short(where), nbytes), {})
            counts[event.rank] = counts.get(event.rank, 0) + 1
    if not operations:
        return "  nothing"
    rows = []
    for (operation, where, nbytes), counts in operations.items():
        ranks = ranks_in_words(sorted(counts))
        times = sorted(set(counts.values()))
        often = f"{times[0]} x " if len(times) == 1 else f"{times[0]} to {times[-1]} x "
        direction = "sent" if operation.startswith("send") else "received"
        rows.append((ranks, f"{often}{operation}", f"{direction} {nbytes} B each", where))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row[:3], widths, strict=True)) + f"  {row[3]}"
        for row in rows[:MOST_LINES]
    ]
    return "\n".join([*lines, *([f"  ... and {len(rows) - MOST_LINES} more"] if len(rows) > MOST_LINES else [])])


def _short(location: str) -> str:
    """``file:line``, relative to the current directory if the file lies below it."""
    filename, colon, line = location.rpartition(":")
    try:
        near = os.path.relpath(filename)
    except (ValueError, OSError):
        near = filename
    return f"{near if not near.startswith(os.pardir) else filename}{colon}{line}"
