"""Ctrl-C is deferred until the exchange with the devices is in a consistent state.

So is the cancellation of a device whose kernel has a cluster of its own.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_innermost: dict[int, DeferredInterrupt] = {}
"""By thread, the block that it is in."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_innermost.clear)  # a device that is forked is in none


def defer(ident: int | None, error: BaseException) -> bool:
    """Raise ``error`` in a thread when the block that it is in delivers or ends. False if it is in none."""
    block = _innermost.get(ident or 0)
    if block is None:
        return False
    block.take(error)
    return True


class DeferredInterrupt:
    """Inside the ``with`` block, SIGINT is only noted and ``wake`` is called. `deliver`, or the end of the block, then
    runs the handler that was installed before. The same holds for the errors of `defer`, in every thread.

    Python raises KeyboardInterrupt between any two bytecodes of the main thread, for example between a read from a
    pipe and the assignment of the data, which would then be lost. Other threads get no signals. A handler that is not a
    Python function (the default, or ignore) is left in place.
    """

    def __init__(self, wake: Callable[[], object] | None = None) -> None:
        self._wake = wake
        self._before: Any = None
        self._noted: tuple[int, FrameType | None] | None = None
        self._error: BaseException | None = None
        self._outer: DeferredInterrupt | None = None

    def __enter__(self) -> Self:
        mine = threading.get_ident()
        self._outer = _innermost.get(mine)
        _innermost[mine] = self
        before = signal.getsignal(signal.SIGINT)
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._outer is None:
            _innermost.pop(threading.get_ident(), None)
        else:
            _innermost[threading.get_ident()] = self._outer
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if error is None:
            self.deliver()

    def deliver(self) -> None:
        """If Ctrl-C was pressed, run the previous handler, which raises KeyboardInterrupt by default. Raise an error of
        `defer`. A block inside another one leaves both to that.
        """
        if self._noted is not None:
            noted, self._noted = self._noted, None
            self._before(*noted)
        if self._error is not None:
            error, self._error = self._error, None
            if self._outer is None:
                raise error
            self._outer.take(error)

    def take(self, error: BaseException) -> None:
        """Note an error that is to be raised."""
        self._error = error
        if self._wake is not None:
            self._wake()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame
        if self._wake is not None:
            self._wake()
