"""A file is written whole or not at all: beside its place first, and then put there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def written_whole(
    path: str | os.PathLike[str],
    *,
    encoding: str | None = "ascii",
    errors: str = "strict",
    durable: bool = False,
) -> Iterator[IO[Any]]:
    """A file to write.  If that fails, on a full disk for example, what was at ``path`` before is still there.

    It takes text in ``encoding``, or bytes if ``encoding`` is None.  With ``durable`` the file is on the disk at the
    end, so that it outlives a crash of the machine.

    What is no regular file, such as a pipe or a device, is written as it is.  So is, unless ``durable``, a file in a
    directory in which nothing can be created.  ``OSError`` as usual.
    """
    target = Path(path)
    target = target.resolve() if target.is_symlink() else target
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
    kind, options = ("b", {}) if encoding is None else ("", {"encoding": encoding, "errors": errors})
    whole = target.is_file() or not target.exists()
    file = None
    if whole:
        try:
            with _telling_of(path):
                file = beside.open(f"x{kind}", **options)  # type: ignore[call-overload]
        except PermissionError:
            if durable:
                raise
            whole = False
    try:
        with file or target.open(f"w{kind}", **options) as stream:  # type: ignore[call-overload]
            yield stream
            if durable and whole:
                stream.flush()
                os.fsync(stream.fileno())
        if whole:
            if target.exists():
                beside.chmod(target.stat().st_mode & 0o7777)
            beside.replace(target)
    except BaseException:
        if whole:
            with suppress(OSError):
                beside.unlink()
        raise
    if durable:
        with suppress(
            OSError
        ):  # The new directory entry, too.  A platform that cannot open a directory needs no sync.
            directory = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)


@contextmanager
def _telling_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """An ``OSError`` in this context names the path that the caller gave."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise
