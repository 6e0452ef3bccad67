"""The same work under MPICH (mpi4py), JAX on forced host devices, and torch's gloo, in turn with vcluster.

A peer that is not installed is skipped with a line.  A ratio is vcluster's median by the peer's: below 1, vcluster is
faster.  Peers have private arrays only; vcluster's shared ones are held against the same figures of theirs.  Two
processes that only copy take their turns as well, for the least that the memory of this machine allows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing

from benchmarks.cases import Case
from benchmarks.copying import PROCESSES, Copying, cases as copies
from benchmarks.installed import PEERS, missing, start_peer
from benchmarks.plan import KIB, MIB, Plan
from benchmarks.results import Measurement, Results
from benchmarks.suites.collectives import DEVICES, cases, spread_line
from benchmarks.systems import OurCluster, Say, System, SystemFailedError, take_turns
from benchmarks.tables import nbytes_text, paragraph, rate_text, ratio_text, seconds_text, table
from benchmarks.targets import JUDGED, LARGE_BYTES, Bound, Growth, Standing, Verdict

NAME = "peers"
SIZES = (8, 512, 4 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK_SIZES = (8, 64 * KIB, MIB, 16 * MIB)
MOST_BYTES = 512 * MIB
"""Of the buffers of all devices together, where nobody asked for sizes."""
COLUMNS = 6
"""Sizes in one table."""
LETTERS = {"mpich": "M", "jax": "J", "gloo": "G", "least": "L", "with out=": "O"}


def measure(plan: Plan, results: Results, say: Say) -> None:
    """For each number of devices, all systems stand ready and take turns."""
    python = plan.peers_python or sys.executable
    absent = missing(python)
    results.skipped.update(absent)
    present = [name for name in PEERS if name not in absent]
    if not present:
        return
    for devices in plan.devices_or(DEVICES, (4,)):
        sizes = plan.sizes_or(SIZES, QUICK_SIZES)
        if plan.sizes is None:
            sizes = tuple(nbytes for nbytes in sizes if nbytes * devices <= MOST_BYTES)
        with ExitStack() as stack:
            say(f"{NAME}: starting {', '.join(present)} on {devices} devices")
            systems: list[System] = [stack.enter_context(closing(OurCluster(devices)))]
            systems += [stack.enter_context(closing(Copying(processes))) for processes in PROCESSES]
            systems += started(stack, present, python, devices, results)
            take_turns(NAME, systems, _todo(plan.operations, sizes, devices), plan, results, say)


def started(
    stack: ExitStack, names: Sequence[str], python: str, devices: int, results: Results
) -> list[System]:
    """The peers of these names, ready, until the ``stack`` ends; those that fail are noted as skipped."""
    starting, ready = [], list[System]()
    for name in names:  # all at once: each takes seconds
        try:
            starting.append(stack.enter_context(closing(start_peer(name, python, devices))))
        except SystemFailedError as error:
            results.skipped[f"{name} on {devices}"] = str(error)
    for peer in starting:
        try:
            peer.connect()
        except SystemFailedError as error:
            results.skipped[f"{peer.name} on {devices}"] = str(error)
        else:
            results.versions[peer.name] = peer.version
            ready.append(peer)
    return ready


def _todo(operations: tuple[str, ...], sizes: tuple[int, ...], devices: int) -> list[Case]:
    """Both kinds of memory, large ones without ``out=`` too; private round trips; copies."""
    todo = cases(operations, sizes)
    todo += [
        Case(case.operation, case.nbytes, case.memory, fresh=True) for case in todo if case.nbytes >= LARGE_BYTES
    ]
    todo += [Case("round_trip", nbytes) for nbytes in sizes]
    return todo + copies(devices, max(sizes))


def report(results: Results) -> str:
    """For each number of devices: vcluster's median, its ratio to each peer's, the target and whether it is met."""
    standing = Standing(results)
    verdicts = {_key(verdict.ours): verdict for verdict in standing.verdicts()}
    parts = []
    for devices in standing.devices:
        mine = [m for m in standing.ours() if m.devices == devices]
        sizes = sorted({m.nbytes for m in mine if m.nbytes})
        for start in range(0, max(1, len(sizes)), COLUMNS):
            shown = sizes[start : start + COLUMNS]
            rows: list[list[str]] = []
            for operation, memory in dict.fromkeys((m.operation, m.memory) for m in mine):
                if operation != "barrier" or start == 0:
                    rows += _rows(standing, verdicts, operation, memory, devices, shown)
            header = [f"{devices} devices", "", *(map(nbytes_text, shown) if shown else [""])]
            parts.append(table(header, rows, labels=2))
        parts.append(_machine(standing, devices))
    growths = standing.growths()
    if growths:
        parts.append(_growth_table(growths, standing.peers))
    if parts:
        parts += [_legend(), _summary(list(verdicts.values()), growths)]
        parts.append(paragraph(spread_line([m.seconds for m in standing.ours()])))
    return "\n\n".join(part for part in parts if part)


def _key(m: Measurement) -> tuple[str, str, bool, int, int]:
    return m.operation, m.memory, m.fresh, m.devices, m.nbytes


def _rows(
    standing: Standing, verdicts: dict[tuple[str, str, bool, int, int], Verdict], operation: str, memory: str,
    devices: int, sizes: list[int],
) -> list[list[str]]:
    """All that is known of one operation on arrays in one memory; rows that say nothing are left out."""
    columns = sizes if operation != "barrier" else [0]
    blank = [""] * (max(1, len(sizes)) - len(columns))
    ours = [standing.own(operation, memory, devices, nbytes) for nbytes in columns]
    medians = [None if m is None else m.seconds.median for m in ours]
    judged = [verdicts.get((operation, memory, False, devices, nbytes)) for nbytes in columns]
    fresh = [standing.own(operation, memory, devices, nbytes, fresh=True) for nbytes in columns]

    def over(others: list[float | None]) -> list[str]:
        return ["-" if a is None or b is None else ratio_text(a / b) for a, b in zip(medians, others, strict=True)]

    rows = [
        (memory, ["-" if median is None else seconds_text(median) for median in medians]),
        *(
            (f"/ {peer}", over([standing.theirs(peer, operation, devices, nbytes) for nbytes in columns]))
            for peer in standing.peers
        ),
        ("/ least", over([standing.least(operation, devices, nbytes) for nbytes in columns])),
        ("target", ["-" if verdict is None else bound_text(verdict.tightest) for verdict in judged]),
        ("met", ["-" if verdict is None else _met(verdict) for verdict in judged]),
        ("no out=", [
            "-" if new is None or median is None else ratio_text(new.seconds.median / median)
            for new, median in zip(fresh, medians, strict=True)
        ]),
        ("spread", ["-" if m is None else f"{m.seconds.spread:.0%}" for m in ours]),
    ]
    said = [(label, cells) for label, cells in rows if any(cell != "-" for cell in cells)]
    return [
        [operation if number == 0 else "", label, *cells, *blank] for number, (label, cells) in enumerate(said)
    ]


def bound_text(bound: Bound) -> str:
    """``0.7 M``: 0.7 times MPICH's; ``12 us``."""
    return f"{bound.factor:g} {LETTERS[bound.of]}" if bound.of else f"{bound.seconds * 1e6:.0f} us"


