"""The cheapest route between two layouts on which no rank holds more than under the larger of the two.

The search has two passes.  `parallelism.resharding.distance` finds the fewest communications.  Among the routes with
this number, A* finds the one with the fewest elements received by all ranks together.  The lower bound of A* is the
number of elements that ranks lack of their final blocks: every route must bring these.  It obeys the triangle
inequality, so no layout is expanded twice.

An *exchange*, in which each rank gets its missing elements from all others, is used only if no other moves lead to the
goal.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from typing import Any

from parallelism.resharding.blocks import Blocks
from parallelism.resharding.canonical_form import canonical_form
from parallelism.resharding.distance import Leg, Reach
from parallelism.resharding.moves import State
from parallelism.resharding.permutations import NoRoute

LegPrice = Callable[[Leg], float]

MOST_AXES_EXACT = 4
"""On meshes with more axes, the route to a partial layout may not be the cheapest among those with fewest legs."""

_LEGS_BITS = 10
"""The low bits of a cost count legs, so that among routes of equal cost the one with fewer legs wins."""


def cheapest_route(
    blocks: Blocks, source: State, target: State, *, limit: int, price: LegPrice | None = None
) -> list[Leg]:
    """The legs of the route with the fewest communications, and among these with the fewest elements received.

    With ``price``, the cost of a communication, it is the route with the smallest sum of prices.
    """
    if price is not None:
        return list(_searched(blocks, source, target, limit, price))
    form = canonical_form(blocks, source, target)
    return [
        Leg(leg.kind, form.restored(leg.before), form.restored(leg.after))
        for leg in _of_form(form.shape, blocks.factors, form.source, form.target, limit)
    ]


@lru_cache(1 << 15)
def _of_form(
    shape: tuple[int, ...], factors: tuple[tuple[int, ...], ...], source: State, target: State, limit: int
) -> Sequence[Leg]:
    """The route of a form, for a tensor of this shape."""
    return _searched(_blocks(shape, factors), source, target, limit)


_blocks = lru_cache(256)(Blocks)


def _searched(
    blocks: Blocks, source: State, target: State, limit: int, price: LegPrice | None = None
) -> Sequence[Leg]:
    for exchange in (False, True):
        with suppress(NoRoute):
            reach = Reach(blocks, source, target, limit, exchange=exchange)
            return _fewest_elements(blocks, reach) if price is None else _least_price(reach, price)
    return _straight(source, target)


def _straight(source: State, target: State) -> list[Leg]:
    """A route of a reduction and an exchange, for meshes with too many layouts to search for a better one."""
    reduced = State(source.dims, tuple(axis for axis in source.partial if axis in target.partial))
    arrived = State(target.dims, reduced.partial)
    legs = (
        Leg("all_reduce", source, reduced),
        Leg("exchange", reduced, arrived),
        Leg("slice", arrived, target),
    )
    return [leg for leg in legs if leg.kind == "exchange" or leg.before != leg.after]


def _received(blocks: Blocks, leg: Leg, common: int) -> int:
    """The elements that all ranks receive together, by the closed forms; ``common`` is the number that stay."""
    held = blocks.held(leg.after.dims)
    match leg.kind:
        case "slice":
            return 0
        case "all_reduce":
            return 2 * (held - held * blocks.count(leg.after.partial) // blocks.count(leg.before.partial))
        case "reduce_scatter":
            return blocks.held(leg.before.dims) - held
        case "permute" if leg.before.partial != leg.after.partial:
            return int(blocks.moved(leg.before, leg.after).sum())
    return held - common


def _fewest_elements(blocks: Blocks, reach: Reach) -> list[Leg]:
    """A* along the routes on which every communication comes closer to the goal."""
    remaining = reach.remaining()

    def onward(state: State, spent: int, done: set[State]) -> Iterator[tuple[Leg, int, int]]:
        left = remaining[state]
        legs = []
        for leg in reach.legs(state):
            still = left if leg.kind == "slice" else left - 1
            if leg.after not in done and remaining.get(leg.after) == still:
                legs.append(leg)
        if legs:
            common = blocks.overlap(state.dims, [leg.after.dims for leg in legs]).sum(axis=1).tolist()
            least = _least(blocks, reach.goal, [leg.after for leg in legs])
            for leg, same, more in zip(legs, common, least, strict=True):
                total = spent + (_received(blocks, leg, same) << _LEGS_BITS) + 1
                yield leg, total, total + (more << _LEGS_BITS)

    return _best_first(reach, 0, onward)


def _least(blocks: Blocks, goal: State, states: list[State]) -> Iterable[int]:
    """A lower bound of the elements that must be received after each state; all of them while it is partial.

    For a partial goal this may overestimate, because a rank whose term is dropped need not receive it.  So the bound is
    0 on small meshes.
    """
    if goal.partial and len(blocks.extents) <= MOST_AXES_EXACT:
        return [0] * len(states)
    held = blocks.held(goal.dims)
    common = blocks.overlap(goal.dims, [state.dims for state in states]).sum(axis=1).tolist()
    return [held - same * (not state.partial) for state, same in zip(states, common, strict=True)]


def _least_price(reach: Reach, price: LegPrice) -> list[Leg]:
    """Dijkstra's algorithm over all layouts that fit; a cost is the price and the number of legs."""

    def onward(
        state: State, spent: tuple[float, int], done: set[State]
    ) -> Iterator[tuple[Leg, tuple[float, int], tuple[float, int]]]:
        for leg in reach.legs(state):
            if leg.after not in done:
                total = spent[0] + (0.0 if leg.kind == "slice" else price(leg)), spent[1] + 1
                yield leg, total, total

    return _best_first(reach, (0.0, 0), onward)


def _best_first(
    reach: Reach, nothing: Any, onward: Callable[[State, Any, set[State]], Iterator[tuple[Leg, Any, Any]]]
) -> list[Leg]:
    """The legs from the source to the goal, expanding the layout with the smallest bound first.

    ``onward(layout, cost, done)`` has the legs to layouts that are not done, each with the cost after it and a lower
    bound of the cost at the goal.  ``nothing`` is the cost at the source.
    """
    order = count()
    waiting = [(nothing, next(order), reach.source)]
    reached = {reach.source: nothing}
    came: dict[State, Leg] = {}
    done: set[State] = set()
    while waiting:
        _, _, state = heapq.heappop(waiting)
        if state == reach.goal:
            legs: list[Leg] = []
            while state != reach.source:
                legs.append(came[state])
                state = came[state].before
            return legs[::-1]
        if state in done:
            continue
        done.add(state)
        for leg, total, bound in onward(state, reached[state], done):
            if leg.after not in reached or total < reached[leg.after]:
                reached[leg.after] = total
                came[leg.after] = leg
                heapq.heappush(waiting, (bound, next(order), leg.after))
    raise NoRoute
