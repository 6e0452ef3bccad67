"""A limit of the system that a new cluster runs into, named with the command that shows it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from vcluster.code import ClusterError

_LIMITS = {
    errno.EMFILE: "this process may open no more files (ulimit -n)",
    errno.ENFILE: "the system may open no more files",
    errno.ENOMEM: "there is too little memory or address space (ulimit -v)",
    errno.EFBIG: "shared memory counts as a file, and files may not be so large (ulimit -f)",
    errno.EAGAIN: "there may be no more processes (ulimit -u)",
    errno.ENOSPC: "the disk that holds the temporary files is full",
}


@contextmanager
def naming_limits(size: int) -> Iterator[None]:
    """Turn an ``OSError`` that tells of a limit into a `ClusterError` that names it."""
    try:
        yield
    except OSError as error:
        limit = _LIMITS.get(error.errno or 0)
        if limit is None:
            raise
        raise ClusterError(
            f"a cluster of {size} devices cannot be started: {limit}: {error.strerror}"
        ) from error
