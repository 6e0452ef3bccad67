"""The operations of a trace by their names: how often each rank ran one, and its seconds, flops and bytes.

    totals_by_operation(trace.columns)[rank][Operation("compute", "matmul", stage=0, phase="F")].seconds

Left out are events inside collectives, memory events, and compute that costs nothing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from parallelism.events import Columns
from parallelism.events.columns import sums as sums_of


class Operation(NamedTuple):
    """What the events of one row have in common."""

    kind: str
    """The kind of the events: ``compute``, ``collective``, ``send``, ``recv``, ``wait``, ``h2d`` or ``d2h``."""
    name: str
    """The name of the op or of the collective."""
    stage: int | None = None
    phase: str | None = None
    """The kind of the action of a pipeline that computes: F, B, I or W, or R for recomputation."""
    axes: tuple[str, ...] | None = None
    """The mesh axes of a collective."""


class OperationTotals(NamedTuple):
    """Sums over the events of one row."""

    times: int = 0
    """The number of events."""
    seconds: float = 0.0
    """Seconds of virtual time from the start of each event to its end; those of several events may be the same."""
    flops: float = 0.0
    nbytes: float = 0.0
    """Bytes of memory traffic."""
    bytes_sent: int = 0
    bytes_received: int = 0
    messages: int = 0

    def plus(self, other: "OperationTotals", times: int = 1) -> "OperationTotals":
        """The sums over these events and ``times`` the ``other`` ones."""
        sums: Any = [mine + times * theirs for mine, theirs in zip(self, other, strict=True)]
        return OperationTotals(*sums)


ByOperation = Mapping[Operation, OperationTotals]
_SUMMED = ("duration_seconds", "flops", "nbytes", "bytes_sent", "bytes_received", "messages")


def totals_by_operation(columns: Columns) -> dict[int, ByOperation]:
    """For each rank that has events, the totals of its operations, in the order of their first events."""
    columns = columns.only("rank", "parent", *Operation._fields, *_SUMMED)
    counts = ~columns.isin("kind", {"compute", "memory"})
    counts |= columns.isin("kind", {"compute"}) & np.any(
        [columns.numbers(name) != 0 for name in _SUMMED], axis=0
    )
    columns = columns.take(counts & ~columns.present("parent"))
    _, first, place = np.unique(
        columns.key("rank", *Operation._fields), return_index=True, return_inverse=True
    )
    summed = [sums_of(columns.numbers(name), place, len(first)) for name in _SUMMED]
    times = np.bincount(place, minlength=len(first)).tolist()
    rows = columns.take(first)
    operations = map(Operation, *(rows.values(name) for name in Operation._fields))
    found = sorted(zip(first.tolist(), rows.values("rank"), operations, times, *summed, strict=True))
    by_rank: dict[int, dict[Operation, OperationTotals]] = {}
    for _, rank, operation, *total in found:
        by_rank.setdefault(rank, {})[operation] = OperationTotals(*total)
    return dict(by_rank)
