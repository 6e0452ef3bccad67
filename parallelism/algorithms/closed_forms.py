"""What the textbook says a collective costs, beside the step lists and independent of them.

``S`` is the whole buffer in bytes, ``g`` the positions, ``lg`` the base-2 logarithm, rounded up.  S is what
everyone holds for all_reduce, reduce, broadcast, reduce_scatter and all_to_all, what the root holds for
scatter, all shards together for all_gather, gather and all_scatter, one array for permute.  Even splits.

Sources: Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH* (2005)
for recursive doubling, halving-doubling, binomial trees and rings; Hensgen, Finkel and Manber (1988) for the
dissemination barrier; NVIDIA's nccl-tests, doc/PERFORMANCE.md, for 2(g-1)/g and (g-1)/g.
"""

from __future__ import annotations

from parallelism.algorithms.algorithms import Pairs, algorithm, record_of
from parallelism.algorithms.records import ClosedForm


def bytes_received_per_rank(
    collective: str, name: str | None, size: int, nbytes: int, *, root: int = 0, pairs: Pairs | None = None
) -> tuple[float, ...]:
    """The bytes each position receives, by the formula.

    >>> bytes_received_per_rank("all_reduce", "ring", 4, 4096)
    (6144, 6144, 6144, 6144)
    """
    return closed_form(collective, name, size, root=root, pairs=pairs).bytes_received(nbytes)


def closed_form(
    collective: str, name: str | None, size: int, *, root: int = 0, pairs: Pairs | None = None
) -> ClosedForm:
    """The closed form of an algorithm; names and errors are those of `communication.algorithm`."""
    name = algorithm(collective, name, size, root=root, pairs=pairs).name
    record = record_of(collective, name, size)
    if size == 1:
        return ClosedForm(record.formula, 0, (0,), (0,), (0,))
    return ClosedForm(record.formula, *record.closed_form(size, root, pairs or ()))
