"""What one `VirtualCluster.run` costs the host: empty, and with large arguments and results.

The large ones are dealt to the devices (`PerDevice`), so that all of them together are ``nbytes``.  What they need is
one copy of each byte each way; beside them stands how often the host could copy the same bytes, alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import numpy as np

from benchmarks.cases import Array, WrongAnswerError
from benchmarks.plan import MIB, Plan
from benchmarks.results import Results
from benchmarks.systems import OURS, Say
from benchmarks.tables import nbytes_text, rate_text, seconds_text, table
from benchmarks.targets import COPIES_FACTOR, PLAIN, against
from vcluster.code import PerDevice
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

NAME = "run"
TEXTS = {"empty": "empty run", "arguments": "arguments", "results": "results", "both": "both", "copy": "a copy"}
COPIES = {"arguments": 1, "results": 1, "both": 2}
"""Of all bytes, at least."""
MOST_BYTES = 64 * MIB
MOST_DEVICES_WITH_DATA = 8


def measure(plan: Plan, results: Results, say: Say) -> None:
    """All clusters stand ready, and everything is timed on each in turn."""
    crowds = plan.devices_or((4, 8, 64), (4, 64))
    sizes = plan.sizes_or((MIB, MOST_BYTES), (MOST_BYTES,))
    seconds: dict[tuple[str, int, int], list[float]] = {}
    with ExitStack() as stack:
        # Where user's modules are loaded, a device looks before each run whether they have changed: some 3 us a module.
        # So the empty runs have clusters of their own, in which none are.
        empty = [stack.enter_context(VirtualCluster(devices)) for devices in crowds]
        with_data = [
            stack.enter_context(VirtualCluster(devices)) for devices in crowds if devices <= MOST_DEVICES_WITH_DATA
        ]
        for number in range(plan.passes):
            say(f"{NAME}: pass {number + 1}/{plan.passes}")
            for cluster in empty:
                seconds.setdefault(("empty", cluster.size, 0), []).extend(_empty_runs(cluster, plan.rounds(0)))
            for cluster in with_data:
                for nbytes in sizes:
                    seconds.setdefault(("copy", cluster.size, nbytes), []).extend(_copies(nbytes, plan.rounds(nbytes)))
                    for what, figures in _runs_with_data(cluster, nbytes, plan.rounds(nbytes)).items():
                        seconds.setdefault((what, cluster.size, nbytes), []).extend(figures)
    for (what, devices, nbytes), figures in seconds.items():
        results.add(NAME, OURS, what, figures, devices=devices, nbytes=nbytes)


def report(results: Results) -> str:
    """A line for each figure, with its spread."""
    found = list(results.of(NAME))
    copy = {(m.devices, m.nbytes): m.seconds.median for m in found if m.operation == "copy"}
    rows = []
    for m in found:
        seconds, copies = m.seconds.median, COPIES.get(m.operation, 0)
        limit, said, needed = PLAIN.get((NAME, m.operation, m.devices)), "", copy.get((m.devices, m.nbytes))
        if limit is not None:
            said = seconds_text(limit)
        elif copies and needed and m.nbytes == MOST_BYTES:
            limit, said = COPIES_FACTOR * copies * needed, f"{COPIES_FACTOR:g} x"
        rows.append([
            TEXTS[m.operation], str(m.devices), nbytes_text(m.nbytes) if m.nbytes else "-",
            seconds_text(seconds), f"{m.seconds.spread:.0%}", rate_text(m.nbytes / seconds) if m.nbytes else "-",
            f"{seconds / copies / needed:.2f} x" if copies and needed else "-", against(limit, seconds, said),
        ])
    return table(("", "devices", "bytes", "median", "spread", "rate", "copies", "at most"), rows)


def _copies(nbytes: int, rounds: int) -> list[float]:
    """Seconds that the host takes to copy so many bytes, between pages that are there already."""
    whole = np.ones(max(1, nbytes // 4), np.float32)
    other = whole.copy()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        np.copyto(other, whole)
        found.append(time.perf_counter() - start)
    return found


def _empty_runs(cluster: VirtualCluster, rounds: int) -> list[float]:
    def check(outputs: list[Any]) -> None:
        _expect(outputs == list(range(cluster.size)), "an empty run", cluster)

    return [_timed(lambda: cluster.run(attrgetter("rank")).outputs, check) for _ in range(rounds + 1)][1:]


def _runs_with_data(cluster: VirtualCluster, nbytes: int, rounds: int) -> dict[str, list[float]]:
    whole = (np.arange(max(cluster.size, nbytes // 4)) % 1021).astype(np.float32)
    shards = PerDevice(np.array_split(whole, cluster.size))
    cluster.run(_keep, shards)

    def took(outputs: list[Any]) -> None:
        right = [(part.size, part[0], part[-1]) for part in np.array_split(whole, cluster.size)]
        _expect(outputs == right, "a run with arguments", cluster)

    def gave(outputs: list[Any]) -> None:
        _expect(np.array_equal(np.concatenate(outputs), whole), "a run with results", cluster)

    found: dict[str, list[float]] = {"arguments": [], "results": [], "both": []}
    for _ in range(rounds + 1):
        found["arguments"].append(_timed(lambda: cluster.run(_ends, shards).outputs, took))
        found["results"].append(_timed(lambda: cluster.run(_kept).outputs, gave))
        found["both"].append(_timed(lambda: cluster.run(_same, shards).outputs, gave))
    cluster.run(_forget)
    return {what: figures[1:] for what, figures in found.items()}


def _timed(call: Callable[[], list[Any]], check: Callable[[list[Any]], None]) -> float:
    start = time.perf_counter()
    outputs = call()
    seconds = time.perf_counter() - start
    check(outputs)
    return seconds


def _expect(right: bool, what: str, cluster: VirtualCluster) -> None:
    if not right:
        raise WrongAnswerError(f"{what} on {cluster.size} devices gave wrong outputs")



def _ends(device: VirtualDevice, x: Array) -> tuple[int, float, float]:
    return x.size, float(x[0]), float(x[-1])


def _same(device: VirtualDevice, x: Array) -> Array:
    return x


def _keep(device: VirtualDevice, x: Array) -> None:
    device.state["kept"] = x.copy()


def _kept(device: VirtualDevice) -> Any:
    return device.state["kept"]


def _forget(device: VirtualDevice) -> None:
    device.state.clear()
