"""The same work under MPICH (mpi4py), JAX on forced host devices, and torch's gloo, in turn with vcluster.

A peer that is not installed is skipped with a line.  A ratio is vcluster's median by the peer's: below 1, vcluster is
faster.  Peers have private arrays only; vcluster's shared ones are held against the same figures of theirs.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing

from benchmarks.installed import PEERS, missing, start_peer
from benchmarks.plan import KIB, MIB, Plan
from benchmarks.results import Measurement, Results
from benchmarks.suites.collectives import DEVICES, SIZES, cases
from benchmarks.systems import OURS, OurCluster, Say, System, SystemFailedError, take_turns
from benchmarks.tables import nbytes_text, paragraph, ratio_text, seconds_text, table

NAME = "peers"
QUICK_SIZES = (8, 64 * KIB, MIB, 16 * MIB)


def measure(plan: Plan, results: Results, say: Say) -> None:
    """For each number of devices, all systems stand ready and take turns."""
    python = plan.peers_python or sys.executable
    absent = missing(python)
    results.skipped.update(absent)
    present = [name for name in PEERS if name not in absent]
    if not present:
        return
    todo = cases((*plan.operations, "round_trip"), plan.sizes_or(SIZES, QUICK_SIZES))
    todo = [case for case in todo if case.operation != "round_trip" or case.memory == "private"]
    for devices in plan.devices_or(DEVICES, (4,)):
        with ExitStack() as stack:
            say(f"{NAME}: starting {', '.join(present)} on {devices} devices")
            systems: list[System] = [stack.enter_context(closing(OurCluster(devices)))]
            starting = []
            for name in present:  # all at once: each takes seconds
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
                    systems.append(peer)
            take_turns(NAME, systems, todo, plan, results, say)


def report(results: Results) -> str:
    """For each number of devices: vcluster's median, and below it its ratio to each peer's."""
    found = list(results.of(NAME))
    names = [name for name in PEERS if any(m.system == name for m in found)]
    parts = []
    for devices in dict.fromkeys(m.devices for m in found):
        mine = {(m.system, m.operation, m.memory, m.nbytes): m for m in found if m.devices == devices}
        sizes = sorted({m.nbytes for m in found if m.nbytes})
        rows: list[list[str]] = []
        for operation, memory in dict.fromkeys((m.operation, m.memory) for m in mine.values() if m.system == OURS):
            columns = sizes if operation != "barrier" else [0]
            blank = [""] * (max(1, len(sizes)) - len(columns))
            ours = [mine.get((OURS, operation, memory, nbytes)) for nbytes in columns]
            rows.append([
                operation, memory, *("-" if m is None else seconds_text(m.seconds.median) for m in ours), *blank
            ])
            for name in names:
                theirs = [mine.get((name, operation, "private", nbytes)) for nbytes in columns]
                if any(theirs):
                    rows.append(["", f"/ {name}", *map(_ratio, ours, theirs), *blank])
        header = [f"{devices} devices", "", *(map(nbytes_text, sizes) if sizes else [""])]
        parts.append(table(header, rows, labels=2))
    if found:
        parts.append(paragraph("vcluster's median, and that divided by each peer's: below 1, vcluster is faster."))
    return "\n\n".join(parts)


def _ratio(ours: Measurement | None, theirs: Measurement | None) -> str:
    return "-" if ours is None or theirs is None else ratio_text(ours.seconds.median / theirs.seconds.median)
