"""A forked copy of a process keeps the arrays that it holds, and takes part in no cluster of the original.

Shared memory stays shared after a fork: what the copy writes, or frees as it ends, would reach the original and all
its peers. So the copy leaves the shared memory at once. The blocks in which its arrays lie become private copies, as
all other memory of a forked process is, and the original waits until they are made. Everything else that belongs to
the original is told that it was forked, and then refuses to communicate.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import select
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from parallelism.arrays import Array

PATIENCE_SECONDS = 60.0
"""Seconds that a process waits at most until its copy has copied the blocks."""

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000 if hasattr(os, "memfd_create") else 0


class Member(Protocol):
    """What belongs to one process and must not be used by a forked copy of it."""

    def forked(self, *, keep: bool) -> None:
        """Called in the copy. ``keep``: whether it may use the arrays of the original."""


members: weakref.WeakSet[Any] = weakref.WeakSet()
"""Everything in this process that is told of a fork in the copy."""

held: set[weakref.ref[Any]] = set()
"""The blocks of shared memory in which arrays of this process lie. Each reference frees its block at the end."""

_before: dict[int, tuple[int, int]] = {}
"""By thread that forks: the pipe by which the copy tells that it has copied the blocks."""
_starting = threading.local()


@contextmanager
def start_of_a_device() -> Iterator[None]:
    """Inside, a fork of this thread starts a device, which does not use the arrays of the host: none is copied."""
    _starting.now = True
    try:
        yield
    finally:
        _starting.now = False


def make_private(address: int, nbytes: int, blocks: Iterable[Array]) -> bool:
    """Replace a shared mapping by private pages: copies of the pages of ``blocks``, and zeros. False if that fails."""
    pages = []
    for block in blocks:
        start = block.__array_interface__["data"][0] - address
        if 0 <= start < nbytes:
            end = -(-(start + block.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            pages.append((start // mmap.PAGESIZE * mmap.PAGESIZE, min(end, nbytes)))
    done = 0
    for first, end in sorted(pages):
        start = max(first, done)
        if start >= end:
            continue
        content = ctypes.string_at(address + start, end - start)
        if not (_map(address + done, start - done) and _map(address + start, end - start)):
            return False
        ctypes.memmove(address + start, content, end - start)
        done = end
    return _map(address + done, nbytes - done)


def _map(address: int, nbytes: int) -> bool:
    """Map private zeros at an address."""
    if nbytes <= 0:
        return True
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    found: int | None = _mmap()(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return found == address


@functools.cache
def _mmap() -> Any:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    call.restype = ctypes.c_void_p
    return call


def _before_fork() -> None:
    if held and not getattr(_starting, "now", False):
        with suppress(OSError):  # no descriptor is left: the copy is not waited for
            _before[threading.get_ident()] = os.pipe()


def _in_parent() -> None:
    pipe = _before.pop(threading.get_ident(), None)
    if pipe is not None:
        os.close(pipe[1])
        poll = select.poll()  # `select` takes no descriptor above 1023
        poll.register(pipe[0], select.POLLIN)
        poll.poll(1e3 * PATIENCE_SECONDS)
        os.close(pipe[0])


def _in_child() -> None:
    keep = not getattr(_starting, "now", False)
    try:
        for member in list(members):
            member.forked(keep=keep)
    finally:
        held.clear()
        members.clear()
        for pipe in _before.values():
            for fd in pipe:
                os.close(fd)
        _before.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
