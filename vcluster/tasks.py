"""Operations under way in one endpoint.

An operation is written as a generator: it works until it needs somebody else, yields what it waits for (a function that
tells whether that has happened), and is resumed when it has; what it returns is its result.  A blocking call drives one
generator; an asynchronous one leaves it here, to advance inside any later call.

Operations that must take effect in the order they were issued share a *lane* (the collectives of one group; the
receives from one source under one tag): only the first of a lane advances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import Any

from vcluster.waiting import Signals

Ready = Callable[[], bool]
Steps = Generator[Ready, None, Any]


class Task:
    """One asynchronous operation."""

    __slots__ = ("_steps", "error", "finished", "lane", "result", "waits_for")

    def __init__(self, lane: Hashable, steps: Steps) -> None:
        self.lane = lane
        self._steps = steps
        self.waits_for: Ready | None = None
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
        self._lanes: dict[Hashable, deque[Task]] = {}

    def run(self, lane: Hashable, steps: Steps) -> Any:
        """Drive an operation to its end and return its result."""
        if lane in self._lanes:
            return self.wait(self.issue(lane, steps))
        try:
            while True:
                self._block(next(steps))
        except StopIteration as stop:
            return stop.value

    def issue(self, lane: Hashable, steps: Steps) -> Task:
        """Start an operation; it advances inside later calls."""
        task = Task(lane, steps)
        queue = self._lanes.setdefault(lane, deque())
        queue.append(task)
        if queue[0] is task:
            self._advance_lane(lane, queue)
        return task

    def advance(self) -> None:
        """Let everything go on as far as it can."""
        for lane, queue in list(self._lanes.items()):
            self._advance_lane(lane, queue)

    def wait(self, task: Task) -> Any:
        """The result of a task, when it has one."""
        if not task.finished:
            self._block(lambda: task.finished)
        if task.error is not None:
            raise task.error
        return task.result

    def wait_all(self) -> None:
        """Finish everything; raises the first error among what nobody waited for."""
        while self._lanes:
            self.wait(next(iter(self._lanes.values()))[0])

    def drop_all(self) -> None:
        """Forget everything, after a failure."""
        self._lanes.clear()

    @property
    def pending(self) -> bool:
        return bool(self._lanes)

    def _block(self, ready: Ready) -> None:
        if ready():
            return
        if not self._lanes:
            self._signals.wait(ready)
            return

        def ready_after_advancing() -> bool:
            self.advance()
            return ready()

        self._signals.wait(ready_after_advancing)

    def _advance_lane(self, lane: Hashable, queue: deque[Task]) -> None:
        while queue and queue[0].advance():
            queue.popleft()
        if not queue:
            self._lanes.pop(lane, None)
