"""`Repetition`: a period of a step that comes again with more microbatches, at times that follow.

In a simulation nothing depends on when it happens: what devices do next, and how long it takes, follows from what they
have begun and not ended.  So if all devices do the same in two periods that follow each other, and everything is later by
one constant, then they do so in every further period, as long as their programs go on in the same way.  A step of many
microbatches is one of few, of which the last period before the end of the pipeline comes more often.

None of this is assumed: `cuts_of` compares the schedules, and `repetition` the events of two periods, one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Bools, Floats, Ints
from parallelism.events import Columns
from parallelism.pipelining import Action, Pipeline, Schedule
from parallelism.timeline import operations_of_waits

ROUNDING = 1e-13
"""Differences up to this part of the time of a step are those of rounding."""
_APART = 100
"""No event starts so close to the end of a period: so many times the rounding."""


class Cut(NamedTuple):
    """Where further periods may come into the work of a rank: before each of its actions from ``first`` to ``last``.

    A period has so many ``actions``, and the two before such a place are alike.
    """

    first: int
    last: int
    actions: int


@dataclass(frozen=True)
class Repetition:
    """A period of a simulated step that comes so many ``times`` more."""

    times: int
    begin: float
    end: float
    """Seconds of virtual time."""
    within: Bools
    """By event of the step, whether it is of the period; behind all actions, whether it waits for a send of the period."""

    @property
    def seconds(self) -> float:
        """What all further periods take."""
        return self.times * (self.end - self.begin)


def cuts_of(fewer: Pipeline, whole: Pipeline, period: int) -> list[Cut] | None:
    """By rank, where periods of so many microbatches make the schedule of ``fewer`` that of the ``whole``.

    None where they do not.
    """
    more = whole.microbatches - fewer.microbatches
    if more <= 0 or more % period or _kind(fewer.schedule) != _kind(whole.schedule):
        return None
    cuts = []
    for few, many in zip(fewer.schedule.works, whole.schedule.works, strict=True):
        kinds = dict.fromkeys(action.kind for action in (*few, *many))
        numbers = {kind: number for number, kind in enumerate(kinds)}
        cut = _cut(_rows(few, numbers), _rows(many, numbers), fewer.microbatches, more, period)
        if cut is None:
            return None
        cuts.append(cut)
    return cuts


def _kind(schedule: Schedule) -> tuple[object, ...]:
    return schedule.stages, schedule.ranks, schedule.training, schedule.weights, schedule.local


def _rows(actions: Sequence[Action], numbers: Mapping[str, int]) -> Ints:
    """Of each action its stage, the number of its kind, and its microbatch."""
    return np.array([(stage, numbers[kind], microbatch) for stage, kind, microbatch in actions], np.int64)


def _cut(few: Ints, many: Ints, microbatches: int, more: int, period: int) -> Cut | None:
    """The cut of a rank, from the `_rows` of its actions."""
    each, left = divmod(len(few), microbatches)
    longer, actions = len(many) - len(few), each * period
    if left or longer != each * more:
        return None
    # Whether each of many actions does what that a period before did, for later microbatches; and how many before do not.
    repeats = np.zeros(len(many), np.bool_)
    repeats[actions:] = (many[actions:] == _later(many[:-actions], period)).all(axis=1)
    unlike = np.concatenate([[0], np.cumsum(~repeats)])
    # Before a cut many actions are as few; behind it too, for the last microbatches; between all repeat the period before.
    same_before = _matching(few, many[: len(few)])
    same_behind = _matching(_later(few, more)[::-1], many[::-1][: len(few)])
    first, last = max(len(few) - same_behind, 2 * actions), min(same_before, len(few) - 1)
    at = np.arange(first, last + 1)
    at = at[unlike[at + longer] == unlike[at - actions]]
    if len(at) and np.ptp(at) == len(at) - 1:  # places side by side
        return Cut(int(at[0]), int(at[-1]), actions)
    return None


def _later(rows: Ints, microbatches: int) -> Ints:
    return rows + np.array([0, 0, microbatches], np.int64)


def _matching(rows: Ints, others: Ints) -> int:
    """How many rows are the same before the first that is not."""
    same = (rows == others).all(axis=1)
    return len(same) if same.all() else int(np.argmin(same))


def repetition(
    columns: Columns, lengths: Sequence[int], actions: Sequence[Ints], cuts: Sequence[Cut], times: int
) -> Repetition | None:
    """The period of a step that comes ``times`` more; None if its events do not come to a steady state.

    ``columns`` are the events of lane after lane, ``lengths`` of each.  Each lane has its cut; ``actions`` are the places
    of the first events of its actions, and the one behind the last.
    """
    starts = columns.numbers("start_seconds").astype(np.float64)
    durations = columns.numbers("duration_seconds").astype(np.float64)
    rounding = ROUNDING * float((starts + durations).max(initial=0.0))
    length = float(starts[actions[0][cuts[0].last]] - starts[actions[0][cuts[0].last - cuts[0].actions]])
    end = _quiet_moment(starts, actions, cuts, length, _APART * rounding)
    if end is None or (starts + durations)[starts < end - 2 * length].max(initial=0.0) > end - length:
        return None  # what began before the two periods goes on in the last
    within, shifts = np.zeros(len(columns), np.bool_), list[Floats]()
    stops = np.cumsum(lengths).tolist()
    for start, stop, places, cut in zip([0, *stops[:-1]], stops, actions, cuts, strict=True):
        if (np.diff(starts[start:stop]) < 0).any():
            return None
        moments = [end - 2 * length, end - length, end]
        before, here, last = (start + np.searchsorted(starts[start:stop], moments)).tolist()
        count, at = last - here, int(np.searchsorted(places, last))
        if not here - before == count == places[at] - places[at - cut.actions]:
            return None
        if (np.abs(durations[here:last] - durations[before:here]) > rounding).any():
            return None
        within[here:last] = True
        shifts.append(starts[here:last] - starts[before:here])
    shift = np.concatenate(shifts)
    if np.ptp(shift) > rounding or not _hold_the_same(columns.take(within)):
        return None
    waits, issues = operations_of_waits(columns)
    behind = np.zeros(len(columns), np.bool_)
    for stop, places in zip(stops, actions, strict=True):
        behind[places[-1] : stop] = True
    within[waits] |= behind[waits] & within[issues]
    return Repetition(times, end - float(shift.mean()), end, within)


def _quiet_moment(
    starts: Floats, actions: Sequence[Ints], cuts: Sequence[Cut], length: float, apart: float
) -> float | None:
    """A moment between the cuts of all lanes around which no event starts, at most a period before the last."""
    first = max(starts[places[cut.first]] for places, cut in zip(actions, cuts, strict=True))
    last = min(starts[places[cut.last]] for places, cut in zip(actions, cuts, strict=True))
    first = max(first, last - length)
    if not 0 < length < last:
        return None
    between = np.sort(starts[(first <= starts) & (starts <= last)])
    gaps = np.diff(between)
    if not len(gaps) or gaps.max() < 2 * apart:
        return None
    widest = int(np.argmax(gaps))
    return float(between[widest] + gaps[widest] / 2)


def _hold_the_same(columns: Columns) -> bool:
    """Whether events leave each rank with as many bytes of each category as before."""
    changes = columns.take(columns.isin("kind", {"memory"})).only("rank", "name", "nbytes")
    _, which = np.unique(changes.key("rank", "name"), return_inverse=True)
    return not np.bincount(which, changes.numbers("nbytes")).any()
