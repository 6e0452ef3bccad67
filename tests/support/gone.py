"""Whether processes have ended."""

import os
from multiprocessing.connection import wait

import psutil


def gone(pid: int) -> bool:
    """Waits until the process has ended, whether or not its new parent has noticed."""
    if hasattr(os, "pidfd_open"):
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        gone = wait([ended], 30) == [ended]
        os.close(ended)
        return gone
    try:
        psutil.Process(pid).wait(30)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True
