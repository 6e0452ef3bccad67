"""Facts about this machine. Each is looked up separately, so that one that is unavailable hides no other."""

import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from vcluster.memory import Arena, Layout
from vcluster.processes.forkserver import search_path

DEVICES = 4
"""Number of devices that are started as a test."""
PROBE_SECONDS = 60.0
"""Seconds after which the start of the devices counts as failed."""

T = TypeVar("T")


@dataclass(frozen=True)
class Container:
    """The limits of the cgroup. None where there is no limit."""

    cores: float | None = None
    memory: int | None = None
    memory_used: int = 0
    processes: int | None = None
    processes_used: int = 0


@dataclass(frozen=True)
class Started:
    """The result of starting a few devices. ``threads`` is the number of BLAS threads in a device, by library (None:
    not known)."""

    seconds: float = 0.0
    method: str = ""
    threads: dict[str, int] | None = None
    error: str | None = None
    private: bool | None = None
    """Whether the devices can read each other's private memory. None if not known."""


@dataclass(frozen=True)
class Facts:
    """The facts. None where a fact is not available and where there is no limit. Memory is in bytes."""

    versions: str
    cores: int | None = None
    usable_cores: int | None = None
    memory: int | None = None
    memory_available: int | None = None
    container: Container = Container()
    shared_memory: str | None = None
    """The kind of shared memory."""
    shared_memory_error: str | None = None
    shared_memory_needed: int = 0
    """Bytes of address space that the devices map. Nearly all of it stays untouched."""
    started: Started = Started()
    files_limit: int | None = None
    files_open: int = 0
    processes_limit: int | None = None
    processes_used: int = 0
    address_space_limit: int | None = None
    file_size_limit: int | None = None
    keeps_bytecode: bool = True


def gather() -> Facts:
    """Look at this machine, and start a few devices in a process of their own."""
    shared, shared_error = _try_shared_memory()
    memory: Any = attempt(lambda: import_module("psutil").virtual_memory())
    return Facts(
        versions=_versions(),
        cores=os.cpu_count(),
        usable_cores=attempt(lambda: len(os.sched_getaffinity(0))),
        memory=memory and int(memory.total),
        memory_available=memory and int(memory.available),
        container=attempt(container_limits) or Container(),
        shared_memory=shared,
        shared_memory_error=shared_error,
        shared_memory_needed=attempt(lambda: Layout.for_devices(DEVICES).nbytes) or 0,
        started=_start_some(),
        files_limit=_limit("RLIMIT_NOFILE"),
        files_open=attempt(lambda: len(list(Path("/proc/self/fd").iterdir()))) or 0,
        processes_limit=_limit("RLIMIT_NPROC"),
        processes_used=attempt(_own_processes) or 0,
        address_space_limit=_limit("RLIMIT_AS"),
        file_size_limit=_limit("RLIMIT_FSIZE"),
        keeps_bytecode=not sys.dont_write_bytecode,
    )


def container_limits(root: Path = Path("/")) -> Container:
    """The limits of this process's cgroup and of its ancestors, in version 2 or 1. ``root`` is the file system's
    root."""
    lines = (
        line.split(":", 2) for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    )
    paths = {name: path.strip("/") for _, controllers, path in lines for name in controllers.split(",")}
    base = root / "sys/fs/cgroup"
    names = ("cpu", "memory", "pids")
    if "" in paths and (base / "cgroup.controllers").exists():
        cpu, memory, pids = (_upwards(base, paths[""]) for _ in names)
        limit, used = "memory.max", "memory.current"
    else:
        cpu, memory, pids = (_upwards(base / name, paths.get(name, "")) for name in names)
        limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
    cores = []
    for directory in cpu:
        quota, _, period = _read(directory / "cpu.max").partition(" ")
        quota = quota or _read(directory / "cpu.cfs_quota_us")
        period = period or _read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            cores.append(int(quota) / int(period))
    return Container(
        min(cores, default=None),
        *_tightest(memory, limit, used),
        *_tightest(pids, "pids.max", "pids.current"),
    )


def _upwards(base: Path, path: str) -> list[Path]:
    """The directory of a cgroup and its ancestors. Inside a container, the path may be that outside the container."""
    parts = Path(path).parts
    inner = [base.joinpath(*parts[:count]) for count in range(len(parts), 0, -1)]
    return [*(directory for directory in inner if directory.is_dir()), base]


def _tightest(directories: Sequence[Path], limit: str, used: str) -> tuple[int | None, int]:
    """The limit that leaves the least room, and the amount already used of it."""
    limits = []
    for directory in directories:
        text, count = _read(directory / limit), _read(directory / used)
        if text.isdigit() and int(text) < 1 << 60:  # version 1 writes a very large number for "no limit"
            limits.append((int(text), int(count) if count.isdigit() else 0))
    return min(limits, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def attempt(look: Callable[[], T]) -> T | None:
    """The result of ``look()``. None if the system does not have the fact or forbids to read it."""
    try:
        return look()
    except Exception:  # anything may be missing
        return None


def _versions() -> str:
    modules = {name: attempt(partial(import_module, name)) for name in ("numpy", "cloudpickle", "psutil")}
    return ", ".join(
        [
            f"Python {platform.python_version()}",
            *(f"{name} {getattr(module, '__version__', 'missing')}" for name, module in modules.items()),
        ]
    )


def _own_processes() -> int:
    """Number of processes and threads of this user. The limit counts both."""
    import psutil

    mine = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
    return sum(info["num_threads"] or 1 for info in mine if info["uids"] and info["uids"].real == os.getuid())


def _limit(name: str) -> int | None:
    """A soft limit of this process. None if there is none."""
    if name == "RLIMIT_NPROC" and getattr(os, "geteuid", lambda: 1)() == 0:
        return None  # the limit does not apply to root
    resource: Any = attempt(partial(import_module, "resource"))
    soft = attempt(lambda: resource.getrlimit(getattr(resource, name))[0])
    return None if soft in (None, -1, getattr(resource, "RLIM_INFINITY", -1)) else int(soft)


def _try_shared_memory() -> tuple[str | None, str | None]:
    try:
        arena = Arena(1 << 16)
        arena.view[0] = 1
        arena.close_descriptor()
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return "anonymous (memfd)" if hasattr(os, "memfd_create") else "a temporary file without a name", None


def _start_some() -> Started:
    """Start devices in a process of their own, because a limit may kill it."""
    path = os.pathsep.join(search_path())
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from vcluster.cli.machine import probe; probe()"],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return Started(**json.loads(done.stdout))
        return Started(error=(done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Started(error=f"not within {PROBE_SECONDS:.0f} seconds")
    except Exception as error:
        return Started(error=textwrap.shorten(f"{type(error).__name__}: {error}", 200))


def probe() -> None:
    """Start devices, run a program on them, and print the result as JSON."""
    from vcluster.processes import default_start_method
    from vcluster.runs import VirtualCluster

    start = time.perf_counter()
    with VirtualCluster(DEVICES) as cluster:
        threads, private = cluster.run(_kernel)[0]
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - start,
                "method": default_start_method(),
                "threads": threads,
                "private": private,
            }
        )
    )


def _kernel(device: Any) -> tuple[dict[str, int] | None, bool]:
    device.barrier()
    private = device.endpoint.peers.can_be_read(range(device.size))
    try:
        threads = import_module("threadpoolctl").threadpool_info()
    except ImportError:
        return None, private
    return {info["internal_api"]: info["num_threads"] for info in threads}, private
