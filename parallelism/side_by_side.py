"""`side_by_side`: works that need nothing of each other are done at the same time, on as many cores as there are."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from select import poll
from time import perf_counter
from typing import Any, TypeVar

Result = TypeVar("Result")

MOST_COPIES = 7
"""So many copies of this process are made at most."""
PATIENCE, PATIENCE_SECONDS = 4, 10.0
"""A copy may take so many times as long as this process for its own share, and so many seconds more."""
UNSAFE = "jax", "mpi4py.MPI", "torch"
"""Libraries with threads or connections of their own: a process that has loaded one of them is not copied."""


def side_by_side(
    works: Sequence[Callable[[], Result]], *, told: Callable[[int, int], object] | None = None
) -> list[Result]:
    """The results of all ``works``, in order.

    The works are dealt out to this process and to forked copies of it, one for each further core that it may use.  The
    results of a copy come back in pickles; whatever else a work changes there is lost.  Works that a copy does not do,
    because it fails, dies or takes too long, are done here afterwards, so that errors are those of a process alone.
    ``told(done, all)`` is called here before each work.

    Without copies, all works are done here: on one core, outside of Linux, beside threads that are no daemons, and
    where a library of `UNSAFE` is loaded.
    """
    count = min(max(len(works), 1), 1 + copies())
    started: list[_Copy] = []
    try:
        with suppress(OSError):  # the system allows no further process or descriptor
            for place in range(1, count):
                started.append(_Copy(works[place::count]))
        start = perf_counter()
        done: list[list[Result]] = [_done(works[::count], count, len(works), told)]
        patience = PATIENCE * (perf_counter() - start) + PATIENCE_SECONDS
        for place in range(1, count):
            own = started[place - 1].results(patience) if place <= len(started) else []
            done.append(own + [work() for work in works[place::count][len(own) :]])
    finally:
        for copy in started:
            copy.end()
    return [done[place % count][place // count] for place in range(len(works))]


def copies() -> int:
    """How many copies of this process may work beside it."""
    if sys.platform != "linux" or any(name in sys.modules for name in UNSAFE):
        return 0
    current = threading.current_thread()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not current):
        return 0  # one may hold a lock that a copy would wait for
    return min(len(os.sched_getaffinity(0)) - 1, MOST_COPIES)


def _done(
    works: Sequence[Callable[[], Result]], shares: int, count: int, told: Callable[[int, int], object] | None
) -> list[Result]:
    """The results of the own share."""
    found = []
    for place, work in enumerate(works):
        if told is not None:
            told(min(place * shares, count), count)
        found.append(work())
    return found


class _Copy:
    """A forked copy of this process that does some works and ends."""

    def __init__(self, works: Sequence[Callable[[], Any]]) -> None:
        self.receiving, sending = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads: those here are daemons, and a copy that waits for one is ended.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self.pid = os.fork()
            except OSError:
                os.close(self.receiving)
                os.close(sending)
                raise
        if self.pid == 0:
            os.close(self.receiving)  # then a copy whose parent was killed cannot write, and ends
            _work(works, sending)
        os.close(sending)

    def results(self, patience_seconds: float) -> list[Any]:
        """The results of its first works: of all of them, unless it failed."""
        data, end = bytearray(), perf_counter() + patience_seconds
        asked = poll()
        asked.register(self.receiving)
        while (left := end - perf_counter()) > 0 and asked.poll(1e3 * left):
            piece = os.read(self.receiving, 1 << 20)
            if not piece:
                break
            data += piece
        try:
            found = pickle.loads(data)  # noqa: S301  (from a copy of this process)
        except Exception:  # it is not whole: the error depends on where it ends
            return []
        return list(found)

    def end(self) -> None:
        """Ends the copy, which may have ended before."""
        os.close(self.receiving)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # nobody is told of children where SIGCHLD is ignored
            os.waitpid(self.pid, 0)


def _work(works: Sequence[Callable[[], Any]], sending: int) -> None:
    """What a copy does.  It never returns, and it runs nothing that its parent wanted to run at the end."""
    found: list[Any] = []
    try:
        with suppress(Exception):  # the parent meets the same error
            for work in works:
                found.append(work())
        data = memoryview(pickle.dumps(found, pickle.HIGHEST_PROTOCOL))
        while data:
            data = data[os.write(sending, data) :]
    finally:
        os._exit(0)
