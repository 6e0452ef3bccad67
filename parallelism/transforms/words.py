"""The words in which strategies are written: ``tp``, ``tp:model``, ``tp@block.*=8``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

DEFAULT_AXIS = {"dp": "dp", "tp": "tp", "sp": "tp", "zero": "dp", "pp": "pp", "cp": "cp", "ep": "ep"}
"""The axis that a word is about if it names none."""
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"(?P<name>[a-z0-9_]+)(:(?P<axis>[A-Za-z_][A-Za-z0-9_]*))?(@(?P<regions>[^=]+))?(=(?P<value>.+))?")


class Word(NamedTuple):
    """One word of a strategy's text."""

    name: str
    axis: str | None
    regions: tuple[str, ...]
    value: str | None


def word(name: str, axis: str | None = None, regions: Sequence[str] = (), value: Any = None) -> str:
    """The text of a word.  A default axis is not written."""
    text = name if axis in (None, DEFAULT_AXIS.get(name)) else f"{name}:{axis}"
    text += f"@{','.join(regions)}" if regions else ""
    return text if value is None else f"{text}={value}"


def read(text: str) -> Word:
    """The parts of a word, with its axis.  ``ValueError`` if it is none."""
    found = _WORD.fullmatch(text)
    if found is None:
        raise ValueError(f"a word of a strategy is a name, then :axis, @regions and =value as needed, such as "
                         f"tp@block.*=8; got {text!r}")
    name, regions = found["name"], found["regions"]
    return Word(name, found["axis"] or DEFAULT_AXIS.get(name), tuple(regions.split(",")) if regions else (),
                found["value"])


def checked_axis(transform: Any) -> None:
    """``ValueError`` unless the axis of a transform is a name."""
    if not isinstance(transform.axis, str) or not _AXIS.fullmatch(transform.axis):
        raise ValueError(f"the axis of {type(transform).__name__} must be the name of a mesh axis, got "
                         f"{transform.axis!r}")
