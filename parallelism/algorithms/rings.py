"""Algorithms on a ring: each position sends to the next one, or to all others in turn; or a chain along the ring.

Sources: Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH* (2005).
"""

import numpy as np

from parallelism.algorithms.kinds import Pairs
from parallelism.algorithms.patterns import (
    Around,
    Listed,
    OneByOne,
    Phase,
    Turns,
    ring_all_gather,
    ring_all_to_all,
    ring_reduce_scatter,
)
from parallelism.algorithms.records import CollectiveAlgorithm, Cost, alike, by_size, round_the_ring
from parallelism.arrays import Ints

ORDER = "round the ring: piece j starts at the position after j and ends at j"
CHAIN_ORDER = "along the chain, from the position before the root backwards round the ring to the root"


def _chains(
    kind: str, formula: str, away: bool, order: str = ""
) -> tuple[CollectiveAlgorithm, CollectiveAlgorithm]:
    """S goes along a chain away from the root, or towards it: whole (``ring``) or in pieces (``pipelined_ring``)."""

    def ends(g: int, root: int) -> tuple[Ints, Ints]:
        places = np.arange(root, root + g) % g
        return (places[:-1], places[1:]) if away else (places[:0:-1], places[-2::-1])

    def cost(g: int, root: int, pairs: Pairs) -> Cost:
        up = tuple(int(p != root) for p in range(g))
        down = tuple(int((p - root) % g < g - 1) for p in range(g))
        return Cost(g - 1, down, up, down) if away else Cost(g - 1, up, down, up)

    return (
        CollectiveAlgorithm(
            "ring",
            (kind,),
            formula,
            cost,
            lambda g, root, pairs: [
                Listed(((s, t, (0,)),), not away) for s, t in np.transpose(ends(g, root)).tolist()
            ],
            phases=lambda g, root, pairs: (OneByOne(*ends(g, root), 1),),
            order=order,
            turns=True,
        ),
        CollectiveAlgorithm(
            "pipelined_ring",
            (kind,),
            formula,
            cost,
            phases=lambda g, root, pairs: (
                Phase(g - 1, *ends(g, root), np.ones(g - 1, np.int64), 1, piped=True),
            ),
            order=order,
            preference=1,
        ),
    )


RINGS = (
    CollectiveAlgorithm(
        "ring",
        ("all_reduce",),
        "2(g-1)/g S",
        lambda g, root, pairs: alike(g, 2 * g - 2, 2 * g - 2, 2 * g - 2, g),
        lambda g, root, pairs: ring_reduce_scatter(g) + ring_all_gather(g),
        lambda g: g,
        lambda g, root, pairs: (Around(g, 1, (1,), g, 2 * (g - 1)),),
        ORDER,
    ),
    CollectiveAlgorithm(
        "ring",
        ("all_gather", "all_scatter"),
        "(g-1)/g S",
        round_the_ring,
        by_size(ring_all_gather),
        lambda g: g,
        lambda g, root, pairs: (Around(g, 1, (1,), g, g - 1),),
    ),
    CollectiveAlgorithm(
        "ring",
        ("reduce_scatter",),
        "(g-1)/g S",
        round_the_ring,
        by_size(ring_reduce_scatter),
        lambda g: g,
        lambda g, root, pairs: (Around(g, 1, (1,), g, g - 1),),
        ORDER,
    ),
    CollectiveAlgorithm(
        "ring",
        ("all_to_all",),
        "(g-1)/2 S",
        lambda g, root, pairs: alike(g, g - 1, g - 1, g - 1, 2),
        by_size(ring_all_to_all),
        lambda g: g * g,
        lambda g, root, pairs: (Around(g, 1, range(g - 1, 0, -1), g),),
        turns=True,
    ),
    CollectiveAlgorithm(
        "pairwise",
        ("reduce_scatter", "all_to_all"),
        "(g-1)/g S",
        round_the_ring,
        phases=lambda g, root, pairs: (Turns(g, 1, g),),
        turns=True,
    ),
    *_chains("broadcast", "S each but the root", away=True),
    *_chains("reduce", "(g-1) S over the group", away=False, order=CHAIN_ORDER),
)