def _met(verdict: Verdict) -> str:
    return "yes" if verdict.met else f"NO {ratio_text(verdict.ratio)}"


def _machine(standing: Standing, devices: int) -> str:
    """The rates at which this machine copied meanwhile."""
    rates = standing.rates[devices]
    rows = []
    for processes in PROCESSES:
        found = [rates.rate(processes, nbytes) for nbytes in rates.sizes]
        rows.append([f"{processes} copying", *("-" if rate is None else rate_text(rate).split()[0] for rate in found)])
    return table(("GB/s in all", *map(nbytes_text, rates.sizes)), rows) if rates.sizes else ""


def _growth_table(growths: list[Growth], peers: tuple[str, ...]) -> str:
    rows = [
        [
            f"{growth.devices} / {growth.devices // 2}", growth.operation, growth.memory,
            nbytes_text(growth.nbytes) if growth.nbytes else "-", ratio_text(growth.ours),
            *(ratio_text(growth.theirs[peer]) if peer in growth.theirs else "-" for peer in peers),
            "-" if growth.allowed is None else "yes" if growth.met else "NO",
        ]
        for growth in growths
    ]
    return table(("time on", "", "", "bytes", "vcluster", *peers, "met"), rows, labels=3)


def _legend() -> str:
    return paragraph(
        "vcluster's median, and that divided by each peer's: below 1, vcluster is faster. A small broadcast is held "
        "against the peer's barrier and broadcast. Least: what the least memory traffic takes at the rate at which "
        "this machine copies. Targets: M, J, G times MPICH's, JAX's, gloo's; L the least; NO 1.20: 1.20 times what is "
        "allowed. No out=: a new result each time, by the figure with out=; target 1.15. Spread: the quartiles' "
        "distance, by the median."
    )


def _summary(verdicts: list[Verdict], growths: list[Growth]) -> str:
    missed = [verdict for verdict in verdicts if not verdict.met]
    judged = [growth for growth in growths if growth.allowed is not None]
    lines = [paragraph(f"{len(verdicts) - len(missed)} of {len(verdicts)} figures meet their targets.")]
    for verdict in sorted(missed, key=lambda verdict: -verdict.ratio):
        m = verdict.ours
        lines.append(
            f"    {m.operation} {nbytes_text(m.nbytes)} {m.memory}{' no out=' if m.fresh else ''} on {m.devices}: "
            f"{seconds_text(m.seconds.median)}, {verdict.ratio:.2f} x {bound_text(verdict.tightest)}"
        )
    if judged:
        slower = sum(not growth.met for growth in judged)
        over = max(JUDGED)
        lines.append(paragraph(
            f"Above {over} devices, {len(judged) - slower} of {len(judged)} figures grow no faster than the fastest "
            f"peer's."
        ))
    return "\n".join(lines)
