"""Operations under way in one endpoint.

An operation is written as a generator: it works until it needs somebody else, yields what it waits for (a `Wait`), and
is resumed when it has it; what it returns is its result.  A blocking call drives one generator; an asynchronous one
leaves it here, to advance inside any later call.

Operations that must take effect in the order they were issued share a *lane* (the collectives of one group; the
receives from one source under one tag): only the first of a lane advances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from parallelism.operation import Lane
from vcluster.code import call_site
from vcluster.code.call_sites import here
from vcluster.memory import Need, Operation, Signals

Ready = Callable[[], bool]


class Wait:
    """Something to wait for: whether it is there, and (for who wonders why nothing moves) what it needs."""

    __slots__ = ("_ready", "needs")

    def __init__(self, ready: Ready, needs: Callable[[], list[Need]] | None = None) -> None:
        self._ready = ready
        self.needs = needs

    def __call__(self) -> bool:
        return self._ready()


Steps = Generator[Wait, None, Any]


class Task:
    """One asynchronous operation."""

    __slots__ = ("_steps", "error", "finished", "lane", "location", "result", "waits_for", "what")

    def __init__(self, lane: Lane, steps: Steps, what: object) -> None:
        self.lane = lane
        self.what = what
        self.location = here()
        self._steps = steps
        self.waits_for: Wait | None = None
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None

    def advance(self) -> bool:
        """Go on as far as possible; True if the operation is finished."""
        while self.waits_for is None or self.waits_for():
            try:
                self.waits_for = next(self._steps)
            except StopIteration as stop:
                self.result = stop.value
                self.finished = True
                return True
            except BaseException as error:  # kept for who waits for it
                self.error = error
                self.finished = True
                return True
        return False


class Tasks:
    """All operations under way in one endpoint."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self.lanes: dict[Lane, deque[Task]] = {}
        """The asynchronous operations under way."""
        self._blocked_in: tuple[Lane, object, Wait | None] | None = None
        self._issued_at = ""

    def run(self, lane: Lane, steps: Steps, what: object) -> Any:
        """Drive an operation to its end and return its result.  ``what`` it is, its ``str`` tells."""
        if lane in self.lanes:
            return self.wait(self.issue(lane, steps, what))
        try:
            while True:
                wait = next(steps)
                if not wait():
                    self._blocked_in = lane, what, wait
                    self._block(wait)
        except StopIteration as stop:
            return stop.value

    def issue(self, lane: Lane, steps: Steps, what: object) -> Task:
        """Start an operation; it advances inside later calls."""
        task = Task(lane, steps, what)
        queue = self.lanes.setdefault(lane, deque())
        queue.append(task)
        if queue[0] is task:
            self._advance_lane(lane, queue)
        return task

    def advance(self) -> None:
        """Let everything go on as far as it can."""
        for lane, queue in list(self.lanes.items()):
            self._advance_lane(lane, queue)

    def wait(self, task: Task) -> Any:
        """The result of a task, when it has one."""
        if not task.finished:
            self._blocked_in = task.lane, task.what, None
            self._issued_at = task.location
            self._block(lambda: task.finished)
        if task.error is not None:
            raise task.error
        return task.result

    def drop_all(self) -> None:
        """Forget everything, after a failure."""
        self.lanes.clear()
        self._blocked_in = None

    def waits_at(self) -> str:
        """The line of the kernel that waits; at its end, for works nobody waited for, where they were issued."""
        site = call_site()
        return site.location if site.is_users else self._issued_at

    def blocked_on(self) -> list[Operation]:
        """What is under way, for `vcluster.memory.status`: first what the kernel itself waits for."""
        assert self._blocked_in is not None
        lane, what, wait = self._blocked_in
        if not call_site().is_users:
            what = f"{what}, never waited for,"
        heads = {lane: queue[0] for lane, queue in self.lanes.items()}
        own = heads.pop(lane, None)
        if wait is None and own is not None:
            wait = own.waits_for
        first = Operation(lane, str(what), _needs(wait))
        others = (Operation(lane, str(task.what), _needs(task.waits_for)) for lane, task in heads.items())
        return [first, *others]

    def _block(self, ready: Ready) -> None:
        if not self.lanes:
            self._signals.wait(ready)
            return

        def ready_after_advancing() -> bool:
            self.advance()
            return ready()

        self._signals.wait(ready_after_advancing)

    def _advance_lane(self, lane: Lane, queue: deque[Task]) -> None:
        while queue and queue[0].advance():
            queue.popleft()
        if not queue:
            self.lanes.pop(lane, None)


def _needs(wait: Wait | None) -> list[Need] | None:
    return None if wait is None or wait.needs is None else wait.needs()
