"""Which traces `Trace.on` can price on other hardware, and by what.

    what `simulate` returned     its `Simulation` runs again, so the times are those of a simulation there
    any other                    its events, if they tell their work: flops, bytes, dtypes and shapes of compute, calls
                                 of collectives, bytes of messages

A trace that is filtered, copied or loaded has events, but no simulation.  If its events are all those of a run or of a
simulation op by op, they tell their work.  If not, it is refused here, because a price would be wrong without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from parallelism.events import HOST, Columns
from parallelism.hardware import Software
from parallelism.timeline import Priced, warn_of_undeclared
from parallelism.timeline.replay import repriced

if TYPE_CHECKING:
    from parallelism.timeline import Pricing
    from parallelism.trace.trace import Trace


class Simulation(Protocol):
    """A program with all that is needed to simulate it on any hardware."""

    def on(self, pricing: Pricing) -> Trace:
        """The trace that the program would leave under other prices."""


def repriced_events(trace: Trace, pricing: Pricing) -> tuple[Columns, Priced]:
    """The events of a trace with their times under other prices, and how these were computed.

    ``ValueError`` for a trace whose events do not tell their work.
    """
    _check_work_is_known(trace, pricing)
    seen, before = repriced(trace.columns, trace.size, pricing), trace.priced
    left_out = before.left_out_seconds + seen.left_out_seconds
    undeclared = left_out + seen.undeclared_seconds
    if before.compute != "modelled":
        warn_of_undeclared(undeclared, before.left_out_seconds + seen.compute_seconds, trace.size)
    return seen.events, before._replace(
        compute=pricing.compute,
        priced_dtype=pricing.priced_dtype,
        link_sharing=pricing.link_sharing,
        undeclared_seconds=undeclared,
        left_out_seconds=left_out,
    )


def _check_work_is_known(trace: Trace, pricing: Pricing) -> None:
    """``ValueError`` for a trace without a `Simulation` whose events do not tell their work."""
    where = "the host" if pricing.name is None else pricing.name
    priced = trace.priced
    if priced.folded or priced.pieces:
        held = "one device for all that are equal to it" if priced.folded else "one event for several ops"
        raise ValueError(
            f"a folded trace that was loaded, filtered or copied cannot be priced on {where}: it has {held}, and not "
            f"the program. {_INSTEAD}"
        )
    software = Software.of(pricing.hardware)
    if priced.software not in (None, software):
        raise ValueError(
            f"a simulated trace that was loaded, filtered or copied cannot be priced on {where}: its ops are those on "
            f"{trace.hardware or 'the host'}, and software on {where} {_difference(priced.software, software)}. "
            f"{_INSTEAD}"
        )
    if missing := _partners_outside(trace):
        raise ValueError(
            f"a trace of some ranks cannot be priced on {where}: it has what ranks {_first(trace.ranks)} do together "
            f"with rank {min(missing)}, and not what rank {min(missing)} does. Write trace.on(hardware) before "
            "trace.filter(rank=...)"
        )


_INSTEAD = (
    "Write simulate(program, hardware, mesh=...) for that hardware, or trace.on(hardware) before "
    "trace.save() or trace.filter()"
)


def _difference(mine: Software, there: Software) -> str:
    """What the software of the other hardware does differently."""
    if mine.fused != there.fused:
        return (
            "fuses other chains of elementwise ops"
            if there.fused
            else "does not fuse chains of elementwise ops"
        )
    if mine.overlapping != there.overlapping:
        return f"{'runs' if there.overlapping else 'does not run'} collectives of a backward beside products"
    return f"{'has' if there.gradient_buffers else 'has no'} buffers for the gradients of a single microbatch"


def _first(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:3])) + (", ..." if len(ranks) > 3 else "")


def _partners_outside(trace: Trace) -> set[int]:
    """The devices that are not in a trace, and take part in its collectives and messages."""
    if len(trace.ranks) == trace.size:
        return set()
    partners = trace.columns.distinct("peer") - {None, HOST}
    for group in trace.columns.distinct("group") - {None}:
        partners.update(group)
    return partners.difference(trace.ranks)
