"""Whose line of code is it: ours, an installed library's, or the user's?

Errors, traces and deadlock reports point at the user's own line, so every one of them asks this.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType

PACKAGES = ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster")

_ROOT = Path(__file__).absolute().parent.parent
_OURS = tuple(f"{_ROOT / name}{os.sep}" for name in PACKAGES)
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_owners: dict[str, bool] = {}


def is_ours(filename: str) -> bool:
    """Does this file belong to one of our packages?"""
    owned = _owners.get(filename)
    if owned is None:
        owned = _owners[filename] = filename.startswith(_OURS)
    return owned


@lru_cache(maxsize=8192)
def is_installed(filename: str) -> bool:
    """Does this file belong to the standard library, an installed package, or us (and so never change)?"""
    return (
        is_ours(filename) or filename.startswith(("<frozen ", *_STDLIB)) or any(part in filename for part in _INSTALLED)
    )


def here(skip: int = 0) -> str:
    """``file:line`` of the nearest caller outside our packages; of the outermost caller when all are ours.

    ``skip`` leaves out that many frames above the one that calls.  Well below a microsecond.
    """
    frame: FrameType | None = sys._getframe(skip + 1)
    outermost = frame
    while frame is not None:
        filename = frame.f_code.co_filename
        owned = _owners.get(filename)
        if owned is None:
            owned = is_ours(filename)
        if not owned:
            return f"{filename}:{frame.f_lineno}"
        outermost, frame = frame, frame.f_back
    assert outermost is not None
    return f"{outermost.f_code.co_filename}:{outermost.f_lineno}"
