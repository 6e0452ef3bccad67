"""Ctrl-C is deferred until the exchange with the devices is in a consistent state."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class DeferredInterrupt:
    """Inside the ``with`` block, SIGINT is only noted and ``wake`` is called. `deliver`, or the end of the block, then
    runs the handler that was installed before.

    Python raises KeyboardInterrupt between any two bytecodes of the main thread, for example between a read from a
    pipe and the assignment of the data, which would then be lost. In other threads nothing is deferred. A handler
    that is not a Python function (the default, or ignore) is left in place.
    """

    def __init__(self, wake: Callable[[], object] | None = None) -> None:
        self._wake = wake
        self._before: Any = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if error is None:
                self.deliver()

    def deliver(self) -> None:
        """If Ctrl-C was pressed, run the previous handler, which raises KeyboardInterrupt by default."""
        if self._noted is not None:
            noted, self._noted = self._noted, None
            self._before(*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame
        if self._wake is not None:
            self._wake()
