"""Small collectives in plain loops, with no barrier between the calls: as a program makes them, with the tail.

    for _ in range(3000):
        device.all_reduce(x, out=out)

The figure of a call is the time from the end of the call before on the last rank to its own end there, so that all add
up to the loop.  Targets are by the mean, because the tail counts: how often a device sleeps and is woken.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing

from benchmarks.cases import Case
from benchmarks.installed import PEERS, missing
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.suites.peers import started
from benchmarks.systems import OURS, OurCluster, Say, System, take_turns
from benchmarks.tables import ratio_text, seconds_text, table
from benchmarks.targets import LOOP_FACTORS, SLOW_SECONDS, against

NAME = "loops"
NBYTES = 8
OPERATIONS = ("all_reduce", "broadcast", "barrier")


def measure(plan: Plan, results: Results, say: Say) -> None:
    """For each number of devices, vcluster and the peers that are there take turns."""
    python = plan.peers_python or sys.executable
    present = [name for name in PEERS if name != "jax" and name not in missing(python)]
    cases = [
        Case(operation, 0 if operation == "barrier" else NBYTES, in_a_loop=True)
        for operation in OPERATIONS if operation in plan.operations
    ]
    for devices in plan.devices_or((2, 4, 8), (4,)):
        with ExitStack() as stack:
            say(f"{NAME}: starting {devices} devices")
            systems: list[System] = [stack.enter_context(closing(OurCluster(devices)))]
            take_turns(
                NAME, [*systems, *started(stack, present, python, devices, results)], cases, plan, results, say)


def report(results: Results) -> str:
    """A row for each operation and number of devices: median, mean and p99, and the mean by the best peer's."""
    found = {(m.operation, m.devices, m.system): m.seconds for m in results.of(NAME)}
    speeds = results.additions.get(NAME)
    is_slow = speeds is not None and sum(speeds) / 2 > SLOW_SECONDS
    rows = []
    for operation, devices in dict.fromkeys((operation, devices) for operation, devices, _ in found):
        ours = found[operation, devices, OURS]
        peers = {name: found[operation, devices, name].mean for name in PEERS if (operation, devices, name) in found}
        best = min(peers, key=peers.__getitem__, default=None)
        ratio = None if best is None else ours.mean / peers[best]
        factors = LOOP_FACTORS.get(devices)
        limit = factors[is_slow] if factors and ratio is not None else None
        rows.append([
            operation, str(devices), *map(seconds_text, (ours.median, ours.mean, ours.p99)), best or "-",
            "-" if best is None else seconds_text(peers[best]), "-" if ratio is None else ratio_text(ratio),
            "-" if ratio is None else against(limit, ratio, f"{limit}"),
        ])
    return table(("8 B in a loop", "on", "median", "mean", "p99", "best peer", "mean", "ratio", "at most"), rows)
