"""What supervision with its checks, and what tracing, cost each operation.

A kernel runs small all_reduces as they are, then with the published status and the note of the last call taken out of
its device, then with the events taken out, in turn; the figures are CPU time of its thread for each operation, which
does not count the others' turns.  (That a member calls the same is seen by the very comparison that says it has come.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from benchmarks.cases import WrongAnswerError
from benchmarks.plan import Plan
from benchmarks.results import Results
from benchmarks.suites.tracing import without_tracing
from benchmarks.systems import OURS, Say
from benchmarks.tables import seconds_text, table
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

NAME = "checks"
OPERATIONS_A_ROUND = 200
TITLES = {
    "everything": "all_reduce of 8 B, as it is",
    "unsupervised": "without supervision and checks",
    "untraced": "without tracing",
}


def measure(plan: Plan, results: Results, say: Say) -> None:
    """CPU seconds of one operation, the dearest rank's."""
    for devices in plan.devices_or((1, 4), (1, 4)):
        say(f"{NAME}: {devices} devices")
        with VirtualCluster(devices) as cluster:
            run = cluster.run(_kernel, max(5, plan.rounds(0) // 10))
            for what in TITLES:
                figures = [max(rounds) for rounds in zip(*(output[what] for output in run), strict=True)]
                results.add(NAME, OURS, what, figures, devices=devices, nbytes=8)


def report(results: Results) -> str:
    """A line for each variant, and what it saves."""
    found = {(m.devices, m.operation): m.seconds for m in results.of(NAME)}
    rows = []
    for (devices, what), seconds in found.items():
        saves = found[devices, "everything"].median - seconds.median
        rows.append([
            TITLES[what], str(devices), seconds_text(seconds.median),
            "-" if what == "everything" else f"{saves * 1e6:.1f} us",
        ])
    return table(("CPU time of an operation", "devices", "median", "so that costs"), rows)


def _kernel(device: VirtualDevice, rounds: int) -> dict[str, list[float]]:
    x = np.ones(1)
    variants: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "everything": nullcontext,
        "unsupervised": lambda: _without_supervision(device),
        "untraced": without_tracing,
    }
    found: dict[str, list[float]] = {what: [] for what in variants}
    for number in range(rounds + 1):
        for what, variant in variants.items():
            with variant():
                start = time.thread_time()
                for _ in range(OPERATIONS_A_ROUND):
                    y = device.all_reduce(x)
                seconds = (time.thread_time() - start) / OPERATIONS_A_ROUND
            if y[0] != device.size:
                raise WrongAnswerError(f"all_reduce of ones over {device.size} gave {y[0]}")
            if number:
                found[what].append(seconds)
    return found


@contextmanager
def _without_supervision(device: VirtualDevice) -> Iterator[None]:
    signals = device.endpoint.signals
    before = signals.note_awaited, signals.after_sleep
    signals.note_awaited = signals.after_sleep = None
    note, device.recorder.note = device.recorder.note, None
    yield
    device.recorder.note = note
    signals.note_awaited, signals.after_sleep = before


