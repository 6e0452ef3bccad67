"""Names for the parts and the events of a trace, shared by all its views."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.arrays import Ints
from parallelism.display.quantities import fit
from parallelism.events import Columns

LONGEST_NAME = 80
_NUMBERS = re.compile(r"\d+")
_PARTS = {"communication": "exposed communication", "other": "other compute"}

Data = dict[str, Any]
"""The content of a view, as plain data."""


def part_name(part: str) -> str:
    """The full name of a part of a device's time."""
    return _PARTS.get(part, part)


def without_numbers(name: object) -> str:
    """The name with ``#`` in place of each number, so that all microbatches of a stage share a name."""
    return _NUMBERS.sub("#", str(name))


def groups(events: Columns, *fields: str) -> tuple[list[tuple[Any, ...]], Ints, Ints]:
    """The events with equal fields: the fields of each group, its first event, and the group of each event."""
    _, first, place = np.unique(events.key(*fields), return_index=True, return_inverse=True)
    return (
        list(zip(*(events.take(first).values(field) for field in fields), strict=True)),
        first,
        place.ravel(),
    )


def numbered(names: Sequence[str]) -> tuple[list[str], Ints]:
    """The different names, shortened to one line, and for each given name the index of its short name."""
    short = [fit(name, LONGEST_NAME) for name in names]
    place = {name: i for i, name in enumerate(dict.fromkeys(short))}
    return list(place), np.array([place[name] for name in short], np.int64)
