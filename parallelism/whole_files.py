"""A file is written whole or not at all: beside its place first, and then put there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import TextIO


@contextmanager
def written_whole(
    path: str | PathLike[str], *, encoding: str = "ascii", errors: str = "strict"
) -> Iterator[TextIO]:
    """A text file to write.  If that fails, on a full disk for example, what was at ``path`` before is still there.

    What is no regular file, such as a pipe or a device, is written as it is, and so is a file in a directory in which
    nothing can be created.  ``OSError`` as usual.
    """
    target = Path(path)
    target = target.resolve() if target.is_symlink() else target
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
    whole = target.is_file() or not target.exists()
    file = None
    if whole:
        try:
            file = beside.open("x", encoding=encoding, errors=errors)
        except PermissionError:
            whole = False
    try:
        with file or target.open("w", encoding=encoding, errors=errors) as stream:
            yield stream
        if whole:
            if target.exists():
                beside.chmod(target.stat().st_mode & 0o7777)
            beside.replace(target)
    except BaseException:
        if whole:
            with suppress(OSError):
                beside.unlink()
        raise
