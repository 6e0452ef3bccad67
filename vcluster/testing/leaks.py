"""What a test has left behind: threads, processes, messages that nobody received."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallelism.trace import HOST
from vcluster.messages import ChannelStatistics
from vcluster.processes import running_processes
from vcluster.runs import VirtualCluster

PATIENCE_SECONDS = 0.25
"""A thread or process that is just ending is given so long."""

_LIBRARIES = ("site-packages", "dist-packages")
_QUEUES = ("multiprocessing", "queues.py")


class Snapshot:
    """The threads and devices that there were on the host before a test."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._pids = set(running_processes())

    def leftovers(self, cluster: VirtualCluster | None, warm: set[int]) -> list[str]:
        """What there is now and was not then, in words; ``warm`` are the processes that are meant to stay."""
        found = [f"{told} on the host" for told in _threads_but(self._threads)]
        devices = {pid: name for pid, name in running_processes().items() if pid not in self._pids | warm}
        if devices:
            told = ", ".join(f"{name} (pid {pid})" for pid, name in sorted(devices.items()))
            found.append(f"the devices of a cluster that was not closed: {told}")
        if cluster is not None and not cluster.closed:
            for rank, (texts, theirs) in enumerate(cluster.run(device_leftovers)):
                found += [f"{text} on rank {rank}" for text in texts]
                found += _undelivered(rank, cluster.channel(rank).statistics(), theirs)
        return found


def _undelivered(rank: int, ours: ChannelStatistics, theirs: ChannelStatistics) -> list[str]:
    """Messages in the channel of host and device.  (Those between devices must be received when a run ends.)"""
    return [
        f"{sent - received} message{'s' * (sent - received > 1)} from {way} that nobody received"
        for sent, received, way in (
            (theirs.messages_sent, ours.messages_received, f"rank {rank} to the host"),
            (ours.messages_sent, theirs.messages_received, f"the host to rank {rank}"),
        )
        if sent > received
    ]


def device_leftovers(device: Any) -> tuple[list[str], ChannelStatistics]:
    """The threads and child processes of a device's process, and what its channel with the host has seen.

    (On the thread backend it is the host that sees the threads and processes.)
    """
    traffic = device.channel(HOST).statistics()
    main = threading.main_thread()
    if threading.current_thread() is not main:
        return [], traffic
    found = _threads_but({main})
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (children := _children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found + [f"the process {name} (pid {pid})" for pid, name in children.items()], traffic


def _threads_but(before: set[threading.Thread]) -> list[str]:
    found = []
    for thread in threading.enumerate():
        if thread in before or isinstance(thread, threading._DummyThread) or _is_for_good(thread):
            continue
        thread.join(PATIENCE_SECONDS)
        if thread.is_alive():
            found.append(f"the thread {thread.name!r}")
    return found


def _is_for_good(thread: threading.Thread) -> bool:
    """Does it belong to an installed package, to a queue or to a device, and so is meant to stay?"""
    if thread.name.startswith("vcluster-"):
        return True
    run = getattr(thread, "_target", None) or type(thread).run
    filename = getattr(getattr(getattr(run, "__func__", run), "__code__", None), "co_filename", "")
    return any(part in filename for part in _LIBRARIES) or Path(filename).parts[-2:] == _QUEUES


def _children() -> dict[int, str]:
    """The names of the child processes of this one that still run (where the system tells)."""
    pids: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            pids += map(int, task.read_text().split())
        except OSError:  # a thread that has ended
            continue
    found = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if rest.split()[0] != "Z":
                found[pid] = name
    return found
