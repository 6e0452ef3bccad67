"""How long a mistake takes to be told, and what clusters and runs leave behind.

Times run from the moment from which nothing can save the run (the last rank enters, returns or dies) until the error
leaves ``run``, the cluster repaired.  Each error is checked: its type, text, ranks, operation and lines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path

import numpy as np
import psutil

from benchmarks.cases import WrongAnswerError
from benchmarks.mistakes import MISTAKES, Mistake, last_moment
from benchmarks.plan import Plan
from benchmarks.remote import ROOT
from benchmarks.results import Level, Results
from benchmarks.systems import OURS, Say, SystemFailedError
from benchmarks.tables import seconds_text, table
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

NAME = "limits"
THREADS = "vcluster threads"
BACKENDS = {OURS: "process", THREADS: "thread"}
HOST_KILLED = "host killed"
FIRST_TEST, SPMD_TEST, MESH_TEST = "first test", "spmd test", "mesh test"
BOUNDS = {
    **{name: mistake.bound_seconds for name, mistake in MISTAKES.items()},
    HOST_KILLED: 1.0, FIRST_TEST: 0.3, SPMD_TEST: 0.005, MESH_TEST: 0.005,
}
LONGEST_WAIT_SECONDS = 20.0
SETTLE_SECONDS = 0.1
"""After so long the fork server has taken note of devices that ended."""
HOST = """
import sys
from vcluster import VirtualCluster
with VirtualCluster({devices}) as cluster:
    print(*cluster.pids(), flush=True)
    def busy(device):
        while device.rank:
            sum(range(100))
        device.recv(1)
    cluster.run(busy)
"""


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Mistakes on warm clusters, then a killed host, then many clusters and many runs."""
    for devices in plan.devices_or((2, 4, 8), (2,)):
        for system, backend in BACKENDS.items():
            say(f"{NAME}: mistakes of {devices} devices, backend={backend!r}")
            _mistakes(plan, results, devices, system)
        say(f"{NAME}: {devices} devices whose host is killed")
        results.add(NAME, OURS, HOST_KILLED, [_host_killed(devices) for _ in range(plan.passes)], devices=devices)
    clusters, runs, crowd = (10, 100, 16) if plan.quick else (100, 2000, 256)
    say(f"{NAME}: {clusters} clusters")
    _levels(results, "clusters", clusters, _one_cluster)
    say(f"{NAME}: {runs} runs")
    with VirtualCluster(4) as cluster:
        _levels(results, "runs", runs, lambda: _one_run(cluster), {"device": cluster.pids()[0]})
    say(f"{NAME}: {crowd} devices")
    _crowd(results, crowd)
    if not plan.quick:
        say(f"{NAME}: tests")
        _tests(plan, results)


def report(results: Results) -> str:
    """Median and maximum beside the bound, then what is left behind, then the crowd."""
    found = {(m.operation, m.devices, m.system): m.seconds for m in results.of(NAME)}
    rows = []
    for name, devices in dict.fromkeys((name, devices) for name, devices, _ in found if name in BOUNDS):
        told = [found.get((name, devices, system)) for system in BACKENDS]
        cells = [f"{seconds_text(s.median)} / {seconds_text(s.maximum)}" if s is not None else "-" for s in told]
        late = any(s is not None and s.maximum > BOUNDS[name] for s in told)
        rows.append([name, str(devices), *cells, seconds_text(BOUNDS[name]) + (" !" if late else "")])
    parts = [table(("median / maximum", "devices", "processes", "threads", "bound"), rows)]
    rows = [
        [f"after {level.after} {level.what}", level.process, str(level.descriptors), str(level.threads),
         f"{level.resident_nbytes / 2**20:.1f} MiB"]
        for level in results.levels
    ]
    parts.append(table(("", "process", "descriptors", "threads", "resident"), rows, labels=2))
    rows = [
        [f"{name}, {devices} devices", seconds_text(seconds.median)]
        for (name, devices, _), seconds in found.items() if name not in BOUNDS
    ]
    parts.append(table(("", "median"), rows))
    return "\n\n".join(parts)


def _mistakes(plan: Plan, results: Results, devices: int, system: str) -> None:
    with VirtualCluster(devices, backend=BACKENDS[system]) as cluster, tempfile.TemporaryDirectory() as directory:
        moments = Path(directory, "moments")
        moments.write_bytes(bytes(8 * devices))
        for name, mistake in MISTAKES.items():
            if mistake.ends_process and cluster.backend == "thread":
                continue
            seconds = [_told(cluster, name, mistake, moments) for _ in range(1 if plan.quick else 2 * plan.passes)]
            results.add(NAME, system, name, seconds, devices=devices)


