"""Opening, writing, waiting for and closing descriptors."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import suppress


def pipes(count: int) -> list[int]:
    """The ends of so many pipes, the one to read before the one to write. All of them, or an ``OSError`` and none."""
    ends: list[int] = []
    try:
        for _ in range(count):
            ends += os.pipe()
    except OSError:
        for end in ends:
            os.close(end)
        raise
    return ends


def write_all(fd: int, program: bytes) -> None:
    """Write to a pipe and close it."""
    with (
        open(fd, "wb", buffering=0) as pipe,
        suppress(BrokenPipeError),
    ):  # it has died; its exit code tells why
        rest = memoryview(program)
        while rest:
            rest = rest[pipe.write(rest) :]


def is_readable(fd: int, timeout_seconds: float | None) -> bool:
    """Whether a descriptor becomes readable within the time; None waits without a limit. The end of a pipe is readable."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_seconds is None else 1e3 * timeout_seconds))


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors, as far as they are open."""
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
