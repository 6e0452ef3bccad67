"""`Sheet`: the events of a small step as one table of numbers, and of other extents by interpolation.

The rows of a sheet are events and sizes of the pieces of a step (`parallelism.simulation.step_pieces`).  In a row only
numbers depend on the extents: flops, bytes and payloads.  Local shapes are products of extents of which each occurs
once, whole or divided: so every number is affine in the rows of a microbatch, and in one over the number of devices
that something is split over.  Two values of each such variable give the line, and so every other value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.collectives import moved_alike
from parallelism.mesh import Mesh
from parallelism.simulation.device_events import FIELDS, DeviceEvents, StepCall
from parallelism.simulation.step_pieces import EndPieces, StagePieces

Floats = npt.NDArray[np.float64]
Exact = npt.NDArray[np.longdouble]

NUMBERS = 10
OTHERS, SHAPE, SENT = FIELDS.index("other_bytes"), FIELDS.index("shape"), FIELDS.index("bytes_sent")
MEMORY, COMPUTE, COLLECTIVE, MESSAGE, SIZE = "memory", "compute", "collective", "message", "size"


class Kind(NamedTuple):
    """What a row is, without its numbers."""

    what: str
    name: str | None = None
    """Of an op, of a collective, or of a category of memory."""
    dtype: str | None = None
    axes: tuple[str, ...] = ()
    """Of a collective."""
    pairs: Any = ()
    others: tuple[str, ...] = ()
    """Of a compute event, the dtypes of its other bytes."""
    extents: int = 0
    """Of a compute event, the number of extents in its shape."""
    seconds: float | None = None


class Unpriceable(ValueError):
    """A step that cannot be put together from pieces."""


@dataclass(frozen=True)
class Sheet:
    """Rows in sections, each with up to `NUMBERS` numbers: bytes, flops, bytes of other dtypes, and a shape."""

    kinds: tuple[Kind, ...]
    sections: Mapping[Any, slice]
    numbers: Exact = field(repr=False)

    @classmethod
    def of(cls, sections: Iterable[tuple[Any, Sequence[tuple[Kind, Sequence[float]]]]]) -> Sheet:
        """The sheet of rows by section."""
        places: dict[Any, slice] = {}
        kinds: list[Kind] = []
        numbers: list[Sequence[float]] = []
        for section, rows in sections:
            places[section] = slice(len(kinds), len(kinds) + len(rows))
            kinds += [kind for kind, _ in rows]
            numbers += [(*given, *([0] * (NUMBERS - len(given)))) for _, given in rows]
        return cls(tuple(kinds), places, np.array(numbers, np.longdouble).reshape(-1, NUMBERS))

    def alike(self, other: Sheet) -> bool:
        """Whether two sheets differ in numbers alone."""
        return self.kinds == other.kinds and self.sections == other.sections

    def rows(self, section: Any) -> tuple[tuple[Kind, ...], Exact]:
        """The rows of a section."""
        return self.kinds[self.sections[section]], self.numbers[self.sections[section]]

    def size(self, section: Any, name: str) -> int:
        """The number of the row of a section that has this name; 0 if there is none."""
        kinds, numbers = self.rows(section)
        return next((int(row[0]) for kind, row in zip(kinds, numbers, strict=True) if kind.name == name), 0)


def sections_of(label: Any, pieces: StagePieces | EndPieces, mesh: Mesh) -> Iterator[tuple[Any, Any]]:
    """The sections of a stage or of an end: ``(label, action)``, and ``(label, what)`` for what is no action."""
    if isinstance(pieces, EndPieces):
        yield (label, "held"), [(Kind(SIZE, name), [nbytes]) for name, nbytes in pieces.held.items()]
        yield (label, "end"), events_rows(pieces.events, mesh)
        return
    for kind, action in pieces.actions.items():
        yield (label, kind), events_rows(action.events, mesh)
        yield (label, kind, "kept"), [(Kind(SIZE, "kept"), [action.kept_more])]
    yield (label, "received"), [
        (Kind(MESSAGE, kind, message.dtype), [message.nbytes]) for kind, message in pieces.received.items()]


def events_rows(events: DeviceEvents, mesh: Mesh) -> list[tuple[Kind, Sequence[float]]]:
    """Events as rows.  `Unpriceable` for events that have no price of their own."""
    calls = {each.event: each for each in events.collectives}
    rows: list[tuple[Kind, Sequence[float]]] = []
    for place, row in enumerate(events.rows):
        kind, name, nbytes, flops, dtype, seconds = row[:6]
        if kind == "memory":
            rows.append((Kind(MEMORY, name), [nbytes]))
        elif kind == "compute":
            others, shape = row[OTHERS], row[SHAPE] or ()
            if 2 + len(others) + len(shape) > NUMBERS:
                raise Unpriceable(f"{name} has values of {len(others) + 1} dtypes")
            if flops or nbytes or seconds:
                kind_of = Kind(COMPUTE, name, dtype, others=tuple(other for other, _ in others), extents=len(shape),
                               seconds=seconds)
                rows.append((kind_of, [nbytes, flops, *(size for _, size in others), *shape]))
        elif kind == "collective":
            _, axes, _, call = calls[place]
            if isinstance(call, StepCall):
                raise Unpriceable(f"{name} has pieces of different sizes")
            over = tuple(axis for axis in axes if isinstance(axis, str))
            if len(over) < len(axes):
                raise Unpriceable(f"{name} is over ranks that lie along no axis")
            moved = moved_alike(call, prod(mesh.shape[axis] for axis in over))
            if over:
                rows.append((Kind(COLLECTIVE, name, dtype, over, moved.pairs), [moved.payload_bytes]))
        elif kind == "send":
            rows.append((Kind(MESSAGE, name, dtype), [row[SENT]]))
        elif kind not in ("recv", "wait"):
            raise Unpriceable(f"{kind} has no price of its own")
    return rows


class Interpolated:
    """Sheets by the values of variables, most of them by interpolation.

    ``measure(*values)`` makes the sheet of a small step.  ``lines[i]`` has the two values of variable ``i`` between
    which its line is drawn, with the function that the numbers are affine in; None for a variable of which every value
    is measured.
    """

    def __init__(
        self, measure: Callable[..., Sheet], lines: Sequence[tuple[int, int, Callable[[int], Any]] | None]
    ) -> None:
        self.measure, self.lines = measure, lines
        self._measured: dict[tuple[int, ...], Sheet] = {}
        self._known: dict[tuple[int, ...], Sheet] = {}

    def at(self, *values: int) -> Sheet:
        """The sheet of these values."""
        if values not in self._known:
            self._known[values] = self._between(values) or self.measured(values)
        return self._known[values]

    def measured(self, values: tuple[int, ...]) -> Sheet:
        """The sheet of a small step of these values."""
        if values not in self._measured:
            self._measured[values] = self.measure(*values)
        return self._measured[values]

    def _between(self, values: tuple[int, ...]) -> Sheet | None:
        """The sheet by interpolation; None if the sheets at the ends of the lines differ in more than numbers."""
        ends = [(value,) if line is None or value in line[:2] else line[:2]
                for value, line in zip(values, self.lines, strict=True)]
        if prod(map(len, ends)) == 1:
            return None
        total: Any = 0
        first: Sheet | None = None
        for corner in product(*ends):
            sheet = self.measured(corner)
            first = first or sheet
            if not first.alike(sheet):
                return None
            weight = np.longdouble(1)
            for value, end, line, its in zip(values, corner, self.lines, ends, strict=True):
                if line is not None and len(its) > 1:
                    other = line[0] if end == line[1] else line[1]
                    of = line[2]
                    weight *= (of(value) - of(other)) / (of(end) - of(other))
            total = total + weight * sheet.numbers
        assert first is not None
        return Sheet(first.kinds, first.sections, np.rint(total))


def whole(value: int) -> Any:
    """For numbers that are affine in a variable."""
    return np.longdouble(value)


def divided(value: int) -> Any:
    """For numbers that are affine in one over a variable."""
    return np.longdouble(1) / np.longdouble(value)
