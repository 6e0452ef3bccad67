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
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from parallelism.operation import Lane
from vcluster.code import ClusterError, call_site
from vcluster.code.call_sites import here
from vcluster.memory import Need, Operation, Signals

if TYPE_CHECKING:
    from vcluster.messages.envelopes import Envelope
    from vcluster.messages.mailbox import Mailbox

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
        """Advance as far as possible. True if the operation is finished.

        What a handler of a signal raises while this only asks whether it can advance leaves the operation as it is.
        """
        if self.finished:
            return True
        while self.waits_for is None or self.waits_for.ready():
            try:
                self.waits_for = next(self._steps)
            except StopIteration as stop:
                self.result = stop.value
                self.finished = True
                return True
            except BaseException as error:
                return _end_with(self, error)
        return False


class Receive:
    """A task that takes one message of a tag, without a generator; ``open`` makes the result of what has arrived.

    A device that has posted a receive polls for its message in every poll of every later call, so that must be cheap.
    """

    __slots__ = ("_key", "_mailbox", "_open", "error", "finished", "lane", "location", "result", "what")

    def __init__(
        self,
        mailbox: Mailbox,
        lane: Lane,
        tag: int,
        open: Callable[[Envelope], Any],
        what: object,
        location: str,
    ) -> None:
        self._mailbox, self._key, self._open = mailbox, (0, tag), open
        self.lane, self.what, self.location = lane, what, location
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def waits_for(self) -> Wait:
        """The message that it waits for."""
        return Wait(lambda: self._mailbox.may_take(self._key), lambda: self._mailbox.needs_message(self._key))

    def advance(self) -> bool:
        """Take the message if it is there. True if the operation is finished.

        What a handler of a signal raises while this only polls leaves the operation as it is.
        """
        if self.finished:
            return True
        try:
            if not self._mailbox.may_take(self._key):
                return False
        except ClusterError as error:
            return _end_with(self, error)
        try:
            self.result = self._open(self._mailbox.take(self._key))
        except BaseException as error:
            return _end_with(self, error)
        self.finished = True
        return True


def _end_with(task: Task | Receive, error: BaseException) -> bool:
    """End a task with an error, which `Tasks.wait` raises again. It is finished: True."""
    if isinstance(error, ClusterError):
        error.called_at = task.location
    task.error = error
    task.finished = True
    return True


def _nothing() -> Steps:
    yield from ()


DONE = Task(("done",), _nothing(), "nothing", "")
"""An operation that was over when it was issued."""
DONE.advance()


class Awaited(NamedTuple):
    """What an endpoint waits for, for `vcluster.memory.status`."""

    operations: list[Operation]
    """The first ones are those that threads wait for, and the others are pending."""
    location: str
    waits: int


class Blocked:
    """What one thread waits for."""

    __slots__ = ("lane", "location", "task", "text", "wait", "what")

    def __init__(self, lane: Lane, what: object, wait: Wait | None, task: Task | Receive | None) -> None:
        self.lane = lane
        self.what = what
        self.wait = wait
        self.task = task
        """The asynchronous operation that it waits for. None if it drives its operation itself."""
        self.text = self.location = ""

    def locate(self) -> None:
        """Note the line that waits, in the thread itself. After the kernel's end: the line that issued the operation."""
        if not self.location:
            site = call_site()
            self.text = str(self.what) if site.is_users else f"{self.what}, never waited for,"
            self.location = site.location if site.is_users or self.task is None else self.task.location


