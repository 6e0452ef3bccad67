"""What this machine offers: each fact looked up by itself, so that one that cannot be had hides no other."""

from __future__ import annotations

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

DEVICES = 4
"""As many are started, to see that they do."""
PROBE_SECONDS = 60.0
"""After so long they are taken not to start."""

T = TypeVar("T")


@dataclass(frozen=True)
class Container:
    """The limits of the cgroup; None where there is none."""

    cores: float | None = None
    memory: int | None = None
    memory_used: int = 0
    processes: int | None = None
    processes_used: int = 0


@dataclass(frozen=True)
class Started:
    """How the start of a few devices went, and the threads of the BLAS in them by library (None: cannot be told)."""

    seconds: float = 0.0
    method: str = ""
    threads: dict[str, int] | None = None
    error: str | None = None
    private: bool | None = None
    """Whether the devices can read each other's private memory (None: cannot be told)."""


@dataclass(frozen=True)
class Facts:
    """What was seen; None for what this system has not, or would not tell, and for limits that are none.  In bytes."""

    versions: str
    cores: int | None = None
    usable_cores: int | None = None
    memory: int | None = None
    memory_available: int | None = None
    container: Container = Container()
    shared_memory: str | None = None
    """What it is."""
    shared_memory_error: str | None = None
    shared_memory_needed: int = 0
    """Address space that the devices map, nearly all of it never touched."""
    started: Started = Started()
    files_limit: int | None = None
    files_open: int = 0
    processes_limit: int | None = None
    processes_used: int = 0
    address_space_limit: int | None = None
    file_size_limit: int | None = None
    keeps_bytecode: bool = True


def gather() -> Facts:
    """Looks at this machine, and starts a few devices in a process of its own."""
    shared, shared_error = _try_shared_memory()
    files = _limit("RLIMIT_NOFILE")
    return Facts(
        versions=_versions(), cores=os.cpu_count(), usable_cores=told(_usable_cores), memory=told(_total_memory),
        memory_available=told(_available_memory), container=told(container_limits) or Container(),
        shared_memory=shared, shared_memory_error=shared_error,
        shared_memory_needed=told(lambda: Layout.for_devices(DEVICES).nbytes) or 0, started=_start_some(),
        files_limit=files, files_open=told(lambda: len(list(Path("/proc/self/fd").iterdir()))) or 0,
        processes_limit=_limit("RLIMIT_NPROC"), processes_used=told(_own_processes) or 0,
        address_space_limit=_limit("RLIMIT_AS"), file_size_limit=_limit("RLIMIT_FSIZE"),
        keeps_bytecode=not sys.dont_write_bytecode,
    )


def container_limits(root: Path = Path("/")) -> Container:
    """The limits of this process's cgroup and of those above it, in version 2 or 1; ``root`` is the file system's."""
    paths = {}
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path.strip("/")))
    base = root / "sys/fs/cgroup"
    if "" in paths and (base / "cgroup.controllers").exists():
        directories = {name: _upwards(base, paths[""]) for name in ("cpu", "memory", "pids")}
        limit, used = "memory.max", "memory.current"
    else:
        directories = {name: _upwards(base / name, paths.get(name, "")) for name in ("cpu", "memory", "pids")}
        limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
    cores = []
    for directory in directories["cpu"]:
        quota, _, period = _read(directory / "cpu.max").partition(" ")
        quota, period = quota or _read(directory / "cpu.cfs_quota_us"), period or _read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            cores.append(int(quota) / int(period))
    memory, memory_used = _tightest(directories["memory"], limit, used)
    processes, processes_used = _tightest(directories["pids"], "pids.max", "pids.current")
    return Container(min(cores, default=None), memory, memory_used, processes, processes_used)


def _upwards(base: Path, path: str) -> list[Path]:
    """The directory of a cgroup and those above it.  Inside a container the path may be the one outside."""
    parts = Path(path).parts
    inner = [base.joinpath(*parts[:count]) for count in range(len(parts), 0, -1)]
    return [*(directory for directory in inner if directory.is_dir()), base]


def _tightest(directories: Sequence[Path], limit: str, used: str) -> tuple[int | None, int]:
    """The limit that leaves the least, and what counts against it."""
    found = []
    for directory in directories:
        text, count = _read(directory / limit), _read(directory / used)
        if text.isdigit() and int(text) < 1 << 60:  # version 1 says "none" by a very large number
            found.append((int(text), int(count) if count.isdigit() else 0))
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def told(look: Callable[[], T]) -> T | None:
    """What ``look`` finds; None where this system has no such thing, or forbids to look."""
    try:
        return look()
    except Exception:  # anything may be missing; a doctor does not fall ill from it
        return None


def _versions() -> str:
    versions = [f"Python {platform.python_version()}"]
    for name in ("numpy", "cloudpickle", "psutil"):
        module = told(partial(import_module, name))
        versions.append(f"{name} {getattr(module, '__version__', 'missing')}")
    return ", ".join(versions)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _total_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _available_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _own_processes() -> int:
    """Processes and threads of this user, which is what the limit counts."""
    import psutil

    me = os.getuid()
    count = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == me:
            count += process.info["num_threads"] or 1
    return count


def _limit(name: str) -> int | None:
    """A soft limit of this process; None if there is none."""

    def look() -> int | None:
        import resource

        soft = resource.getrlimit(getattr(resource, name))[0]
        return None if soft in (resource.RLIM_INFINITY, -1) else int(soft)

    if name == "RLIMIT_NPROC" and getattr(os, "geteuid", lambda: 1)() == 0:
        return None  # does not bind root
    return told(look)


def _try_shared_memory() -> tuple[str | None, str | None]:
    try:
        arena = Arena(1 << 16)
        arena.view[0] = 1
        arena.close_descriptor()
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    if hasattr(os, "memfd_create"):
        return "anonymous (memfd)", None
    return "a temporary file without a name", None


def _start_some() -> Started:
    """Start devices in a process of their own: a limit may kill it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from vcluster.cli.machine import probe; probe()"], env=environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False,
        )
        if done.returncode == 0:
            return Started(**json.loads(done.stdout))
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return Started(error=said[0])
    except subprocess.TimeoutExpired:
        return Started(error=f"not within {PROBE_SECONDS:.0f} seconds")
    except Exception as error:
        return Started(error=textwrap.shorten(f"{type(error).__name__}: {error}", 200))


def probe() -> None:
    """Start devices, run something on them, and print how it went as JSON."""
    from vcluster.processes import default_start_method
    from vcluster.runs import VirtualCluster

    start = time.perf_counter()
    with VirtualCluster(DEVICES) as cluster:
        run = cluster.run(_kernel)
    seconds = time.perf_counter() - start
    threads, private = run[0]
    told = {"seconds": seconds, "method": default_start_method(), "threads": threads, "private": private}
    print(json.dumps(told))


def _kernel(device: Any) -> tuple[dict[str, int] | None, bool]:
    device.barrier()
    private = device.endpoint.peers.can_be_read(range(device.size))
    try:
        threads = import_module("threadpoolctl").threadpool_info()
    except ImportError:
        return None, private
    return {info["internal_api"]: info["num_threads"] for info in threads}, private
