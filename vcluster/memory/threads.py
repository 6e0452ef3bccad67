"""The threads that use one endpoint: one at a time works inside the library, and one that waits lets the others in.

A kernel has one thread as a rule, and that one pays nothing: no lock is taken while it is alone. The first call of
another thread ends this. From then on each call holds a lock, except while it sleeps.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from parallelism.operation import ROOT
from parallelism.operation.thread_frames import frames_by_thread
from vcluster.memory.interrupts import DeferredInterrupt, deliver, leave_block

POLL_SECONDS = 2e-4
"""Seconds between two looks whether the first thread, which holds no lock, has left the library."""

_ROOMS = ("device", "collectives", "messages", "tracing", "memory", "mpi")
_INSIDE = tuple(f"{ROOT}{os.sep}vcluster{os.sep}{room}{os.sep}" for room in _ROOMS)
_WORKER = f"{ROOT}{os.sep}vcluster{os.sep}processes{os.sep}worker.py"
_PASSIVE = {"threading.py": {"wait", "join", "_wait_for_tstate_lock"}, "thread.py": {"_worker"}}
"""Functions of the standard library, by file, in which a thread waits until another thread of its process acts."""


own: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""The threads of this process that the library has started. None of them runs code of the host."""


_conducting: set[int] = set()
"""The threads of this process that are in `run` of a cluster."""


@contextmanager
def conducts() -> Iterator[None]:
    """A context in which the calling thread conducts a run."""
    mine = threading.get_ident()
    outermost = mine not in _conducting
    _conducting.add(mine)
    try:
        yield
    finally:
        if outermost:
            _conducting.discard(mine)


def is_engaged() -> bool:
    """Whether the calling thread serves a device, or waits for the devices of a run."""
    return threading.get_ident() in _conducting or threading.current_thread() in own


def others_run() -> bool:
    """Whether this process has another Python thread than the calling one and the library's own, by any name."""
    ours = {thread.ident for thread in own} | {threading.get_ident()}
    return any(ident not in ours and not _is_feeder(frame) for ident, frame in frames_by_thread().items())


def _is_feeder(frame: FrameType | None) -> bool:
    """Whether a thread only writes the messages of a ``multiprocessing.Queue`` into a pipe."""
    queues = sys.modules.get("multiprocessing.queues")
    while queues is not None and frame is not None:
        if frame.f_code is queues.Queue._feed.__code__:
            return True
        frame = frame.f_back
    return False


class Threads:
    """The threads of one device's kernel, or of the host."""

    def __init__(self, *, many: bool = False) -> None:
        """``many``: take the lock from the start, because any thread of the host may use its channels."""
        self.first = 0 if many else threading.get_ident()
        """The thread of the kernel."""
        self.many = many
        """Whether another thread has made a call."""
        self.on_many: Callable[[], object] = _nothing
        """Called when that happens."""
        self.depth: Callable[[], int] = int
        """The number of calls inside each other that the first thread is in."""
        self.helpers: dict[int, int] = {}
        """The other threads that are in a call, with the number of calls inside each other."""
        self._lock = threading.RLock()
        self._first_sleeps = False
        self._known: set[int] | None = None

    def begin(self, *, own_process: bool) -> None:
        """The calling thread is about to run a kernel. Without a process of its own, present threads are not its own."""
        self.let_go_of_all()
        self.first = threading.get_ident()
        self._first_sleeps = False
        if not self.helpers:
            self.many = False
        self._known = None if own_process else set(frames_by_thread())

    def __enter__(self) -> Self:
        mine = threading.get_ident()
        if mine != self.first or self.many:
            self._lock.acquire()
            if mine != self.first:
                self.helpers[mine] = self.helpers.get(mine, 0) + 1
                if not self.many:
                    try:
                        self._join_in()
                    except BaseException:
                        self.__exit__()
                        raise
        return self

    def __exit__(self, *_: object) -> None:
        mine = threading.get_ident()
        if mine in self.helpers:
            self.helpers[mine] -= 1
            if not self.helpers[mine]:
                del self.helpers[mine]
        if self._lock._is_owned():  # type: ignore[attr-defined]  # the first thread may have come in without it
            self._lock.release()

    def let_go_of_all(self) -> None:
        """The calling thread is in no call; an interrupt may have come as it left one."""
        while self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()

    def leave_recorder(self) -> None:
        """At the end: drop what refers to the recorder, so that no cycle keeps its memory alive."""
        self.on_many, self.depth = _nothing, int

    def _join_in(self) -> None:
        """From now on every call takes the lock. Wait until the first thread, which has not, leaves the library."""
        self.many = True
        self.on_many()
        while not self._first_sleeps and _is_inside(frames_by_thread().get(self.first)):
            time.sleep(POLL_SECONDS)

    def let_go(self) -> Any:
        """The calling thread is about to sleep inside a call: let others in. Returns what `take_back` needs."""
        if self.many and self._lock._is_owned():  # type: ignore[attr-defined]
            return self._lock._release_save()  # type: ignore[attr-defined]
        if threading.get_ident() == self.first:
            self._first_sleeps = True
        return None

    def take_back(self, held: Any) -> None:
        """The calling thread has slept: wait until no other thread is at work in a call."""
        if held is not None:
            self._lock._acquire_restore(held)  # type: ignore[attr-defined]
            return
        if threading.get_ident() != self.first:
            return
        self._first_sleeps = False
        if self.many:  # another thread came while this one slept
            for _ in range(max(1, self.depth())):
                self._lock.acquire()

    def some_other_may_act(self, asleep: set[int]) -> bool:
        """Whether a thread of the kernel runs, or can go on by itself, besides those that are ``asleep`` in a call of
        any device.

        The kernel's own thread is one of the library's where a device has no process of its own.
        """
        ours = {thread.ident for thread in own} - {self.first} | {threading.get_ident()}
        return any(
            ident not in ours and ident not in asleep and not is_passive(frame)
            for ident, frame in frames_by_thread().items()
            if self._known is None or ident not in self._known or ident == self.first or ident in self.helpers
        )


