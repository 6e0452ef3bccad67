"""`Order`: the order of a pipeline's actions, in a form in which many plans are timed at once.

The actions are put on levels: an action is one level above the last of those that it waits for, which are the action
before it on its rank, and the one whose result it takes.  Actions on one level do not depend on each other, so a level
of all plans is computed at once.  Memory needs only the different states in which a rank starts an action.

With many microbatches most levels repeat (`Window`), so that only an order of few microbatches is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.pipelining.generators import SCHEDULES
from parallelism.planning.repeats import Labelled, Levels, Window, levels_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Work = tuple[int, str, int]

KINDS = "F", "B", "I", "W"
FIRST, MIDDLE, LAST, ONLY = range(4)
"""The places of a stage in the pipeline: stages between the first and the last do the same work."""


@dataclass(frozen=True)
class Order:
    """The actions of all ranks of a pipeline."""

    ranks: int
    stages: int
    levels: Levels
    count: int
    last: Ints
    """The last action of each rank."""
    rank_of: tuple[int, ...]
    """The rank of each stage."""
    messages: tuple[tuple[int, int, str], ...]
    """``(source, target, kind)``: the messages between ranks, and the kind of action that takes each."""
    kept: Ints
    """For each different state in which an action begins, rank after rank, how many times the change of memory by a
    forward, and by a backward for the input, is kept: at ``2 * place`` and at ``2 * place + 1``."""
    begun: Ints
    """For each state ``4 * place + kind`` of the action that begins in it."""
    first_state: Ints
    """By rank, its first state."""
    key_of: Ints
    """By action ``4 * stage + kind``."""
    microbatch_of: Ints
    window: Window | None = None
    """The levels that repeat with more microbatches."""

    @classmethod
    def of(cls, schedule: str, ranks: int, microbatches: int, chunks: int) -> Order:
        """The order of a schedule by its name."""
        more = (chunks,) if chunks > 1 else ()
        rows = [list(_works(SCHEDULES[schedule](rank, ranks, microbatches, *more))) for rank in range(ranks)]
        return _order(rows, ranks * chunks)

    @property
    def labelled(self) -> Labelled:
        """The levels, and what the actions are."""
        return self.levels, self.key_of, self.microbatch_of

    @cached_property
    def works(self) -> tuple[tuple[int, str], ...]:
        """The places of stages, with the kinds of actions that they have."""
        return tuple((each // 4, KINDS[each % 4]) for each in np.unique(self.begun).tolist())

    def ends(self, durations: Floats, messages: Floats, repeats: Ints | int = 0) -> Floats:
        """When each rank has done its last action: ``[rank, plan]``.

        ``durations[4 * place + kind]`` are those of an action, by plan; ``messages`` those of `messages`, with a row of
        zeros at the end.  ``repeats`` says for each plan how often the `window` comes once more.
        """
        times = np.zeros((self.count + 1, durations.shape[1]))
        levels = self.levels
        if np.any(repeats):
            assert self.window is not None
            levels.run(times, durations, messages, 0, self.window.end)
            self.window.repeat(levels, times, durations, messages, np.broadcast_to(repeats, durations.shape[1]))
            levels.run(times, durations, messages, self.window.end, levels.depth)
        else:
            levels.run(times, durations, messages, 0, levels.depth)
        ends: Floats = times[self.last]
        return ends

    def peaks(self, changes: Ints, peaks: Ints) -> Ints:
        """The most bytes that the actions of each rank hold: ``[rank, plan]``.

        ``changes[2 * place]`` are those of memory by a forward, ``changes[2 * place + 1]`` those by a backward for the
        input; ``peaks[4 * place + kind]`` are the most bytes of an action.
        """
        found: Ints = np.maximum.reduceat(self.kept @ changes + peaks[self.begun], self.first_state)
        return found


def place_of(stage: int, stages: int) -> int:
    """The place of a stage: `FIRST`, ..."""
    if stages == 1:
        return ONLY
    return FIRST if stage == 0 else LAST if stage == stages - 1 else MIDDLE


def order_of(schedule: str, ranks: int, microbatches: int, chunks: int) -> tuple[Order, int]:
    """An order for so many microbatches, and how often its `Order.window` comes once more.

    It is that of few microbatches if the levels and the states of the orders of few microbatches, and of a period more,
    are the same but for the period.
    """
    unit = ranks if chunks > 1 and microbatches % ranks == 0 else 1
    for period in (unit, 2 * unit):
        for least in (2 * ranks, 4 * ranks):
            few = least + 2 * period
            few += (microbatches - few) % period
            if few + period > microbatches:
                continue
            order = _repeating(schedule, ranks, few, chunks, period)
            if order is not None:
                return order, (microbatches - few) // period
    return _order_of(schedule, ranks, microbatches, chunks), 0


@lru_cache(maxsize=512)
def _order_of(schedule: str, ranks: int, microbatches: int, chunks: int) -> Order:
    return Order.of(schedule, ranks, microbatches, chunks)


@lru_cache(maxsize=512)
def _repeating(schedule: str, ranks: int, microbatches: int, chunks: int, period: int) -> Order | None:
    """The order, with a window of so many microbatches; None if nothing repeats."""
    less, order = (_order_of(schedule, ranks, count, chunks) for count in (microbatches - period, microbatches))
    same = (np.array_equal(of, than) for of, than in (
        (less.kept, order.kept), (less.begun, order.begun), (less.first_state, order.first_state)))
    if less.messages != order.messages or not all(same):
        return None
    window = Window.between(less.labelled, order.labelled, period)
    return None if window is None else replace(order, window=window)


def _works(steps: Any) -> Any:
    for step in steps:
        if isinstance(step[0], tuple):
            yield from step
        else:
            yield step


def _order(rows: Sequence[Sequence[Work]], stages: int) -> Order:
    count = sum(map(len, rows))
    rank_of = [0] * stages
    number: dict[Work, int] = {}
    for rank, row in enumerate(rows):
        for work in row:
            number[work] = len(number)
            rank_of[work[0]] = rank
    before, taken = np.full(count, count), np.full(count, count)
    duration, message = np.zeros(count, np.int64), np.full(count, -1)
    messages: dict[tuple[int, int, str], int] = {}
    for rank, row in enumerate(rows):
        last = count
        for work in row:
            i = number[work]
            stage, kind, microbatch = work
            before[i], last = last, i
            duration[i] = 4 * place_of(stage, stages) + KINDS.index(kind)
            source = stage - 1 if kind == "F" else stage + 1 if kind in ("B", "I") else -1
            if not 0 <= source < stages:
                continue
            wanted = [(source, "F", microbatch)] if kind == "F" else [
                (source, "B", microbatch), (source, "I", microbatch)]
            taken[i] = next(number[each] for each in wanted if each in number)
            if rank_of[source] != rank:
                key = rank_of[source], rank, "F" if kind == "F" else "B"
                message[i] = messages.setdefault(key, len(messages))
    message[message < 0] = len(messages)
    levels = levels_of(_levels(rows, number, before, taken), before, taken, duration, message)
    states = [_states(row, stages) for row in rows]
    every = np.array([state for each in states for state in each])
    return Order(
        len(rows), stages, levels, count, np.array([number[row[-1]] for row in rows]), tuple(rank_of), tuple(messages),
        every[:, :-1], every[:, -1], np.cumsum([0, *map(len, states[:-1])]),
        np.array([4 * stage + KINDS.index(kind) for stage, kind, _ in number]), np.array([work[2] for work in number]))


def _levels(rows: Sequence[Sequence[Work]], number: dict[Work, int], before: Ints, taken: Ints) -> Ints:
    """The level of each action."""
    level, count = [-1] * (len(before) + 1), len(before)
    waiting: dict[int, list[int]] = {}
    needs, after = taken.tolist(), [-1] * count
    for i, j in enumerate(before.tolist()):
        if j != count:
            after[j] = i
    previous = before.tolist()
    ready = [number[row[0]] for row in rows]
    while ready:
        i = ready.pop()
        while i >= 0:
            if needs[i] != count and level[needs[i]] < 0:
                waiting.setdefault(needs[i], []).append(i)
                break
            level[i] = 1 + max(level[previous[i]], level[needs[i]])
            ready += waiting.pop(i, ())
            i = after[i]
    return np.array(level[:count])


def _states(row: Sequence[Work], stages: int) -> list[tuple[int, ...]]:
    """The different states of a rank: a row of `Order.kept`, and the action that begins.

    A microbatch whose backward, or both halves of it, is done leaves nothing.
    """
    kept = [0] * 8
    found: dict[tuple[int, ...], None] = {}
    for stage, kind, _ in row:
        place = place_of(stage, stages)
        found[*kept, 4 * place + KINDS.index(kind)] = None
        kept[2 * place] += (kind == "F") - (kind in ("B", "W"))
        kept[2 * place + 1] += (kind == "I") - (kind == "W")
    return list(found)
