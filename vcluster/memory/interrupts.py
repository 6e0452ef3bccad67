"""The handlers of signals are deferred until the books of the host and the devices agree.

A handler may raise: Ctrl-C does, and so does the alarm of a time limit. Python runs handlers between any two bytecodes
of the main thread, for example between a command that is sent and the note that it was. What one raised there would
leave a device in a kernel of which the host knows nothing.

So is the cancellation of a device whose kernel has a cluster of its own.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_signal: Any = importlib.import_module("_signal")
"""What `signal` wraps: it makes no enumerations of handlers, which takes ten times as long."""

handler_of: Callable[[int], Any] = _signal.getsignal
set_handler: Callable[[int, Any], Any] = _signal.signal

SIGNALS = tuple(
    sorted(
        int(number)
        for number in signal.valid_signals()
        if number not in (getattr(signal, "SIGKILL", 0), getattr(signal, "SIGSTOP", 0))
    )
)
"""The signals that can have a handler."""

_known: tuple[tuple[Any, ...], dict[int, Any]] = (), {}
"""The handlers of all signals when they were looked at last, and those of them that Python calls."""

_innermost: dict[int, DeferredInterrupt] = {}
"""By thread, the block that it is in."""


def _forked() -> None:
    """In a forked copy: it is in no block, and has the handlers that it would have outside."""
    block = _innermost.get(threading.get_ident())
    _innermost.clear()
    while block is not None:
        block._put_back()
        block = block._outer


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def defer(ident: int | None, error: BaseException) -> bool:
    """Raise ``error`` in a thread when the block that it is in delivers or ends. False if it is in none."""
    block = _innermost.get(ident or 0)
    if block is None:
        return False
    block.take(error)
    return True


def leave_block() -> None:
    """Leave the block that the calling thread is in."""
    block = _innermost.get(threading.get_ident())
    if block is not None:  # this is no fork
        block.__exit__(None, None, None)


def deliver() -> None:
    """Run the handlers of signals that came since the calling thread is in its block, if that is no part of another."""
    block = _innermost.get(threading.get_ident())
    if block is not None:
        block.deliver()


class DeferredInterrupt:
    """Inside the ``with`` block, a signal that has a handler in Python is only noted and ``wake`` is called. `deliver`,
    or the end of the block, then runs the handlers. The same holds for the errors of `defer`, in every thread.

    Threads other than the main one get no signals. A block inside another one leaves everything to that.
    """

    def __init__(self, wake: Callable[[], object] | None = None) -> None:
        self.wake = wake
        self._before: dict[int, Any] = {}
        """By signal, the handler in whose place this block notes it."""
        self._noted: dict[int, FrameType | None] = {}
        """The signals that came, and where."""
        self._is_open = False
        self._note: Any = self._take_signal
        """The handler that this block sets: one object, by which it is known among the handlers."""
        self._error: BaseException | None = None
        self._outer: DeferredInterrupt | None = None

    def __enter__(self) -> Self:
        mine = threading.get_ident()
        self._outer = _innermost.get(mine)
        if self._outer is None and threading.current_thread() is threading.main_thread():
            try:
                self._take_over()
            except BaseException:  # from a handler that was not replaced yet
                self.__exit__(None, None, None)
                raise
        _innermost[mine] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._outer is None:
            _innermost.pop(threading.get_ident(), None)
        else:
            _innermost[threading.get_ident()] = self._outer
        try:
            self._put_back()
        finally:
            if error is not None:
                self._error = None  # that of the block takes precedence
            self.deliver()

    def deliver(self) -> None:
        """Run the handlers of the signals that came; that of Ctrl-C raises KeyboardInterrupt by default. Raise an error
        of `defer`. A block inside another one leaves both to that.
        """
        __tracebackhide__ = True  # for pytest and IPython
        if self._noted:
            self._run_handlers()
        if self._error is not None:
            error, self._error = self._error, None
            if self._outer is None:
                raise error
            self._outer.take(error)

    def take(self, error: BaseException) -> None:
        """Note an error that is to be raised."""
        self._error = error
        if self.wake is not None:
            self.wake()

    def _take_over(self) -> None:
        """Note the signals from now on that have a handler in Python. The default, and to ignore it, are none."""
        global _known
        self._is_open = True
        handlers = tuple(map(_signal.getsignal, SIGNALS))
        if handlers != _known[0]:  # they seldom change
            _known = (
                handlers,
                {number: each for number, each in zip(SIGNALS, handlers, strict=True) if callable(each)},
            )
        for number, handler in _known[1].items():
            self._before[number] = handler
            _signal.signal(number, self._note)

    def _put_back(self) -> None:
        """Put the handlers back that this block has replaced, but for those that the program has replaced since."""
        raised: BaseException | None = None
        left = list(self._before) if self._is_open else []
        while left:
            try:
                if _signal.getsignal(left[-1]) is self._note:
                    _signal.signal(left[-1], self._before[left[-1]])
                left.pop()
            except BaseException as error:  # from a handler that is back already
                raised = error
        self._is_open, self._note = False, None  # no cycle
        if raised is not None:
            try:
                raise raised
            finally:
                del raised

    def _run_handlers(self) -> None:
        __tracebackhide__ = True
        number = min(self._noted)  # as Python does, if several have come
        frame = self._noted.pop(number)
        try:
            self._before[number](number, frame)
        finally:
            if self._noted:
                self._run_handlers()

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_open:  # the program has kept this handler, and has set it again since
            self._before[number](number, frame)
            return
        self._noted[number] = frame
        block = _innermost.get(threading.get_ident())
        while block is not None:
            if block.wake is not None:
                block.wake()
            block = block._outer
