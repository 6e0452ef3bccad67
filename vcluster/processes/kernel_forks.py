"""Forks and devices: a fork of a device is no device, and the programs that a device starts inherit nothing.

A kernel may fork its device. The child may compute and print, and it must end by itself. A kernel may not start
processes by multiprocessing: if its device is killed, nobody ends them.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from contextlib import suppress
from multiprocessing import process
from typing import Any, NoReturn

from vcluster.processes.output import write_lines


def end_fork(rank: int) -> NoReturn:
    """End a child that comes back from the kernel, by a return or an exception."""
    code: Any = 1
    try:
        error = sys.exception() if hasattr(sys, "exception") else sys.exc_info()[1]
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code
        elif error is not None:
            write_lines(2, rank, f"in a fork (pid {os.getpid()}) of the device:\n{traceback.format_exc()}")
        else:
            write_lines(
                2,
                rank,
                (
                    f"the kernel has forked (pid {os.getpid()}), and the fork has returned from the kernel, too: it is no "
                    f"device, and nothing that it returns is used; end it with os._exit(0)"
                ),
            )
    finally:
        os._exit(code if isinstance(code, int) else 1)


def keep_from_programs() -> None:
    """In a fork of the host: programs that a kernel starts shall not keep what the host has open."""
    directory = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    for name in os.listdir(directory):
        if int(name) > 2:
            with suppress(OSError):  # that of the directory itself
                os.set_inheritable(int(name), False)


def refuse_children() -> None:
    """In the process of a device: multiprocessing shall say what to use in place of its processes."""
    usual = process.BaseProcess.start

    def start(self: process.BaseProcess) -> None:
        if process.current_process().daemon:
            raise RuntimeError(
                "a kernel cannot start processes by multiprocessing (Process, Pool, Manager, ProcessPoolExecutor), "
                "because its device is itself a daemon process of multiprocessing; use threads (ThreadPoolExecutor, "
                "multiprocessing.pool.ThreadPool), or more devices, or the pool outside the kernel"
            )
        usual(self)

    process.BaseProcess.start = start  # type: ignore[method-assign]


def explain_pickling(error: BaseException) -> None:
    """Add a note to an error of multiprocessing, which cannot send a function of the kernel to a process.

    It comes to that where the devices are threads, or ranks of MPI.
    """
    called = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)}
    if "multiprocessing.reduction" in called and isinstance(error, pickle.PicklingError | AttributeError):
        error.add_note(
            "multiprocessing looks up functions by their names, and the functions of a kernel are copies; "
            "define what the pool calls in a module that can be imported, or use threads (ThreadPoolExecutor)"
        )
