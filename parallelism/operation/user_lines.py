"""Which lines of code are the user's: errors, traces and deadlock reports point at these."""

import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from os.path import abspath, dirname
from types import FrameType, TracebackType
from typing import NamedTuple

PACKAGES = ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster")

ROOT = dirname(dirname(dirname(abspath(__file__))))
_OURS = tuple(f"{ROOT}{os.sep}{name}{os.sep}" for name in PACKAGES)
_STDLIB = dirname(os.__file__) + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


class Line(NamedTuple):
    """A line that is being executed."""

    function: str
    place: str
    """``file:line``."""


@lru_cache(maxsize=8192)
def is_ours(filename: str) -> bool:
    """Whether a file belongs to one of our packages."""
    return filename.startswith(_OURS)


@lru_cache(maxsize=8192)
def is_installed(filename: str) -> bool:
    """Whether a file belongs to the standard library, an installed package or us, and so never changes."""
    return (
        is_ours(filename)
        or filename.startswith(("<frozen ", _STDLIB))
        or any(part in filename for part in _INSTALLED)
    )


def user_lines(frame: FrameType | None) -> Iterator[Line]:
    """The user's lines on the stack of ``frame``, innermost first."""
    while frame is not None:
        if not is_installed(frame.f_code.co_filename):
            yield Line(frame.f_code.co_name, f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back


def calling_line() -> str | None:
    """``file:line`` of the user's line that is calling us; None if there is none."""
    line = next(user_lines(sys._getframe(1)), None)
    return line and line.place


def line_of(error: BaseException) -> str | None:
    """The innermost line of the user's in the traceback of an error; None if there is no such line."""
    place = None
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not is_installed(filename):
            place = f"{filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
