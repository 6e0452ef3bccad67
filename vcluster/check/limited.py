"""A student's function of numbers, called with a limit of time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from parallelism.operation import line_of
from vcluster.check.failures import LOOP, Finding, at

SECONDS = 3.0
"""What such a function may take.  It computes a few numbers."""


class NeverEnds(Exception):
    """The function works for longer than `SECONDS`."""


def limited(function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function(*arguments)`` returns.  `NeverEnds` after `SECONDS`, where the system has such an alarm.

    Only the main thread can be interrupted so; a cell of a notebook runs in it.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return function(*arguments)

    def stop(_: int, frame: FrameType | None) -> None:
        raise NeverEnds

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def raised(call: str, error: Exception) -> Finding:
    """What a call raised, in words, with the line of the function; ``call`` as in ``f(2)`` or ``for rank 2``."""
    where = line_of(error)
    lines = () if where is None else (at(where),)
    if isinstance(error, NeverEnds):
        return Finding(f"the call {call} does not come to an end", lines, LOOP)
    return Finding(f"the call {call} raised {type(error).__name__}: {error}", lines)
