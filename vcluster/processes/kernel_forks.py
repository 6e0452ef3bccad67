"""Forks and devices: a fork of a device is no device, and the programs that a device starts inherit nothing.

A kernel may fork its device. The child may compute and print, and it must end by itself.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
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
            write_lines(2, rank, (
                f"the kernel has forked (pid {os.getpid()}), and the fork has returned from the kernel, too: it is no "
                f"device, and nothing that it returns is used; end it with os._exit(0)"
            ))
    finally:
        os._exit(code if isinstance(code, int) else 1)


def keep_from_programs() -> None:
    """In a fork of the host: programs that a kernel starts shall not keep what the host has open."""
    directory = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    for name in os.listdir(directory):
        if int(name) > 2:
            with suppress(OSError):  # that of the directory itself
                os.set_inheritable(int(name), False)
