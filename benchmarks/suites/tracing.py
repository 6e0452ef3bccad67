"""What it costs to record, and what a million events cost when they are merged, saved and loaded.

``traced`` and ``untraced`` are the CPU seconds of a device's thread for one small all_reduce, with the recorder and
with a recorder that does nothing, in turn.  All else is one process that starts four devices, has them record a
quarter of the events each, and goes on with the trace: wall seconds and the CPU seconds of that process, with the most
memory that it had at any time, less what it had before.

``replayed`` are the CPU seconds of an event when a storm of messages is priced on described hardware, links shared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.cases import WrongAnswerError
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.storms import STORMS
from benchmarks.suites.startup import fresh
from benchmarks.systems import OURS, Say
from benchmarks.tables import seconds_text, table
from parallelism.trace import Trace
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

NAME = "tracing"
OPERATIONS_A_ROUND = 200
DEVICES = 4
STORMY = (8, 16, 32, 64)
STORMY_HARDWARE = ("ethernet-cpu:64", "dgx-h100:8")
EVENTS = 1_000_000
EVENTS_QUICKLY = 50_000
"""Of all devices together."""
STEPS = {
    "record": "recorded by 4 devices", "merge": "merged, virtual time and all", "save": "saved",
    "load": "loaded", "count": "filtered, counted, totalled",
}


def measure(plan: Plan, results: Results, say: Say) -> None:
    """CPU seconds of one operation, the dearest rank's; then all steps of a large trace."""
    for devices in plan.devices_or((1, 2), (1, 2)):
        say(f"{NAME}: {devices} devices")
        with VirtualCluster(devices) as cluster:
            run = cluster.run(_kernel, max(5, plan.rounds(0)))
            for what in ("traced", "untraced"):
                figures = [max(rounds) for rounds in zip(*(output[what] for output in run), strict=True)]
                results.add(NAME, OURS, what, figures, devices=devices, nbytes=8)
    for devices, (name, storm) in product((8,) if plan.quick else STORMY, STORMS.items()):
        trace = storm(devices)
        for hardware in STORMY_HARDWARE:
            say(f"{NAME}: {name} of {devices} on {hardware}")
            figures = [_replayed(trace, hardware) for _ in range(1 if plan.quick else 1 + 2 * plan.passes)]
            what = f"replayed, {name} on {hardware.partition(':')[0]}"
            results.add(NAME, OURS, what, figures[not plan.quick:], devices=devices, memory=f"{len(trace)} events")
    events = EVENTS_QUICKLY if plan.quick else EVENTS
    found: dict[str, list[float]] = {}
    for number in range(plan.passes):
        say(f"{NAME}: pass {number + 1}/{plan.passes}, {events} events")
        for what, figures in fresh("trace", str(DEVICES), str(events)).items():
            found.setdefault(what, []).extend(figures)
    memory = max(found.pop("bytes"))
    for what, figures in found.items():
        results.add(NAME, OURS, what, figures, devices=DEVICES, nbytes=int(memory), memory=f"{events} events")


def report(results: Results) -> str:
    """What an operation's event costs; then a line for each step of a large trace."""
    found = {(m.devices, m.operation): m for m in results.of(NAME)}
    rows = []
    for devices in sorted({m.devices for m in results.of(NAME) if m.operation == "traced"}):
        with_it, without = found[devices, "traced"].seconds.median, found[devices, "untraced"].seconds.median
        rows.append([str(devices), seconds_text(with_it), seconds_text(without), f"{(with_it - without) * 1e6:.1f} us"])
    text = table(("devices", "all_reduce of 8 B", "without tracing", "so that costs"), rows)
    storms = {(m.devices, m.operation.removeprefix("replayed, ")): m for m in results.of(NAME)
              if m.operation.startswith("replayed, ")}
    if storms:
        rows = [[what, str(devices), seconds_text(m.seconds.median)] for (devices, what), m in storms.items()]
        text += f"\n\n{table(('replayed with shared links', 'devices', 'an event'), rows)}"
    if (DEVICES, "save") not in found:      # that process failed
        return text
    rows = []
    for what, title in STEPS.items():
        wall, cpu = found[DEVICES, what], found[DEVICES, f"{what}, CPU of the host"]
        rows.append([title, seconds_text(wall.seconds.median), seconds_text(cpu.seconds.median)])
    large = found[DEVICES, "save"]
    total = sum(found[DEVICES, what].seconds.median for what in ("record", "merge", "save"))
    rows.append(["recorded, merged and saved", seconds_text(total), ""])
    return (f"{text}\n\n{table((large.memory, 'wall', 'CPU of the host'), rows)}\n"
            f"  at the host, {large.nbytes / 2**20:.0f} MiB at most beside what it had before")


def _replayed(trace: Trace, hardware: str) -> float:
    """CPU seconds of an event."""
    start = time.process_time()
    trace.on(hardware, compute="modelled")
    return (time.process_time() - start) / len(trace)


def _kernel(device: VirtualDevice, rounds: int) -> dict[str, list[float]]:
    x = np.ones(1)
    found: dict[str, list[float]] = {"traced": [], "untraced": []}
    for number in range(rounds + 1):
        for what, figures in found.items():
            with without_tracing(when=what == "untraced"):
                start = time.thread_time()
                for _ in range(OPERATIONS_A_ROUND):
                    y = device.all_reduce(x)
                seconds = (time.thread_time() - start) / OPERATIONS_A_ROUND
            if y[0] != device.size:
                raise WrongAnswerError(f"all_reduce of ones over {device.size} gave {y[0]}")
            if number:
                figures.append(seconds)
    return found


@contextmanager
def without_tracing(*, when: bool = True) -> Iterator[None]:
    """A recorder that does nothing, and takes no time but that of the calls."""
    def nothing(*_: Any) -> int:
        return 0

    row = [None, "all_reduce"]

    def the_row(*_: Any) -> list[Any]:
        return row

    if not when:
        yield
        return
    with mock.patch.multiple(
        "vcluster.tracing.recorder.Recorder", enter=nothing, leave=nothing, add_repeated=nothing,
        add_collective=the_row, finish_collective=nothing,
    ):
        yield
