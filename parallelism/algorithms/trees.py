"""Algorithms on binomial trees, and algorithms that combine a tree and a ring.

Sources: Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH* (2005):
binomial trees, van de Geijn's broadcast and Rabenseifner's reduce.  Chan, Heimlich, Purkayastha and van de Geijn,
*Collective communication: theory, practice, and experience* (2007): the same as compositions of scatter and gather.
"""

from collections.abc import Iterator

import numpy as np

from parallelism.algorithms.doublings import ORDER
from parallelism.algorithms.kinds import Pairs
from parallelism.algorithms.patterns import (
    Around,
    Phase,
    binomial_broadcast,
    binomial_gather,
    binomial_reduce,
    binomial_scatter,
    distances,
    joined,
    lg,
)
from parallelism.algorithms.records import CollectiveAlgorithm, Cost, alike


def _height(p: int, root: int) -> int:
    """Position p represents a block of 2**height in the tree: it starts at p and does not contain the root."""
    apart = (p ^ root).bit_length() - 1
    return apart if p == 0 else min((p & -p).bit_length() - 1, apart)


def _broadcast(g: int, root: int, pairs: Pairs) -> Cost:
    serves = []
    for p in range(g):
        number = (p - root) % g
        serves.append(sum(d > number and number + d < g for d in distances(g)))
    return Cost(lg(g), tuple(serves), tuple(int(p != root) for p in range(g)), tuple(serves))


def _reduce(g: int, root: int, pairs: Pairs) -> Cost:
    served = []
    for p in range(g):
        served.append(sum(p + (1 << k) < g for k in range(_height(p, root))))
    served[root] = sum(((root >> k) ^ 1) << k < g for k in range(lg(g)))
    leaves = tuple(int(p != root) for p in range(g))
    return Cost(lg(g), leaves, tuple(served), leaves)


def _gather(g: int, root: int, pairs: Pairs) -> Cost:
    """Each position sends the shards of its block, S/g each, in one message."""
    sent, received = [], []
    for p in range(g):
        if p == root:
            firsts = [((root >> k) ^ 1) << k for k in range(lg(g))]
            block, children = 0, [min(1 << k, g - first) for k, first in enumerate(firsts) if first < g]
        else:
            height = _height(p, root)
            block = min(1 << height, g - p)
            children = [min(1 << k, g - p - (1 << k)) for k in range(height) if p + (1 << k) < g]
        sent.append(block)
        received.append(sum(children))
    return Cost(lg(g), tuple(sent), tuple(received), tuple(int(p != root) for p in range(g)), g)


def _scatter(g: int, root: int, pairs: Pairs) -> Cost:
    gathered = _gather(g, root, pairs)
    links = _reduce(g, root, pairs).received  # a message to each child, as one comes from each in a reduce
    return Cost(gathered.steps, gathered.received, gathered.sent, links, g)


def _both(first: Cost, second: Cost) -> Cost:
    """One algorithm after the other."""
    whole = max(first.whole, second.whole)

    def added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(m * whole // first.whole + n * whole // second.whole for m, n in zip(a, b, strict=True))

    messages = tuple(m + n for m, n in zip(first.messages, second.messages, strict=True))
    return Cost(
        first.steps + second.steps,
        added(first.sent, second.sent),
        added(first.received, second.received),
        messages,
        whole,
    )


def _broadcasts(g: int, root: int) -> Iterator[Phase]:
    for d in distances(g):
        here = np.arange(root, root + min(d, g - d)) % g
        yield Phase(1, here, (here + d) % g, np.ones_like(here), 1)


def _reductions(g: int, root: int) -> Iterator[Phase]:
    return (Phase(1, sources, targets, np.ones_like(sources), 1) for sources, targets, _ in joined(g, root))


def _gathers(g: int, root: int) -> Iterator[Phase]:
    return (Phase(1, sources, targets, blocks, g) for sources, targets, blocks in joined(g, root))


def _scatters(g: int, root: int) -> Iterator[Phase]:
    return (Phase(1, targets, sources, blocks, g) for sources, targets, blocks in joined(g, root)[::-1])


BLOCKS = "the shards of the position's half, quarter, ... of the group"

TREES = (
    CollectiveAlgorithm(
        "tree",
        ("all_reduce",),
        "2(g-1) S over the group",
        lambda g, root, pairs: _both(_reduce(g, 0, pairs), _broadcast(g, 0, pairs)),
        lambda g, root, pairs: binomial_reduce(g, 0) + binomial_broadcast(g, 0),
        phases=lambda g, root, pairs: (*_reductions(g, 0), *_broadcasts(g, 0)),
        order=ORDER,
    ),
    CollectiveAlgorithm(
        "tree",
        ("broadcast",),
        "S each but the root",
        _broadcast,
        lambda g, root, pairs: binomial_broadcast(g, root),
        phases=lambda g, root, pairs: _broadcasts(g, root),
    ),
    CollectiveAlgorithm(
        "tree",
        ("reduce",),
        "(g-1) S over the group",
        _reduce,
        lambda g, root, pairs: binomial_reduce(g, root),
        phases=lambda g, root, pairs: _reductions(g, root),
        order=ORDER,
    ),
    CollectiveAlgorithm(
        "tree",
        ("scatter",),
        BLOCKS,
        _scatter,
        lambda g, root, pairs: binomial_scatter(g, root),
        lambda g: g,
        lambda g, root, pairs: _scatters(g, root),
    ),
    CollectiveAlgorithm(
        "tree",
        ("gather",),
        BLOCKS,
        _gather,
        lambda g, root, pairs: binomial_gather(g, root),
        lambda g: g,
        lambda g, root, pairs: _gathers(g, root),
    ),
    CollectiveAlgorithm(
        "van_de_geijn",
        ("broadcast",),
        "a scatter by a tree, and (g-1)/g S round the ring",
        lambda g, root, pairs: _both(_scatter(g, root, pairs), alike(g, g - 1, g - 1, g - 1, g)),
        phases=lambda g, root, pairs: (*_scatters(g, root), Around(g, 1, (1,), g, g - 1)),
    ),
    CollectiveAlgorithm(
        "van_de_geijn",
        ("reduce",),
        "(g-1)/g S round the ring, and a gather by a tree",
        lambda g, root, pairs: _both(alike(g, g - 1, g - 1, g - 1, g), _gather(g, root, pairs)),
        phases=lambda g, root, pairs: (Around(g, 1, (1,), g, g - 1), *_gathers(g, root)),
        order=ORDER,
    ),
)
