"""Algorithms in lg g steps, with partners at distance 1, 2, 4, ...: doublings, halvings, Bruck's, dissemination.

Sources: Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH* (2005):
recursive doubling, halving-doubling.  Bruck, Ho, Kipnis, Upfal and Weathersby (1997): all_gather and all_to_all in
lg g steps.  Hensgen, Finkel and Manber (1988): the dissemination barrier.
"""

from parallelism.algorithms.patterns import (
    Around,
    Listed,
    Swap,
    block_doubling,
    distances,
    halving_undone,
    lg,
    recursive_doubling,
    recursive_halving,
)
from parallelism.algorithms.records import CollectiveAlgorithm, Cost, alike, by_size, power_of_two

ORDER = "as a balanced tree over the group order: ((0 1) (2 3)) ((4 5) (6 7))"
POWER = "a power of two"


@by_size
def _in_log_steps(g: int) -> Cost:
    """The cost of lg g steps in which each position sends and receives the shards of all others."""
    return alike(g, lg(g), g - 1, lg(g), g)


def _signals(g: int, distance: int) -> Listed:
    """Each position sends an empty message over a distance."""
    return Listed(tuple((p, (p + distance) % g, ()) for p in range(g)))


def _halving(g: int) -> list[Swap]:
    return [Swap(g, d, g // (2 * d), g) for d in distances(g)]


def _blocks_at(g: int, distance: int) -> int:
    """The number of blocks that Bruck's all_to_all moves over a distance: the blocks with its bit in their number."""
    pairs, further = divmod(g, 2 * distance)
    return pairs * distance + max(0, further - distance)


DOUBLINGS = (
    CollectiveAlgorithm(
        "recursive_doubling",
        ("all_reduce",),
        "lg g S",
        lambda g, root, pairs: alike(g, lg(g), lg(g), lg(g)),
        by_size(recursive_doubling),
        phases=lambda g, root, pairs: (Swap(g, d, 1, 1) for d in distances(g)),
        order=ORDER,
        applies=power_of_two,
        needs=POWER,
    ),
    CollectiveAlgorithm(
        "halving_doubling",
        ("all_reduce",),
        "2(g-1)/g S",
        lambda g, root, pairs: alike(g, 2 * lg(g), 2 * (g - 1), 2 * lg(g), g),
        lambda g, root, pairs: recursive_halving(g) + halving_undone(g),
        lambda g: g,
        lambda g, root, pairs: _halving(g) + _halving(g)[::-1],
        ORDER,
        power_of_two,
        POWER,
    ),
    CollectiveAlgorithm(
        "recursive_doubling",
        ("all_gather",),
        "(g-1)/g S",
        _in_log_steps,
        by_size(block_doubling),
        lambda g: g,
        lambda g, root, pairs: (Swap(g, d, d, g) for d in distances(g)),
        "",
        power_of_two,
        POWER,
    ),
    CollectiveAlgorithm(
        "halving_doubling",
        ("reduce_scatter",),
        "(g-1)/g S",
        _in_log_steps,
        by_size(recursive_halving),
        lambda g: g,
        by_size(_halving),
        ORDER,
        power_of_two,
        POWER,
    ),
    CollectiveAlgorithm(
        "bruck",
        ("all_gather",),
        "(g-1)/g S",
        _in_log_steps,
        phases=lambda g, root, pairs: (Around(g, -d, (min(d, g - d),), g) for d in distances(g)),
    ),
    CollectiveAlgorithm(
        "bruck",
        ("all_to_all",),
        "lg g S/2 (for powers of two)",
        lambda g, root, pairs: alike(g, lg(g), sum(_blocks_at(g, d) for d in distances(g)), lg(g), g),
        phases=lambda g, root, pairs: (Around(g, d, (_blocks_at(g, d),), g) for d in distances(g)),
    ),
    CollectiveAlgorithm(
        "dissemination",
        ("barrier",),
        "0 (lg g empty messages)",
        lambda g, root, pairs: alike(g, lg(g), 0, lg(g)),
        lambda g, root, pairs: [_signals(g, d) for d in distances(g)],
        lambda g: 0,
        lambda g, root, pairs: (Around(g, d, (0,), 1) for d in distances(g)),
    ),
)
