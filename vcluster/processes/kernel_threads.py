"""The threads that a kernel has started, when its run has failed."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from parallelism.operation import is_installed, is_ours
from parallelism.operation.thread_frames import frames_by_thread
from vcluster.code import OperationCancelled
from vcluster.memory import Signals

POLL_SECONDS = 1e-3
"""Seconds between two looks whether they have left the library."""


def cancel_helpers(signals: Signals, *, own_process: bool) -> None:
    """Raise `OperationCancelled` in every thread of the kernel but its own, and return when none is in a call.

    Pending calls raise it by themselves, as the run is cancelled. In a process of its own, all threads that are in a
    function of the user's belong to the kernel; an idle thread of a pool is in none, and may serve later runs.
    """
    helpers, mine = signals.threads.helpers, threading.get_ident()
    if own_process:
        for ident, frame in frames_by_thread().items():
            if ident not in (mine, *helpers) and _runs_users_code(frame):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(ident), ctypes.py_object(OperationCancelled)
                )
    while helpers:
        signals.threads.let_go_of_all()
        signals.rouse_own_threads()
        time.sleep(POLL_SECONDS)


def quiet_after_cancellation(usual: Callable[[Any], object], args: Any) -> None:
    """The hook for exceptions that end a thread: the end of a cancelled thread is no news."""
    if not isinstance(args.exc_value, OperationCancelled):
        usual(args)


def _runs_users_code(frame: FrameType | None) -> bool:
    while frame is not None:
        filename = frame.f_code.co_filename
        if not is_ours(filename) and not is_installed(filename):
            return True
        frame = frame.f_back
    return False
