"""Whose line of code is it: ours, an installed library's, or the user's?

Errors, traces and deadlock reports point at the user's own line, so every one of them asks this.
"""

from __future__ import annotations

import opcode
import os
import sys
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

from parallelism.operation import ROOT, is_installed, is_ours

_WORKER = f"{ROOT}{os.sep}vcluster{os.sep}processes{os.sep}worker.py"
_POP_TOP = bytes([opcode.opmap["POP_TOP"]])
MOST_SITES = 4096
_sites: dict[tuple[CodeType, int], CallSite] = {}


def code_of(program: Any) -> CodeType | None:
    """The code that runs when ``program`` is called; None where that is none of Python's."""
    while isinstance(program, partial):
        program = program.func
    code = getattr(program, "__code__", None) or getattr(type(program).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


class CallSite(NamedTuple):
    """A line that called us: the user's, or our own at the end of a kernel."""

    location: str
    """``file:line``."""
    is_users: bool
    """Whether the line is outside our packages."""
    drops_result: bool
    """Whether the call is a statement of its own in a file of the user's: nothing takes its result."""


def call_site(skip: int = 0) -> CallSite:
    """The nearest caller outside our packages; the outermost one of the kernel if all are ours.

    ``skip`` leaves out that many frames above the one that calls.  Below half a microsecond, after the first time.
    """
    frame = sys._getframe(skip + 1)
    site = _sites.get((frame.f_code, frame.f_lasti))
    if site is not None and site.is_users:
        return site
    while is_ours(filename := frame.f_code.co_filename) and filename != _WORKER and frame.f_back is not None:
        frame = frame.f_back
    key = frame.f_code, frame.f_lasti
    site = _sites.get(key)
    if site is None:
        if len(_sites) >= MOST_SITES:  # code that is made anew in every run
            _sites.clear()
        drops = not is_installed(filename) and _is_dropped(frame.f_code, frame.f_lasti)
        site = _sites[key] = CallSite(f"{filename}:{frame.f_lineno}", not is_ours(filename), drops)
    return site


def here(skip: int = 0) -> str:
    """``file:line`` of the nearest caller outside our packages."""
    return call_site(skip + 1).location


def _is_dropped(code: CodeType, place: int) -> bool:
    """Whether the instruction after the call at ``place`` removes its result from the stack.

    An instruction has two bytes, its code first; the caches behind a call have the code zero.
    """
    return code.co_code[place + 2 :: 2].lstrip(b"\0")[:1] == _POP_TOP
