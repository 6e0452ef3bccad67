"""The program that is being written, if one is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from parallelism.ir.core import Builder, check_path

_recording: ContextVar[Builder | None] = ContextVar("recording", default=None)


def current() -> Builder | None:
    """Who writes it."""
    return _recording.get()


@contextmanager
def recording(builder: Builder) -> Iterator[Builder]:
    """While a program is written by ``builder``: what has no recorded operand goes there."""
    before = _recording.set(builder)
    try:
        yield builder
    finally:
        _recording.reset(before)


@contextmanager
def region(path: str) -> Iterator[None]:
    """What is recorded meanwhile belongs to this region, ``block.0``, of the model; one in another lies inside it.

    Where nothing is recorded it does nothing.  ``ValueError`` for what is no path of names.
    """
    check_path(path)
    builder = _recording.get()
    with builder.region(path) if builder else nullcontext():
        yield
