"""The end of a child process as a descriptor that becomes readable.

The end of a pipe does not tell it: a child of that process may hold the pipe. Linux has a descriptor for a process.
Elsewhere a thread waits for the process and closes a pipe, of which no other process has an end.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from vcluster.memory.threads import own

POLL_SECONDS = 0.02
"""Seconds between two looks of the thread, which leaves the exit code to others."""


def watch(pid: int) -> int:
    """A descriptor that is readable from the moment on at which the child ``pid`` has ended."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):  # a kernel before Linux 5.3, or a sandbox
            return os.pidfd_open(pid)
    ended, writer = os.pipe()
    thread = threading.Thread(target=_wait, args=(pid, writer), name=f"vcluster-death-of-{pid}", daemon=True)
    own.add(thread)
    thread.start()
    return ended


def _wait(pid: int, writer: int) -> None:
    with suppress(ChildProcessError):
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(POLL_SECONDS)
    os.close(writer)


def is_ending(pid: int) -> bool:
    """Whether a process has begun to end, or has ended and its parent does not know yet. True where nothing tells."""
    fields = _status(pid)
    return not fields or fields[_STATE] in "ZX" or bool(int(fields[_FLAGS]) & _EXITING)


def is_stopped(pid: int | None) -> bool:
    """Whether a signal has stopped a process. False where nothing tells."""
    fields = _status(pid)
    return bool(fields) and fields[_STATE] in "Tt"


def unclaimed_exit_code(pid: int) -> int | None:
    """The exit code of a process that has ended while its parent does not know yet. None if there is none."""
    fields = _status(pid)
    return os.waitstatus_to_exitcode(int(fields[_CODE])) if fields and fields[_STATE] == "Z" else None


def _status(pid: int | None) -> list[str]:
    """What Linux says of a process, from its state on; empty where nothing tells."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


_STATE, _FLAGS, _CODE = 0, 6, 49
_EXITING = 4
"""The flag of a Linux task that ends."""
