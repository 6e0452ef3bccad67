"""One run under way: every device is commanded, and every one replies, whatever happens.

When one fails (or the run is broken off: by Ctrl-C, a deadline, a deadlock, a close), the others are told to cancel
what they wait in; one that computes on is interrupted, and in the end killed.  Nobody is left behind in a run that is
over.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from parallelism.operation import Stuck, deadlock_error
from parallelism.operation.deadlock import callers
from parallelism.operation.errors import folded
from vcluster.code import ClusterError, ClusterTimeoutError, DeadlockError, Frame
from vcluster.memory import State, Status
from vcluster.messages import Endpoint
from vcluster.processes import Cancelled, Crew, Done, Printed, RunCommand
from vcluster.runs.deadlock import look
from vcluster.runs.interrupts import DeferredInterrupt
from vcluster.runs.outcome import Reply, error_of

LOOK_EVERY_SECONDS = 0.05
"""So often look whether those that are not heard of can still go on."""

LOOKS_WHILE_OTHERS_RUN = 4

INTERRUPT_AFTER_SECONDS = 0.03
KILL_AFTER_SECONDS = 5.0
"""When a run has failed, a device that still computes is interrupted, and in the end killed and replaced."""

ShowOutput = Callable[[int, str, str], object]


class Conduct:
    """One run, from the first command to the last reply."""

    def __init__(
        self, crew: Crew, endpoint: Endpoint, status: Status, size: int, deadline_seconds: float | None,
        show_output: ShowOutput, cluster_end: Any,
    ) -> None:
        """``endpoint`` is the host's; ``cluster_end`` is alive until the cluster is closed, and closes it if called."""
        self._crew = crew
        self._endpoint = endpoint
        self._status = status
        self._size = size
        self._deadline_seconds = deadline_seconds
        self._show_output = show_output
        self._cluster_end = cluster_end
        self._asked: BaseException | None = None
        self.replies: dict[int, Reply] = {}
        """What each device said at its end, so far."""
        self.broken_off: BaseException | None = None
        """Why the run is ended, if not by a device."""
        self._pending: set[int] = set()
        self._started = time.monotonic()
        self._failed_at: float | None = None
        self._looked = self._started
        self._looks = 0
        self._stuck: list[Stuck] = []
        self._finished: set[int] = set()
        self._late: dict[int, State] = {}
        """What devices were doing when the deadline came."""

    def break_off(self, error: BaseException) -> None:
        """From another thread: end the run with this error."""
        self._asked = error
        self._crew.wake()

    def collect(self, command: Callable[[int], RunCommand], interrupt: DeferredInterrupt) -> None:
        """Command every device and wait for its reply; on a failure, see to it that all come back."""
        with self._crew.printing():
            for rank in range(self._size):
                self._status.begin(rank)
            try:
                for rank in range(self._size):
                    self._crew.send(rank, command(rank))
                    self._pending.add(rank)
            except BaseException as error:  # Ctrl-C, or no memory for the arguments
                self.broken_off = error
            while True:
                try:
                    interrupt.deliver()
                    if not self._cluster_end.alive:
                        raise ClusterError("the cluster was closed while the run was under way")
                    self.broken_off = self.broken_off or self._asked
                    if self.broken_off is not None:
                        self._cancel()
                    if not self._pending:
                        return
                    self._listen()
                    if not self._in_time():
                        return
                except BaseException as error:  # Ctrl-C, a time limit's signal, an output that cannot be written to
                    closed = not self._cluster_end.alive
                    if closed or (self.broken_off is not None and isinstance(error, Exception)):
                        self._cluster_end()
                        raise
                    self.broken_off = error

    def _cancel(self) -> None:
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self._endpoint.signals.cancel()

    def error(self, killed_for_memory: Callable[[], bool | None]) -> BaseException | None:
        """What the run ends in, once all replies are there; None if all is well."""
        if self._stuck and isinstance(self.broken_off, DeadlockError):
            return self._deadlock()
        if self._late and isinstance(self.broken_off, ClusterTimeoutError):
            return self._too_late()
        return self.broken_off or error_of(self.replies, self._status.last_seen, killed_for_memory)

    def _listen(self) -> None:
        """Hear what devices say; now and then look whether those that say nothing can go on."""
        self._take(self._crew.receive(self._timeout()))
        if self._failed_at is None and self._look():
            self._take(self._crew.receive(0.0))
            if self._failed_at is None:  # a failure that was on its way outranks
                self._finished = {rank for rank, reply in self.replies.items() if isinstance(reply, Done)}
                self.broken_off = self._deadlock()

    def _take(self, messages: list[tuple[int, Any]]) -> None:
        for rank, message in messages:
            if isinstance(message, Printed):
                if self.broken_off is None:
                    self._show_output(rank, message.stream, message.text)
                continue
            self._pending.discard(rank)
            self.replies[rank] = message
            if not isinstance(message, Done):
                self._cancel()

    def _in_time(self) -> bool:
        """Keep the deadline, and hurry those that hold up a run which has failed; False if that is hopeless."""
        now = time.monotonic()
        if self._failed_at is not None:
            return self._hurry(now - self._failed_at)
        if self._deadline_seconds is not None and now - self._started > self._deadline_seconds:
            self._late = {rank: self._status.read(rank) for rank in sorted(self._pending)}
            self.broken_off = self._too_late()
        return True

    def _timeout(self) -> float:
        if self._failed_at is not None:
            return INTERRUPT_AFTER_SECONDS
        if self._deadline_seconds is not None:
            left = max(0.0, self._started + self._deadline_seconds - time.monotonic()) + 1e-3
            return min(LOOK_EVERY_SECONDS, left)
        return LOOK_EVERY_SECONDS

    def _look(self) -> bool:
        """Whether there is a deadlock.  While others run it is told only after some looks, when those who come to it
        late have come, and are told of, too."""
        now = time.monotonic()
        if now - self._looked < 0.9 * LOOK_EVERY_SECONDS:
            return False
        self._looked = now
        self._endpoint.take_in()  # lest a device wait for room in a ring to the host
        others = [t for t in threading.enumerate() if not t.name.startswith(("vcluster-", "Queue"))]
        self._stuck = look(self._status, self._size, host_may_act=len(others) > 1)
        self._looks = self._looks + 1 if self._stuck else 0
        return self._looks >= (2 if len(self._stuck) == len(self._pending) else LOOKS_WHILE_OTHERS_RUN)

    def _deadlock(self) -> DeadlockError:
        return deadlock_error(self._stuck, self._finished, self._stacks())

    def _stacks(self) -> dict[int, tuple[Frame, ...]]:
        """Where the kernels were as the run was broken off, those that have come back since."""
        return {rank: reply.stack for rank, reply in self.replies.items() if isinstance(reply, Cancelled)}

    def _hurry(self, seconds: float) -> bool:
        """Interrupt or kill who still computes; False if that cannot be done, and the cluster is closed."""
        if seconds < INTERRUPT_AFTER_SECONDS:
            return True
        for rank in sorted(self._pending):
            if seconds < KILL_AFTER_SECONDS:
                self._crew.interrupt(rank)
            elif not self._crew.kill(rank):
                self._cluster_end()  # a thread
                return False
        return True

    def _too_late(self) -> ClusterTimeoutError:
        said, places, stacks = {}, [], self._stacks()
        for rank, state in self._late.items():
            stack = stacks.get(rank, ())
            place = state.location or (stack[-1].place if stack else "")
            seen = self._status.last_seen(rank)
            if state.operations:
                what = f"in {state.operations[0].text}"
            else:  # who has just come to a call does not wait yet, as others see it
                what = f"in {seen.operation}" if seen.operation and seen.location == place else "computing"
            said[rank] = what + (f" at {place}" if place else "") + callers(stack, place)
            places += [place] if place else []
        return ClusterTimeoutError(
            "\n".join([f"the run took longer than deadline_seconds={self._deadline_seconds}", *folded(said)]),
            ranks=list(self._late), locations=places,
        )


def show_with_rank(rank: int, stream: str, text: str) -> None:
    """Print lines that a device printed, to the host's ``stdout`` or ``stderr``, with the rank in front."""
    file = sys.stdout if stream == "stdout" else sys.stderr
    print("".join(f"[rank {rank}] {line}\n" for line in text[:-1].split("\n")), end="", file=file, flush=True)
