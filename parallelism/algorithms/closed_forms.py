"""The costs of the collectives by the formulas of the textbooks, which do not depend on the lists of steps.

``S`` is the whole buffer in bytes, ``g`` the number of positions, ``lg`` the base-2 logarithm, rounded up.  S is the
array of each member for all_reduce, reduce, broadcast, reduce_scatter and all_to_all, that of the root for scatter,
all shards together for all_gather, gather and all_scatter, and one array for permute.  Splits are even.

Sources: Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH* (2005)
for recursive doubling, halving-doubling, binomial trees and rings; Hensgen, Finkel and Manber (1988) for the
dissemination barrier; NVIDIA's nccl-tests, doc/PERFORMANCE.md, for 2(g-1)/g and (g-1)/g.
"""

from parallelism.algorithms.algorithms import algorithm, record_of
from parallelism.algorithms.kinds import Pairs
from parallelism.algorithms.records import ClosedForm


def closed_form(
    collective: str, name: str | None, size: int, *, root: int = 0, pairs: Pairs | None = None
) -> ClosedForm:
    """The closed form of an algorithm; names and errors are those of `parallelism.algorithms.algorithms.algorithm`.

    >>> closed_form("all_reduce", "ring", 4).bytes_received(4096)
    (6144, 6144, 6144, 6144)
    """
    name = algorithm(collective, name, size, root=root, pairs=pairs).name
    record = record_of(collective, name, size)
    cost = record.closed_form(size, root, pairs or ()) if size > 1 else (0, (0,), (0,), (0,))
    return ClosedForm(record.formula, *cost)
