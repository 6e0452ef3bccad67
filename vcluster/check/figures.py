"""The communication of a run beside that of the known algorithms, by their closed forms."""

from __future__ import annotations

from typing import NamedTuple

from parallelism.algorithms import ALGORITHMS, CollectiveKind, closed_form
from parallelism.display.quantities import plural
from parallelism.trace import Trace


class Traffic(NamedTuple):
    """The largest figures over all ranks."""

    bytes_received: float
    messages: int
    steps: int


def measured(trace: Trace) -> Traffic:
    """The traffic of a run whose messages take a second each."""
    ranks = range(trace.size)
    return Traffic(
        max(trace.bytes_received(rank) for rank in ranks),
        max(trace.messages(rank) for rank in ranks),
        round(trace.makespan_seconds),
    )


def known(kind: CollectiveKind, size: int, nbytes: int, root: int) -> dict[str, Traffic]:
    """By algorithm, for a buffer S of ``nbytes``; algorithms that read shared memory have no messages to compare."""
    found = {}
    for (own_kind, name), record in ALGORITHMS.records.items():
        if own_kind == kind.name and name != "direct" and record.steps is not None and record.fits(size):
            form = closed_form(own_kind, name, size, root=root)
            found[name] = Traffic(max(form.bytes_received(nbytes)), max(form.messages), form.steps)
    return found


def table_of(mine: Traffic, others: dict[str, Traffic]) -> tuple[tuple[str, ...], ...]:
    """The table, the own function first."""
    rows = [("yours", *mine), *((name, *traffic) for name, traffic in others.items())]
    return (
        ("", "bytes received", "messages sent", "steps"),
        *(
            (str(name), f"{received:g}", str(messages), str(steps))
            for name, received, messages, steps in rows
        ),
    )


def verdict(mine: Traffic, others: dict[str, Traffic]) -> str:
    """The comparison in a sentence."""
    alike = [name for name, traffic in others.items() if traffic == mine]
    if alike:
        return f"its bytes, messages and steps are those of {' and '.join(alike)}"
    if not others:
        return ""
    least = min(others.values(), key=lambda each: (each.bytes_received, each.steps))
    name = next(name for name, traffic in others.items() if traffic == least)
    quickest = min(each.steps for each in others.values())
    parts = []
    if mine.bytes_received > least.bytes_received:
        parts.append(
            f"a rank receives {mine.bytes_received / least.bytes_received:.3g} times the bytes of {name}"
        )
    else:
        parts.append(
            f"no known algorithm receives fewer bytes at the busiest rank than it ({mine.bytes_received:g})"
        )
    enough = "1 is enough" if quickest == 1 else f"{quickest} are enough"
    parts.append(
        f"it takes {plural(mine.steps, 'step')}, and {enough}"
        if mine.steps > quickest
        else f"it takes {plural(mine.steps, 'step')}"
    )
    return "; ".join(parts)
