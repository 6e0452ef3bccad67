"""What the views of a trace call its parts and its events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.quantities import fit

LONGEST_NAME = 80
_NUMBERS = re.compile(r"\d+")
_PARTS = {"communication": "exposed communication", "other": "other compute"}

Data = dict[str, Any]
"""What is shown, as plain data."""


def part_name(part: str) -> str:
    """A part of a device's time, in words."""
    return _PARTS.get(part, part)


def without_numbers(name: object) -> str:
    """The name with ``#`` for each number, so that all microbatches of a stage have one."""
    return _NUMBERS.sub("#", str(name))


def numbered(names: Sequence[str]) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Each name once, shortened to one line, and for each of the given ones its place among them."""
    short = [fit(name, LONGEST_NAME) for name in names]
    place = {name: i for i, name in enumerate(dict.fromkeys(short))}
    return list(place), np.array([place[name] for name in short], np.int64)
