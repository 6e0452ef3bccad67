"""What each algorithm of a collective does, phase by phase: who sends at the same time, and how much of the buffer.

A phase is a set of messages that are sent together, so many times over.  Its parts are whole numbers of the buffer
``S`` of `closed_forms` divided by ``whole``.  Over one level of links, with a latency ``a`` and ``b`` seconds per byte,
the phases add up to the textbook's formulas (lg rounded up; k the number of pieces):

    all_reduce      ring                  2(g-1) a + 2(g-1)/g S b
                    recursive_doubling    lg g (a + S b)                              powers of two
                    halving_doubling      2 lg g a + 2(g-1)/g S b                     powers of two
                    tree                  2 lg g (a + S b)
                    direct                2(g-1) a + 2(g-1)/g S b
                    naive                 (g-1) (a + S b)
    all_gather      ring, direct, naive   (g-1) a + (g-1)/g S b
                    recursive_doubling    lg g a + (g-1)/g S b                        powers of two
                    bruck                 lg g a + (g-1)/g S b
    reduce_scatter  ring, pairwise,
                    direct                (g-1) a + (g-1)/g S b
                    halving_doubling      lg g a + (g-1)/g S b                        powers of two
                    naive                 (g-1) (a + S b)
    all_to_all      pairwise, direct      (g-1) a + (g-1)/g S b
                    ring                  (g-1) a + (g-1)/2 S b
                    bruck                 lg g a + lg g S/2 b  (for powers of two)
    broadcast,      tree                  lg g (a + S b)
    reduce          ring, direct, naive   (g-1) (a + S b)
                    van_de_geijn          (lg g + g-1) a + 2(g-1)/g S b  (for powers of two)
                    pipelined_ring        (g-2+k) (a + S b / k)
    scatter,        tree                  lg g a + (g-1)/g S b  (for powers of two)
    gather          direct                (g-1) (a + S b / g)
    all_scatter     ring, direct          (g-1) a + (g-1)/g S b
    permute         direct                a + S b
    barrier         dissemination         lg g a
                    direct                (g-1) a

A device sends one message at a time, so ``direct`` takes turns.  Adding is not counted.

Sources: Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH* (2005): ring,
recursive doubling, halving-doubling, Bruck, pairwise, binomial trees, van de Geijn's broadcast and Rabenseifner's
reduce.  Chan, Heimlich, Purkayastha and van de Geijn, *Collective communication: theory, practice, and experience*
(2007): the same as compositions of scatter, gather and their like.  Bruck, Ho, Kipnis, Upfal and Weathersby (1997):
all_gather and all_to_all in lg g steps.  Hensgen, Finkel and Manber (1988): the dissemination barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.collectives.algorithms import COLLECTIVES, ROOTED, Pairs, algorithm, algorithms
from parallelism.collectives.patterns import chain, distances


class Phase(NamedTuple):
    """Messages by position that are sent together, ``times`` over; each carries its part of S over ``whole``.

    ``piped``: the phase stands for a chain that S goes down in pieces, so many at a time as suits.
    """

    times: int
    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]
    whole: int
    piped: bool = False


Phases = tuple[Phase, ...]

_MORE = {
    "all_gather": ("bruck",), "reduce_scatter": ("pairwise",), "all_to_all": ("pairwise", "bruck"),
    "broadcast": ("van_de_geijn", "pipelined_ring"), "reduce": ("van_de_geijn", "pipelined_ring"),
}
"""Algorithms that are priced and not run: beside those of `communication`."""

_PREFERRED = (
    "ring", "recursive_doubling", "halving_doubling", "tree", "pairwise", "bruck", "van_de_geijn", "pipelined_ring",
    "dissemination", "direct", "naive",
)
"""Of two that take as long, the first."""


def names(collective: str, size: int) -> tuple[str, ...]:
    """The algorithms that have phases over ``size`` positions."""
    both = (*algorithms(collective, size), *_MORE.get(collective, ()))
    return tuple(sorted(both, key=_PREFERRED.index))


def phases(collective: str, name: str, size: int, root: int = 0, pairs: Pairs = ()) -> Phases:
    """The phases of an algorithm over ``size`` positions; of one, none.

    ``ValueError`` for a name that does not apply, naming those that do.
    """
    applying = names(collective, size)
    if name not in applying:
        raise ValueError(f"no algorithm {name!r} for {collective} over {size}; these apply: {', '.join(applying)}")
    if collective in ROOTED or name in algorithms(collective, size):
        algorithm(collective, None, size, root=root, pairs=pairs if collective == "permute" else None)   # refuses
    if size == 1:
        return ()
    rule = _RULES.get((collective, name))
    return tuple(rule(size, root)) if rule is not None else tuple(_listed(collective, name, size, root, pairs))


def _listed(collective: str, name: str, g: int, root: int, pairs: Pairs) -> Iterator[Phase]:
    """The steps of `communication`, each a phase."""
    plan = algorithm(collective, name, g, root=root, pairs=pairs if collective == "permute" else None)
    whole = 1 if collective in ("permute", "barrier") else plan.chunks
    for step in plan.steps:
        if step:
            ends = np.array([(move.source, move.target, len(move.chunks)) for move in step], np.int64)
            yield Phase(1, ends[:, 0], ends[:, 1], ends[:, 2], whole)


def _round(g: int, distance: int, part: int, whole: int, times: int = 1) -> Phase:
    """Everybody to whom is so far behind."""
    here = np.arange(g)
    return Phase(times, here, (here + distance) % g, np.full(g, part), whole)


def _turns(part: int, whole: Callable[[int], int]) -> Callable[[int, int], Iterator[Phase]]:
    """Everybody with everybody, the nearest first."""
    return lambda g, root: (_round(g, d, part, whole(g)) for d in range(1, g))


def _rings(times: int) -> Callable[[int, int], Iterator[Phase]]:
    return lambda g, root: iter([_round(g, 1, 1, g, times * (g - 1))])


def _both_turns(g: int, root: int) -> Iterator[Phase]:
    for _ in range(2):
        yield from (_round(g, d, 1, g) for d in range(1, g))


def _ring_all_to_all(g: int, root: int) -> Iterator[Phase]:
    return (_round(g, 1, left, g) for left in range(g - 1, 0, -1))


def _swaps(g: int, distance: int, part: int, whole: int) -> Phase:
    """Everybody with whom is so far away; g is a power of two."""
    here = np.arange(g)
    return Phase(1, here, here ^ distance, np.full(g, part), whole)


def _recursive_doubling(g: int, root: int) -> Iterator[Phase]:
    return (_swaps(g, d, 1, 1) for d in distances(g))


def _halving(g: int, root: int) -> Iterator[Phase]:
    return (_swaps(g, d, g // (2 * d), g) for d in distances(g))


def _halving_doubling(g: int, root: int) -> Iterator[Phase]:
    halving = tuple(_halving(g, root))
    return iter(halving + halving[::-1])


def _block_doubling(g: int, root: int) -> Iterator[Phase]:
    return (_swaps(g, d, d, g) for d in distances(g))


def _bruck_all_gather(g: int, root: int) -> Iterator[Phase]:
    return (_round(g, -d, min(d, g - d), g) for d in distances(g))


def _bruck_all_to_all(g: int, root: int) -> Iterator[Phase]:
    return (_round(g, d, sum(block & d > 0 for block in range(g)), g) for d in distances(g))


def _with_root(away: bool, whole: Callable[[int], int]) -> Callable[[int, int], Iterator[Phase]]:
    """The root with one after the other."""
    def made(g: int, root: int) -> Iterator[Phase]:
        one = np.ones(1, np.int64)
        for d in range(1, g):
            here, there = one * root, one * ((root + d) % g)
            yield Phase(1, *((here, there) if away else (there, here)), one, whole(g))
    return made


def _down_the_chain(away: bool, piped: bool) -> Callable[[int, int], Iterator[Phase]]:
    """From the root round to the position before it, or back."""
    def made(g: int, root: int) -> Iterator[Phase]:
        ends = np.array(chain(g, root) if away else [(t, s) for s, t in chain(g, root)[::-1]], np.int64)
        one = np.ones(1, np.int64)
        if piped:
            yield Phase(g - 1, ends[:, 0], ends[:, 1], np.ones(g - 1, np.int64), 1, True)
        else:
            yield from (Phase(1, one * s, one * t, one, 1) for s, t in ends.tolist())
    return made


def _van_de_geijn(g: int, root: int) -> Iterator[Phase]:
    yield from _listed("scatter", "tree", g, root, ())
    yield from _rings(1)(g, root)


def _rabenseifner(g: int, root: int) -> Iterator[Phase]:
    yield from _rings(1)(g, root)
    yield from _listed("gather", "tree", g, root, ())


def _g(g: int) -> int:
    return g


def _one(g: int) -> int:
    return 1


_RULES: dict[tuple[str, str], Callable[[int, int], Iterator[Phase]]] = {
    ("all_reduce", "ring"): _rings(2),
    ("all_reduce", "recursive_doubling"): _recursive_doubling,
    ("all_reduce", "halving_doubling"): _halving_doubling,
    ("all_reduce", "direct"): _both_turns,
    ("all_reduce", "naive"): _turns(1, _one),
    ("all_gather", "ring"): _rings(1),
    ("all_gather", "recursive_doubling"): _block_doubling,
    ("all_gather", "direct"): _turns(1, _g),
    ("all_gather", "naive"): _turns(1, _g),
    ("all_gather", "bruck"): _bruck_all_gather,
    ("reduce_scatter", "ring"): _rings(1),
    ("reduce_scatter", "halving_doubling"): _halving,
    ("reduce_scatter", "direct"): _turns(1, _g),
    ("reduce_scatter", "pairwise"): _turns(1, _g),
    ("reduce_scatter", "naive"): _turns(1, _one),
    ("all_to_all", "direct"): _turns(1, _g),
    ("all_to_all", "pairwise"): _turns(1, _g),
    ("all_to_all", "ring"): _ring_all_to_all,
    ("all_to_all", "bruck"): _bruck_all_to_all,
    ("all_scatter", "ring"): _rings(1),
    ("all_scatter", "direct"): _turns(1, _g),
    ("broadcast", "ring"): _down_the_chain(True, False),
    ("broadcast", "pipelined_ring"): _down_the_chain(True, True),
    ("broadcast", "direct"): _with_root(True, _one),
    ("broadcast", "naive"): _with_root(True, _one),
    ("broadcast", "van_de_geijn"): _van_de_geijn,
    ("reduce", "ring"): _down_the_chain(False, False),
    ("reduce", "pipelined_ring"): _down_the_chain(False, True),
    ("reduce", "direct"): _with_root(False, _one),
    ("reduce", "naive"): _with_root(False, _one),
    ("reduce", "van_de_geijn"): _rabenseifner,
    ("scatter", "direct"): _with_root(True, _g),
    ("gather", "direct"): _with_root(False, _g),
    ("barrier", "direct"): _turns(0, _one),
}
"""What is quicker said as a rule than step by step; the rest is taken from the steps of `communication`."""

assert all(collective in COLLECTIVES for collective, _ in _RULES)
