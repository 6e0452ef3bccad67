"""How an endpoint waits for another: spin for a moment, then sleep until it is woken.

With more devices than cores a waiting device must give its core away: `os.sched_yield` does so and costs less than
half a microsecond when nobody wants it.  After a bounded number of turns it sleeps on a futex in shared memory (where
there is none: in short naps).  Whoever changes what others may wait for wakes those that sleep.

The sleeper says that it sleeps, then looks once more; the waker makes the change, then looks who sleeps.  Between the
two steps each needs a full fence, or both could miss the other.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from vcluster.code import OperationCancelled
from vcluster.memory.arena import Arena
from vcluster.memory.core_affinity import HomeCore
from vcluster.memory.layout import Layout

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYONE = 1 << 30
STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether others see what this processor stores in the order in which it was stored."""

SHORTEST_NAP_SECONDS = 3e-4
"""Where nobody can wake a sleeper, it looks again after so long."""

SPIN_NS = 50_000
"""Spinning goes on for so long for each device that shares a core: about what it costs to sleep and be woken.  It is a
time, not a number of turns, since on crowded cores each turn may be a time slice of others."""

LOOKS = 100
"""Between two times of giving way, if each device has a core: others seldom want it, and to ask takes as long."""

NAPS_SECONDS = 1.0, 1.0
"""The first and the longest: a sleeper looks again after so long even if nobody woke it, then after twice that."""

NAPS_WITH_QUEUES_SECONDS = SHORTEST_NAP_SECONDS, 0.1
"""A queue's messages come after the word that tells of them, and nobody wakes for them once more."""

give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Let another run on this core, if one wants to."""


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class Signals:
    """The waiting and waking of one endpoint."""

    def __init__(
        self, arena: Arena, layout: Layout, endpoint: int, *, spins: int = 200,
        naps_seconds: tuple[float, float] = NAPS_SECONDS,
    ) -> None:
        self._arena = arena
        self._layout = layout
        self.spins = spins
        self.spin_ns = SPIN_NS * max(2, -(-layout.size // layout.cores))
        self.looks = LOOKS if layout.size <= layout.cores else 1
        self._first_nap_ns, self._longest_nap_ns = (int(seconds * 1e9) for seconds in naps_seconds)
        self._cancelled = arena.words(0)
        self._sleeping = [arena.words(layout.sleeping_word(e)) for e in range(layout.endpoints)]
        self._me = self._sleeping[endpoint]
        self._address = arena.address + layout.wake_word(endpoint)
        self._words = [np.frombuffer(arena.view, np.uint32, 1, layout.wake_word(e)) for e in range(layout.endpoints)]
        self._word = self._words[endpoint]
        self._sleep: Callable[[int, int, int], None] = _nap
        self._rouse: Callable[[int], None] | None = None
        if sys.platform == "linux" and _SYS_FUTEX:
            self._sleep, self._rouse = _futex()
        self._turnstile = threading.Lock()
        self.home: HomeCore | None = None
        """Where this endpoint sleeps, and where it goes when it waits for the first time in a run."""
        self.has_waited = False
        """Whether it has gone there in this run."""
        self.told_cancelled = False
        """Whether this endpoint knows that the run was broken off: what it raises from then on is a consequence."""
        self.before_sleep: Callable[[], object] | None = None
        """Called before each sleep: to take in messages, lest a ring stay full."""
        self.note_awaited: Callable[[], Any] | None = None
        """Called next, to note what is awaited, and once more after another look: only if nothing came or went on
        meanwhile is that true of one moment, and told to others by `tell_awaited`."""
        self.tell_awaited: Callable[[Any], object] | None = None
        self.after_sleep: Callable[[], object] | None = None
        """Called when a wait that came to sleeping is over."""

    def fence(self) -> None:
        """Everything written before is seen by others before anything read or written after.

        Taking and releasing a lock is a read-modify-write on one word, twice: no processor moves memory
        accesses across both.  (Not blocking: an interrupt may have fallen between the two.)
        """
        self._turnstile.acquire(False)
        self._turnstile.release()

    def wake(self, endpoints: Iterable[int]) -> None:
        """Tell ``endpoints`` that something they may wait for has changed."""
        self._turnstile.acquire(False)  # a fence, and not the call
        self._turnstile.release()
        sleeping = self._sleeping
        for endpoint in endpoints:
            if sleeping[endpoint][0]:
                self.rouse((endpoint,))

    def rouse(self, endpoints: Iterable[int]) -> None:
        """`wake`, for who has made a fence since the change."""
        sleeping = self._sleeping
        for endpoint in endpoints:
            if sleeping[endpoint][0]:
                self._words[endpoint][0] += 1
                if self._rouse is not None:
                    self._rouse(self._arena.address + self._layout.wake_word(endpoint))

    def cancel(self) -> None:
        """Make every pending and coming wait raise `OperationCancelled`."""
        self._cancelled[0] = 1
        self.wake(range(self._layout.endpoints))

    def resume(self) -> None:
        self._cancelled[0] = 0

    @property
    def cancelled(self) -> bool:
        return bool(self._cancelled[0])

    def check(self) -> None:
        if self._cancelled[0]:
            self.told_cancelled = True
            raise OperationCancelled("another device failed")

    def turns(self) -> Iterator[None]:
        """Turns to look whether something has come, giving way after each: few, and none once the run is cancelled."""
        cancelled = self._cancelled
        yield
        if self.home is not None and not self.has_waited:
            self.has_waited = True
            self.home.stay()
            self.home.leave()
        give_up = time.perf_counter_ns() + self.spin_ns
        looks = range(self.looks - 1)
        for _ in range(self.spins):
            for _ in looks:
                yield
            give_way()
            yield
            if cancelled[0] or time.perf_counter_ns() > give_up:
                return

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when ``ready()`` is true."""
        for _ in self.turns():
            if ready():
                return
        self.check()
        nap_ns, last_seen = self._first_nap_ns, -1
        try:
            while True:
                self._me[0] = 1
                self.fence()
                seen = int(self._word[0])
                if seen != last_seen:
                    nap_ns, last_seen = self._first_nap_ns, seen
                if self.before_sleep is not None:
                    self.before_sleep()
                awaited = None if self.note_awaited is None else self.note_awaited()
                if ready():
                    return
                self.check()
                if self.note_awaited is not None and self.tell_awaited is not None:
                    if self.note_awaited() != awaited:
                        continue
                    self.tell_awaited(awaited)
                if self.home is not None:
                    self.home.stay()
                self._sleep(self._address, seen, nap_ns)
                if ready():  # first of all: caches are cold
                    return
                nap_ns = min(2 * nap_ns, self._longest_nap_ns)
        finally:
            self._me[0] = 0
            if self.home is not None:
                self.home.leave()
            if self.after_sleep is not None:
                self.after_sleep()


@functools.cache
def _futex() -> tuple[Callable[[int, int, int], None], Callable[[int], None]]:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes = [
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
    ]

    def sleep(address: int, seen: int, longest_ns: int) -> None:
        span = _Timespec(*divmod(longest_ns, 10**9))
        syscall(_SYS_FUTEX, address, _FUTEX_WAIT, seen, ctypes.addressof(span), None, 0)

    def rouse(address: int) -> None:
        syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYONE, None, None, 0)

    return sleep, rouse


def _nap(address: int, seen: int, longest_ns: int) -> None:
    time.sleep(SHORTEST_NAP_SECONDS)
