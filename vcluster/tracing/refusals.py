"""Why a device refuses a call: there is no run, the process is a fork, or the run cannot go on."""

import ctypes
import os

BREAKING = RecursionError, ctypes.ArgumentError
"""What ends a call anywhere, even between two words that belong together: the second is the first in a call of C."""

NO_RUN = (
    "no run is in progress on this device, and the calls of its kernel end with the run; a __del__, a thread or an "
    "atexit handler may have come later")

ELSEWHERE = (
    "a device can be used by its own kernel only, and not in the thread of another device or of the host, where it "
    "would wait for itself; a __del__ may run in any thread")


def broken_off(kind: type[BaseException]) -> str:
    """The refusal after a call that ended with an exception of this kind."""
    return (
        f"a call of the library was broken off by {kind.__name__} at the limit of Python's stack, and the other "
        f"devices may have seen a part of it; this run cannot go on")


def forked(pid: int) -> str:
    """The refusal in this process, a fork of the one with this id."""
    return (
        f"this process (pid {os.getpid()}) is a fork of pid {pid}, and only the original can use the devices and "
        f"channels of its cluster; let the fork compute and hand back what it found, for example by a pipe, or make a "
        f"new cluster in it")
