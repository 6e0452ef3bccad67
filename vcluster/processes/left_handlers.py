"""The handlers of signals that a kernel leaves behind. Between two kernels what they raise is noted, and told later.

The alarm of a time limit that was not taken back comes when its kernel has ended. What its handler raises there would
end the device in the middle of a message of the host's, and the next run would be told of a death.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from typing import Any

from parallelism.display import shortened
from vcluster.code import OperationCancelled
from vcluster.memory.interrupts import SIGNALS, handler_of, set_handler

MOST_TOLD = 8
"""The different errors of handlers that are told of, at most, between two runs."""


ENDING = (SystemExit, KeyboardInterrupt, OperationCancelled)
"""What a handler raises to end the process or its run."""


class LeftHandlers:
    """The handlers that kernels have set in this process. Those that it had before are left alone."""

    def __init__(self) -> None:
        self._first = _handlers()
        self._aside = False
        self._lost: list[str] = []

    def set_aside(self) -> None:
        """From now on, an error of one of them is only noted. They still run, and may end the process."""
        while True:
            try:
                now = _handlers()
                if now != self._first:
                    self._replace(now)
                return
            except ENDING:
                raise
            except BaseException as error:  # of a handler that is not set aside yet
                self._note("a signal", error)

    def put_back(self) -> None:
        """From now on, what they raise is an error of the kernel's."""
        if not self._aside:
            return
        self._aside = False
        for number, handler in zip(SIGNALS, _handlers(), strict=True):
            if isinstance(handler, _Harmless):
                set_handler(number, handler.handler)

    def take_lost(self) -> list[str]:
        """What to tell about errors that were noted, one line for each."""
        lost, self._lost = self._lost, []
        return lost

    def _replace(self, now: tuple[Any, ...]) -> None:
        for number, handler, first in zip(SIGNALS, now, self._first, strict=True):
            if handler is not first and callable(handler) and not isinstance(handler, _Harmless):
                self._aside = True
                set_handler(number, _Harmless(handler, self._note))

    def _note(self, name: str, error: BaseException) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        line = (
            f"the handler of {name}, which an earlier kernel set, raised {type(error).__name__} "
            f"({shortened(error)}) between two runs, at {place.filename}:{place.lineno}; it is ignored. A kernel "
            f"that sets a time limit takes it back when it ends, as by signal.setitimer(signal.ITIMER_REAL, 0)"
        )
        if line not in self._lost and len(self._lost) < MOST_TOLD:
            self._lost.append(line)


class _Harmless:
    """A handler whose errors are noted. What ends a process, such as SystemExit, ends it."""

    def __init__(
        self, handler: Callable[[int, Any], Any], note: Callable[[str, BaseException], None]
    ) -> None:
        self.handler, self._note = handler, note

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self.handler(number, frame)
        except ENDING:
            raise
        except (
            BaseException
        ) as error:  # a time limit is often none of `Exception`, so that no kernel swallows it
            self._note(signal.Signals(number).name, error)


def _handlers() -> tuple[Any, ...]:
    return tuple(map(handler_of, SIGNALS))
