"""The algorithms of the collectives as phases, for pricing: messages at the same time, and their parts of the buffer.

A phase is a set of messages that are sent together, a number of times.  Its parts are whole numbers of the buffer
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

from parallelism.algorithms.algorithms import algorithm, record_of, records_of
from parallelism.algorithms.kinds import Pairs, kind_of
from parallelism.algorithms.patterns import Rule, each_phase, listed
from parallelism.algorithms.records import Phases


def names(collective: str, size: int) -> tuple[str, ...]:
    """The algorithms that have phases over ``size`` positions; of two that take as long, the first is preferred."""
    return tuple(
        record.name for record in sorted(records_of(collective, size), key=lambda each: each.preference)
    )


def phases(collective: str, name: str, size: int, root: int = 0, pairs: Pairs = ()) -> Phases:
    """The phases of an algorithm over ``size`` positions; of one, none.

    ``ValueError`` for a name that does not apply, naming those that do.
    """
    return tuple(each_phase(phase_rules(collective, name, size, root, pairs)))


def phase_rules(collective: str, name: str, size: int, root: int = 0, pairs: Pairs = ()) -> tuple[Rule, ...]:
    """`phases`, with those of one rule as one."""
    record = record_of(collective, name, size)
    kind = kind_of(collective)
    named = pairs if kind.paired else None
    if kind.rooted or record.steps is not None:
        algorithm(collective, None, size, root=root, pairs=named)  # refuses a root or pairs outside the group
    if size == 1:
        return ()
    if record.phases is not None:
        return tuple(record.phases(size, root, pairs))
    plan = algorithm(
        collective, name, size, root=root, pairs=named
    )  # without a shorter rule each step is a phase
    made = []
    for step in plan.steps:
        if step:
            messages = [(each.source, each.target, len(each.chunks)) for each in step]
            made.append(listed(messages, plan.chunks_of_buffer))
    return tuple(made)
