"""The collectives of vcluster: by size, number of devices, and where the arrays lie; always with ``out=``."""

from __future__ import annotations

from contextlib import closing

from benchmarks.cases import MEMORIES, Case
from benchmarks.plan import KIB, MIB, Plan
from benchmarks.results import Results
from benchmarks.summary import Summary
from benchmarks.systems import OurCluster, Say, take_turns
from benchmarks.tables import nbytes_text, paragraph, seconds_text, table

NAME = "collectives"
DEVICES = (2, 4, 8)
SIZES = (8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
QUICK_SIZES = (8, 64 * KIB, MIB, 16 * MIB)


def cases(operations: tuple[str, ...], sizes: tuple[int, ...], memories: tuple[str, ...] = MEMORIES) -> list[Case]:
    """Each operation at each size in each kind of memory; a barrier once."""
    return [
        Case(operation, nbytes, memory)
        for operation in operations
        for nbytes in (sizes if operation != "barrier" else (0,))
        for memory in (memories if operation != "barrier" else ("private",))
    ]


def measure(plan: Plan, results: Results, say: Say) -> None:
    """One cluster after the other."""
    todo = cases(plan.operations, plan.sizes_or(SIZES, QUICK_SIZES))
    for devices in plan.devices_or(DEVICES, (4,)):
        with closing(OurCluster(devices)) as system:
            take_turns(NAME, [system], todo, plan, results, say)


def report(results: Results) -> str:
    """For each number of devices a table of medians: a row an operation and memory, a column a size."""
    found = list(results.of(NAME))
    parts = []
    for devices in dict.fromkeys(m.devices for m in found):
        mine = {(m.operation, m.memory, m.nbytes): m for m in found if m.devices == devices}
        sizes = sorted({nbytes for _, _, nbytes in mine if nbytes})
        rows = []
        for operation, memory in dict.fromkeys((operation, memory) for operation, memory, _ in mine):
            columns = sizes if operation != "barrier" else [0] + [-1] * (len(sizes) - 1)
            row = [mine.get((operation, memory, nbytes)) for nbytes in columns or [0]]
            rows.append([operation, memory, *("" if m is None else seconds_text(m.seconds.median) for m in row)])
        header = [f"{devices} devices", "arrays", *(map(nbytes_text, sizes) if sizes else [""])]
        parts.append(table(header, rows, labels=2))
    if found:
        parts.append(paragraph(spread_line([m.seconds for m in found])))
    return "\n\n".join(parts)


def spread_line(summaries: list[Summary]) -> str:
    """How far apart the quartiles are in most of them."""
    spreads = sorted(summary.spread for summary in summaries)
    half, most = spreads[len(spreads) // 2], spreads[len(spreads) * 9 // 10]
    return f"Medians; their quartiles lie {half:.0%} apart in half of the cells, {most:.0%} at most in nine of ten."
