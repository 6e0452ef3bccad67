"""The mistake of an attribute that is called, ``device.rank()``, and of a method that is not, ``1 + device.size``.

Python says that an int is not callable.  Numbers and arrays cannot know that they are called, so the instruction that
failed is looked at: which attributes of objects of this library it reads.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import FrameType, MethodType, TracebackType
from typing import Any

from parallelism.operation import is_installed

OURS = ("vcluster", "parallelism", "tensor_parallelism", "pipeline_parallelism")
_VARIABLES = (
    "LOAD_FAST",
    "LOAD_DEREF",
    "LOAD_GLOBAL",
    "LOAD_NAME",
    "LOAD_CLASSDEREF",
    "LOAD_FAST_CHECK",
    "LOAD_FAST_BORROW",
)
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_NOT_CALLABLE, _METHOD = "object is not callable", "'method'"


def called_or_not(error: BaseException) -> str:
    """What to write in place of the attribute that was called, or of the method that was not; empty otherwise."""
    text = str(error) if type(error) is TypeError else ""
    if not text.endswith(_NOT_CALLABLE) and _METHOD not in text:
        return ""
    last = _innermost(error.__traceback__)
    if last is None or is_installed(last.tb_frame.f_code.co_filename):
        return ""
    for written, value, first in _attributes(last):
        if text.endswith(_NOT_CALLABLE) and first and not callable(value):
            return f"{written} is no method: write {written}, without ()"
        if _METHOD in text and isinstance(value, MethodType):
            return f"{written} is a method: write {written}(...)"
    return ""


def _innermost(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb


def _attributes(tb: TracebackType) -> Iterator[tuple[str, Any, bool]]:
    """What the failing instruction reads of our objects: as it is written, its value, and whether it begins with it.

    The last come first.
    """
    frame = tb.tb_frame
    instructions = [each for each in dis.get_instructions(frame.f_code) if each.opname != "CACHE"]
    failing = next((each for each in instructions if each.offset == tb.tb_lasti), None)
    if failing is None or failing.positions is None:
        return
    found: list[tuple[str, Any, bool]] = []
    written, value = "", None
    for each in instructions:
        if each.opname in _VARIABLES and isinstance(each.argval, str):
            written, value = each.argval, _variable(frame, each.argval)
        elif each.opname in _ATTRIBUTES and written:
            ours = type(value).__module__.partition(".")[0] in OURS
            written, value = f"{written}.{each.argval}", getattr(value, each.argval, None) if ours else None
            if ours and _inside(each.positions, failing.positions):
                found.append((written, value, _start(each.positions) == _start(failing.positions)))
        elif each.opname not in ("PRECALL", "PUSH_NULL"):
            written, value = "", None
    yield from reversed(found)


def _variable(frame: FrameType, name: str) -> Any:
    return frame.f_locals.get(name, frame.f_globals.get(name))


def _start(place: Any) -> Any:
    return None if place is None else (place.lineno, place.col_offset)


def _inside(one: Any, other: Any) -> bool:
    """Whether code lies inside other code."""
    if None in (*one, *other):
        return False
    return bool(
        _start(other) <= _start(one)
        and (one.end_lineno, one.end_col_offset) <= (other.end_lineno, other.end_col_offset)
    )
