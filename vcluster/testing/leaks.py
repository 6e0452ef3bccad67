"""Leftovers of a test: threads, processes, and messages that were never received."""

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallelism.display.quantities import plural
from parallelism.trace import HOST
from vcluster.messages import ChannelStatistics
from vcluster.processes import running_processes
from vcluster.runs import VirtualCluster

PATIENCE_SECONDS = 0.25
"""Seconds that a thread or process gets to end."""

_LIBRARIES = ("site-packages", "dist-packages")
_QUEUES = ("multiprocessing", "queues.py")


class Snapshot:
    """The threads and devices that existed on the host before a test."""

    def __init__(self) -> None:
        self._threads, self._pids = set(threading.enumerate()), set(running_processes())

    def leftovers(self, cluster: VirtualCluster | None, warm: set[int]) -> list[str]:
        """A description of everything that exists now and did not then. ``warm`` are processes that should stay."""
        texts = [f"{thread} on the host" for thread in _threads_but(self._threads)]
        devices = {pid: name for pid, name in running_processes().items() if pid not in self._pids | warm}
        if devices:
            names = ", ".join(f"{name} (pid {pid})" for pid, name in sorted(devices.items()))
            texts.append(f"the devices of a cluster that was not closed: {names}")
        if cluster is not None and not cluster.closed:
            for rank, (on_device, theirs) in enumerate(cluster.run(device_leftovers)):
                texts += [f"{text} on rank {rank}" for text in on_device]
                ours = cluster.channel(rank).statistics()  # a run checks the channels between devices itself
                for lost, way in (
                    (theirs.messages_sent - ours.messages_received, f"rank {rank} to the host"),
                    (ours.messages_sent - theirs.messages_received, f"the host to rank {rank}"),
                ):
                    if lost > 0:
                        texts.append(f"{plural(lost, 'message')} from {way}, never received")
        return texts


def device_leftovers(device: Any) -> tuple[list[str], ChannelStatistics]:
    """The threads and child processes of a device's process, and the statistics of its channel with the host.

    On the thread backend the list is empty: `Snapshot.leftovers` lists threads and processes on the host.
    """
    traffic = device.channel(HOST).statistics()
    if threading.current_thread() is not threading.main_thread():
        return [], traffic
    texts = _threads_but({threading.main_thread()})
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (children := _children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return texts + [f"the process {name} (pid {pid})" for pid, name in children.items()], traffic


def _threads_but(before: set[threading.Thread]) -> list[str]:
    threads = [
        thread
        for thread in threading.enumerate()
        if thread not in before
        and not isinstance(thread, threading._DummyThread)
        and not _is_for_good(thread)
    ]
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    return [f"the thread {thread.name!r}" for thread in threads if thread.is_alive()]


def _is_for_good(thread: threading.Thread) -> bool:
    """Whether the thread belongs to an installed package, to a queue or to a device, and should stay."""
    if thread.name.startswith("vcluster-"):
        return True
    run = getattr(thread, "_target", None) or type(thread).run
    filename = getattr(getattr(getattr(run, "__func__", run), "__code__", None), "co_filename", "")
    return any(part in filename for part in _LIBRARIES) or Path(filename).parts[-2:] == _QUEUES


def _children() -> dict[int, str]:
    """The running child processes of this process: their names by process id (Linux only)."""
    pids: list[str] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids += task.read_text().split()
    names = {}
    for pid in map(int, pids):
        with suppress(OSError):  # the process has ended
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if rest.split()[0] != "Z":
                names[pid] = name
    return names
