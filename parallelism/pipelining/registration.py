"""Schedules added from outside the package, and the checks that they pass."""

from __future__ import annotations

from parallelism.pipelining.generators import SCHEDULES, ScheduleKind
from parallelism.pipelining.generators.kinds import spelt
from parallelism.pipelining.pipeline import Pipeline

RANKS, MICROBATCHES = (1, 2, 3), (1, 2, 5)
"""The sizes for which a schedule is checked when it is registered."""


def register_schedule(kind: ScheduleKind, *, replace: bool = False) -> None:
    """Add a schedule, which is then known by its name wherever a schedule is named.

    >>> from parallelism import Pipeline, ScheduleKind, register_schedule
    >>> def one_by_one(rank, ranks, microbatches):
    ...     for k in range(microbatches):
    ...         yield rank, "F", k
    ...         yield rank, "B", k
    >>> register_schedule(ScheduleKind("one_by_one", one_by_one, aliases=("sequential",)))
    >>> print(Pipeline(2, 2, "sequential"))
    one_by_one: 2 stages on 2 ranks, 2 microbatches; 8 cycles, 50% idle
    cycle   0  1  2  3  4  5  6  7
    rank 0  F0 .  .  B0 F1 .  .  B1
    rank 1  .  F0 B0 .  .  F1 B1 .

    The order is validated for pipelines of some small sizes now, and each time that a `Pipeline` is made of it.  A
    schedule is a value when it reaches a device, so it need not be registered there.

    ``ValueError`` for a name or an alias that another schedule has, and for an order that is not valid; ``replace``
    puts it in the place of one that was registered.
    """
    _check_names(kind, replace=replace)
    before = SCHEDULES.kinds.get(kind.name)
    SCHEDULES.kinds[kind.name] = kind
    try:
        _check_orders(kind)
    except BaseException:
        del SCHEDULES.kinds[kind.name]
        if before is not None:
            SCHEDULES.kinds[kind.name] = before
        raise


def forget_schedule(name: str) -> None:
    """Take out a schedule that was registered.  ``ValueError`` for a name that was not."""
    if name in SCHEDULES.own or name not in SCHEDULES.kinds:
        raise ValueError(f"no schedule {name!r} was registered")
    del SCHEDULES.kinds[name]


def _check_names(kind: ScheduleKind, *, replace: bool) -> None:
    known = SCHEDULES.by_spelling()
    for name in (kind.name, *kind.aliases):
        other = known.get(spelt(name))
        if other is None:
            continue
        if other.name in SCHEDULES.own:
            raise ValueError(f"schedule {name!r} is part of the package")
        if other.name != kind.name or not replace:
            raise ValueError(
                f"schedule {name!r} is registered; replace=True takes the place of one of the same name"
            )


def _check_orders(kind: ScheduleKind) -> None:
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            Pipeline(ranks * kind.fewest_chunks, microbatches, kind.name, kind.fewest_chunks)
