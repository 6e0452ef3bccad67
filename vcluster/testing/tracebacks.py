"""A traceback that crossed from a device is rebuilt as a traceback that Python and pytest accept.

Only running code creates frames. For each line, a piece of code with that function's name and position is run, and its
frame is kept. The values of the variables stay in the device.
"""

import traceback
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from vcluster.code import Failure, Frame


def attach_tracebacks(error: BaseException, failure: Failure) -> None:
    """Give an exception, and its causes, the tracebacks that they had in the device."""
    error.__traceback__ = traceback_of(failure.frames)
    link = error.__cause__ if failure.explicit else error.__context__
    if link is not None and failure.cause is not None:
        attach_tracebacks(link, failure.cause)


def traceback_of(frames: Iterable[Frame]) -> TracebackType | None:
    """The traceback with these lines, outermost first. None if there are none."""
    result: TracebackType | None = None
    for frame in reversed(list(frames)):
        result = TracebackType(result, _frame_of(frame), -1, frame.line)  # -1: no position within the line
    return result


def frame_at(location: str, within: CodeType) -> Frame:
    """The frame for a ``file:line``. It belongs to the function ``within`` if the line lies there."""
    filename, _, number = location.rpartition(":")
    line = int(number)
    lines = [at for _, _, at in within.co_lines() if at is not None]
    inside = filename == within.co_filename and lines and min(lines) <= line <= max(lines)
    name, first = (within.co_name, within.co_firstlineno) if inside else (Path(filename).name, line)
    return Frame(filename, line, None, None, None, name, first)


def _frame_of(frame: Frame) -> FrameType:
    code = compile("raise ZeroDivisionError", frame.filename, "exec").replace(
        co_name=frame.function, co_qualname=frame.function, co_firstlineno=max(frame.first_line, 1)
    )
    try:
        exec(code, {"__name__": frame.function}, {"__tracebackhide__": frame.hidden})
    except ZeroDivisionError as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return innermost
