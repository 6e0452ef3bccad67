"""Every line of code belongs to the library, to an installed package, or to the user.

Errors, traces and deadlock reports point at the user's line, and find it here.
"""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

PACKAGES = ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster")

_ROOT = Path(__file__).absolute().parents[2]
_OURS = tuple(f"{_ROOT / name}{os.sep}" for name in PACKAGES)
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_owners: dict[str, bool] = {}
_WORKER = str(_ROOT / "vcluster" / "processes" / "worker.py")
MOST_SITES = 4096
_sites: dict[tuple[CodeType, int], CallSite] = {}


def is_ours(filename: str) -> bool:
    """Whether this file belongs to one of our packages."""
    owned = _owners.get(filename)
    if owned is None:
        owned = _owners[filename] = filename.startswith(_OURS)
    return owned


@lru_cache(maxsize=8192)
def is_installed(filename: str) -> bool:
    """Whether this file belongs to the standard library, an installed package or us, and so never changes."""
    return (
        is_ours(filename) or filename.startswith(("<frozen ", *_STDLIB)) or any(part in filename for part in _INSTALLED)
    )


def code_of(program: Any) -> CodeType | None:
    """The code that runs when ``program`` is called. None if it is not Python code."""
    while isinstance(program, partial):
        program = program.func
    code = getattr(program, "__code__", None) or getattr(type(program).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


class CallSite(NamedTuple):
    """The place where the user's code called the library."""

    location: str
    """``file:line``."""
    is_users: bool
    """Whether the location is the user's. At the end of a kernel the library itself makes calls."""
    drops_result: bool
    """Whether the call is a statement of its own, so that its result is discarded."""


def call_site(skip: int = 0) -> CallSite:
    """The nearest caller outside our packages, or the outermost caller if all are inside.

    ``skip`` is the number of frames to skip above the direct caller. A repeated call takes less than half a
    microsecond.
    """
    frame: FrameType | None = sys._getframe(skip + 1)
    assert frame is not None
    site = _sites.get((frame.f_code, frame.f_lasti))
    if site is not None and site.is_users:
        return site
    outermost = frame
    while frame is not None:
        filename = frame.f_code.co_filename
        owned = _owners.get(filename)
        if owned is None:
            owned = is_ours(filename)
        if not owned:
            break
        if filename == _WORKER:  # the callers of the worker are not part of the kernel
            outermost, frame = frame, None
            break
        outermost, frame = frame, frame.f_back
    caller = frame or outermost
    assert caller is not None
    key = caller.f_code, caller.f_lasti
    site = _sites.get(key)
    if site is None:
        if len(_sites) >= MOST_SITES:  # a program may create new code in every run
            _sites.clear()
        location = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        users = frame is not None and not is_installed(caller.f_code.co_filename)
        site = _sites[key] = CallSite(location, frame is not None, users and _drops(caller.f_code, caller.f_lasti))
    return site


def here(skip: int = 0) -> str:
    """``file:line`` of the nearest caller outside our packages."""
    return call_site(skip + 1).location


def _drops(code: CodeType, place: int) -> bool:
    """Whether the instruction after the call at offset ``place`` discards the result."""
    following = (instruction for instruction in dis.get_instructions(code) if instruction.offset > place)
    return next((instruction.opname == "POP_TOP" for instruction in following), False)