class HostThreads(Threads):
    """The threads of the host. Any of them may use its channels, so the lock is taken from the start.

    The handlers of signals run before a call, after it, or while it sleeps, and not in the midst of it.
    """

    def __init__(self) -> None:
        super().__init__(many=True)

    def __enter__(self) -> Self:
        block = DeferredInterrupt().__enter__()
        try:
            return super().__enter__()
        except BaseException as error:
            block.__exit__(type(error), error, None)
            raise

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        leave_block()

    def let_go(self) -> Any:
        """The calling thread is about to sleep: what a handler raises ends the call."""
        deliver()
        return super().let_go()


def is_passive(frame: FrameType) -> bool:
    """Whether a thread only waits, without a limit of time, for another thread of its process."""
    code = frame.f_code
    if code.co_name not in _PASSIVE.get(os.path.basename(code.co_filename), ()):  # noqa: PTH119
        return False
    timeout = frame.f_locals.get("timeout")
    return (timeout is None or timeout == -1) and not _is_released(frame)


def _is_released(frame: FrameType) -> bool:
    """Whether a thread goes on as soon as it gets to run, because what it waits for has come already.

    On a crowded machine it may stand there for long: the thread that released it has the interpreter's lock.
    """
    name, values = frame.f_code.co_name, frame.f_locals
    if name == "_worker":
        idle = getattr(values["executor_reference"](), "_idle_semaphore", None)
        return values["work_queue"].qsize() > 0 or (idle is not None and idle._value == 0)
    if "join" in name or "tstate" in name:
        return values["self"].ident not in frames_by_thread()
    return values.get("waiter") not in getattr(
        values["self"], "_waiters", ()
    )  # `notify` has taken it from them


def is_in_library(frame: FrameType | None) -> bool:
    """Whether this frame itself is code of the library for devices."""
    return frame is not None and frame.f_code.co_filename.startswith(_INSIDE)


def is_starting_thread(frame: FrameType | None) -> bool:
    """Whether a thread is about to start another. What is raised in it by its number may reach the new one: CPython
    gives that the number of its creator at first.
    """
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        if frame.f_code is threading.Thread.start.__code__:
            return True
        frame = frame.f_back
    return False


def _is_inside(frame: FrameType | None) -> bool:
    """Whether a thread of a kernel is in a call of the library. What called the kernel, over MPI too, is none."""
    while frame is not None and frame.f_code.co_filename != _WORKER:
        if is_in_library(frame):
            return True
        frame = frame.f_back
    return False


def _nothing() -> None:
    pass
