"""What devices cost that have nothing to do, and how soon one that sleeps is awake.

``idle``: nothing runs; ``waiting``: all devices but one wait in a barrier for that one, which sleeps (less what the
same run takes if it does not).  Both are CPU seconds of all devices and the host for each second by the wall, in parts
of a core.  ``wake``: from just before a device sends until its peer, which has slept in a ``recv``, has returned from
it; beside it a bare pipe between the same processes, ``os.write`` to ``os.read``: what the system and cold caches take.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.cases import WrongAnswerError
from benchmarks.cpu import cpu_seconds
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.systems import OURS, Say
from benchmarks.tables import seconds_text, table
from benchmarks.targets import IDLE_PART, PLAIN, against
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

NAME = "idle"
TEXTS = {"idle": "an idle cluster of {}", "waiting": "{} waiting for one of them"}
SLEEP_SECONDS = 0.01
"""Long enough for the other to have fallen asleep."""


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Some seconds of nothing."""
    seconds = 1.0 if plan.quick else 3.0
    for devices in plan.devices_or((4, 64), (64,)):
        say(f"{NAME}: {devices} devices")
        with VirtualCluster(devices) as cluster:
            for what in TEXTS:
                parts = [_part(cluster, what, seconds / plan.passes) for _ in range(plan.passes)]
                results.note(NAME, OURS, what, parts, "of a core", devices=devices)
    say(f"{NAME}: waking")
    taken: dict[str, list[float]] = {OURS: [], "pipe": []}
    with VirtualCluster(2) as cluster, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipe"
        os.mkfifo(path)
        for _ in range(plan.passes):
            for system, run in (
                (OURS, cluster.run(_wake, 20)), ("pipe", cluster.run(_wake_by_pipe, str(path), 20))
            ):
                taken[system] += [end - start for start, end in zip(*run.outputs, strict=True)]
    for system, seconds_each in taken.items():
        results.add(NAME, system, "wake", seconds_each, devices=2)


def report(results: Results) -> str:
    """A line for each figure and what it may be at most."""
    rows = []
    for q in results.amounts_of(NAME):
        limit = IDLE_PART if (q.what, q.devices) == ("idle", 64) else None
        rows.append([
            TEXTS[q.what].format(f"{q.devices}"), *(f"{part:.2%}" for part in q.amount.points[:3]),
            against(limit, q.amount.median, f"{IDLE_PART:.0%}"),
        ])
    for m in results.of(NAME):
        limit = PLAIN.get((NAME, m.operation, m.devices)) if m.system == OURS else None
        rows.append([
            "waking a sleeping device" if m.system == OURS else "waking it by a bare pipe",
            *map(seconds_text, m.seconds.points[:3]),
            against(limit, m.seconds.median, seconds_text(limit or 0.0)),
        ])
    return table(("CPU time, in parts of a core", "median", "25 %", "75 %", "at most"), rows)


def _part(cluster: VirtualCluster, what: str, seconds: float) -> float:
    pids = {*cluster.pids(), os.getpid()}

    def spent(seconds: float) -> float:
        time.sleep(SLEEP_SECONDS)  # who still goes to sleep from before does so now
        before = cpu_seconds(pids)
        if what == "waiting":
            cluster.run(_late, seconds)
        else:
            time.sleep(seconds)
        return cpu_seconds(pids) - before

    cluster.run(_late, 0.0)
    return (spent(seconds) - (spent(0.0) if what == "waiting" else 0.0)) / seconds


def _late(device: VirtualDevice, seconds: float) -> None:
    """Everybody waits for rank 0."""
    if device.rank == 0:
        time.sleep(seconds)
    device.barrier()


def _wake(device: VirtualDevice, rounds: int) -> list[float]:
    moments = []
    for number in range(rounds + 1):
        device.barrier()
        if device.rank == 0:
            time.sleep(SLEEP_SECONDS)
            moments.append(time.perf_counter())
            device.send(np.array([number]), 1)
        else:
            x = device.recv(0)
            moments.append(time.perf_counter())
            if x[0] != number:
                raise WrongAnswerError(f"message {number} brought {x[0]}")
    return moments[1:]


def _wake_by_pipe(device: VirtualDevice, path: str, rounds: int) -> list[float]:
    moments = []
    pipe = os.open(path, os.O_RDONLY if device.rank else os.O_WRONLY)
    for _ in range(rounds + 1):
        device.barrier()
        if device.rank == 0:
            time.sleep(SLEEP_SECONDS)
            moments.append(time.perf_counter())
            os.write(pipe, bytes(8))
        else:
            os.read(pipe, 8)
            moments.append(time.perf_counter())
    os.close(pipe)
    return moments[1:]
