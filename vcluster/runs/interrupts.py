"""Ctrl-C at a moment of our choosing: what has begun with the devices is first brought to a state that can be left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class DeferredInterrupt:
    """Inside of the ``with`` block SIGINT only takes a note and calls ``wake``; `deliver`, or the block's end, lets it
    happen.

    Python raises KeyboardInterrupt between any two bytecodes of the main thread: between a read from a pipe and the
    assignment of what was read, too, which would then be lost.  In other threads there is nothing to defer, and a
    handler that is not Python's (none, or ignored) stays.
    """

    def __init__(self, wake: Callable[[], object] | None = None) -> None:
        self._wake = wake
        self._before: Any = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if error is None:
                self.deliver()

    def deliver(self) -> None:
        """Do what the program does on Ctrl-C, by default raise KeyboardInterrupt, if it was pressed."""
        if self._noted is not None:
            noted, self._noted = self._noted, None
            self._before(*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame
        if self._wake is not None:
            self._wake()
