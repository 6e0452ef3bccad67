"""How few communications lead from one layout to another, when nobody may hold more than a bound.

Breadth first from both ends, a level for each communication.  What is local costs nothing: slices, masks, another name
for the same blocks.  *Permute* joins all layouts of a class (`parallelism.resharding.permutations`), so a class that was met once
need not be looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from parallelism.resharding.blocks import Blocks
from parallelism.resharding.moves import (
    State,
    exchanges,
    gathers,
    masks,
    reductions,
    slices,
    unmasks,
    unreductions,
    unslices,
)
from parallelism.resharding.permutations import Class, NoWay, Permutations

MOST_AXES_HIDDEN = 4
"""On meshes of more axes only what is partial at the end is made so on the way."""

Free = Callable[[State], Iterable[State]]


class Leg(NamedTuple):
    """One move of a way."""

    kind: str
    before: State
    after: State


class Reach:
    """The layouts on the ways from ``source`` to ``goal``.

    With ``exchange``, one straight to the end is among the moves, once all is reduced that must be.  ``limit`` is how
    many layouts may be looked at.
    """

    def __init__(self, blocks: Blocks, source: State, goal: State, limit: int, *, exchange: bool = False) -> None:
        self.source = source
        self.goal = goal
        self._blocks = blocks
        self._axes = len(blocks.extents)
        self._exchange = exchange
        self._limit = limit
        self._bound = max(blocks.largest(source.dims), blocks.largest(goal.dims))
        self._reduces = bool(source.partial)
        axes = tuple(range(self._axes)) if self._axes <= MOST_AXES_HIDDEN else goal.partial
        self._hideable = axes if self._reduces else ()
        """The axes that may be made partial: two that are reduced together may go where one after the other cannot."""
        self._permutations = Permutations(blocks, partial=self._reduces)
        self._fits: dict[State, bool] = {}

    # -- what is one move away -----------------------------------------------------------------------------------------

    def legs(self, state: State) -> Iterator[Leg]:
        """All that can be done with a layout within the bound."""
        told = chain(
            (("slice", after) for after in self._onward(state)), self._successors(state),
            (("permute", after) for after in self._permutations.members(self._permutations.class_of(state))),
        )
        return (Leg(kind, state, after) for kind, after in told if self.fits(after))

    def fits(self, state: State) -> bool:
        """Whether nobody holds more than the bound."""
        found = self._fits.get(state)
        if found is None:
            if len(self._fits) > self._limit:
                raise NoWay
            found = self._fits[state] = self._blocks.largest(state.dims) <= self._bound
        return found

    def _onward(self, state: State) -> list[State]:
        """What it is for nothing."""
        return [*slices(state, self._axes), *self._permutations.alike(state), *masks(state, self._hideable)]

    def _back(self, state: State) -> list[State]:
        """What is this for nothing."""
        return [*unslices(state), *self._permutations.alike(state), *unmasks(state, self._hideable)]

    def _successors(self, state: State) -> Iterator[tuple[str, State]]:
        """What one communication makes of it, but for permutations."""
        for after in gathers(state):
            yield "all_gather", after
        for after in exchanges(state):
            yield "all_to_all", after
        if state.partial:
            yield from reductions(state)
        if self._exchange and set(self.goal.partial).issuperset(state.partial):
            yield "exchange", State(self.goal.dims, state.partial)

    def _predecessors(self, state: State) -> Iterator[State]:
        """Of what one communication makes it, but for gathers, permutations and the exchange."""
        yield from exchanges(state)
        if self._reduces:
            yield from unreductions(state, self._axes)

    # -- fewest communications -----------------------------------------------------------------------------------------

    def remaining(self) -> dict[State, int]:
        """For the layouts on the ways with fewest communications (and for some others): how many of them remain."""
        ahead: dict[State, int] = {}
        behind: dict[State, int] = {}
        levels = [self._level([self.source], ahead, 0, self._onward)]
        ends = [self._level([self.goal], behind, 0, self._back)]
        permuted: tuple[set[Class], set[Class]] = (set(), set())
        while not any(state in behind for state in levels[-1]):
            if not levels[-1] or not ends[-1]:
                raise NoWay
            if self._exchange or len(levels[-1]) <= len(ends[-1]):
                found = [after for state in levels[-1] for _, after in self._successors(state)]
                found += self._permuted(levels[-1], permuted[0])
                levels.append(self._level(found, ahead, len(levels), self._onward))
            else:
                found = self._level(ends[-1], {}, 0, lambda state: slices(state, self._axes))   # what is gathered to it
                found += (before for state in ends[-1] for before in self._predecessors(state))
                found += self._permuted(ends[-1], permuted[1])
                ends.append(self._level(found, behind, len(ends), self._back))
        return self._leading(levels, behind)

    def _permuted(self, level: list[State], permuted: set[Class]) -> list[State]:
        """The members of the classes that are met for the first time."""
        classes = dict.fromkeys(map(self._permutations.class_of, level))
        new = [kind for kind in classes if kind not in permuted]
        permuted.update(new)
        return [state for kind in new for state in self._permutations.members(kind)]

    def _level(self, found: Iterable[State], seen: dict[State, int], number: int, free: Free) -> list[State]:
        """What is new among ``found``, with what that leads to for nothing."""
        level: list[State] = []
        waiting = list(found)
        while waiting:
            state = waiting.pop()
            if state not in seen and self.fits(state):
                seen[state] = number
                level.append(state)
                waiting += free(state)
        return level

    def _leading(self, levels: list[list[State]], behind: dict[State, int]) -> dict[State, int]:
        """``behind``, and of the levels from the source what leads there."""
        remaining = dict(behind)
        met = min(behind[state] for state in levels[-1] if state in behind)
        for left, level in enumerate(reversed(levels[:-1]), met + 1):
            nearer = {state for state, n in remaining.items() if n == left - 1}
            classes = {self._permutations.class_of(state) for state in nearer}
            waiting = [
                state for state in level
                if self._permutations.class_of(state) in classes
                or any(after in nearer for _, after in self._successors(state))
            ]
            others = set(level)
            while waiting:
                state = waiting.pop()
                if state in others:
                    others.discard(state)
                    remaining[state] = left
                    waiting += self._back(state)
        return remaining
