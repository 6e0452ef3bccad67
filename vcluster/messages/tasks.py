"""The pending operations of one endpoint.

An operation is a generator. It works until it needs another endpoint, yields a `Wait`, and is resumed when the
condition holds. Its return value is its result. A blocking call drives one generator; an asynchronous call leaves it
here, to advance inside any later call.

Operations that must take effect in the order they were issued share a *lane*, for example the collectives of one group,
or the receives from one source under one tag. Only the first operation of a lane advances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from parallelism.operation import Lane
from vcluster.code import call_site
from vcluster.code.call_sites import here
from vcluster.memory import Need, Operation, Signals

Ready = Callable[[], bool]


class Wait(NamedTuple):
    """A condition to wait for. ``needs()`` lists what it depends on, for deadlock detection."""

    ready: Ready
    needs: Callable[[], list[Need]]


Steps = Generator[Wait, None, Any]


class Task:
    """One asynchronous operation."""

    __slots__ = ("_steps", "error", "finished", "lane", "location", "result", "waits_for", "what")

    def __init__(self, lane: Lane, steps: Steps, what: object, location: str) -> None:
        self.lane = lane
        self.what = what
        self.location = location
        self._steps = steps
        self.waits_for: Wait | None = None
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None

    def advance(self) -> bool:
        """Advance as far as possible. True if the operation is finished."""
        while self.waits_for is None or self.waits_for.ready():
            try:
                self.waits_for = next(self._steps)
            except StopIteration as stop:
                self.result = stop.value
                self.finished = True
                return True
            except BaseException as error:  # raised again by wait()
                self.error = error
                self.finished = True
                return True
        return False


class Tasks:
    """All pending operations of one endpoint."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self.lanes: dict[Lane, deque[Task]] = {}
        """The asynchronous operations that are not finished, by lane."""
        self._blocked_in: tuple[Lane, object, Wait | None] | None = None
        self._issued_at = ""

    def run(self, lane: Lane, steps: Steps, what: object) -> Any:
        """Drive an operation to its end and return its result. ``str(what)`` describes it."""
        if lane in self.lanes:
            return self.wait(self.issue(lane, steps, what))
        try:
            while True:
                wait = next(steps)
                if not wait.ready():
                    self._blocked_in = lane, what, wait
                    self._block(wait.ready)
        except StopIteration as stop:
            return stop.value

    def issue(self, lane: Lane, steps: Steps, what: object, location: str | None = None) -> Task:
        """Start an operation, issued at ``location`` (None: it is looked up). It advances inside later calls."""
        task = Task(lane, steps, what, here() if location is None else location)
        queue = self.lanes.setdefault(lane, deque())
        queue.append(task)
        if queue[0] is task:
            self._advance_lane(lane, queue)
        return task

    def advance(self) -> None:
        """Let every lane advance as far as it can."""
        for lane, queue in list(self.lanes.items()):
            self._advance_lane(lane, queue)

    def wait(self, task: Task) -> Any:
        """Block until the task is finished and return its result."""
        if not task.finished:
            self._blocked_in = task.lane, task.what, None
            self._issued_at = task.location
            self._block(lambda: task.finished)
        if task.error is not None:
            raise task.error
        return task.result

    def drop_all(self) -> None:
        """Drop all operations after a failure."""
        self.lanes.clear()
        self._blocked_in = None

    def waits_at(self) -> str:
        """The line of the kernel that waits. After the kernel's end: the line that issued the operation."""
        site = call_site()
        return site.location if site.is_users else self._issued_at

    def blocked_on(self) -> list[Operation]:
        """The pending operations, for `vcluster.memory.status`. The first is the one that the kernel waits for."""
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
    return None if wait is None else wait.needs()
