"""The fewest communications that lead from one layout to another, if no rank may hold more than a bound.

The search is breadth-first from both ends, with one level for each communication.  Local moves cost nothing: slices,
masks, and other layouts of the same blocks.  *Permute* connects all layouts of a class
(`parallelism.resharding.permutations`), so each class is expanded only once.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from parallelism.memoized import memoized
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
from parallelism.resharding.permutations import Class, NoRoute, Permutations

MOST_AXES_HIDDEN = 4
"""On meshes with more axes, a mask may make only those axes partial that are partial in the goal."""

Free = Callable[[State], Iterable[State]]


class Leg(NamedTuple):
    """One move of a route."""

    kind: str
    """The kind of the move: slice, or a communication."""
    before: State
    """The layout before the move."""
    after: State
    """The layout after the move."""


class Reach:
    """The layouts on routes from ``source`` to ``goal``.

    With ``exchange``, a direct exchange to the goal is allowed once every required reduction is done.  ``limit`` is the
    largest number of layouts to examine; `NoRoute` is raised beyond it.
    """

    def __init__(
        self, blocks: Blocks, source: State, goal: State, limit: int, *, exchange: bool = False
    ) -> None:
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
        """The axes that masks may make partial.  Two axes reduced together may reach layouts that one by one cannot."""
        self._permutations = Permutations(blocks, partial=self._reduces)
        self._examined = 0

    # -- single moves --------------------------------------------------------------------------------------------------

    def legs(self, state: State) -> Iterator[Leg]:
        """All moves from a layout whose results fit the bound."""
        moves = chain(
            (("slice", after) for after in self._onward(state)),
            self._successors(state),
            (("permute", after) for after in self._permutations.members(self._permutations.class_of(state))),
        )
        return (Leg(kind, state, after) for kind, after in moves if self.fits(after))

    @memoized
    def fits(self, state: State) -> bool:
        """Whether no rank holds more than the bound."""
        if self._examined > self._limit:
            raise NoRoute
        self._examined += 1
        return self._blocks.largest(state.dims) <= self._bound

    def _onward(self, state: State) -> list[State]:
        """The layouts that local moves reach from ``state``."""
        return [*slices(state, self._axes), *self._permutations.alike(state), *masks(state, self._hideable)]

    def _back(self, state: State) -> list[State]:
        """The layouts from which local moves reach ``state``."""
        return [*unslices(state), *self._permutations.alike(state), *unmasks(state, self._hideable)]

    def _successors(self, state: State) -> Iterator[tuple[str, State]]:
        """The layouts that one communication reaches from ``state``, without permutations."""
        yield from (("all_gather", after) for after in gathers(state))
        yield from (("all_to_all", after) for after in exchanges(state))
        yield from reductions(state)
        if self._exchange and set(self.goal.partial).issuperset(state.partial):
            yield "exchange", State(self.goal.dims, state.partial)

    def _predecessors(self, state: State) -> Iterator[State]:
        """The layouts from which one communication reaches ``state``, without gathers, permutations and exchange."""
        yield from exchanges(state)
        if self._reduces:
            yield from unreductions(state, self._axes)

    # -- fewest communications -----------------------------------------------------------------------------------------

    def remaining(self) -> dict[State, int]:
        """The remaining number of communications for each layout on a shortest route, and for some others."""
        ahead: dict[State, int] = {}
        behind: dict[State, int] = {}
        levels = [self._level([self.source], ahead, 0, self._onward)]
        ends = [self._level([self.goal], behind, 0, self._back)]
        permuted: tuple[set[Class], set[Class]] = (set(), set())
        while not any(state in behind for state in levels[-1]):
            if not levels[-1] or not ends[-1]:
                raise NoRoute
            if self._exchange or len(levels[-1]) <= len(ends[-1]):
                states = [after for state in levels[-1] for _, after in self._successors(state)]
                states += self._permuted(levels[-1], permuted[0])
                levels.append(self._level(states, ahead, len(levels), self._onward))
            else:
                states = self._level(
                    ends[-1], {}, 0, lambda state: slices(state, self._axes)
                )  # a gather leads back
                states += (before for state in ends[-1] for before in self._predecessors(state))
                states += self._permuted(ends[-1], permuted[1])
                ends.append(self._level(states, behind, len(ends), self._back))
        return self._leading(levels, behind)

    def _permuted(self, level: list[State], permuted: set[Class]) -> list[State]:
        """The members of all classes in ``level`` that are not in ``permuted``, which is updated."""
        new = [
            kind for kind in dict.fromkeys(map(self._permutations.class_of, level)) if kind not in permuted
        ]
        permuted.update(new)
        return [state for kind in new for state in self._permutations.members(kind)]

    def _level(self, states: Iterable[State], seen: dict[State, int], number: int, free: Free) -> list[State]:
        """The new ones among ``states``, and the layouts that the local moves ``free`` reach from them."""
        level: list[State] = []
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state not in seen and self.fits(state):
                seen[state] = number
                level.append(state)
                waiting += free(state)
        return level

    def _leading(self, levels: list[list[State]], behind: dict[State, int]) -> dict[State, int]:
        """``behind``, extended by the layouts of the levels from the source that lead there."""
        remaining = dict(behind)
        met = min(behind[state] for state in levels[-1] if state in behind)
        for left, level in enumerate(reversed(levels[:-1]), met + 1):
            nearer = {state for state, n in remaining.items() if n == left - 1}
            classes = {self._permutations.class_of(state) for state in nearer}
            waiting = []
            for state in level:
                if self._permutations.class_of(state) in classes or not nearer.isdisjoint(
                    after for _, after in self._successors(state)
                ):
                    waiting.append(state)
            others = set(level)
            while waiting:
                state = waiting.pop()
                if state in others:
                    others.discard(state)
                    remaining[state] = left
                    waiting += self._back(state)
        return remaining
