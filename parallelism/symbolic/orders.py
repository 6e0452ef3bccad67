"""`Order`: the order of a pipeline's actions, in a form in which many plans are timed at once.

The actions are put on levels: an action is one level above the last of those that it waits for, which are the action
before it on its rank, and the one whose result it takes.  Actions on one level do not depend on each other, so a level
of all plans is computed at once.  Memory needs only the different states in which a rank starts an action.

With many microbatches most levels repeat (`Window`), so that only an order of few microbatches is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Floats, Ints
from parallelism.pipelining.generators import SCHEDULES, ScheduleKind
from parallelism.side_by_side import copies, first_come
from parallelism.symbolic.steady_state import Labelled, Levels, Window, levels_of

Work = tuple[int, str, int]

KINDS = "F", "B", "I", "W"
FIRST, MIDDLE, LAST, ONLY, LONGER = range(5)
"""The places of a stage in the pipeline: stages between the first and the last do the same work, but those with one
block more are `LONGER`."""
PLACES = 5
NONE_LONGER = range(0)


class Ends(NamedTuple):
    """What ranks do after their last actions: seconds by rank, and of messages between the first and the last rank."""

    before: Floats
    """By rank, the seconds before the first and the last rank exchange something: ``[rank]``, or ``[rank, plan]``."""
    there: Floats | float
    """The seconds of the message from the first rank to the last; minus infinite where they exchange nothing."""
    back: Floats | float
    after: Floats

    def step_seconds(self, times: Floats) -> Floats:
        """The seconds of the step of each plan, given when ranks have done their last actions: ``[rank, plan]``."""
        times = times + self.before
        first, last = times[0].copy(), times[-1].copy()
        times[0], times[-1] = np.maximum(first, last + self.back), np.maximum(last, first + self.there)
        seconds: Floats = (times + self.after).max(axis=0)
        return seconds


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
    """A row for each different state in which an action begins, rank after rank.  Columns ``2 * place`` and
    ``2 * place + 1``: how many forwards, and how many backwards for the input, hold memory then."""
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
    def of(
        cls,
        kind: ScheduleKind,
        ranks: int,
        microbatches: int,
        chunks: int,
        longer: range | None = NONE_LONGER,
    ) -> Order:
        """The order of a schedule, where these stages are ``longer`` than others: see `place_of`."""
        more = (chunks,) if chunks > 1 else ()
        rows = [_works(kind.generator(rank, ranks, microbatches, *more)) for rank in range(ranks)]
        return _order(rows, ranks * chunks, longer)

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
            self.window.repeat(
                levels, times, durations, messages, np.broadcast_to(repeats, durations.shape[1])
            )
            levels.run(times, durations, messages, self.window.end, levels.depth)
        else:
            levels.run(times, durations, messages, 0, levels.depth)
        ends: Floats = times[self.last]
        return ends

    def step_seconds(
        self, columns: Sequence[tuple[Floats, Floats]], repeats: Sequence[int], ends: Sequence[Ends]
    ) -> Floats:
        """The seconds of the steps of plans; a column has the durations and the messages of a plan, as `ends` takes them.

        Plans that have one column, and differ in their ``ends`` alone, are timed once.
        """
        keys = [(id(column), more) for column, more in zip(columns, repeats, strict=True)]
        different = dict(zip(keys, columns, strict=True))
        place = {key: place for place, key in enumerate(different)}
        durations, messages = (np.stack(each, axis=1) for each in zip(*different.values(), strict=True))
        times = self.ends(durations, messages, np.array([more for _, more in different]))
        times = times[:, [place[key] for key in keys]]
        before, there, back, after = (np.array(each).T for each in zip(*ends, strict=True))
        return Ends(before, there, back, after).step_seconds(times)

    def peaks(self, changes: Ints, peaks: Ints) -> Ints:
        """The most bytes that the actions of each rank hold: ``[rank, plan]``.

        ``changes[2 * place]`` are those of memory by a forward, ``changes[2 * place + 1]`` those by a backward for the
        input; ``peaks[4 * place + kind]`` are the most bytes of an action.
        """
        of_places, kept = self._holding
        found: Ints = np.maximum.reduceat(kept @ changes[of_places] + peaks[self.begun], self.first_state)
        return found

    @cached_property
    def _holding(self) -> tuple[Ints, Ints]:
        """The columns of `kept` in which something holds memory, and what is in them."""
        columns = np.flatnonzero(self.kept.any(axis=0))
        return columns, np.ascontiguousarray(self.kept[:, columns])


def place_of(stage: int, stages: int, longer: range | None = NONE_LONGER) -> int:
    """The place of a stage: `FIRST`, ..., given the stages that have one block more.  None: each stage is a place."""
    if longer is None:
        return stage
    if stages == 1:
        return ONLY
    if stage == 0:
        return FIRST
    if stage == stages - 1:
        return LAST
    return LONGER if stage in longer else MIDDLE


class Shape(NamedTuple):
    """The pipeline of a plan."""

    schedule: str
    ranks: int
    microbatches: int
    chunks: int
    longer: range
    """The stages between the first and the last that have one block more than others there."""
    blocks: tuple[int, int, int]
    """Those of the first stage, of most stages between, and of the last one."""

    @classmethod
    def of(cls, schedule: str, ranks: int, microbatches: int, chunks: int, counts: Sequence[int]) -> Shape:
        """The pipeline whose stages have so many blocks."""
        inner = counts[1:-1] or counts[:1]
        longer = [stage for stage, count in enumerate(counts[1:-1], 1) if count > min(inner)]
        within = range(longer[0], longer[-1] + 1) if longer else NONE_LONGER
        return cls(schedule, ranks, microbatches, chunks, within, (counts[0], min(inner), counts[-1]))

    def blocks_of(self, place: int) -> int:
        """The blocks of a stage at a place."""
        first, middle, last = self.blocks
        return {FIRST: first, ONLY: first, LAST: last, LONGER: middle + 1}.get(place, middle)

    @property
    def blocks_of_ranks(self) -> list[int]:
        """The blocks of all stages of each rank."""
        counts = [self.blocks_of(place_of(stage, self.stages, self.longer)) for stage in range(self.stages)]
        return [sum(counts[rank :: self.ranks]) for rank in range(self.ranks)]

    @property
    def is_even(self) -> bool:
        """Whether all stages have equally many blocks."""
        return not self.longer and len({*self.blocks}) == 1

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def is_v_shaped(self) -> bool:
        """Whether the first rank has the first stage and the last one."""
        return SCHEDULES[self.schedule].is_v_shaped


Asked = tuple[str, int, int, int, range | None]
"""``(schedule, ranks, microbatches, chunks, longer)``: what is asked of `order_of`."""
MOST_KEPT = 2048
"""So many orders are kept for further searches."""
_known: dict[Any, tuple[Order, int]] = {}
"""By `_key`."""


def order_of(
    schedule: str, ranks: int, microbatches: int, chunks: int, longer: range | None = NONE_LONGER
) -> tuple[Order, int]:
    """An order for so many microbatches, and how often its `Order.window` comes once more.

    It is that of few microbatches if the levels and the states of the orders of few microbatches, and of a period more,
    are the same but for the period.
    """
    asked = schedule, ranks, microbatches, chunks, longer
    key = _key(asked)
    if key not in _known:
        _keep({asked: _made(*asked)})
    return _known[key]


def make_orders(asked: Iterable[Asked]) -> None:
    """Makes orders that may be asked for, if this process has copies that help: else `order_of` makes those that are.
    Those that cannot be made are left to it, too."""
    if not copies():
        return
    alike: dict[Any, list[Asked]] = {}
    for each in sorted(asked, key=lambda each: -prod(each[1:4])):  # those that take longest first
        if _key(each) not in _known:
            schedule, ranks, _, chunks, longer = each
            alike.setdefault((schedule, ranks, chunks, longer), []).append(each)
    first_come([partial(_all_made, each) for each in alike.values()], took=lambda _, found: _keep(found))


def _all_made(asked: Iterable[Asked]) -> dict[Asked, tuple[Order, int]]:
    """Orders that may be one order of few microbatches."""
    found = {}
    for each in asked:
        with suppress(ValueError):
            found[each] = _made(*each)
    return found


def _keep(found: Mapping[Asked, tuple[Order, int]]) -> None:
    if len(_known) + len(found) > MOST_KEPT:
        _known.clear()
    _known.update({_key(asked): made for asked, made in found.items()})


def _key(asked: Asked) -> tuple[Any, ...]:
    """Another schedule may get the name of one that was registered."""
    return SCHEDULES[asked[0]], *asked[1:]


def _made(
    schedule: str, ranks: int, microbatches: int, chunks: int, longer: range | None
) -> tuple[Order, int]:
    """See `order_of`."""
    kind = SCHEDULES[schedule]
    unit = ranks if chunks > 1 and microbatches % ranks == 0 else 1
    for period in (unit, 2 * unit):
        for least in (2 * ranks, 4 * ranks):
            few = least + 2 * period
            few += (microbatches - few) % period
            if few + period > microbatches:
                continue
            order = _repeating(kind, ranks, few, chunks, longer, period)
            if order is not None:
                return order, (microbatches - few) // period
    return _order_of(kind, ranks, microbatches, chunks, longer), 0


@lru_cache(maxsize=512)
def _order_of(kind: ScheduleKind, ranks: int, microbatches: int, chunks: int, longer: range | None) -> Order:
    return Order.of(kind, ranks, microbatches, chunks, longer)


@lru_cache(maxsize=512)
def _repeating(
    kind: ScheduleKind, ranks: int, microbatches: int, chunks: int, longer: range | None, period: int
) -> Order | None:
    """The order, with a window of so many microbatches; None if nothing repeats."""
    less, order = (
        _order_of(kind, ranks, count, chunks, longer) for count in (microbatches - period, microbatches)
    )
    same = (
        np.array_equal(of, than)
        for of, than in (
            (less.kept, order.kept),
            (less.begun, order.begun),
            (less.first_state, order.first_state),
        )
    )
    if less.messages != order.messages or not all(same):
        return None
    window = Window.between(less.labelled, order.labelled, period)
    return None if window is None else replace(order, window=window)


_NUMBER_OF_KIND = np.full(128, -1)
"""By the code of its letter."""
_NUMBER_OF_KIND[[*map(ord, KINDS)]] = range(len(KINDS))


def _works(steps: Iterable[Any]) -> list[Work]:
    """The actions of steps, of which some are several actions."""
    found = list(steps)
    if set(map(type, map(itemgetter(0), found))) <= {int}:
        return found
    works: list[Work] = []
    for step in found:
        if isinstance(step[0], tuple):
            works.extend(step)
        else:
            works.append(step)
    return works


def _order(rows: Sequence[Sequence[Work]], stages: int, longer: range | None) -> Order:
    lengths = np.array([len(row) for row in rows])
    count, starts = int(lengths.sum()), np.cumsum([0, *lengths[:-1]])
    works = list(chain.from_iterable(rows))
    stage, microbatch = (np.fromiter(map(itemgetter(column), works), np.int64, count) for column in (0, 2))
    letters = "".join(map(itemgetter(1), works)).encode()
    kind = _NUMBER_OF_KIND[np.frombuffer(letters, np.uint8)]
    number = np.full((stages, len(KINDS), microbatch.max() + 1), -1)
    number[stage, kind, microbatch] = np.arange(count)
    rank, rank_of = np.repeat(np.arange(len(rows)), lengths), np.zeros(stages, np.int64)
    rank_of[stage] = rank
    before = np.arange(count) - 1
    before[starts] = count
    place = np.array([place_of(each, stages, longer) for each in range(stages)])[stage]
    forward, backward = kind == KINDS.index("F"), (kind == KINDS.index("B")) | (kind == KINDS.index("I"))
    source = np.where(forward, stage - 1, np.where(backward, stage + 1, -1))
    at = np.flatnonzero((source >= 0) & (source < stages))
    given = number[source[at], :, microbatch[at]]  # a result is that of one of these kinds
    f, b, i = (given[:, KINDS.index(each)] for each in "FBI")
    taken = np.full(count, count)
    taken[at] = np.where(forward[at], f, np.where(b >= 0, b, i))
    assert taken.min() >= 0
    sent = at[rank_of[source[at]] != rank[at]]
    ends = (rank_of[source[sent]] * len(rows) + rank[sent]) * 2 + ~forward[sent]
    different, of_ends = np.unique(ends, return_inverse=True)
    messages = tuple(
        (each // 2 // len(rows), each // 2 % len(rows), "FB"[each % 2]) for each in different.tolist()
    )
    message = np.full(count, len(messages))
    message[sent] = of_ends
    levels = levels_of(_levels(starts, lengths, taken), before, taken, 4 * place + kind, message)
    kept, begun, first_state = _states(rank, starts, place, kind)
    return Order(
        len(rows),
        stages,
        levels,
        count,
        starts + lengths - 1,
        tuple(rank_of.tolist()),
        messages,
        kept,
        begun,
        first_state,
        4 * stage + kind,
        microbatch,
    )


def _levels(starts: Ints, lengths: Ints, taken: Ints) -> Ints:
    """The level of each action: on each level every rank does its next action if it need not wait for another one."""
    count = len(taken)
    behind = np.arange(len(starts))  # behind the actions of each rank stands one that is never done
    place = np.append(np.arange(count) + np.repeat(behind, lengths), [count + len(starts)])
    waited = np.zeros(count + len(starts) + 1, np.int64)
    waited[place[:-1]] = place[taken]
    waited[starts + lengths + behind] = starts + lengths + behind
    level = np.full(len(waited), count)
    level[place[-1]] = -1  # of no action
    following, left = starts + behind, count
    for now in range(count):
        can = level.take(waited.take(following)) < now
        done = following[can]
        level[done] = now
        following += can
        left -= len(done)
        if not left:
            break
    found: Ints = level[place[:-1]]
    return found


def _states(rank: Ints, starts: Ints, place: Ints, kind: Ints) -> tuple[Ints, Ints, Ints]:
    """The different states of each rank: rows of `Order.kept`, the actions that begin, and the first of each rank.

    A microbatch whose backward, or both halves of it, is done leaves nothing.
    """
    places = max(PLACES, int(place.max()) + 1)
    f, b, i, w = (kind == each for each in range(4))
    changes = {0: f.astype(np.int64) - (b | w), 1: i.astype(np.int64) - w}
    columns = dict[int, Ints]()
    for each in np.unique(place).tolist():
        here = place == each
        for half, change in changes.items():
            own = np.where(here, change, 0)
            before = np.cumsum(own) - own
            columns[2 * each + half] = before - before[starts][rank]
    begun = 4 * place + kind
    key = rank
    for column, extent in [
        *((before - before.min(), int(np.ptp(before)) + 1) for before in columns.values()),
        (begun, 4 * places),
    ]:
        if int(key.max() + 1) * extent >= 2**62:  # fewer different numbers in the same order
            key = np.unique(key, return_inverse=True)[1]
        key = key * extent + column
    first = np.unique(key, return_index=True)[1]
    kept = np.zeros((len(first), 2 * places), np.int64)
    for number, before in columns.items():
        kept[:, number] = before[first]
    return kept, begun[first], np.searchsorted(rank[first], np.arange(len(starts)))
