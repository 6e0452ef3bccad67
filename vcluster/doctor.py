"""What this machine offers a cluster, and what would get in the way: `python -m vcluster doctor`.

`gather` looks (each fact by itself, so that one that cannot be had hides no other), `examine` judges, `report` tells.
"""

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
from pathlib import Path
from typing import Any, TypeVar

from vcluster.control import Layout
from vcluster.memory import Arena

WIDTH = 80
DEVICES = 4
"""As many are started, to see that they do."""
WANTED_DEVICES = 16
"""Limits that leave room for fewer are in the way."""
DESCRIPTORS_PER_DEVICE = 3
WANTED_MEMORY = 512 << 20
LONGEST_START_SECONDS = 10.0
PROBE_SECONDS = 60.0

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


@dataclass(frozen=True)
class Facts:
    """What was seen; None for what this system has not, or would not tell.  Sizes in bytes; limits None if there is no
    limit."""

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


@dataclass(frozen=True)
class Finding:
    """One line of the report; and one on what to do, if this gets in the way."""

    subject: str
    found: str
    to_do: str | None = None


# -- judging -----------------------------------------------------------------------------------------------------------


def examine(facts: Facts) -> list[Finding]:
    """What there is to say about each fact."""
    return [
        Finding("versions", facts.versions), _cores(facts), _memory(facts), _container(facts.container),
        _shared_memory(facts), *_start(facts.started), _files(facts), _processes(facts),
        _space(facts), Finding("ptrace", "not needed"),
    ]


def _cores(facts: Facts) -> Finding:
    if facts.cores is None and facts.usable_cores is None:
        return Finding("cores", "cannot be told")
    usable, there = facts.usable_cores or facts.cores, facts.cores or facts.usable_cores
    return Finding("cores", f"{usable}" if usable == there else f"{usable} of {there} may be used here")


def _memory(facts: Facts) -> Finding:
    box = facts.container
    left = None if box.memory is None else max(0, box.memory - box.memory_used)
    free = min((n for n in (facts.memory_available, left) if n is not None), default=None)
    if free is None:
        return Finding("memory", "cannot be told")
    found = f"{_size(free)} free" + (f" of {_size(facts.memory)}" if facts.memory is not None else "")
    if free >= WANTED_MEMORY:
        return Finding("memory", found)
    limited = left is not None and free == left
    who = "raise the memory limit of the container" if limited else "end other programs"
    return Finding("memory", found, f"{who}: a device may be killed with less than {_size(WANTED_MEMORY)}")


def _container(box: Container) -> Finding:
    told = []
    if box.cores is not None:
        told.append(f"{box.cores:g} cores' time")
    if box.memory is not None:
        told.append(f"{_size(box.memory)} memory")
    if box.processes is not None:
        told.append(f"{box.processes} processes and threads")
    return Finding("container", f"limits to {', '.join(told)}" if told else "no limits")


def _shared_memory(facts: Facts) -> Finding:
    if facts.shared_memory_error is not None:
        return Finding(
            "shared memory", facts.shared_memory_error, 'allow memfd_create, or run with backend="thread"'
        )
    return Finding("shared memory", f"{facts.shared_memory or 'cannot be told'}; /dev/shm is not used")


def _start(started: Started) -> list[Finding]:
    if started.error is not None:
        advice = 'see the limits below; backend="thread" works without processes'
        return [Finding("start", f"{DEVICES} devices do not start: {started.error}", advice)]
    found = f"{DEVICES} devices and a first run in {started.seconds:.2f} s, by {started.method}"
    slow = started.seconds > LONGEST_START_SECONDS
    start = Finding("start", found, "wait, or find what is slow: other programs, a file system?" if slow else None)
    if started.threads is None:
        return [start, Finding("BLAS", "cannot be told; pip install threadpoolctl shows it")]
    several = {name: count for name, count in started.threads.items() if count > 1}
    told = ", ".join(f"{name}: {_many(count, 'thread')} a device" for name, count in started.threads.items())
    if not several:
        return [start, Finding("BLAS", told or "none with threads of its own")]
    return [start, Finding("BLAS", told, f"limit {' and '.join(several)} to 1 thread, or devices crowd the cores")]


def _files(facts: Facts) -> Finding:
    if facts.files_limit is None:
        return Finding("open files", "no limit")
    devices = max(0, facts.files_limit - facts.files_open) // DESCRIPTORS_PER_DEVICE
    found = f"limit {facts.files_limit}, {facts.files_open} open: room for about {_many(devices, 'device')}"
    return Finding("open files", found, "ulimit -n 4096" if devices < WANTED_DEVICES else None)


