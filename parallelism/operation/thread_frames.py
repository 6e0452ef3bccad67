"""What every thread of this process executes."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

_lock = threading.RLock()


def frames_by_thread() -> dict[int, FrameType]:
    """The innermost frame of each thread, by the thread's identifier.

    `sys._current_frames` allocates while it holds the interpreter's list of threads.  A garbage collection in there
    that runs a finalizer lets other threads go on, and the first that starts or asks for frames waits for the list,
    and keeps the interpreter: all threads hang.  (CPython before 3.11.9 and 3.12.3, issue 106883.)
    """
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
