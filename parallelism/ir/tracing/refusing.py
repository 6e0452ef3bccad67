"""The error for a call that cannot be recorded, and the warning for a promotion, with the user's line."""

import os
import re
import sys
import warnings
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn

import numpy as np

from parallelism.ir.core import PromotionWarning, RecordError, SymbolError
from parallelism.ir.core.lines import Line, on_line

_OURS = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(np.__file__).parent))

_SHAPE = "the shape of its result depends on the values"
REASONS: dict[Any, str] = {
    **dict.fromkeys((np.nonzero, np.argwhere, np.flatnonzero, np.unique, np.extract, np.bincount), _SHAPE),
    **dict.fromkeys((np.allclose, np.array_equal), "a decision by the values of an array"),
    **dict.fromkeys((np.put, np.copyto, np.place, np.putmask), "write x[...] = y, or use numpy.where"),
}
"""For NumPy functions that cannot be recorded: the reason, or what to write instead."""

CONVERSIONS = {
    "__index__": ("an array as an index or a count",),
    "__int__": ("int() of an array",),
    "__float__": ("float() of an array",),
    "__complex__": ("complex() of an array",),
    "__round__": ("round() of an array", "numpy.round can be"),
    "item": ("item() of an array",),
}
"""For methods that give a number: what cannot be recorded, and what to write instead."""


def refuse(what: str, why: str = "", line: Line | None = None) -> NoReturn:
    """Raise `RecordError` with the line of the user's code that made the call, or with another line of it."""
    line = line or recorded_line()
    reason = f": {why}" if why else ""
    raise RecordError(f"{what} cannot be recorded{reason}{on_line(line)}") from None


_MADE_OF_SYMBOLS = {
    **{
        name: f"numpy.{name}_like(x, {given}dtype=..., shape=...), where x is any recorded array and the shape may have "
        "symbols"
        for name, given in {"zeros": "", "ones": "", "empty": "", "full": "value, "}.items()
    },
    "arange": "ir.apply('iota', dim=0, shape=(n,), starts=(0,), dtype=numpy.dtype('int64')) for numpy.arange(n)",
}
"""For NumPy functions that make arrays of numbers: what to write for an array whose shape has symbols."""


def refuse_symbols(error: SymbolError) -> NoReturn:
    """Raise `RecordError` for code that needs a number of a symbolic extent, with the line of the user's code."""
    frames = [(frame, number) for frame, number in walk_tb(error.__traceback__)]
    frame, number = next(
        (each for each in reversed(frames) if not each[0].f_code.co_filename.startswith(_OURS)), frames[-1]
    )
    line = Line(frame.f_code.co_filename, number)
    advice = next(
        (
            f"; or write {text}"
            for name, text in _MADE_OF_SYMBOLS.items()
            if re.search(rf"\b{name}\(", line.text)
        ),
        "",
    )
    raise RecordError(f"{error}{advice}{on_line(line)}") from None


def warn_of_promotion(
    function: str, array: np.dtype[Any], number: np.dtype[Any], result: np.dtype[Any]
) -> None:
    """Give `PromotionWarning` for an array of 16 or 8 bits that a NumPy number makes larger, at the user's line."""
    line = recorded_line()
    warnings.warn_explicit(
        f"{function} makes {result} of an array of {array}, because a NumPy number of {number} promotes it: make it a "
        f"Python number, as in x / float(np.sqrt(n)), or convert the result with astype",
        PromotionWarning,
        line.file,
        line.number,
    )


def recorded_line() -> Line:
    """The line outside of this library's recording and of NumPy that is being recorded."""
    frame = sys._getframe(1)
    while frame.f_back and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


@cache
def _is_ours(file: str) -> bool:
    return file.startswith(_OURS)
