"""Why a device refuses a call: there is no run, the process is a fork, or the run cannot go on."""

import ctypes
import os
from types import TracebackType

from vcluster.code.pickling import is_from_handler
from vcluster.memory.threads import is_in_library

BREAKING = RecursionError, ctypes.ArgumentError
"""What ends a call anywhere, even between two words that belong together: the second is the first in a call of C."""

NO_RUN = (
    "no run is in progress on this device, and the calls of its kernel end with the run; a __del__, a thread or an "
    "atexit handler may have come later"
)

ELSEWHERE = (
    "a device can be used by its own kernel only, and not in the thread of another device or of the host, where it "
    "would wait for itself; a __del__ may run in any thread"
)


def broken_off(error: BaseException) -> str:
    """The refusal after a call that this exception has ended; empty if calls may follow."""
    kind = type(error)
    if issubclass(kind, BREAKING):
        why = " at the limit of Python's stack"
    elif (
        isinstance(error, Exception) and is_from_handler(error) and not _has_only_waited(error.__traceback__)
    ):
        why = ", which the handler of a signal raised"
    else:
        return ""
    return (
        f"a call of the library was broken off by {kind.__name__}{why}, and the other devices may have seen a part of "
        f"it; this run cannot go on"
    )


def _has_only_waited(entry: TracebackType | None) -> bool:
    """Whether a call that was broken off can be made again: it waited for a message, or for an operation that goes on
    by itself. An error that passes through the wait was raised while it slept or looked: what operations raise while
    they advance beside it, they keep.
    """
    repeatable = waited = False
    while entry is not None:
        frame = entry.tb_frame
        name = frame.f_code.co_name
        if is_in_library(frame):
            module = os.path.basename(frame.f_code.co_filename)  # noqa: PTH119
            if (module, name) == ("tasks.py", "drive"):
                repeatable = frame.f_locals["lane"][0] == "recv"
            elif (module, name) == ("endpoint.py", "wait"):
                repeatable = True
            elif (module, name) == ("signals.py", "wait"):
                waited = True
        entry = entry.tb_next
    return repeatable and waited


def forked(pid: int) -> str:
    """The refusal in this process, a fork of the one with this id."""
    return (
        f"this process (pid {os.getpid()}) is a fork of pid {pid}, and only the original can use the devices and "
        f"channels of its cluster; let the fork compute and hand back what it found, for example by a pipe, or make a "
        f"new cluster in it"
    )
