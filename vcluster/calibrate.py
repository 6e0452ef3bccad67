"""This machine as a `Hardware`: measured through the tracer, fitted, written with where its numbers are from.

    python -m vcluster calibrate mine.json
    VirtualCluster(2, hardware="mine.json", compute="modelled")

Products and copies are known by the CPU seconds of the devices' threads; messages go to and fro between two devices,
collectives follow a barrier, and both are known by the wall.  The model is `parallelism.cost`'s, with one level of
links.  It is fitted to every other case; the rest are held out, and say how far it can be trusted.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os import PathLike
from statistics import median

import numpy as np
import psutil

from parallelism.cost import Costs
from parallelism.hardware import Hardware
from parallelism.links import HostLink, Link
from parallelism.operation import Device
from vcluster.cluster import VirtualCluster
from vcluster.fitting import Floats, fitted
from vcluster.run import Run

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
DTYPES = ("float32", "float64")
WIDTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
COPIED = tuple(1 << k for k in range(12, 27, 2))
MOVED = tuple(1 << k for k in range(6, 23, 2))
NAME = "this-machine"


@dataclass(frozen=True)
class Case:
    """Something that was measured: what it was, how large, how long it took."""

    kind: str
    """``matmul``, ``copy``, ``message``, or a collective."""
    size: int
    """The width of the matrices; bytes otherwise: those copied, of the message, of the whole buffer."""
    seconds: float
    dtype: str | None = None

    def predicted(self, costs: Costs, devices: int) -> float:
        """What it would take on a hardware."""
        if self.kind == "matmul":
            assert self.dtype is not None
            n = float(self.size)
            return costs.compute_seconds(2 * n**3, 3 * n**2 * np.dtype(self.dtype).itemsize, dtype=self.dtype)
        if self.kind == "copy":
            return costs.compute_seconds(nbytes=2 * self.size)
        if self.kind == "message":
            return costs.message_seconds(self.size, 0, 1)
        return costs.collective(self.kind, self.size, range(devices)).seconds


@dataclass(frozen=True)
class Calibration:
    """A machine as it was found, and how well the model tells what it was not fitted to."""

    hardware: Hardware
    cases: tuple[Case, ...]
    held_out: tuple[Case, ...]

    def errors(self, kind: str | None = None) -> tuple[float, ...]:
        """The relative errors, predicted against measured, of the cases held out."""
        costs = Costs(self.hardware)
        return tuple(abs(case.predicted(costs, self.hardware.devices) / case.seconds - 1) for case in self.held_out
                     if kind in (None, case.kind))

    def __str__(self) -> str:
        lines = [str(self.hardware), "", "error of what was held out   cases  median  largest"]
        for kind in (*dict.fromkeys(case.kind for case in self.held_out), None):
            errors = self.errors(kind)
            lines.append(f"  {kind or 'all':26} {len(errors):5}  {median(errors):6.1%}  {max(errors):7.1%}")
        return "\n".join(lines)


# -- measuring ---------------------------------------------------------------------------------------------------------

def measured(
    cluster: VirtualCluster, *, widths: Iterable[int] = WIDTHS, copied: Iterable[int] = COPIED,
    moved: Iterable[int] = MOVED, repeats: int = 30,
) -> list[Case]:
    """Each case on the cluster, at least 2 devices, as the median of its repetitions."""
    cases = []
    for dtype in DTYPES:
        for width in widths:
            run = cluster.run(_products, width, dtype, _fewer(repeats, width**3 // 64))
            cases.append(Case("matmul", width, _cpu(run, "matmul"), dtype))
    for nbytes in copied:
        cases.append(Case("copy", nbytes, _cpu(cluster.run(_copies, nbytes, _fewer(repeats, nbytes)), "copy")))
    for nbytes in moved:
        cases.append(Case("message", nbytes, _round_trip(cluster.run(_to_and_fro, nbytes, _fewer(repeats, nbytes)))))
    for name in COLLECTIVES:
        for nbytes in moved:
            whole = nbytes * cluster.size
            run = cluster.run(_collective, name, whole, _fewer(repeats, whole))
            cases.append(Case(name, whole, _together(run, name)))
    return cases


def _fewer(repeats: int, nbytes: int) -> int:
    return max(min(repeats, 5), min(repeats, (1 << 25) // max(nbytes, 1)))


def _products(device: Device, width: int, dtype: str, repeats: int) -> None:
    a = np.ones((width, width), dtype)
    for _ in range(repeats):
        device.matmul(a, a)


def _copies(device: Device, nbytes: int, repeats: int) -> None:
    x, y = np.ones(nbytes // 8), np.empty(nbytes // 8)
    for _ in range(repeats):
        with device.compute("copy", nbytes=2 * nbytes):
            np.copyto(y, x)


def _to_and_fro(device: Device, nbytes: int, repeats: int) -> None:
    x = np.ones(nbytes // 8)
    device.barrier()
    for _ in range(repeats if device.rank < 2 else 0):
        if device.rank == 0:
            device.send(x, 1)
            device.recv(1)
        else:
            device.recv(0)
            device.send(x, 0)


def _collective(device: Device, name: str, nbytes: int, repeats: int) -> None:
    x = np.ones(nbytes // 8 // (device.size if name == "all_gather" else 1))
    for _ in range(repeats):
        device.barrier()
        result = getattr(device, name)(x)
        del result


def _cpu(run: Run, name: str) -> float:
    return median(event.cpu_seconds for event in run.trace.filter(kind="compute", name=name))


def _round_trip(run: Run) -> float:
    """Half of what it takes from the begin of a send until its answer has been received."""
    sends, recvs = (run.trace.filter(kind=kind, rank=0) for kind in ("send", "recv"))
    return median(back.wall_start_seconds + back.wall_duration_seconds - there.wall_start_seconds
                  for there, back in zip(sends, recvs, strict=True)) / 2


def _together(run: Run, name: str) -> float:
    """Who comes last waits for nobody: the shortest of each."""
    by_rank = [run.trace.filter(kind="collective", name=name, rank=rank) for rank in range(len(run))]
    shortest = [min(event.wall_duration_seconds for event in events) for events in zip(*by_rank, strict=True)]
    return float(median(shortest))


# -- fitting -----------------------------------------------------------------------------------------------------------

def calibrated(cases: Sequence[Case], devices: int) -> Calibration:
    """The hardware that fits every other case of each kind and dtype; ``ValueError`` for fewer than two of one."""
    fitted_to: list[Case] = []
    held_out: list[Case] = []
    for alike in dict.fromkeys((case.kind, case.dtype) for case in cases):
        found = sorted((case for case in cases if (case.kind, case.dtype) == alike), key=lambda case: case.size)
        if len(found) < 2:
            raise ValueError(f"calibration needs at least 2 cases of each kind; got 1 of {alike[0]}")
        fitted_to += found[::2]
        held_out += found[1::2]
    hardware = _start(devices)
    computes = [case for case in fitted_to if case.kind in ("matmul", "copy")]
    moves = [case for case in fitted_to if case.kind not in ("matmul", "copy")]
    hardware = _nearest(hardware, computes, _with_compute, (1e-6, 3e10, 1.5e10, 1e-6, 8e9, 1e-7))
    hardware = _nearest(hardware, moves, _with_links, (2e-5, 2e9))
    found_there = Calibration(hardware, tuple(fitted_to), tuple(held_out))
    told = (f"fitted to {len(fitted_to)} cases by python -m vcluster calibrate, {datetime.now(UTC):%Y-%m-%d}, on "
            f"{platform.machine()} with {os.cpu_count()} cores, {platform.system()}, NumPy {np.__version__}; "
            f"median error {median(found_there.errors()):.1%} of {len(held_out)} cases held out")
    fields = ("flops_per_second", "flops_ramp_seconds", "kernel_launch_seconds", "memory_bytes_per_second",
              "memory_ramp_seconds", "links")
    sources = {**dict.fromkeys(fields, told), "memory_bytes": "what the system has, in equal parts",
               "host": "as a message between devices"}
    return replace(found_there, hardware=replace(hardware, sources=sources))


def _start(devices: int) -> Hardware:
    return Hardware(
        NAME, dict.fromkeys(DTYPES, 1e10), psutil.virtual_memory().total / devices, 1e10,
        (Link("shared memory", devices, 1e-5, 1e9),), HostLink(1e-5, 1e9), title="this machine, as it was measured")


def _with_compute(hardware: Hardware, found: Floats) -> Hardware:
    launch, single, double, ramp, bandwidth, memory_ramp = found.tolist()
    return replace(
        hardware, kernel_launch_seconds=launch, flops_per_second=dict(zip(DTYPES, (single, double), strict=True)),
        flops_ramp_seconds=ramp, memory_bytes_per_second=bandwidth, memory_ramp_seconds=memory_ramp)


def _with_links(hardware: Hardware, found: Floats) -> Hardware:
    latency, bandwidth = found.tolist()
    (link,) = hardware.links
    joined = Link(link.name, link.extents, latency, bandwidth)
    return replace(hardware, links=(joined,), host=HostLink(latency, bandwidth))


def _nearest(
    hardware: Hardware, cases: Sequence[Case], changed: Callable[[Hardware, Floats], Hardware], start: Sequence[float]
) -> Hardware:
    def predict(parameters: Floats) -> list[float]:
        costs = Costs(changed(hardware, parameters))
        return [case.predicted(costs, hardware.devices) for case in cases]

    return changed(hardware, fitted(predict, [case.seconds for case in cases], start))


def calibrate(path: str | PathLike[str], devices: int) -> Calibration:
    """Measures this machine with so many devices, and writes what was found to ``path``."""
    with VirtualCluster(devices) as cluster:
        cases = measured(cluster)
    found = calibrated(cases, devices)
    found.hardware.save(path)
    return found
