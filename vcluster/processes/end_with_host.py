"""A process ends when its host does, whatever it is doing: the host holds the other end of a pipe."""

from __future__ import annotations

import os
import signal
import threading

from vcluster.processes.descriptors import is_readable


def end_with(life: int) -> None:
    """Make sure that this process is killed, whatever it is doing, when the other end of the pipe closes."""
    import fcntl  # Windows has none, and threads need none

    if hasattr(fcntl, "F_SETSIG"):  # the kernel does it
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
        if is_readable(life, 0):
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(life,), daemon=True, name="end-with-host").start()


def _watch(life: int) -> None:
    is_readable(life, None)
    os.kill(os.getpid(), signal.SIGKILL)
