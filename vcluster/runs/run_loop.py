"""One run in progress: the host commands every device and collects one reply from each.

When a device fails, or when the run is cancelled by Ctrl-C, a deadline, a deadlock or a close, the pending calls of all
other devices are cancelled. A device that keeps computing is interrupted and, after some seconds, killed. When a run
is over, no device is still in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING

from parallelism.operation import Stuck, deadlock_error
from parallelism.operation.deadlock import callers
from parallelism.operation.errors import folded
from vcluster.code import (
    ClusterError,
    ClusterTimeoutError,
    CollectiveMismatchError,
    DeadlockError,
    Frame,
    ranks_in_words,
)
from vcluster.memory import LEFT, State
from vcluster.memory.interrupts import DeferredInterrupt
from vcluster.memory.threads import conducts, others_run
from vcluster.processes import Cancelled, Died, Done, Failed, Printed, RunCommand, Warned
from vcluster.runs.deadlock import find_deadlock
from vcluster.runs.host_waits import HostWaits
from vcluster.runs.outcome import Reply, error_of, remarks_on
from vcluster.tracing.failed_run import Ended, FailedRun

if TYPE_CHECKING:
    from vcluster.processes.crew import Messages
    from vcluster.runs.engine import Body

CHECK_EVERY_SECONDS = 0.05
"""Interval, in seconds, between two checks for a deadlock while no reply arrives."""

CHECKS_WHILE_OTHERS_RUN = 4
"""Consecutive positive checks before a deadlock is reported while other devices still run."""
INTERRUPT_AFTER_SECONDS = 0.03
KILL_AFTER_SECONDS = 5.0
"""After a failure, a computing device is interrupted after the first time and killed and replaced after the second."""

ShowOutput = Callable[[int, str, str], object]
ShowWarning = Callable[[Warned], object]


class Conduct:
    """Conducts one run, from the first command to the last reply."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._crew = body.crew
        self._status = body.status
        self.replies: dict[int, Reply] = {}
        """The final reply of each device that has replied."""
        self.broken_off: BaseException | None = None
        """The reason to cancel the run, if it is not a device's failure."""
        self._run = 0
        """The number of the run. A reply of another run is ignored."""
        self._host_waits = HostWaits()
        self._pending: set[int] = set()
        self._started = time.monotonic()
        self._failed_at: float | None = None
        self._checked_at = self._started
        self._positive_checks = 0
        self._stuck: list[Stuck] = []
        self._finished: set[int] = set()
        self._states: dict[int, State] = {}
        """What each pending device published when the run failed."""
        self._by_signal = False
        """Whether a signal's handler has broken the run off: Ctrl-C, or the time limit of a tool such as pytest-timeout."""
        self._late: dict[int, State] = {}
        """The state of each pending device at the deadline."""

    def collect(self, command: Callable[[int], RunCommand], interrupt: DeferredInterrupt) -> None:
        """Command every device and wait for its reply. After a failure, make sure that every device comes back."""
        __tracebackhide__ = True
        with self._crew.printing(), conducts():
            self._send_commands(command)
            goes_on = True
            while goes_on:
                try:
                    interrupt.deliver()
                except BaseException as error:  # Ctrl-C, the signal of a time limit
                    self.broken_off, self._by_signal = error, True
                try:
                    goes_on = self._go_on()
                except BaseException as error:  # an output that fails
                    if self._body.closed or (self.broken_off is not None and isinstance(error, Exception)):
                        self._body.finalizer()
                        raise
                    self.broken_off = error
            self._look_for_the_lost()

    def _look_for_the_lost(self) -> None:
        """Count a device that replied, but closed its connection, to the run that closed it and not to the next one."""
        if self._failed_at is None and not self._body.closed:
            self._take(self._crew.receive(0.0))

    def _send_commands(self, command: Callable[[int], RunCommand]) -> None:
        for rank in range(self._body.size):
            self._status.begin(rank)
        try:
            for rank in range(self._body.size):
                sent = command(rank)
                self._run = sent.number
                self._crew.send(rank, sent)
                self._pending.add(rank)
        except BaseException as error:  # Ctrl-C, or no memory for the arguments
            self.broken_off = error

    def _go_on(self) -> bool:
        """Take what the devices tell, after a moment at most. False once no device is in the run, or it cannot end."""
        if self._body.closed:  # by a handler
            raise self.broken_off or ClusterError("the cluster was closed while a run was in progress")
        self.broken_off = self.broken_off or self._body.asked
        if self.broken_off is not None:
            self._cancel()
        if not self._pending:
            return False
        self._listen()
        return self._in_time()

    def _cancel(self) -> None:
        if self._failed_at is None:
            self._failed_at = time.monotonic()
            self._states = {rank: self._status.read(rank) for rank in sorted(self._pending)}
            self._body.endpoint.signals.cancel()

    def error(self, killed_for_memory: Callable[[], bool | None]) -> BaseException | None:
        """The error of the run once all replies are there; None if it succeeded."""
        if self._stuck and isinstance(self.broken_off, DeadlockError):
            return self._deadlock()
        if self._late and isinstance(self.broken_off, ClusterTimeoutError):
            return self._too_late()
        signalled = self._by_signal or isinstance(self.broken_off, KeyboardInterrupt)
        if self.broken_off is not None and signalled and self._states:
            lines, _ = self._activities(self._states)
            self.broken_off.add_note("\n".join(["When the run was interrupted:", *lines]))
        found = self.broken_off or error_of(self.replies, self._status.last_seen, killed_for_memory)
        if found is None and not all(isinstance(reply, Done) for reply in self.replies.values()):
            missing = [rank for rank, reply in sorted(self.replies.items()) if not isinstance(reply, Done)]
            text = f"{ranks_in_words(missing)} did not finish the run, and no device failed"
            return ClusterError(text, ranks=missing)
        return found

    def _listen(self) -> None:
        """Receive messages of the devices, and now and then check for a deadlock."""
        self._take(self._crew.receive(self._timeout()))
        if self._failed_at is None and self._is_deadlocked():
            self._take(self._crew.receive(0.0))
            if self._failed_at is None:  # a failure whose message was still in transit takes precedence
                self._finished = {rank for rank, reply in self.replies.items() if isinstance(reply, Done)}
                self.broken_off = self._deadlock()

    def _take(self, messages: Messages) -> None:
        for rank, message in messages:
            if isinstance(message, Printed):
                if self.broken_off is not None:
                    pass
                elif message.warned is not None and self._body.show_warning is not None:
                    self._body.show_warning(message.warned)
                else:
                    self._body.show_output(rank, message.stream, message.text)
                continue
            if not isinstance(message, Died) and message.run != self._run:
                continue
            self._pending.discard(rank)
            self.replies[rank] = message
            if not isinstance(message, Done):
                self._cancel()

    def _in_time(self) -> bool:
        """Enforce the deadline, and end devices that delay a failed run. False if a device cannot be ended."""
        now = time.monotonic()
        if self._failed_at is not None:
            return self._hurry(now - self._failed_at)
        if self._body.deadline_seconds is not None and now - self._started > self._body.deadline_seconds:
            self._late = {rank: self._status.read(rank) for rank in sorted(self._pending)}
            self.broken_off = self._too_late()
        return True

    def _timeout(self) -> float:
        if self._failed_at is not None:
            return INTERRUPT_AFTER_SECONDS
        deadline = inf if self._body.deadline_seconds is None else self._started + self._body.deadline_seconds
        return min(CHECK_EVERY_SECONDS, max(0.0, deadline - time.monotonic()) + 1e-3)

    def _is_deadlocked(self) -> bool:
        """Whether there is a deadlock. While other devices still run, it is reported only after several checks, so that
        devices that join the deadlock late are reported, too.
        """
        now = time.monotonic()
        if now - self._checked_at < 0.9 * CHECK_EVERY_SECONDS:
            return False
        self._checked_at = now
        with self._body.endpoint.threads:
            self._body.endpoint.take_in()  # otherwise a device could wait for room in its ring to the host
        host_may_act = others_run()
        self._stuck = find_deadlock(
            self._status, self._body.size, host_may_act=host_may_act, wake=self._body.endpoint.signals.wake
        )
        if host_may_act and not self._stuck:
            self._host_waits.check(self._status, self._body.size, now)
        self._positive_checks = self._positive_checks + 1 if self._stuck else 0
        return self._positive_checks >= (
            2 if len(self._stuck) == len(self._pending) else CHECKS_WHILE_OTHERS_RUN
        )

    def _deadlock(self) -> DeadlockError:
        remarks = remarks_on(self._stuck, self.replies, self._body.capacity)
        return deadlock_error(self._stuck, self._finished, self._stacks(), remarks)

    def failed_run(self, error: BaseException) -> FailedRun:
        """The record of the run, which has failed with ``error``."""
        calls = error.calls if isinstance(error, CollectiveMismatchError) else {}
        finished = self._finished if isinstance(error, DeadlockError) else None
        ended = {rank: self._ended(rank, reply, finished) for rank, reply in self.replies.items()}
        records = {
            rank: reply.record
            for rank, reply in sorted(self.replies.items())
            if not isinstance(reply, Died) and not isinstance(reply.record, int)
        }
        return FailedRun(self._body.mesh, records, {rank: ended[rank] for rank in records}, calls)

    def _ended(self, rank: int, reply: Reply, finished: set[int] | None) -> Ended:
        """How a rank ended; ``finished``: those that had returned when a deadlock was found."""
        if isinstance(reply, Done) and (finished is None or rank in finished):
            return Ended("returned")
        if isinstance(reply, Failed):
            return Ended("raised", reply.failure.type_name, reply.failure.location or "")
        stack = reply.stack if isinstance(reply, Cancelled) else ()
        return Ended("stopped", state=self._states.get(rank), stack=stack)

    def _stacks(self) -> dict[int, tuple[Frame, ...]]:
        """Where each cancelled kernel was, for the devices that have replied."""
        return {rank: reply.stack for rank, reply in self.replies.items() if isinstance(reply, Cancelled)}

    def _hurry(self, seconds: float) -> bool:
        """Interrupt or kill devices that still compute. False if that is impossible; the cluster is then closed."""
        if seconds < INTERRUPT_AFTER_SECONDS:
            return True
        for rank in sorted(self._pending):
            if seconds < KILL_AFTER_SECONDS:
                self._crew.interrupt(rank)
            elif self._status.read(rank).state == LEFT:
                continue  # what it has recorded will come
            elif not self._crew.kill(rank):
                self._body.finalizer()  # a thread cannot be killed
                return False
        return True

    def _too_late(self) -> ClusterTimeoutError:
        lines, places = self._activities(self._late)
        said = f"the run took longer than deadline_seconds={self._body.deadline_seconds}"
        return ClusterTimeoutError("\n".join([said, *lines]), ranks=list(self._late), locations=places)

    def _activities(self, states: Mapping[int, State]) -> tuple[list[str], list[str]]:
        """In words, what these devices were doing, and at which lines of the kernel; equal ones have one line."""
        lines, places, stacks = {}, [], self._stacks()
        for rank, state in states.items():
            stack = stacks.get(rank, ())
            place = state.location or (stack[-1].place if stack else "")
            seen = self._status.last_seen(rank)
            activity = f"in {seen.operation}" if seen.operation and seen.location == place else "computing"
            if (
                state.operations
            ):  # otherwise: a device that has just made a call is not yet published as waiting in it
                activity = f"in {state.operations[0].text}"
            lines[rank] = activity + (f" at {place}" if place else "") + callers(stack, place)
            places += [place] if place else []
        return list(folded(lines)), places


def print_with_rank(rank: int, stream: str, text: str) -> None:
    """Print lines of a device to the host's ``stdout`` or ``stderr``, with the rank in front of each line."""
    file = sys.stdout if stream == "stdout" else sys.stderr
    lines = "".join(f"[rank {rank}] {line}\n" for line in text[:-1].split("\n"))
    try:
        print(lines, end="", file=file, flush=True)
    except UnicodeEncodeError:  # a kernel may print what the host's locale has not
        encoding = getattr(file, "encoding", None) or "ascii"
        print(lines.encode(encoding, "backslashreplace").decode(encoding), end="", file=file, flush=True)
