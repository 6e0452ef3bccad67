"""Every line of code belongs to the library, to an installed package, or to the user.

Errors, traces and deadlock reports point at the user's line, and find it here.
"""

import opcode
import os
import sys
from functools import partial
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

from parallelism.operation import ROOT, is_installed, is_ours

WORKER = f"{ROOT}{os.sep}vcluster{os.sep}processes{os.sep}worker.py"
_POP_TOP = bytes([opcode.opmap["POP_TOP"]])
known_sites: "dict[int, dict[int, CallSite]]" = {}
"""By the id of the code, and the place in it: to hash code takes longer.  Those of code that is gone are forgotten."""
NO_SITES: "dict[int, CallSite]" = {}
_known: "dict[int, ref[CodeType]]" = {}
"""By its id, the code that has sites.  A device gets new code in every run, so it is not kept."""
_ours: dict[int, CodeType] = {}
"""Code of our packages by its id, except the worker's."""


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
    microsecond, and a sixth for each frame of ours.
    """
    frame = sys._getframe(skip + 1)
    while True:
        code = frame.f_code
        if id(code) not in _ours:
            found = known_sites.get(id(code), NO_SITES).get(frame.f_lasti)
            if found is not None:
                return found
            filename = code.co_filename
            if not is_ours(filename) or filename == WORKER:
                break
            _ours[id(code)] = code
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    filename, place = code.co_filename, frame.f_lasti
    drops = not is_installed(filename) and _is_dropped(code, place)
    site = CallSite(f"{filename}:{frame.f_lineno}", not is_ours(filename), drops)
    if id(code) not in _known:
        known_sites[id(code)], _known[id(code)] = {}, ref(code, partial(_forget, id(code)))
    known_sites[id(code)][place] = site
    return site


def _forget(number: int, code: "ref[CodeType]") -> None:
    """Forgets the sites of code that had this id."""
    known_sites.pop(number, None)
    _known.pop(number, None)


def here(skip: int = 0) -> str:
    """``file:line`` of the nearest caller outside our packages."""
    return call_site(skip + 1).location


def _is_dropped(code: CodeType, place: int) -> bool:
    """Whether the instruction after the call at ``place`` removes its result from the stack.

    An instruction has two bytes, its code first; the caches behind a call have the code zero.
    """
    return code.co_code[place + 2 :: 2].lstrip(b"\0")[:1] == _POP_TOP
