"""Algorithms on a ring: every position sends to the next, to all others in turn, or a chain goes round from the root.

Sources: Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH* (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parallelism.algorithms import patterns
from parallelism.algorithms.kinds import Pairs
from parallelism.algorithms.patterns import Listed, Stage
from parallelism.algorithms.phase_patterns import around, listed, turns
from parallelism.algorithms.records import CollectiveAlgorithm, Cost, Phase, alike

ORDER = "round the ring: piece j starts at the position after j and ends at j"
CHAIN_ORDER = "along the chain, from the position before the root backwards round the ring to the root"


def chain_cost(away: bool) -> Callable[[int, int, Pairs], Cost]:
    """S goes down a chain from the root (``away``), or up to it."""
    def cost(g: int, root: int, pairs: Pairs) -> Cost:
        up = tuple(int(p != root) for p in range(g))
        down = tuple(int((p - root) % g < g - 1) for p in range(g))
        return Cost(g - 1, down, up, down) if away else Cost(g - 1, up, down, up)
    return cost


def _chain(g: int, root: int, away: bool) -> list[tuple[int, int]]:
    forth = patterns.chain(g, root)
    return forth if away else [(target, source) for source, target in forth[::-1]]


def _chain_steps(away: bool) -> Callable[[int, int, Pairs], list[Stage]]:
    return lambda g, root, pairs: [Listed(((s, t, (0,)),), not away) for s, t in _chain(g, root, away)]


def _chain_phases(away: bool) -> Callable[[int, int, Pairs], Iterator[Phase]]:
    return lambda g, root, pairs: (listed([(s, t, 1)], 1) for s, t in _chain(g, root, away))


def _piped(away: bool) -> Callable[[int, int, Pairs], Iterator[Phase]]:
    return lambda g, root, pairs: iter(
        [listed([(s, t, 1) for s, t in _chain(g, root, away)], 1, times=g - 1, piped=True)])


RINGS = (
    CollectiveAlgorithm(
        "ring", ("all_reduce",), "2(g-1)/g S", lambda g, root, pairs: alike(g, 2 * g - 2, 2 * g - 2, 2 * g - 2, g),
        lambda g, root, pairs: patterns.ring_reduce_scatter(g) + patterns.ring_all_gather(g), lambda g: g,
        lambda g, root, pairs: iter([around(g, 1, 1, g, 2 * (g - 1))]), ORDER),
    CollectiveAlgorithm(
        "ring", ("all_gather", "all_scatter"), "(g-1)/g S", lambda g, root, pairs: alike(g, g - 1, g - 1, g - 1, g),
        lambda g, root, pairs: patterns.ring_all_gather(g), lambda g: g,
        lambda g, root, pairs: iter([around(g, 1, 1, g, g - 1)])),
    CollectiveAlgorithm(
        "ring", ("reduce_scatter",), "(g-1)/g S", lambda g, root, pairs: alike(g, g - 1, g - 1, g - 1, g),
        lambda g, root, pairs: patterns.ring_reduce_scatter(g), lambda g: g,
        lambda g, root, pairs: iter([around(g, 1, 1, g, g - 1)]), ORDER),
    CollectiveAlgorithm(
        "ring", ("all_to_all",), "(g-1)/2 S", lambda g, root, pairs: alike(g, g - 1, g - 1, g - 1, 2),
        lambda g, root, pairs: patterns.ring_all_to_all(g), lambda g: g * g,
        lambda g, root, pairs: (around(g, 1, left, g) for left in range(g - 1, 0, -1)), turns=True),
    CollectiveAlgorithm(
        "ring", ("broadcast",), "S each but the root", chain_cost(True), _chain_steps(True),
        phases=_chain_phases(True), turns=True),
    CollectiveAlgorithm(
        "ring", ("reduce",), "(g-1) S over the group", chain_cost(False), _chain_steps(False),
        phases=_chain_phases(False), order=CHAIN_ORDER, turns=True),
    CollectiveAlgorithm(
        "pairwise", ("reduce_scatter", "all_to_all"), "(g-1)/g S",
        lambda g, root, pairs: alike(g, g - 1, g - 1, g - 1, g), phases=lambda g, root, pairs: turns(g, 1, g),
        turns=True),
    CollectiveAlgorithm(
        "pipelined_ring", ("broadcast",), "S each but the root", chain_cost(True), phases=_piped(True), preference=1),
    CollectiveAlgorithm(
        "pipelined_ring", ("reduce",), "(g-1) S over the group", chain_cost(False), phases=_piped(False),
        order=CHAIN_ORDER, preference=1),
)
