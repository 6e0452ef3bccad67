"""What cannot be recorded, told with the line that asked for it."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from parallelism.ir.core import RecordError

_OURS = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(np.__file__).parent))

_SHAPE = "the shape of its result depends on the numbers"
REASONS: dict[Any, str] = {
    **dict.fromkeys((np.nonzero, np.argwhere, np.flatnonzero, np.unique, np.extract, np.bincount), _SHAPE),
    **dict.fromkeys((np.allclose, np.array_equal), "a decision by the numbers of an array"),
    **dict.fromkeys((np.put, np.copyto, np.place, np.putmask), "write x[...] = y, or say it with where"),
}
"""Why functions of NumPy can never be recorded, or what to write instead."""


def refuse(what: str, why: str = "") -> NoReturn:
    """`RecordError`, with the line of the user's that led here."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    name, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, line).strip()
    reason = f": {why}" if why else ""
    raise RecordError(f"{what} cannot be recorded{reason}\n  {name}:{line}: {text}") from None
