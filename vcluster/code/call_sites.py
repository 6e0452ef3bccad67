"""Whose line of code is it: ours, an installed library's, or the user's?

Errors, traces and deadlock reports point at the user's own line, so every one of them asks this.
"""

from __future__ import annotations

import dis
import os
import sys
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

from parallelism.operation import ROOT, is_installed, is_ours

_owners: dict[str, bool] = {}
_WORKER = f"{ROOT}{os.sep}vcluster{os.sep}processes{os.sep}worker.py"
MOST_SITES = 4096
_sites: dict[tuple[CodeType, int], CallSite] = {}


def code_of(program: Any) -> CodeType | None:
    """The code that runs when ``program`` is called; None where that is none of Python's."""
    while isinstance(program, partial):
        program = program.func
    code = getattr(program, "__code__", None) or getattr(type(program).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


class CallSite(NamedTuple):
    """Where the user's code called us."""

    location: str
    """``file:line``."""
    is_users: bool
    """Whether there is a line of the user's: at the end of a kernel, our own code calls."""
    drops_result: bool
    """Whether the call is a statement of its own, whose result nobody gets."""


def call_site(skip: int = 0) -> CallSite:
    """The nearest caller outside our packages; the outermost one when all are ours.

    ``skip`` leaves out that many frames above the one that calls.  Below half a microsecond, after the first time.
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
            owned = _owners[filename] = is_ours(filename)
        if not owned:
            break
        if filename == _WORKER:  # what called it is no part of the kernel
            outermost, frame = frame, None
            break
        outermost, frame = frame, frame.f_back
    found = frame or outermost
    assert found is not None
    key = found.f_code, found.f_lasti
    site = _sites.get(key)
    if site is None:
        if len(_sites) >= MOST_SITES:  # code that is made anew in every run
            _sites.clear()
        location = f"{found.f_code.co_filename}:{found.f_lineno}"
        users = frame is not None and not is_installed(found.f_code.co_filename)
        site = _sites[key] = CallSite(location, frame is not None, users and _drops(found.f_code, found.f_lasti))
    return site


def here(skip: int = 0) -> str:
    """``file:line`` of the nearest caller outside our packages."""
    return call_site(skip + 1).location


def _drops(code: CodeType, place: int) -> bool:
    """Whether the instruction after the call at ``place`` throws its result away."""
    following = (instruction for instruction in dis.get_instructions(code) if instruction.offset > place)
    return next((instruction.opname == "POP_TOP" for instruction in following), False)
