"""`Pending` is the work object that an asynchronous operation returns. Its owner keeps it until it is waited for."""

from __future__ import annotations

from typing import Any, Protocol

from parallelism.operation import Lane
from vcluster.messages.endpoint import Endpoint
from vcluster.messages.tasks import Steps, Task
from vcluster.tracing import Recorder


class Owner(Protocol):
    """An object that starts operations: the collectives of a device, or the host."""

    endpoint: Endpoint
    recorder: Recorder
    unwaited: dict[int, Pending]


def issue(owner: Owner, lane: Lane, steps: Steps, text: object, work: int, name: str) -> Pending:
    """Start an operation and return at once; ``str(text)`` describes it, ``work`` is its number."""
    pending = owner.unwaited[work] = Pending(owner, owner.endpoint.tasks.issue(lane, steps, text), work, name)
    return pending


class Pending:
    """An operation that was issued. `wait` returns its result, and `done` tells whether it is finished."""

    def __init__(self, owner: Owner, task: Task, number: int, name: str) -> None:
        self._owner = owner
        self._task = task
        self._number = number
        self._name = name
        self._waited = False

    def __repr__(self) -> str:
        return f"<{self._name}, {'done' if self._task.finished else 'pending'}>"

    def done(self) -> bool:
        """Whether the result is available. Calling this lets pending operations advance."""
        if not self._task.finished:
            self._owner.endpoint.signals.check()
            self._owner.endpoint.tasks.advance()
        return self._task.finished

    def wait(self) -> Any:
        """Block until the operation is finished and return its result. May be called again."""
        if self._waited:
            return self._owner.endpoint.tasks.wait(self._task)
        self._waited = True
        self._owner.unwaited.pop(self._number, None)
        recorder = self._owner.recorder
        start = recorder.enter()
        try:
            return self._owner.endpoint.tasks.wait(self._task)
        finally:
            recorder.add("wait", self._name, None, work=self._number, **recorder.since(start))
            recorder.leave()
