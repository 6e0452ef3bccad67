"""A traceback that has crossed from a device, made into one that Python and pytest take for their own.

Only code makes frames, so for each line that was on the way a piece of code with that function's name and place is run,
and its frame is kept.  What was in the variables has stayed in the device.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType

from vcluster.code import Failure, Frame


def attach_tracebacks(error: BaseException, failure: Failure) -> None:
    """Give an exception, and those behind it, the tracebacks that they had in the device."""
    found: BaseException | None = error
    told: Failure | None = failure
    while found is not None and told is not None:
        found.__traceback__ = traceback_of(told.frames)
        found = found.__cause__ if told.explicit else found.__context__
        told = told.cause


def traceback_of(frames: Iterable[Frame]) -> TracebackType | None:
    """The traceback with these lines, outermost first; None if there are none."""
    made: TracebackType | None = None
    for frame in reversed(list(frames)):
        made = TracebackType(made, _frame_of(frame), -1, frame.line)  # -1: no place within the line
    return made


def frame_at(location: str, within: CodeType) -> Frame:
    """The frame of a ``file:line``: of the function ``within``, if it lies there."""
    filename, _, number = location.rpartition(":")
    line = int(number)
    lines = [at for _, _, at in within.co_lines() if at is not None]
    if filename == within.co_filename and lines and min(lines) <= line <= max(lines):
        return Frame(filename, line, None, None, None, within.co_name, within.co_firstlineno)
    return Frame(filename, line, None, None, None, os.path.basename(filename), line)  # noqa: PTH119


def _frame_of(frame: Frame) -> FrameType:
    code = compile("raise ZeroDivisionError", frame.filename, "exec").replace(
        co_name=frame.function, co_qualname=frame.function, co_firstlineno=max(frame.first_line, 1)
    )
    try:
        exec(code, {"__name__": frame.function}, {"__tracebackhide__": frame.hidden})
    except ZeroDivisionError as error:
        entries = list(traceback.walk_tb(error.__traceback__))
    return entries[-1][0]
