"""The builder of the program that is being recorded, if there is one."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from parallelism.ir.core import Builder, check_path

_recording: ContextVar[Builder | None] = ContextVar("recording", default=None)


def current() -> Builder | None:
    """The current builder; None if nothing is being recorded."""
    return _recording.get()


@contextmanager
def recording(builder: Builder) -> Iterator[Builder]:
    """Make ``builder`` current: it receives ops that have no recorded operand, such as constants."""
    before = _recording.set(builder)
    try:
        yield builder
    finally:
        _recording.reset(before)


@contextmanager
def region(path: str) -> Iterator[None]:
    """Mark the ops that are recorded in this context as part of a region of the model, such as ``block.0``.

    A region inside another is nested in it.  Outside of a recording it does nothing.  ``ValueError`` if ``path`` is
    not a path of names.
    """
    check_path(path)
    builder = _recording.get()
    with builder.region(path) if builder else nullcontext():
        yield
