"""An endpoint waits for another: it spins for a moment, then sleeps until it is woken.

With more devices than cores, a waiting device must give up its core. `os.sched_yield` does so and costs less than half
a microsecond when no other process wants the core. After a bounded time the device sleeps on a futex in shared memory,
or where there is no futex, in short naps. An endpoint that changes a word wakes the endpoints that may wait for it.

The sleeper first publishes that it sleeps and then checks its condition again. The waker first makes the change and
then checks which endpoints sleep. Each needs a full memory fence between its two steps; otherwise both could miss the
other.
"""

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
from vcluster.memory.layout import SLEEPING, WAKE, Layout
from vcluster.memory.threads import HostThreads, Threads

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(
    platform.machine()
)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYONE = 1 << 30
STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether other cores see the stores of this processor in the order in which they were made."""

SHORTEST_NAP_SECONDS = 3e-4
"""Seconds between two polls where no endpoint can wake a sleeper."""

SPIN_NS = 50_000
"""Nanoseconds of spinning for each device that shares a core: about the cost of sleeping and being woken. It is a time
and not a number of polls, because on crowded cores one poll may last a time slice of another process."""

POLLS = 100
"""Polls between two calls of `give_way` if each device has a core of its own. A call costs as much as a poll, and the
core is seldom wanted."""

SPINS = 200
"""The number of calls of `give_way`, at most, before a process sleeps."""

SPINS_OF_A_THREAD = 20
"""As many calls at most where devices are threads: the other devices cannot run while one spins."""

NAPS_SECONDS = 1.0, 1.0
"""The first and the longest sleep. A sleeper that is not woken polls after the first, then backs off up to the
longest."""

NAPS_WITH_QUEUES_SECONDS = SHORTEST_NAP_SECONDS, 0.1
"""The first and the longest sleep under the queue transport. A message arrives after the word that announces it, and
its arrival wakes no endpoint."""

QUIET_NS = 5_000_000
"""Nanoseconds of a wait, from its first sleep on, in which an endpoint publishes nothing. Most waits end sooner, and to
find out and publish what an endpoint waits for takes longer than a message."""

NAP_BESIDE_OTHERS_NS = 50_000_000
"""Nanoseconds of a sleep, at most, while another thread of the kernel runs. The host is told when none does."""

give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
"""Yield this core to another process that wants it."""


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class Signals:
    """Waiting and waking of one endpoint."""

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        endpoint: int,
        *,
        spins: int = SPINS,
        naps_seconds: tuple[float, float] = NAPS_SECONDS,
    ) -> None:
        self._arena = arena
        self._layout = layout
        self.spins = spins
        self.spin_ns = SPIN_NS * max(2, -(-layout.size // layout.cores))
        self.polls = POLLS if layout.size <= layout.cores else 1
        self._first_nap_ns, self._longest_nap_ns = (int(seconds * 1e9) for seconds in naps_seconds)
        self._cancelled = arena.words(arena.cancel_place)
        self.threads = HostThreads() if endpoint == layout.host else Threads()
        """The threads that make calls of this endpoint."""
        self._asleep: set[int] = set()
        """The threads of this endpoint that sleep, by their identifiers."""
        self._number = endpoint
        self._sleeping = [arena.words(layout.word(e, SLEEPING)) for e in range(layout.endpoints)]
        self._me = self._sleeping[endpoint]
        self._address = arena.address + layout.word(endpoint, WAKE)
        self._words = [
            np.frombuffer(arena.view, np.uint32, 1, layout.word(e, WAKE)) for e in range(layout.endpoints)
        ]
        self._word = self._words[endpoint]
        self._sleep: Callable[[int, int, int], None] = _nap
        self._rouse: Callable[[int], None] | None = None
        if sys.platform == "linux" and _SYS_FUTEX:
            self._sleep, self._rouse = _futex()
        self._turnstile = threading.Lock()
        self.home: HomeCore | None = None
        """The core on which this endpoint sleeps. It moves there when it waits for the first time in a run."""
        self.has_waited = False
        """Whether it has moved there in this run."""
        self.saw_cancellation = False
        """Whether this endpoint has seen that the run is cancelled. Exceptions that it raises later are
        consequences."""
        self.passed_cancellation = False
        """Whether the run was cancelled during a wait that may have ended all the same. No later one goes on for long:
        devices that never wait for a device that has ended could otherwise call each other for ever."""
        self.before_sleep: Callable[[], object] | None = None
        """Called before each sleep, to take in messages so that no ring stays full."""
        self.note_awaited: Callable[[], Any] | None = None
        """Called after it, to collect what the endpoint waits for, and again after one more poll. If both results are
        equal they describe one moment, and `publish_awaited` publishes them."""
        self.publish_awaited: Callable[[Any], object] | None = None
        self.after_sleep: Callable[[], object] | None = None
        """Called at the end of a wait that reached the sleeping phase."""

    def fence(self) -> None:
        """A full memory fence: other endpoints see all earlier writes before any later access.

        Taking and releasing a lock are two read-modify-write operations on one word, and no processor moves memory
        accesses across both. The lock is taken without blocking, because an interrupt may have come between the two.
        """
        self._turnstile.acquire(False)
        try:  # noqa: SIM105  (a `suppress` takes longer than the fence)
            self._turnstile.release()
        except (
            RuntimeError
        ):  # another thread came between and released it: the switch to it and back was a fence
            pass

    def wake(self, endpoints: Iterable[int]) -> None:
        """Wake those of ``endpoints`` that sleep, because something they may wait for has changed."""
        self._turnstile.acquire(False)  # the fence, inlined
        try:  # noqa: SIM105
            self._turnstile.release()
        except RuntimeError:
            pass
        sleeping = self._sleeping
        for endpoint in endpoints:
            if sleeping[endpoint][0]:
                self.rouse((endpoint,))

    def rouse(self, endpoints: Iterable[int]) -> None:
        """`wake` without the fence, for a caller that made one after the change."""
        sleeping = self._sleeping
        for endpoint in endpoints:
            if sleeping[endpoint][0]:
                self._words[endpoint][0] += 1
                if self._rouse is not None:
                    self._rouse(self._arena.address + self._layout.word(endpoint, WAKE))

    def rouse_own_threads(self) -> None:
        """Wake the threads of this endpoint that sleep, because one of them has done what another may wait for."""
        if self._asleep:
            self.rouse((self._number,))

    def cancel(self) -> None:
        """Make every pending and every later wait raise `OperationCancelled`."""
        self._cancelled[0] = 1
        self.wake(range(self._layout.endpoints))

    def resume(self) -> None:
        self._cancelled[0] = 0

    @property
    def cancelled(self) -> bool:
        return bool(self._cancelled[0])

    def check(self) -> None:
        if self._cancelled[0]:
            self.saw_cancellation = True
            raise OperationCancelled("another device failed")

    def turns(self) -> Iterator[None]:
        """Iterate over a bounded number of polls, yielding the core between them. It ends early after a
        cancellation."""
        cancelled = self._cancelled
        yield
        if self.passed_cancellation:
            self.check()
        if self.home is not None and not self.has_waited:
            self.has_waited = True
            self.home.stay()
            self.home.leave()
        give_up = time.perf_counter_ns() + self.spin_ns
        polls = range(self.polls - 1)
        for _ in range(self.spins):
            for _ in polls:
                yield
            give_way()
            if cancelled[0]:
                self.passed_cancellation = True
            yield
            if cancelled[0] or time.perf_counter_ns() > give_up:
                return

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when ``ready()`` is true."""
        give_up = time.perf_counter_ns() + self.spin_ns
        for _ in self.turns():
            if ready():
                return
            if time.perf_counter_ns() > give_up:  # with many pending operations, one poll takes long
                break
        self.check()
        me = threading.get_ident()
        try:
            self._sleep_until(ready, me)
        finally:
            self._get_up(me)

    def _sleep_until(self, ready: Callable[[], bool], me: int) -> None:
        """Sleep again and again, as the thread ``me``, until ``ready()`` is true."""
        nap_ns, last_seen = self._first_nap_ns, -1
        quiet_until = time.perf_counter_ns() + (0 if self.note_awaited is None else QUIET_NS)
        while True:
            seen = self._lie_down(me)
            if seen != last_seen:
                nap_ns, last_seen = self._first_nap_ns, seen
            quiet_ns = 0 if self.threads.many else max(0, quiet_until - time.perf_counter_ns())
            awaited = None if self.note_awaited is None or quiet_ns else self.note_awaited()
            if ready():
                return
            self.check()
            if awaited is not None and self.note_awaited is not None and self.publish_awaited is not None:
                if self.note_awaited() != awaited:
                    continue
                if not self.threads.some_other_may_act(self._arena.asleep):
                    self.publish_awaited(awaited)
                else:  # which may begin to wait, too
                    nap_ns = min(nap_ns, NAP_BESIDE_OTHERS_NS)
            if self.home is not None:
                self.home.stay()
            held = self.threads.let_go()
            try:
                self._sleep(self._address, seen, min(nap_ns, quiet_ns or nap_ns))
            finally:
                self.threads.take_back(held)
            if ready():  # check this first, because the caches are cold
                return
            nap_ns = min(2 * nap_ns, self._longest_nap_ns)

    def _lie_down(self, me: int) -> int:
        """Publish that a thread sleeps, and take messages in. The word that whoever wakes it changes, as it was."""
        self._asleep.add(me)
        self._arena.asleep.add(me)
        self._me[0] = 1
        self.fence()
        seen = int(self._word[0])
        if self.before_sleep is not None:
            self.before_sleep()
        return seen

    def _get_up(self, me: int) -> None:
        """Publish that a thread no longer sleeps."""
        self._asleep.discard(me)
        self._arena.asleep.discard(me)
        self._me[0] = 1 if self._asleep else 0
        if self.home is not None:
            self.home.leave()
        if self.after_sleep is not None:
            self.after_sleep()


@functools.cache
def _futex() -> tuple[Callable[[int, int, int], None], Callable[[int], None]]:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]

    def sleep(address: int, seen: int, longest_ns: int) -> None:
        span = _Timespec(*divmod(longest_ns, 10**9))
        syscall(_SYS_FUTEX, address, _FUTEX_WAIT, seen, ctypes.addressof(span), None, 0)

    def rouse(address: int) -> None:
        syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _EVERYONE, None, None, 0)

    return sleep, rouse


def _nap(address: int, seen: int, longest_ns: int) -> None:
    time.sleep(SHORTEST_NAP_SECONDS)
