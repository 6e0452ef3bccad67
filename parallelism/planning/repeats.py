"""`Window`: levels of actions that repeat with more microbatches, and how their times go on without computing each.

In a steady state the times of a repetition are those of the one before plus a constant for each action.  They stay so
as long as every action waits for the same of the two that it may wait for: a time is then a sum along the same way.  So
if the constants of two repetitions are equal, all repetitions follow until the first action has to wait for its other
one; when that is follows from how much later one of the two is, and by how much that changes in a repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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

    @property
    def depth(self) -> int:
        """The number of levels."""
        return len(self.action)

    def run(self, times: Floats, durations: Floats, messages: Floats, start: int, end: int) -> None:
        """Computes the times at which the actions of some levels end."""
        for action, before, taken, duration, message in zip(*(each[start:end] for each in self), strict=True):
            times[action] = np.maximum(times[before], times[taken] + messages[message]) + durations[duration]


def levels_of(level: Ints, before: Ints, taken: Ints, duration: Ints, message: Ints) -> Levels:
    """The actions by their ``level``."""
    order = np.argsort(level, kind="stable")
    edges = np.flatnonzero(np.diff(level[order])) + 1
    actions = tuple(np.split(order, edges))
    return Levels(actions, *(tuple([of[at] for at in actions]) for of in (before, taken, duration, message)))


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
        start = next((i for i in range(less[0].depth) if others.level(i) != named.level(i)), 0)
        end = start + length
        if start < length or end > more[0].depth:
            return None
        if any(named.level(i) != named.level(i - length, period) for i in range(start, end)) or any(
                named.level(i + length) != others.level(i, period) for i in range(start, less[0].depth)):
            return None
        actions = np.concatenate(more[0].action[start:end])
        place = {named.of(i): i for i in np.concatenate(more[0].action[start - length:start]).tolist()}
        earlier = np.array([place.get(named.of(i, -period), -1) for i in actions.tolist()])
        known = {*actions.tolist(), *earlier.tolist(), len(more[1])}
        waited = {int(i) for side in (more[0].before, more[0].taken) for level in side[start:end] for i in level}
        if -1 in known or not waited <= known:
            return None
        return cls(start, end, actions, earlier)

    def repeat(self, levels: Levels, times: Floats, durations: Floats, messages: Floats, repeats: Ints) -> None:
        """Changes the ``times`` of the window and of the one before it to those after so many ``repeats``."""
        every, inner = self._inner(levels)
        here, there = np.arange(len(self.actions)), len(self.actions) + np.arange(len(self.actions))
        left, active = repeats.copy(), np.flatnonzero(repeats)
        now = np.append(times[every], np.zeros((1, times.shape[1])), axis=0)
        base = np.zeros(times.shape[1])
        before, after = (np.concatenate(side) for side in (inner.before, inner.taken))
        message = np.concatenate(inner.message)
        kept: tuple[Floats, Floats] | None = None
        while len(active):
            mine = now[:, active]
            shift = mine[there].min(axis=0)         # small numbers keep the rounding small
            mine[:-1] -= shift
            base[active] += shift
            previous, earlier = mine[here].copy(), mine[there].copy()
            mine[there] = previous
            row = messages[:, active]
            # An action of the first rank waits for none: the time 0 that stands for it must be early.
            mine[-1] = -base[active]
            inner.run(mine, durations[:, active], row, 0, inner.depth)
            left[active] -= 1
            grown, grown_before = mine[here] - previous, previous - earlier
            lead = mine[before] - (mine[after] + row[message])
            if kept is not None:
                span = np.abs(grown).max(axis=0)
                steady = (np.abs(grown - grown_before) <= ROUNDING * span).all(axis=0)
                slope = lead - kept[1]
                slope[np.abs(slope) <= ROUNDING * span] = 0.0
                nearing = lead * slope < 0
                with np.errstate(divide="ignore", invalid="ignore"):
                    lasts = np.where(nearing, np.floor(-lead / slope), np.inf).min(axis=0)
                jump = np.where(steady, np.minimum(lasts, left[active]), 0.0)
                mine[here] += jump * grown
                mine[there] += jump * grown
                left[active] -= jump.astype(np.int64)
                lead = lead + jump * slope
            mine[-1] = 0.0
            now[:, active] = mine
            going = left[active] > 0
            kept = grown[:, going], lead[:, going]
            active = active[going]
        times[every] = now[:-1] + base

    def _inner(self, levels: Levels) -> tuple[Ints, Levels]:
        """The actions of the window, then those of the one before; and the levels, with these numbers."""
        every = np.concatenate([self.actions, self.earlier])
        number = np.full(sum(map(len, levels.action)) + 1, -1)
        number[every] = np.arange(len(every))
        number[-1] = len(every)
        mine = Levels(*(each[self.start:self.end] for each in levels))
        return every, mine._replace(**{name: tuple([number[level] for level in getattr(mine, name)])
                                       for name in ("action", "before", "taken")})


class _Names:
    """Levels by what their actions are."""

    def __init__(self, labelled: Labelled) -> None:
        self.levels, key, microbatch = labelled
        self.key, self.microbatch = key.tolist(), microbatch.tolist()

    def of(self, action: int, shift: int = 0) -> tuple[int, int] | None:
        """The stage and kind of an action, and its microbatch, shifted; None for none."""
        return None if action == len(self.key) else (self.key[action], self.microbatch[action] + shift)

    def level(self, number: int, shift: int = 0) -> list[tuple[object, ...]]:
        """All that is said of the actions of a level, with microbatches that are shifted."""
        sides: Sequence[Ints] = [each[number] for each in self.levels]
        return sorted((self.of(action, shift), self.of(before, shift), self.of(taken, shift), duration, message)
                      for action, before, taken, duration, message in zip(*(side.tolist() for side in sides),
                                                                          strict=True))
