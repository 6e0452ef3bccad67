"""`StepParts`: where the time of a step goes, op by op, from a trace in which repeated actions are pieces.

A piece is one compute event that stands for the events of an action (`parallelism.simulation.repeated_stages`).  Equal
pieces stand for the same events.  So these events are priced and summed once, and the sums are multiplied by the number
of pieces.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Bools, Floats, Ints
from parallelism.events import Columns
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.steady_steps import Repetition
from parallelism.trace import (
    PARTS,
    STEP_PARTS,
    ByOperation,
    Operation,
    OperationTotals,
    Split,
    StepSplit,
    Trace,
    part_of,
    split,
    step_part_of,
    step_split,
    totals_by_operation,
)
from parallelism.trace.transfers import Moving, moving


@dataclass(frozen=True)
class StepParts:
    """The parts of the time of each simulated device.  Each device stands for all its equals.

    >>> from parallelism import Mesh, models, step_parts
    >>> parts = step_parts(models.mlp((1024, 4096, 1024), 8192), "dgx-h100", mesh=Mesh(dp=8))
    >>> parts.devices, parts.slowest
    ({0: 8}, 0)
    """

    trace: Trace
    """The step, folded; repeated work may be one compute event."""
    split: Mapping[int, Split]
    """By rank: the seconds of each part, which add up to the makespan; collectives are ``communication``."""
    step_split: Mapping[int, StepSplit]
    """By rank: finer parts, which add up to the makespan, too."""
    by_operation: Mapping[int, ByOperation]
    """By rank: the totals of each op and collective."""
    devices: Mapping[int, int]
    """By rank: the number of equal devices that it stands for."""

    @classmethod
    def of_all(cls, trace: Trace) -> "StepParts":
        """The parts of a trace of all devices and events."""
        moved = moving(trace)
        return cls(
            trace,
            split(trace, moved),
            step_split(trace, moved),
            totals_by_operation(trace.columns),
            dict.fromkeys(trace.ranks, 1),
        )

    @property
    def slowest(self) -> int:
        """The rank that waits least for others, the first of several: what it does lasts as long as the step."""
        return min(self.step_split, key=lambda rank: (self.step_split[rank].bubble, rank))


def parts_of(
    trace: Trace,
    events: Sequence[DeviceEvents],
    lengths: Sequence[int],
    devices: Sequence[int],
    priced: Callable[[int, DeviceEvents], Columns],
    same_price: Callable[[int, DeviceEvents], Any],
    more: Repetition | None = None,
) -> StepParts:
    """The parts of a trace of representatives, and of ``more`` of its periods.

    ``events``, ``lengths`` and ``devices`` are those of each rank of the trace, in order.  ``priced(rank, events)``
    returns columns with the seconds of the events that a piece stands for;
    ``same_price(rank, events)`` is equal on ranks on which these are equal.
    """
    columns, moved = trace.columns, moving(trace)
    times = np.ones(len(columns), np.int64)
    if more is not None:
        times[more.within] += more.times
    coarse = _Shares(part_of, split, trace, moved, len(PARTS), times, more)
    fine = _Shares(step_part_of, step_split, trace, moved, len(STEP_PARTS), times, more)
    whole = np.ones(len(columns), np.bool_)
    inside: list[tuple[int, int, int, ByOperation]] = []
    known: dict[Any, _Piece] = {}
    start = 0
    for rank, each, length in zip(trace.ranks, events, lengths, strict=True):
        at = start + np.concatenate([np.zeros(0, np.int64), *(piece.places for piece in each.pieces)])
        whole[at] = False
        different = {id(piece.events): piece.events for piece in each.pieces}
        costs: dict[int, _Piece] = {}
        for key, stands_for in different.items():
            alike = key, same_price(rank, stands_for)
            if alike not in known:
                cost = priced(rank, stands_for)
                known[alike] = _Piece(
                    totals_by_operation(cost).get(rank, {}),
                    *(shares.of_piece(rank, cost, trace) for shares in (coarse, fine)),
                )
            costs[key] = known[alike]
        count: Counter[tuple[int, int]] = Counter()
        for piece in each.pieces:
            count[id(piece.events), piece.stage] += int(times[start + np.asarray(piece.places)].sum())
        for (key, stage), number in count.items():
            inside.append((rank, number, stage, costs[key].totals))
        for shares in (coarse, fine):
            shares.take(rank, at)
        for (key, _), number in count.items():
            coarse.seconds[rank] += number * costs[key].split
            fine.seconds[rank] += number * costs[key].step_split
        start += length
    totals = _totals(columns, whole, more, inside)
    return StepParts(
        trace,
        {rank: Split(*each.tolist()) for rank, each in coarse.seconds.items()},
        {rank: StepSplit(*each.tolist()) for rank, each in fine.seconds.items()},
        totals,
        dict(zip(trace.ranks, devices, strict=True)),
    )


def _totals(
    columns: Columns,
    whole: Bools,
    more: Repetition | None,
    inside: Sequence[tuple[int, int, int, ByOperation]],
) -> dict[int, dict[Operation, OperationTotals]]:
    """The totals of the operations of each rank: of the ``whole`` events, which are no pieces, and of those ``inside``.

    Of pieces ``inside`` has the rank, how many they are, their stage, and what each stands for.
    """
    totals = {rank: dict(each) for rank, each in totals_by_operation(columns.take(whole)).items()}
    again = {} if more is None else totals_by_operation(columns.take(whole & more.within))
    for rank, own in again.items():
        for operation, total in own.items():
            totals[rank][operation] = totals[rank][operation].plus(total, more.times if more else 0)
    for rank, number, stage, found in inside:
        mine = totals.setdefault(rank, {}) if found else {}
        for operation, total in found.items():
            own_stage = operation if operation.stage is None else operation._replace(stage=stage)
            mine[own_stage] = mine.get(own_stage, OperationTotals()).plus(total, number)
    return totals


class _Piece(NamedTuple):
    """What a piece stands for, once."""

    totals: ByOperation
    split: Floats
    step_split: Floats
    """The seconds of each part, as `split`."""


class _Shares:
    """The seconds of each part by rank, of which pieces are replaced by the events that they stand for."""

    def __init__(
        self,
        part_of: Callable[[Columns], npt.NDArray[np.int8]],
        split: Callable[..., Mapping[int, Any]],
        trace: Trace,
        moved: Moving,
        count: int,
        times: Ints,
        more: Repetition | None,
    ) -> None:
        self.part_of, self.split, self.count, self.parts = part_of, split, count, part_of(trace.columns)
        self.durations: Floats = trace.columns.numbers("duration_seconds") * times
        self.seconds = {rank: np.array(each) for rank, each in split(trace, moved).items()}
        if more is not None:
            for rank, each in split(trace, moved, (more.begin, more.end)).items():
                self.seconds[rank] += more.times * np.array(each)

    def take(self, rank: int, at: Ints) -> None:
        """Takes the events at these places out of the parts of a rank."""
        self.seconds[rank] -= self._by_part(self.parts[at], self.durations[at])

    def of_piece(self, rank: int, columns: Columns, trace: Trace) -> Floats:
        """The seconds of each part of events that a piece on a rank of the ``trace`` stands for."""
        if columns.isin("kind", {"wait"}).any():  # what is behind compute is in no part
            alone = Trace(
                columns,
                trace.size,
                mesh_shape=trace.mesh_shape,
                hardware=trace.hardware,
                ranks=[rank],
                priced=trace.priced,
            )
            return np.array(self.split(alone)[rank])
        return self._by_part(self.part_of(columns), columns.numbers("duration_seconds"))

    def _by_part(self, parts: npt.NDArray[np.int8], seconds: Floats) -> Floats:
        """The seconds of each part."""
        return np.bincount(parts, seconds, self.count).astype(np.float64)  # of no events it is of integers
