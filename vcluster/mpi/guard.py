"""A rank of an MPI job has a guard: the process that the launcher started, which waits for the rank to end.

MPI ends the job when a rank dies, and does not say which device that was. The guard does, with the cause. It also
passes on the signals that the launcher sends, and the rank dies with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2", "SIGCONT")

FORWARDED_SECONDS = 0.1
"""Given to the launcher to forward what the guard has printed: Open MPI's may drop it when it ends a job."""


class Watched:
    """What a rank tells its guard."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def _say(self, text: str) -> None:
        if self._pipe >= 0:
            with suppress(OSError):  # the guard is gone
                os.write(self._pipe, f"{text}\n".encode())

    def is_rank(self, rank: int) -> None:
        """This is the rank of the job with this number."""
        self._say(f"rank {rank}")

    def serves(self, device: int | None) -> None:
        """This rank serves this device now, or none."""
        self._say(f"device {'' if device is None else device}")

    def ends_well(self) -> None:
        """The rank ends as it should, whatever its exit code."""
        self._say("ends")


def guard() -> Watched:
    """Become a child of this process, which guards it from now on. MPI must not be initialized yet."""
    if not hasattr(os, "fork"):
        return Watched(-1)
    reading, writing = os.pipe()
    guard_pid = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        _wait_for(pid, reading)
    os.close(reading)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard_pid:
            os._exit(1)
    os.setpgid(0, 0)  # what the launcher sends to a group comes through the guard, once
    return Watched(writing)


def _wait_for(pid: int, reading: int) -> None:
    """Wait for the rank, report its death, and end as it ended."""
    passed_on: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed_on.append(number)
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for name in _PASSED_ON:
        signal.signal(getattr(signal, name), pass_on)
    said = b""
    while more := os.read(reading, 1 << 12):  # until the rank ends, or closes all that it has
        said = said[-(1 << 12) :] + more
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if b"ends\n" not in said and -code not in passed_on:
        os.write(
            2,
            f"vcluster: {_name(said.decode())}pid {pid} on {socket.gethostname()}) {_how(code)}; "
            f"the job ends\n".encode(),
        )
        time.sleep(FORWARDED_SECONDS)
        code = code or 1
    os._exit(code if code >= 0 else 128 - code)


def _name(said: str) -> str:
    """The rank by the last that it said, up to the bracket that names its process."""
    rank = device = ""
    for line in said.splitlines():
        what, _, number = line.partition(" ")
        if what == "rank":
            rank = number
        elif what == "device":
            device = number
    if device:
        return f"the process of rank {device} (rank {rank} of the job, "
    if rank == "0":
        return "the host (rank 0 of the job, "
    return f"an idle process (rank {rank} of the job, " if rank else "a process that had just started ("


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} (os._exit in the kernel or in a library it calls?)"
    return f"was ended by {signal.Signals(-code).name}"
