"""Calls that could fall off the fast way, each beside the same call that does not, with the tail.

A figure is one call, from the moment the last device starts until the last has it, with a barrier before each; of
``shapes`` it is the CPU time of a call on a device, in a loop over so many arrays of distinct shapes.  The last answer
of each case is checked.  *Beside* is the case that a row is held against, measured in the same rounds:

- ``float``, ``np.float64``, ``int``: an all_reduce of a scalar, beside one of an array of one element;
- ``64 KiB + 4 B``: an all_reduce just above the size that is copied into slots, beside one just below;
- ``transposed``: an all_reduce of a transposed array of 4 MiB, beside a contiguous one, whose time
  has that of two of NumPy's own copies added;
- ``1,100 shapes``: more distinct calls than are kept prepared, beside 50; ``new shape``: the first call of each;
- ``100,000 numbers``: a list of as many floats as a message, held against plain seconds;
- ``recorded``: one all_reduce of 1 MiB recorded over many ranks without processes, held against plain seconds;
- 32, 64, 128 devices: a barrier and all_reduces, held against twice the time on half the devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.cases import Array, Times, WrongAnswerError, seconds_of
from benchmarks.plan import KIB, MIB, Plan
from benchmarks.results import Measurement, Results
from benchmarks.systems import OURS, Say
from benchmarks.tables import nbytes_text, ratio_text, seconds_text, table
from benchmarks.targets import CLIFF_FACTORS, CLIFF_SECONDS, GROWTH_FACTOR, against
from parallelism import Mesh
from parallelism.recorder import record
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

NAME = "cliffs"
WIDTH = 1024
NUMBERS = 100_000
MANY_SHAPES, FEW_SHAPES = 1100, 50
BESIDE = {
    "a float": "an array of 1", "a np.float64": "an array of 1", "an int": "an array of 1",
    "64 KiB + 4 B": "64 KiB", "transposed": "contiguous", f"{MANY_SHAPES} shapes": f"{FEW_SHAPES} shapes",
    "a new shape": f"{FEW_SHAPES} shapes",
}
"""What each case is held against."""


def measure(plan: Plan, results: Results, say: Say) -> None:
    """The cases on 2 and 4 devices; then messages, records, and clusters of 32 to 128 devices."""
    for devices in plan.devices_or((2, 4), (2,)):
        say(f"{NAME}: {devices} devices")
        with VirtualCluster(devices) as cluster:
            for what, seconds in _merged([_on(cluster, _calls, plan) for _ in range(plan.passes)]).items():
                results.add(NAME, OURS, what, seconds, devices=devices)
            shapes = cluster.run(_shapes, 2 + plan.passes, 100 if plan.quick else MANY_SHAPES).outputs
            for what in shapes[0]:
                slowest = [max(each) for each in zip(*(found[what] for found in shapes), strict=True)]
                results.add(NAME, OURS, what, slowest, devices=devices)
    with VirtualCluster(2) as cluster:
        say(f"{NAME}: a list of {NUMBERS:,} numbers")
        for what, seconds in _on(cluster, _numbers, plan).items():
            results.add(NAME, OURS, what, seconds, devices=2)
    for algorithm, ranks in ((None, 64), ("ring", 16)) if plan.quick else ((None, 1024), ("ring", 256)):
        say(f"{NAME}: recorded over {ranks} ranks")
        results.add(NAME, OURS, "recorded" + (f", {algorithm}" if algorithm else ""),
                    [_recorded(algorithm, ranks) for _ in range(plan.passes)], devices=ranks, nbytes=MIB)
    for devices in () if plan.quick else (32, 64, 128):
        say(f"{NAME}: {devices} devices")
        with VirtualCluster(devices) as cluster:
            for what, seconds in _merged([_on(cluster, _grown, plan) for _ in range(plan.passes)]).items():
                results.add(NAME, OURS, what, seconds, devices=devices)


def report(results: Results) -> str:
    """A row for each case: median, mean, p99, what it is held against, and whether it keeps that."""
    found = {(m.operation, m.devices): m for m in results.of(NAME)}
    rows = []
    for (what, devices), m in found.items():
        against_what, limit = _limit(found, m)
        rows.append([
            what, str(devices), *map(seconds_text, (m.seconds.median, m.seconds.mean, m.seconds.p99)), against_what,
            "-" if limit is None else ratio_text(m.seconds.median / limit[0]),
            "-" if limit is None else against(limit[1], m.seconds.median / limit[0], f"{limit[1]:g}"),
        ])
    return table(("", "on", "median", "mean", "p99", "beside", "times", "at most"), rows)


def _limit(found: dict[tuple[str, int], Measurement], m: Measurement) -> tuple[str, tuple[float, float] | None]:
    """What a figure is held against, in words, and as seconds and a factor."""
    if m.operation in CLIFF_SECONDS:
        return seconds_text(CLIFF_SECONDS[m.operation]), (CLIFF_SECONDS[m.operation], 1.0)
    near = found.get((BESIDE.get(m.operation, ""), m.devices))
    if near is not None:
        copy = found.get(("NumPy's copy", m.devices)) if m.operation == "transposed" else None
        seconds = near.seconds.median + (2 * copy.seconds.median if copy is not None else 0.0)
        return BESIDE[m.operation], (seconds, CLIFF_FACTORS[m.operation])
    half = found.get((m.operation, m.devices // 2)) if m.devices >= 64 else None
    return (f"{half.devices} devices", (half.seconds.median, GROWTH_FACTOR)) if half is not None else ("-", None)


def _merged(parts: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {what: [seconds for part in parts for seconds in part[what]] for what in parts[0]}


def _on(cluster: VirtualCluster, kernel: Callable[..., dict[str, Times]], plan: Plan) -> dict[str, list[float]]:
    outputs = cluster.run(kernel, plan.rounds(8), plan.rounds(MIB)).outputs
    return {
        what: seconds_of("copy" if what == "NumPy's copy" else "all_reduce", [output[what] for output in outputs])
        for what in outputs[0]
    }


def _rounds(device: VirtualDevice, count: int, call: Callable[[], Any], expected: Any) -> Times:
    """``count`` calls on this device, with a barrier before each."""
    answer: Any = None
    for _ in range(3):
        answer = call()
    times: Times = []
    for _ in range(count):
        device.barrier()
        start = time.perf_counter()
        answer = call()
        times.append((start, time.perf_counter()))
        device.barrier()
    if not np.array_equal(np.asarray(answer), expected):
        raise WrongAnswerError(f"{NAME}: rank {device.rank} of {device.size} has a wrong answer")
    return times


def _calls(device: VirtualDevice, many: int, few: int) -> dict[str, Times]:
    size = device.size
    scalars = {"an array of 1": np.ones(1), "a float": 1.0, "a np.float64": np.float64(1), "an int": 1}
    found = {
        what: _rounds(device, many, lambda x=x: device.all_reduce(x), np.full(np.shape(x), size))  # type: ignore[misc]
        for what, x in scalars.items()
    }
    for what, nbytes in (("64 KiB", 64 * KIB), ("64 KiB + 4 B", 64 * KIB + 4)):
        x = np.ones(nbytes // 4, np.float32)
        out = np.empty_like(x)
        found[what] = _rounds(device, many, lambda x=x, out=out: device.all_reduce(x, out=out),  # type: ignore[misc]
                              np.full(x.shape, size))
    square: Array = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH) % 1021
    found["contiguous"] = _rounds(device, few, lambda: device.all_reduce(square), square * size)
    found["transposed"] = _rounds(device, few, lambda: device.all_reduce(square.T), square.T * size)
    found["NumPy's copy"] = _rounds(device, few, lambda: np.ascontiguousarray(square.T), square.T)
    return found


def _shapes(device: VirtualDevice, rounds: int, most: int) -> dict[str, list[float]]:
    """CPU seconds of a call, for each round through the shapes; the first round of the most is of new ones."""
    found: dict[str, list[float]] = {}
    for count in (FEW_SHAPES, most):
        arrays = [np.ones(extent + 1, np.float32) for extent in range(count)]
        outs = [np.empty_like(array) for array in arrays]
        figures = []
        for _ in range(rounds):
            device.barrier()
            start = time.thread_time()
            for array, out in zip(arrays, outs, strict=True):
                device.all_reduce(array, out=out)
            figures.append((time.thread_time() - start) / count)
        if any(out[-1] != device.size for out in outs):
            raise WrongAnswerError(f"{NAME}: rank {device.rank} of {device.size} has a wrong sum among {count} shapes")
        found[f"{FEW_SHAPES if count == FEW_SHAPES else MANY_SHAPES} shapes"] = figures[2:]
        if count == FEW_SHAPES:
            found["a new shape"] = figures[:1]
    return found


def _numbers(device: VirtualDevice, many: int, few: int) -> dict[str, Times]:
    """From the moment both are there until the receiver has the list."""
    numbers = [float(number) for number in range(NUMBERS)]
    channel = device.channel(1 - device.rank)

    def call() -> Any:
        if device.rank == 0:
            channel.send(numbers)
            return numbers[-1]
        return channel.recv()[-1]

    return {f"{NUMBERS:,} numbers": _rounds(device, few, call, numbers[-1])}


def _grown(device: VirtualDevice, many: int, few: int) -> dict[str, Times]:
    small, large = np.ones(1), np.ones(MIB // 4, np.float32)
    return {
        "barrier": _rounds(device, many, device.barrier, None),
        "all_reduce, 8 B": _rounds(device, many, lambda: device.all_reduce(small), np.full(1, device.size)),
        f"all_reduce, {nbytes_text(MIB)}": _rounds(
            device, few, lambda: device.all_reduce(large), np.full(large.shape, device.size)),
    }


def _recorded(algorithm: str | None, ranks: int) -> float:
    x = np.ones(MIB // 4, np.float32)
    start = time.process_time()
    run = record(lambda device: device.all_reduce(x, algorithm=algorithm), Mesh(tp=ranks))
    seconds = time.process_time() - start
    if run.trace.count("all_reduce", rank=ranks - 1) != 1:
        raise WrongAnswerError(f"{NAME}: an all_reduce over {ranks} ranks was recorded wrongly")
    return seconds