def _processes(facts: Facts) -> Finding:
    box = facts.container
    rooms = []
    if facts.processes_limit is not None:
        rooms.append((facts.processes_limit - facts.processes_used, "ulimit -u 4096"))
    if box.processes is not None:
        rooms.append((box.processes - box.processes_used, "raise the container's limit of processes (pids)"))
    if not rooms:
        return Finding("processes", "no limit")
    room, to_do = min(rooms)
    found = f"room for {max(0, room)} more"
    return Finding("processes", found, to_do if room < WANTED_DEVICES else None)


def _space(facts: Facts) -> Finding:
    """Sparse: only what is touched costs memory, but all of it counts against these limits."""
    needed = facts.shared_memory_needed
    for limit, what, to_do in (
        (facts.address_space_limit, "address space", "ulimit -v unlimited"),
        (facts.file_size_limit, "size of a file", "ulimit -f unlimited"),
    ):
        if limit is not None and limit < needed:
            found = f"{what} limited to {_size(limit)}; {DEVICES} devices map {_size(needed)}, sparse"
            return Finding("address space", found, to_do)
    return Finding("address space", f"enough for the {_size(needed)} that {DEVICES} devices map, sparse")


# -- telling -----------------------------------------------------------------------------------------------------------


def report(findings: Sequence[Finding]) -> str:
    """The findings as lines of at most 80 columns."""
    lines = []
    for finding in findings:
        mark = " " if finding.to_do is None else "!"
        lines.append(f"{mark} {finding.subject:<14}{finding.found}")
        if finding.to_do is not None:
            lines.append(f"{'':<16}to do: {finding.to_do}")
    wrong = sum(finding.to_do is not None for finding in findings)
    verdict = "Nothing gets in the way." if not wrong else f"{_many(wrong, 'thing')} in the way, marked with !"
    shortened = (line[: WIDTH - 3] + "..." if len(line) > WIDTH else line for line in map(_plain, lines))
    return "\n".join([*shortened, "", verdict])


def show() -> int:
    """Looks, prints the report; the exit status: 1 if something gets in the way."""
    findings = examine(gather())
    print(report(findings))
    return int(any(finding.to_do is not None for finding in findings))


def _plain(text: str) -> str:
    """On one line, whatever an error said."""
    lead = text[: len(text) - len(text.lstrip())]
    return lead + "".join(c if c.isprintable() else " " for c in text.lstrip())


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _size(nbytes: int) -> str:
    value, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.0f} {units[0]}"


# -- looking -----------------------------------------------------------------------------------------------------------


def gather() -> Facts:
    """Looks at this machine, and starts a few devices in a process of its own."""
    shared, shared_error = _try_shared_memory()
    files = _limit("RLIMIT_NOFILE")
    return Facts(
        versions=_versions(), cores=os.cpu_count(), usable_cores=_told(_usable_cores), memory=_told(_total_memory),
        memory_available=_told(_available_memory), container=_told(container_limits) or Container(),
        shared_memory=shared, shared_memory_error=shared_error,
        shared_memory_needed=_told(lambda: Layout.for_devices(DEVICES).nbytes) or 0, started=_start_some(),
        files_limit=files, files_open=_told(lambda: len(list(Path("/proc/self/fd").iterdir()))) or 0,
        processes_limit=_limit("RLIMIT_NPROC"), processes_used=_told(_own_processes) or 0,
        address_space_limit=_limit("RLIMIT_AS"), file_size_limit=_limit("RLIMIT_FSIZE"),
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
    inner = base / path
    return [base] if inner == base or not inner.is_dir() else [inner, *_upwards(base, str(Path(path).parent).strip("."))]


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


def _told(look: Callable[[], T]) -> T | None:
    """What ``look`` finds; None where this system has no such thing, or forbids to look."""
    try:
        return look()
    except Exception:  # anything may be missing; a doctor does not fall ill from it
        return None


def _versions() -> str:
    told = [f"Python {platform.python_version()}"]
    for name in ("numpy", "cloudpickle", "psutil"):
        module = _told(lambda name=name: __import__(name))  # type: ignore[misc]
        told.append(f"{name} {getattr(module, '__version__', 'missing')}")
    return f"{', '.join(told)}; {platform.system()}"


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
    return _told(look)


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
            [sys.executable, "-c", "from vcluster.doctor import probe; probe()"], env=environment,
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
    from vcluster.cluster import VirtualCluster
    from vcluster.processes import default_start_method

    start = time.perf_counter()
    with VirtualCluster(DEVICES) as cluster:
        run = cluster.run(_kernel)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "method": default_start_method(), "threads": run[0]}))


def _kernel(device: Any) -> dict[str, int] | None:
    device.barrier()
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return None
    import numpy as np

    np.ones((2, 2)) @ np.ones((2, 2))
    return {info["internal_api"]: info["num_threads"] for info in threadpool_info()}
