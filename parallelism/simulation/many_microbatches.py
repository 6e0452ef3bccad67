"""`parts_of_many`: the parts of a step of many microbatches, from one of few that comes to a steady state."""

from collections.abc import Iterator, Sequence
from os import PathLike
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Ints
from parallelism.hardware import Hardware, Software
from parallelism.pipelining import Pipeline
from parallelism.simulation.operations import SimulatedOperation, StepOfMany
from parallelism.simulation.parts import StepParts
from parallelism.simulation.simulator import Folded, Simulation
from parallelism.simulation.steady_steps import Cut, Repetition, cuts_of, repetition
from parallelism.timeline import Pricing

WORTH = 6000
"""A step is simulated whole if fewer of its actions than that need not be."""
_FIRST, _SHARE = 1 / 6, 0.6
"""So much of a step is simulated at first, and at most, to find its steady state."""
_GROWTH = 1.6
"""Where a number of microbatches does not come to a steady state, so many times more may."""


class PartsOfMany(NamedTuple):
    """What is known of a step from one of fewer microbatches."""

    parts: StepParts
    """The parts of the whole step, with the trace of the one of fewer microbatches, which holds as much at its peak."""
    seconds: float
    """The time of the whole step."""


def parts_of_many(
    operation: SimulatedOperation, hardware: Hardware | str | PathLike[str]
) -> PartsOfMany | None:
    """The parts of a step; None where they do not follow from those of few microbatches, or where it is as quick whole."""
    pricing = Pricing.of(hardware, "modelled", None, True)
    if not isinstance(operation, StepOfMany) or operation.software != Software.of(pricing.hardware):
        return None
    for fewer, periods in _fewer(operation):
        folded = Simulation(fewer, None, None, None, fold=True).folded_on(pricing)
        for period, cuts in periods:
            times = (operation.pipeline.microbatches - fewer.pipeline.microbatches) // period
            more = _repetition(folded, fewer, cuts, times)
            if more is not None:
                return PartsOfMany(folded.parts(more), folded.trace.makespan_seconds + more.seconds)
    return None


def _fewer(operation: StepOfMany) -> Iterator[tuple[StepOfMany, list[tuple[int, list[Cut]]]]]:
    """The step with fewer microbatches, more and more, each with the periods that it may have, and their cuts."""
    whole = operation.pipeline
    for count in _numbers(whole):
        fewer = operation.with_microbatches(count)
        if fewer is None:
            return
        found = (
            (period, cuts_of(fewer.pipeline, whole, period))
            for period in (1, 2, whole.ranks, 2 * whole.ranks)
        )
        periods = [(period, cuts) for period, cuts in found if cuts is not None]
        if periods:
            yield fewer, periods


def _numbers(whole: Pipeline) -> Iterator[int]:
    """So many microbatches are simulated, and if their steps come to no steady state, so many."""
    ranks, microbatches = whole.ranks, whole.microbatches
    unit = ranks if whole.chunks > 1 and microbatches % ranks == 0 else 1
    most = min(_SHARE * microbatches, microbatches - WORTH / (2 * whole.stages))
    count = max(2 * ranks + 3 * unit, int(_FIRST * microbatches))
    while (count := count + (microbatches - count) % unit) <= most:
        yield count
        count, unit = int(_GROWTH * count), ranks


def _repetition(folded: Folded, step: StepOfMany, cuts: Sequence[Cut], times: int) -> Repetition | None:
    """The period of the step that comes so many times more."""
    axis, lengths = step.pipeline_axis, folded.representatives.lengths
    actions, own = list[Ints](), list[Cut]()
    for rank, start, each in zip(
        folded.trace.ranks, np.cumsum([0, *lengths]).tolist(), folded.classes, strict=False
    ):
        if each.bulk is None:
            return None
        actions.append(start + each.bulk_start + each.bulk.actions)
        own.append(cuts[step.mesh.index(rank)[axis] if axis is not None else 0])
    return repetition(folded.trace.columns, lengths, actions, own, times)
