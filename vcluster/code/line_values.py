"""The values of the variables on a failing line, for the error message."""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any

from parallelism.dtypes import is_numeric

LONGEST_TEXT = 60
MOST_ELEMENTS = 6
MOST_VARIABLES = 8


def values_on_lines(frame: FrameType, first: int, last: int) -> str:
    """The variables that the lines ``first`` to ``last`` of a function read: ``divisor = 0, x = float64[3, 4]``.

    Only values of types with a harmless ``repr`` are shown. Variables without a value yet are left out.
    """
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(frame.f_code):
        line = instruction.positions.lineno if instruction.positions is not None else None
        if (
            line is not None
            and first <= line <= last
            and instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF"))
        ):
            read = instruction.argval
            names.update(
                dict.fromkeys(read if isinstance(read, tuple) else (read,))
            )  # some instructions read two
    variables = frame.f_locals
    texts = [(name, _text(variables[name])) for name in names if name in variables and name.isidentifier()]
    return ", ".join([f"{name} = {text}" for name, text in texts if text is not None][:MOST_VARIABLES])


def _text(value: Any) -> str | None:
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray:
        elements = f" {value.tolist()}" if value.size <= MOST_ELEMENTS and is_numeric(value.dtype) else ""
        return f"{value.dtype}{list(value.shape)}{_short(elements)}"
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return _short(repr(value))
    if numpy is not None and isinstance(value, numpy.generic):
        return _short(repr(value.item()))
    if type(value) in (list, tuple, dict, set):
        return f"{type(value).__name__} of {len(value)}"
    return None


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."