class Tasks:
    """All pending operations of one endpoint."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self.lanes: dict[Lane, deque[Task | Receive]] = {}
        """The asynchronous operations that are not finished, by lane."""
        self._blocked: dict[int, Blocked] = {}
        """What each thread waits for, or has waited for in a call that it is still in."""

    def run(self, lane: Lane, steps: Steps, what: object) -> Any:
        """Drive an operation to its end and return its result. ``str(what)`` describes it."""
        if lane in self.lanes or (self._blocked and self._is_driven(lane)):
            task = self.issue(lane, steps, what)
            try:
                return self.wait(task)
            except BaseException:
                self._give_up(task)  # nobody knows it any more
                raise
        return self.drive(lane, steps, what)

    def drive(self, lane: Lane, steps: Steps, what: object) -> Any:
        """`run` for an operation that is under way: it goes on before the operations that wait in its lane."""
        mine = get_ident()
        try:
            while True:
                wait = next(steps)
                if not wait.ready():
                    self._blocked[mine] = Blocked(lane, what, wait, None)
                    self._block(wait.ready)
        except StopIteration as stop:
            return stop.value
        finally:
            if self._blocked.pop(mine, None) is not None and self._signals.threads.many:
                self.advance()
                self._signals.rouse_own_threads()

    def _is_driven(self, lane: Lane) -> bool:
        """Whether a thread drives an operation of this lane."""
        return any(blocked.lane == lane and blocked.task is None for blocked in self._blocked.values())

    def issue(self, lane: Lane, steps: Steps, what: object, location: str | None = None) -> Task:
        """Start an operation, issued at ``location`` (None: it is looked up). It advances inside later calls."""
        task = Task(lane, steps, what, here() if location is None else location)
        self.start(task)
        return task

    def start(self, task: Task | Receive) -> None:
        """Start an operation. It advances inside later calls."""
        queue = self.lanes.get(task.lane)
        if queue is None:
            queue = self.lanes[task.lane] = deque()
        queue.append(task)
        if queue[0] is task:
            self._advance_lane(task.lane, queue)

    def is_free(self, lane: Lane) -> bool:
        """Whether no operation of a lane is under way, nor any that a thread waits for."""
        return lane not in self.lanes and not self._blocked

    def advance(self) -> None:
        """Let every lane advance as far as it can."""
        for lane, queue in list(self.lanes.items()):
            self._advance_lane(lane, queue)

    def wait(self, task: Task | Receive) -> Any:
        """Block until the task is finished and return its result."""
        if not task.finished:
            mine = get_ident()
            self._blocked[mine] = Blocked(task.lane, task.what, None, task)
            try:
                self._block(lambda: task.finished)
            finally:
                self._blocked.pop(mine, None)
        if task.error is not None:
            raise task.error
        return task.result

    def drop_all(self) -> None:
        """Drop all operations after a failure. Who waits for one all the same is told so."""
        for queue in self.lanes.values():
            for task in queue:
                task.error = ClusterError(
                    f"{task.what}, called at {task.location}, was given up before it had ended: its run failed, or the "
                    f"cluster was closed, or forget() was called"
                )
                task.finished = True
        self.lanes.clear()
        self._blocked.clear()

    def _give_up(self, task: Task) -> None:
        """Remove an operation that has not ended, so that it takes nothing that others wait for."""
        queue = self.lanes.get(task.lane, ())
        if task in queue:
            queue.remove(task)  # type: ignore[union-attr]
            if not queue:
                self.lanes.pop(task.lane, None)

    def wait_for_threads(self) -> None:
        """Block until no other thread is in a call."""
        threads = self._signals.threads
        if threads.helpers:
            with threads:
                self._block(lambda: not threads.helpers)

    def blocked_on(self) -> Awaited:
        """What the threads wait for, and the pending operations, when the calling thread is about to sleep."""
        mine = self._blocked.get(get_ident())
        if mine is not None:
            mine.locate()
        heads = {lane: queue[0] for lane, queue in self.lanes.items()}
        operations = []
        first = self._signals.threads.first
        blocked = [each for _, each in sorted(self._blocked.items(), key=lambda entry: entry[0] != first)]
        for each in blocked:
            wait = each.wait
            if wait is None and each.lane in heads:
                wait = heads[each.lane].waits_for
            operations.append(Operation(each.lane, each.text, _needs(wait)))
        for each in blocked:
            heads.pop(each.lane, None)
        waits = len(operations)
        operations += [
            Operation(lane, str(task.what), _needs(task.waits_for)) for lane, task in heads.items()
        ]
        return Awaited(operations, blocked[0].location if blocked else "", waits)

    def _block(self, ready: Ready) -> None:
        if not self.lanes:
            self._signals.wait(ready)
            return

        def ready_after_advancing() -> bool:
            self.advance()
            return ready()

        self._signals.wait(ready_after_advancing)

    def _advance_lane(self, lane: Lane, queue: deque[Task | Receive]) -> None:
        if self._blocked and self._is_driven(lane):  # by a thread, whose operation comes first
            return
        while queue and queue[0].advance():
            queue.popleft()
            self._signals.rouse_own_threads()
        if not queue:
            self.lanes.pop(lane, None)


def _needs(wait: Wait | None) -> list[Need] | None:
    return None if wait is None else wait.needs()
