"""`StepParts`: where the time of a step goes, op by op, from a trace in which repeated actions are pieces.

A piece is one compute event that stands for the events of an action (`parallelism.simulation.repeated_stages`).  Equal
pieces stand for the same events.  So these events are priced and summed once, and the sums are multiplied by the number
of pieces.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parallelism.events import Columns
from parallelism.simulation.device_events import DeviceEvents
from parallelism.trace import PARTS, ByOperation, OperationTotals, Split, Trace, part_of, split, totals_by_operation


@dataclass(frozen=True)
class StepParts:
    """The parts of the time of each simulated device.  Each device stands for all its equals."""

    trace: Trace
    """The step, folded; repeated work may be one compute event."""
    split: Mapping[int, Split]
    """By rank: the seconds of each part, which add up to the makespan; collectives are ``communication``."""
    by_operation: Mapping[int, ByOperation]
    """By rank: the totals of each op and collective."""


def parts_of(
    trace: Trace, events: Sequence[DeviceEvents], lengths: Sequence[int],
    priced: Callable[[int, DeviceEvents], Columns],
) -> StepParts:
    """The parts of a trace of representatives.

    ``events`` and ``lengths`` are those of each rank of the trace, in order.  ``priced(rank, events)`` returns columns
    with the seconds of the events that a piece stands for.
    """
    columns, parts = trace.columns, part_of(trace.columns)
    whole, shares = np.ones(len(columns), np.bool_), {rank: np.array(each) for rank, each in split(trace).items()}
    inside: list[tuple[int, int, Columns]] = []
    start = 0
    for rank, each, length in zip(trace.ranks, events, lengths, strict=True):
        at = start + np.concatenate([np.zeros(0, np.int64), *(piece.places for piece in each.pieces)])
        whole[at] = False
        shares[rank] -= _by_part(parts[at], columns.numbers("duration_seconds")[at])
        different = {id(piece.events): piece.events for piece in each.pieces}
        costs = {key: priced(rank, stands_for) for key, stands_for in different.items()}
        count: Counter[tuple[int, int]] = Counter()
        for piece in each.pieces:
            count[id(piece.events), piece.stage] += len(piece.places)
        for (key, stage), times in count.items():
            cost = costs[key]
            inside.append((times, stage, cost))
            shares[rank] += times * _by_part(part_of(cost), cost.numbers("duration_seconds"))
        start += length
    totals = {rank: dict(each) for rank, each in totals_by_operation(columns.take(whole)).items()}
    for times, stage, cost in inside:
        for rank, found in totals_by_operation(cost).items():
            mine = totals.setdefault(rank, {})
            for operation, total in found.items():
                own = operation if operation.stage is None else operation._replace(stage=stage)
                mine[own] = mine.get(own, OperationTotals()).plus(total, times)
    return StepParts(trace, {rank: Split(*each.tolist()) for rank, each in shares.items()}, totals)


def _by_part(parts: npt.NDArray[np.int8], seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The seconds of each part."""
    return np.bincount(parts, seconds, len(PARTS)).astype(np.float64)   # of no events it is of integers
