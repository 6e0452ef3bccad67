"""Kinds of collectives and algorithms added from outside the package.

    register_kind(CollectiveKind("scan", "rank j gets the {op} of ranks 0 to j", "reduced",
                                 sources=lambda position, size: range(position + 1)))
    prefix = device.collective("scan", x)

A kind that is registered can be called, recorded, explained, priced and traced at once: by a ``direct`` algorithm that
follows from its record.  Registered records travel with each run to the devices, whether the cluster was started
before or after.
"""

from __future__ import annotations

from parallelism.algorithms import ALGORITHMS, KINDS, CollectiveAlgorithm, CollectiveKind, check_kind, direct_of
from parallelism.collectives.checks import check


def _check_with_direct(kind: CollectiveKind) -> None:
    check_kind(kind)
    check(direct_of(kind))


def register_kind(kind: CollectiveKind, *, replace: bool = False) -> None:
    """Add a kind of collective, with its ``direct`` algorithm.

    Registering the same record again changes nothing.  Raises `RegistrationError` for a record that is incomplete or
    contradicts itself, and for a name that is taken; ``replace`` puts it in the place of one that was registered.
    """
    KINDS.register(kind, _check_with_direct, replace)


def register_algorithm(algorithm: CollectiveAlgorithm, *, replace: bool = False) -> None:
    """Add an algorithm for kinds that there are.

    Its steps, closed form and phases are played through for some sizes and compared.  Registering the same record
    again changes nothing.  Raises `RegistrationError` for a record that is incomplete or contradicts itself, and for a
    name that is taken; ``replace`` puts it in the place of one that was registered.
    """
    ALGORITHMS.register(algorithm, check, replace)


def unregister(record: CollectiveKind | CollectiveAlgorithm) -> None:
    """Take out a record that was registered; a kind with all algorithms that serve it."""
    if isinstance(record, CollectiveAlgorithm):
        ALGORITHMS.forget(record)
        return
    for algorithm in ALGORITHMS.outside:
        if record.name in algorithm.kinds:
            ALGORITHMS.forget(algorithm)
    KINDS.forget(record)
