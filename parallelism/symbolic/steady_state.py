"""`Window`: levels of actions that repeat with more microbatches, and how their times go on without computing each.

In a steady state the times of a repetition are those of the one before plus a constant for each action.  They stay so
as long as every action waits for the same of the two that it may wait for: a time is then a sum over the same actions.
So if the constants of two repetitions are equal, all repetitions follow until the first action has to wait for its
other one; when that is follows from how much later one of the two is, and by how much that changes in a repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Bools, Floats, Ints

ROUNDING = 1e-14
"""Differences up to this part of the time of a window are those of rounding."""


class Levels(NamedTuple):
    """Actions by level: the actions, those before them on their ranks, those whose results they take, and the rows of
    their durations and of their messages.  Row ``count`` of the times is always 0."""

    action: tuple[Ints, ...]
    before: tuple[Ints, ...]
    taken: tuple[Ints, ...]
    duration: tuple[Ints, ...]
    message: tuple[Ints, ...]

    def __reduce__(self) -> tuple[Callable[..., Levels], tuple[Any, ...]]:
        """In a pickle they are an array for each column, not thousands of small ones."""
        edges = np.cumsum([0, *map(len, self.action)])
        return _levels_between, (edges, *(np.concatenate(column).astype(np.int32) for column in self))

    @property
    def depth(self) -> int:
        """The number of levels."""
        return len(self.action)

    def run(self, times: Floats, durations: Floats, messages: Floats, start: int, end: int) -> None:
        """Computes the times at which the actions of some levels end.

        Rows of the arrays should lie together: else each `take` copies the whole array first.
        """
        for action, before, taken, duration, message in zip(*(each[start:end] for each in self), strict=True):
            ends = times.take(taken, axis=0)  # quicker than an index, of small arrays by half
            ends += messages.take(message, axis=0)
            np.maximum(ends, times.take(before, axis=0), out=ends)
            ends += durations.take(duration, axis=0)
            times[action] = ends


def levels_of(level: Ints, before: Ints, taken: Ints, duration: Ints, message: Ints) -> Levels:
    """The actions by their ``level``."""
    order = np.argsort(level, kind="stable")
    edges = np.concatenate([[0], np.flatnonzero(np.diff(level[order])) + 1, [len(order)]])
    return _levels_between(edges, order, *(of[order] for of in (before, taken, duration, message)))


def _levels_between(edges: Ints, *columns: Ints) -> Levels:
    """The levels in columns in which each ends where the next begins."""
    bounds = [*map(slice, edges[:-1].tolist(), edges[1:].tolist())]
    return Levels(
        *(tuple(map(column.astype(np.int64, copy=False).__getitem__, bounds)) for column in columns)
    )


Labelled = tuple[Levels, Ints, Ints]
"""Levels, and for each action its stage and kind as a number, and its microbatch."""


@dataclass(frozen=True)
class Window:
    """Levels from ``start`` to ``end`` that come once more for each period of more microbatches."""

    start: int
    end: int
    actions: Ints
    """Those of the window, level by level."""
    earlier: Ints
    """For each the one of the same stage and kind a period before."""

    @classmethod
    def between(cls, less: Labelled, more: Labelled, period: int) -> Window | None:
        """The window in levels that have a ``period`` of microbatches more than others; None if there is none.

        It must be the same as the levels before it, of earlier microbatches; they and what comes after it must be the
        levels of the others; and its actions may wait for those of the window and of the one before alone.
        """
        length = more[0].depth - less[0].depth
        if length <= 0:
            return None
        named, others = _Names(more), _Names(less)
        start = others.first_other(named)
        end = start + length
        if start < length or end > more[0].depth:
            return None
        if not (
            named.are(start, end, named, start - length, period)
            and named.are(end, more[0].depth, others, start, period)
        ):
            return None
        actions = np.concatenate(more[0].action[start:end])
        count = len(more[1])
        before = np.full(count, -1)
        before[named.actions(start, end)] = named.actions(start - length, start)
        earlier = before[actions]
        known = np.zeros(count + 1, np.bool_)
        known[actions] = known[earlier] = known[count] = True
        waited = np.concatenate(
            [level for side in (more[0].before, more[0].taken) for level in side[start:end]]
        )
        if not known[waited].all():
            return None
        return cls(start, end, actions, earlier)

    def repeat(
        self, levels: Levels, times: Floats, durations: Floats, messages: Floats, repeats: Ints
    ) -> None:
        """Changes the ``times`` of the window and of the one before it to those after so many ``repeats``."""
        every, inner = self._inner(levels)
        now = np.append(times[every], np.zeros((1, times.shape[1])), axis=0)
        going = _Repetitions(inner, len(self.actions), now, durations, messages, repeats.copy())
        going.run()
        times[every] = now[:-1] + going.base

    def _inner(self, levels: Levels) -> tuple[Ints, Levels]:
        """The actions of the window, then those of the one before; and the levels, with these numbers."""
        every = np.concatenate([self.actions, self.earlier])
        number = np.full(sum(map(len, levels.action)) + 1, -1)
        number[every] = np.arange(len(every))
        number[-1] = len(every)
        mine = Levels(*(each[self.start : self.end] for each in levels))
        return every, mine._replace(
            **{
                name: tuple([number[level] for level in getattr(mine, name)])
                for name in ("action", "before", "taken")
            }
        )


class _Repetitions:
    """Many plans, each of which repeats a window: their times, and how often they have to do so.

    Some come to a steady state in which not one repetition but a cycle of several adds constants: as many as there are
    ranks if a wait goes down the pipeline and back.
    """

    def __init__(
        self, inner: Levels, count: int, now: Floats, durations: Floats, messages: Floats, left: Ints
    ) -> None:
        """``now`` are the times of the ``count`` actions of the window, of those of the one before, and a row of 0."""
        self.inner, self.count, self.now, self.left = inner, count, now, left
        self.durations, self.messages = durations, messages
        self.base = np.zeros(now.shape[1])
        """What the times are later than ``now``, by plan: small numbers keep the rounding small."""
        self.before, self.after = (np.concatenate(side) for side in (inner.before, inner.taken))
        self.message = np.concatenate(inner.message)

    def run(self) -> None:
        """Repeats the windows as often as they have to."""
        waiting = [(np.flatnonzero(self.left), 1)]
        while waiting:
            active, cycle = waiting.pop()
            waiting += self._in_cycles(active, cycle)

    def _in_cycles(self, active: Ints, cycle: int) -> list[tuple[Ints, int]]:
        """Goes on with some plans in cycles of so many repetitions.  The plans that are not done, with other cycles."""
        patience = 3 * self.count if cycle == 1 else 4
        seen = np.zeros((patience if cycle == 1 else 0, self.now.shape[1]))
        others = list[tuple[Ints, int]]()
        going, before = _Going.of(self, active), None
        for number in range(patience):
            left = self.left[going.plans]
            if (left < cycle).any():
                self.now[:, going.plans] = going.now
                if (few := (left > 0) & (left < cycle)).any():
                    others.append((going.plans[few], 1))  # those are repeated one by one
                stay = np.flatnonzero(left >= cycle)
                going, before = going.take(stay), before and before.take(stay)
            if not len(going.plans):
                return others
            grown = self._repeated(going, cycle)
            if cycle == 1:
                seen[number, going.plans] = grown.here[0]
            if before is not None and len(steady := grown.steady_since(before)):
                self._jump(going, cycle, steady, grown, before)
            before = grown
        self.now[:, going.plans] = going.now
        active = going.plans[self.left[going.plans] > 0]
        cycles = _cycles(seen[:, active]) if cycle == 1 else np.ones(len(active), np.int64)
        return others + [(active[cycles == each], int(each)) for each in np.unique(cycles)]

    def _repeated(self, going: _Going, cycle: int) -> _Grown:
        """Repeats the window so many times.  It returns by how much the times have grown, and how long actions wait."""
        plans, now = going.plans, going.now
        here, there = now[: self.count], now[self.count : -1]
        shift = there.min(axis=0)
        now[:-1] -= shift
        self.base[plans] += shift
        start = now[:-1].copy()
        # An action of the first rank waits for none: the time 0 that stands for it must be early.
        now[-1] = -self.base[plans]
        leads = np.empty((cycle, len(self.before), len(plans)))
        for lead in leads:
            there[:] = here
            self.inner.run(now, going.durations, going.messages, 0, self.inner.depth)
            np.subtract(
                now.take(self.before, axis=0),
                now.take(self.after, axis=0) + going.messages.take(self.message, axis=0),
                out=lead,
            )
        now[-1] = 0.0
        self.left[plans] -= cycle
        grown = now[:-1] - start
        return _Grown(grown[: self.count], grown[self.count :], leads.reshape(-1, len(plans)))

    def _jump(self, going: _Going, cycle: int, steady: Ints, grown: _Grown, before: _Grown) -> None:
        """Adds the constants of as many cycles as follow to the times of the plans that are ``steady``, by their places."""
        added, leads = grown.here[:, steady], grown.leads[:, steady]
        slope = leads - before.leads[:, steady]
        slope[np.abs(slope) <= ROUNDING * np.abs(added).max(axis=0)] = 0.0
        nearing = leads * slope < 0
        with np.errstate(divide="ignore", invalid="ignore"):
            lasts = np.where(nearing, np.floor(-leads / slope), np.inf).min(axis=0)
        plans = going.plans[steady]
        jump = np.minimum(lasts, self.left[plans] // cycle)
        going.now[: self.count, steady] += jump * added
        going.now[self.count : -1, steady] += jump * added
        self.left[plans] -= jump.astype(np.int64) * cycle
        grown.leads[:, steady] = leads + jump * slope


class _Going(NamedTuple):
    """The plans of `_Repetitions` that go on together.  The rows of each array lie together, as `Levels.run` takes them."""

    plans: Ints
    now: Floats
    durations: Floats
    messages: Floats

    @classmethod
    def of(cls, every: _Repetitions, plans: Ints) -> _Going:
        """The plans with these numbers among `_Repetitions`."""
        return cls(
            plans, *(each.take(plans, axis=1) for each in (every.now, every.durations, every.messages))
        )

    def take(self, places: Ints) -> _Going:
        """The plans at these places among them."""
        now, durations, messages = (each.take(places, axis=1) for each in self[1:])
        return _Going(self.plans[places], now, durations, messages)


class _Grown(NamedTuple):
    """By how much the times of plans have grown in a cycle."""

    here: Floats
    """Those of the actions of the window."""
    there: Floats
    """Those of the actions of the window before."""
    leads: Floats
    """In every repetition, how much longer each action waits for the one before it than for the one whose result it
    takes."""

    def take(self, places: Ints) -> _Grown:
        """Those of the plans at some places."""
        return _Grown(*(each.take(places, axis=1) for each in self))

    def steady_since(self, before: _Grown) -> Ints:
        """The places of the plans whose times have grown by the same in all rows, as in the cycle ``before``."""
        least = ROUNDING * np.maximum(self.here.max(axis=0), -self.here.min(axis=0))

        def are_close(here: Floats, others: Iterable[Floats], to: Floats) -> Bools:
            found: Bools = np.logical_and.reduce([np.abs(here - other) <= to for other in others])
            return found

        others = self.there, before.here
        # Those that differ in the first row, as most do, are not looked at in the others.
        near = np.flatnonzero(are_close(self.here[0], [each[0] for each in others], least))
        if len(near):
            mine = self.here[:, near]
            near = near[are_close(mine, [each[:, near] for each in others], least[near]).all(axis=0)]
        return near


def _cycles(grown: Floats) -> Ints:
    """For each column the least number of rows after which its end comes again, twice; 1 if nothing does."""
    found = np.ones(grown.shape[1], np.int64)
    for cycle in range(len(grown) // 3, 1, -1):
        end = grown[len(grown) - 3 * cycle :]
        first, before, last = end.reshape(3, cycle, grown.shape[1])
        apart = np.maximum(np.abs(last - before), np.abs(before - first))
        rounding = 100 * ROUNDING * np.abs(last).max(axis=0)
        found[(apart <= rounding).all(axis=0)] = cycle
    return found


class _Names:
    """Levels by what their actions are: numbers that are equal for equal actions of two orders."""

    def __init__(self, labelled: Labelled) -> None:
        levels, self.key, self.microbatch = labelled
        self.depth = levels.depth
        key, microbatch = (
            np.append(self.key, -1),
            np.append(self.microbatch, 0),
        )  # the last stands for no action
        number = np.repeat(np.arange(self.depth), [len(level) for level in levels.action])
        action, before, taken, duration, message = (np.concatenate(side) for side in levels)
        order = np.lexsort((microbatch[action], key[action], number))
        named = [column[side] for side in (action, before, taken) for column in (key, microbatch)]
        self.rows = np.stack([*named, duration, message], axis=1)[order]
        """All that is said of the actions, level by level: their stage and kind, their microbatch, ..."""
        self.action, self.level = action[order], number[order]

    def actions(self, start: int, end: int) -> Ints:
        """The actions of some levels: of each level in the order of their stages and kinds, then of their microbatches."""
        return self.action[slice(*np.searchsorted(self.level, [start, end]))]

    def first_other(self, longer: _Names) -> int:
        """The first level that is not the same in others, of which there are more; 0 if there is none."""
        count = min(len(self.level), len(longer.level))
        same = (self.level[:count] == longer.level[:count]) & (self.rows[:count] == longer.rows[:count]).all(
            axis=1
        )
        if not same.all():
            at = int(np.argmin(same))
            return int(min(self.level[at], longer.level[at]))
        return (
            int(longer.level[count]) if count < len(longer.level) and longer.level[count] < self.depth else 0
        )

    def are(self, start: int, end: int, others: _Names, start_of_others: int, shift: int) -> bool:
        """Whether some levels are as many of others, with microbatches that are shifted."""
        mine = slice(*np.searchsorted(self.level, [start, end]))
        given = slice(*np.searchsorted(others.level, [start_of_others, start_of_others + end - start]))
        if not np.array_equal(self.level[mine] - start, others.level[given] - start_of_others):
            return False
        moved = others.rows[given].copy()
        for column in (0, 2, 4):
            moved[:, column + 1] += np.where(moved[:, column] >= 0, shift, 0)
        return np.array_equal(self.rows[mine], moved)