def _told(cluster: VirtualCluster, name: str, mistake: Mistake, moments: Path) -> float:
    """Seconds from the mistake to its error; the next run must be right."""
    size = cluster.size
    try:
        cluster.run(mistake.kernel, str(moments))
    except Exception as error:
        seconds = time.monotonic() - last_moment(moments, size)
        mistake.check(name, error, size)
    else:
        raise WrongAnswerError(f"{name} on {size} devices ended without an error")
    _expect_sum(cluster)
    return seconds


def _expect_sum(cluster: VirtualCluster) -> None:
    # (A function of this module would have each device import it, first of all.)
    if cluster.run(methodcaller("all_reduce", 1)).outputs != [cluster.size] * cluster.size:
        raise WrongAnswerError(f"all_reduce of ones over {cluster.size} devices gave something else")


def _host_killed(devices: int) -> float:
    """Seconds until the devices of a killed host are gone."""
    host = subprocess.Popen(
        [sys.executable, "-c", HOST.format(devices=devices)], cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True,
    )
    with host:
        assert host.stdout is not None
        pids = [int(word) for word in host.stdout.readline().split()]
        if len(pids) != devices:
            raise SystemFailedError(f"a script with {devices} devices did not start")
        start = time.monotonic()
        host.kill()
        while any(map(_runs, pids)):
            if time.monotonic() - start > LONGEST_WAIT_SECONDS:
                raise SystemFailedError(f"devices of a killed host still run after {LONGEST_WAIT_SECONDS:.0f} s")
            time.sleep(0.001)
        return time.monotonic() - start


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _levels(
    results: Results, what: str, count: int, once: Callable[[], None], others: dict[str, int] | None = None
) -> None:
    """What processes hold after a fifth of ``count``, and after all of them."""
    early = count // 5
    done = 0
    for after in (early, count):
        for _ in range(after - done):
            once()
        done = after
        time.sleep(SETTLE_SECONDS)
        watched: dict[str, int | None] = {"host": os.getpid(), "fork server": _fork_server(), **(others or {})}
        for name, pid in watched.items():
            if pid is not None:
                process = psutil.Process(pid)
                descriptors, threads, memory = process.num_fds(), process.num_threads(), process.memory_info().rss
                results.levels.append(Level(NAME, what, after, name, descriptors, threads, memory))


def _fork_server() -> int | None:
    """The process that devices are forked from; None where there is none (on macOS)."""
    children = psutil.Process().children()
    return next((child.pid for child in children if "vcluster.processes.forkserver" in " ".join(child.cmdline())), None)


def _one_cluster() -> None:
    with VirtualCluster(4) as cluster:
        _one_run(cluster)


def _one_run(cluster: VirtualCluster) -> None:
    x = np.ones(20_000)
    if any((y != cluster.size).any() for y in cluster.run(VirtualDevice.all_reduce, x)):
        raise WrongAnswerError(f"all_reduce of ones over {cluster.size} devices gave something else")


def _crowd(results: Results, devices: int) -> None:
    moments = [time.perf_counter()]
    cluster = VirtualCluster(devices)
    moments.append(time.perf_counter())
    _expect_sum(cluster)
    moments.append(time.perf_counter())
    cluster.close()
    moments.append(time.perf_counter())
    for name, start, end in zip(("start", "a first all_reduce", "stop"), moments, moments[1:], strict=False):
        results.add(NAME, OURS, name, [end - start], devices=devices)


def _tests(plan: Plan, results: Results) -> None:
    """What the pytest plugin costs a test over its own work, in sessions of their own."""
    if find_spec("pytest") is None:
        results.skipped["the pytest plugin"] = "pytest is not installed"
        return
    told: dict[str, list[float]] = {FIRST_TEST: [], SPMD_TEST: [], MESH_TEST: []}
    for _ in range(plan.passes):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.pytest_cost"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False,
        )
        if done.returncode:
            raise SystemFailedError(f"benchmarks.pytest_cost ended with {done.returncode}")
        first, spmd, mesh = costs(done.stdout.splitlines())
        told[FIRST_TEST].append(first)
        told[SPMD_TEST].append(spmd)
        told[MESH_TEST].append(mesh)
    for name, seconds in told.items():
        results.add(NAME, OURS, name, seconds, devices=4)


def costs(lines: Iterable[str]) -> tuple[float, float, float]:
    """From what `benchmarks.pytest_cost` prints: seconds of the first test, and of warm ones over a plain one."""
    rows = {name: list(map(float, rest)) for name, *rest in map(str.split, lines) if name.startswith("test_")}
    spmd, mesh, plain = rows["test_spmd"], rows["test_mesh"], rows["test_plain"]
    return 1e-3 * spmd[0], 1e-3 * (spmd[1] - plain[1]), 1e-3 * (mesh[1] - plain[1])
