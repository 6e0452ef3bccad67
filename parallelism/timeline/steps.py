"""The steps of a record as a program of the engine, and the times of all of them after it ran.

Only steps that do something are in the program.  What follows from their times is computed for all steps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array, Ints
from parallelism.events import ABSENT
from parallelism.timeline.crossing import NO_LINKS, Crossing
from parallelism.timeline.engine import Program, Replay
from parallelism.timeline.matching import CALL, COLLECTIVE, COMPUTE, OUTSIDE, RECV, SEND, WAIT

Kinds = npt.NDArray[np.uint8]

_NONE = -1


class Steps(NamedTuple):
    """The steps of all lanes, lane after lane; each field but ``lengths`` has an entry for each step."""

    lengths: Ints
    """The number of steps in each lane."""
    roles: Kinds
    """Those of `parallelism.timeline.matching.Roles`."""
    keys: Ints
    """The same number for a send and its recv, and for the members of a collective."""
    groups: Ints
    """The number of the group of a collective."""
    works: Ints
    """The number of an asynchronous operation within its lane, on the operation and on its wait; else `ABSENT`."""
    costs: Array
    """The members of a collective have the same cost."""
    overheads: Array
    """How long a send or a recv holds its rank; 0 for other steps."""


class Times(NamedTuple):
    """When the steps start, and how long they last."""

    starts: Array
    durations: Array


class Lanes:
    """The steps of all lanes, and the program of those that do something.

    ``crossing`` has the links that the steps use; None: they share none.
    """

    def __init__(self, steps: Steps, crossing: Crossing | None) -> None:
        self._steps = steps
        self._ends = np.cumsum(steps.lengths)
        self._lane = np.repeat(np.arange(len(steps.lengths)), steps.lengths)
        self._is_later = (steps.works != ABSENT) & np.isin(steps.roles, (RECV, COLLECTIVE))
        pairs = _Pairs.of(steps, self._lane)
        roles, overheads, place = (
            _roles(steps, pairs, self._is_later),
            steps.overheads,
            np.arange(len(self._lane)),
        )
        costs, held = _costs(steps, roles), np.where(roles == SEND, overheads, 0)
        posts = np.where(pairs.operations == _NONE, place, pairs.operations)
        uses_links = np.zeros(len(roles), np.bool_) if crossing is None else crossing.numbers != NO_LINKS

        does_something = (roles != COMPUTE) | (costs != 0) | ((steps.roles == RECV) & (overheads != 0))
        at = np.flatnonzero(does_something)
        self._slots = pairs.slots
        self._before = np.append(0, np.cumsum(does_something))
        """How many steps of the program are before each step."""
        self._in_program = _InProgram(
            np.diff(self._before[self._ends], prepend=0),
            roles[at],
            pairs.slots[at],
            np.where(uses_links, costs + held, costs)[at],
            held[at],
            self._before[pairs.members],
        )
        self.crossing = crossing and crossing._replace(numbers=crossing.numbers[at])
        self.program = Program(
            lengths=self._in_program.lengths.tolist(),
            roles=self._in_program.roles.tolist(),
            slots=self._in_program.slots.tolist(),
            posts=self._before[posts][at].tolist(),
            costs=self._in_program.costs.tolist(),
            leads=np.where(uses_links, 0, held)[at].tolist(),
            overheads=overheads[np.where(roles == RECV, posts, place)][at].tolist(),
            members=np.bincount(
                pairs.slots[steps.roles == COLLECTIVE], minlength=len(pairs.members)
            ).tolist(),
            groups=steps.groups[pairs.members].tolist(),
            messages=pairs.messages,
        )

    def times(self, engine: Replay) -> Times:
        """The times of the steps, after the engine ran their program."""
        steps, following = self._steps, self._before[:-1]
        clocks = self._array(engine.clocks)
        known = np.append(self._array(engine.starts), clocks[:1])
        is_followed = following < self._before[self._ends][self._lane]
        starts = np.where(is_followed, known[following], clocks[self._lane])
        next_starts = _next_starts(starts, steps.lengths, clocks)
        durations = np.where(steps.roles == COMPUTE, steps.costs, next_starts - starts)
        later = np.flatnonzero(self._is_later)
        over = np.maximum(self._array(engine.over)[self._slots[later]], starts[later])
        durations[later] = over + steps.overheads[later] - starts[later]
        return Times(starts, durations)

    def first_shared(self, engine: Replay) -> Sequence[int] | None:
        """For each lane, the step of the program from which it runs again on shared links; the place after its last
        step, if that is right already.  None if no transfer disturbs another.

        The ``engine`` ran the program on links of its own.  All of it runs again if lanes are blocked for ever, or if a
        collective waited for another one of its group: it may begin at another time.
        """
        crossing, steps = self.crossing, self._in_program
        if crossing is None:
            return None
        is_whole = engine.next == engine.ends
        disturbed = 0.0
        if is_whole:
            sends = np.flatnonzero((steps.roles == SEND) & (crossing.numbers != NO_LINKS))
            members = steps.members[crossing.numbers[steps.members] != NO_LINKS]
            begun = [engine.starts[i] for i in sends.tolist()]
            begun += [engine.begun[slot] for slot in steps.slots[members].tolist()]
            transfers = np.append(sends, members)
            lags = crossing.lags(transfers) + steps.held[transfers]
            disturbed = crossing.first_disturbed(transfers, self._array(begun), steps.costs[transfers] - lags)
        if disturbed == inf:
            return None
        if not is_whole or engine.queued:
            begins: list[int] = (np.cumsum(steps.lengths) - steps.lengths).tolist()
            return begins
        return self._first_after(disturbed, engine)

    def _first_after(self, moment: float, engine: Replay) -> list[int]:
        """For each lane, its first step in the program that is not over at the moment, or has started what is not."""
        steps = self._in_program
        lane = np.repeat(np.arange(len(steps.lengths)), steps.lengths)
        over = _next_starts(self._array(engine.starts), steps.lengths, self._array(engine.clocks))
        starts_it = np.flatnonzero(np.isin(steps.roles, (SEND, COLLECTIVE, CALL)))
        over[starts_it] = np.maximum(over[starts_it], self._array(engine.over)[steps.slots[starts_it]])
        later = np.flatnonzero(over > moment)
        first = np.cumsum(steps.lengths)
        np.minimum.at(first, lane[later], later)
        # All members of a collective go on before it, or none.
        meets = np.flatnonzero(np.isin(steps.roles, (COLLECTIVE, CALL)))
        slots = steps.slots[meets]
        while True:
            again = np.bincount(slots, meets >= first[lane[meets]])[slots] > 0
            before = first.copy()
            np.minimum.at(first, lane[meets[again]], meets[again])
            if (first == before).all():
                found: list[int] = first.tolist()
                return found

    def _array(self, numbers: list[Any]) -> Array:
        return np.array(numbers, self._steps.costs.dtype)


class _InProgram(NamedTuple):
    """The steps that are in the program."""

    lengths: Ints
    roles: Kinds
    slots: Ints
    costs: Array
    held: Array
    """How long a send holds its lane."""
    members: Ints
    """By collective, the first of its members."""


class _Pairs(NamedTuple):
    """Which steps belong together."""

    slots: Ints
    """By step, the slot of its collective or message; 0 for others."""
    members: Ints
    """By collective, the first of its members: in their order are the slots."""
    sends: Ints
    """The sends; of several sends of one message the first."""
    operations: Ints
    """By step, the recv or collective that a wait waits for; -1 for other steps, and for a wait for anything else."""

    @classmethod
    def of(cls, steps: Steps, lane: Ints) -> _Pairs:
        sends, recvs, meets = (np.flatnonzero(steps.roles == role) for role in (SEND, RECV, COLLECTIVE))
        slots = np.zeros(len(lane), np.int64)
        _, first, collective = np.unique(steps.keys[meets], return_index=True, return_inverse=True)
        slots[meets] = np.argsort(np.argsort(first))[collective]
        messages, first_sends = np.unique(steps.keys[sends], return_index=True)
        for each in (sends, recvs):
            slots[each] = len(first) + np.searchsorted(messages, steps.keys[each])
        operations = _operations(steps, lane)
        waits = np.flatnonzero(operations != _NONE)
        slots[waits] = slots[operations[waits]]
        return cls(slots, meets[np.sort(first)], sends[first_sends], operations)

    @property
    def messages(self) -> int:
        """The number of messages."""
        return len(self.sends)


def _operations(steps: Steps, lane: Ints) -> Ints:
    """`_Pairs.operations`: of each wait, the last operation before it in its lane that has the same work."""
    roles, works = steps.roles, steps.works
    operations = np.full(len(roles), _NONE)
    at = np.flatnonzero((works != ABSENT) & (roles != COMPUTE) & (roles != OUTSIDE))
    if not len(at):
        return operations
    at = at[np.lexsort((at, works[at], lane[at]))]
    begins = np.append(True, (works[at][1:] != works[at][:-1]) | (lane[at][1:] != lane[at][:-1]))
    count = np.arange(len(at))
    issued = np.maximum.accumulate(np.where(roles[at] != WAIT, count, -1))
    known = (roles[at] == WAIT) & (issued >= np.maximum.accumulate(np.where(begins, count, 0)))
    source = at[np.maximum(issued, 0)]
    known &= np.isin(roles[source], (RECV, COLLECTIVE))
    operations[at[known]] = source[known]
    return operations


def _roles(steps: Steps, pairs: _Pairs, is_later: Array) -> Kinds:
    """The roles in the program.

    An asynchronous recv does nothing; the wait for it is the RECV.  An asynchronous collective is a CALL.  Whatever else
    does nothing, or holds the clock for a time, is a COMPUTE.
    """
    given = steps.roles
    roles = np.full(len(given), COMPUTE, np.uint8)
    roles[pairs.sends] = SEND
    roles[(given == RECV) & ~is_later] = RECV
    roles[given == COLLECTIVE] = COLLECTIVE
    roles[(given == COLLECTIVE) & is_later] = CALL
    waits = np.flatnonzero(pairs.operations != _NONE)
    roles[waits] = np.where(given[pairs.operations[waits]] == RECV, RECV, WAIT)
    return roles


def _costs(steps: Steps, roles: Kinds) -> Array:
    """The costs in the program, where the steps have these roles; a second send of a message costs its overhead."""
    costs = np.where((steps.roles == roles) | (roles == CALL), steps.costs, 0)
    again = (steps.roles == SEND) & (roles == COMPUTE)
    costs[again] = steps.overheads[again]
    return costs


def _next_starts(starts: Array, lengths: Ints, clocks: Array) -> Array:
    """For each step, when the next one of its lane starts; for the last one, the clock of the lane after it."""
    following = np.append(starts[1:], starts[:1])
    following[np.cumsum(lengths)[lengths > 0] - 1] = clocks[lengths > 0]
    return following
