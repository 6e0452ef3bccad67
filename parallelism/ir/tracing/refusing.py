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
_DECISION = "a decision by the values of an array"
_NO_OPERATOR = "there is no operator for it"
REASONS: dict[Any, str] = {
    **dict.fromkeys(
        (
            np.nonzero,
            np.argwhere,
            np.flatnonzero,
            np.unique,
            np.extract,
            np.trim_zeros,
            np.intersect1d,
            np.union1d,
            np.setdiff1d,
            np.setxor1d,
        ),
        f"{_SHAPE}; numpy.where, sort and isin have known shapes",
    ),
    np.allclose: f"{_DECISION}; numpy.isclose(...).all() gives a bool of the program",
    **dict.fromkeys(
        (np.array_equal, np.array_equiv), f"{_DECISION}; (a == b).all() gives a bool of the program"
    ),
    **dict.fromkeys(
        (np.linalg.lstsq, np.linalg.pinv),
        f"{_NO_OPERATOR}; numpy.linalg.solve(a.T @ a, a.T @ b) is recorded for full rank",
    ),
    **dict.fromkeys(
        (np.linalg.svd, np.linalg.eig, np.linalg.eigh, np.linalg.eigvalsh, np.linalg.eigvals, np.linalg.qr),
        f"{_NO_OPERATOR}; numpy.linalg.cholesky, solve, inv and det are recorded",
    ),
    **dict.fromkeys(
        (np.histogram, np.histogram2d, np.histogramdd),
        "numpy.digitize, and bincount with minlength=, are recorded",
    ),
    **dict.fromkeys((np.fft.fft, np.fft.ifft, np.fft.rfft, np.angle), "programs have no complex numbers"),
    **dict.fromkeys((np.apply_along_axis, np.apply_over_axes), "call the function with axis="),
    **dict.fromkeys((np.gcd, np.lcm, np.nextafter, np.spacing, np.frexp), _NO_OPERATOR),
    np.unwrap: "numpy.mod and cumsum are recorded",
    np.i0: f"{_NO_OPERATOR}; write it as a polynomial",
    np.save: "its numbers are known only when the program runs: return the array",
    np.may_share_memory: "random functions of NumPy's need numbers: draw a permutation before, and write x[permutation]",
    np.bitwise_count: "(x >> k) & 1 gives a bit",
}
"""For NumPy functions that cannot be recorded: the reason, or what to write instead."""

OTHER_NAMES = {"expit": "sigmoid"}
"""For functions of SciPy: the operator, where it has another name."""

CONVERSIONS = {
    "__index__": ("an array as an index or a count",),
    "__int__": ("int() of an array",),
    "__float__": (
        "float() of an array",
        "functions of math take one number; those of numpy are recorded, as numpy.exp",
    ),
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
