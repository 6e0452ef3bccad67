"""`StageCosts`: seconds and memory of the pieces of a step, for stages of any number of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.memoized import memoized
from parallelism.planning.growth import Growth, Segment, segments_between
from parallelism.planning.row_prices import Layout, RowPrices
from parallelism.planning.sheets import COLLECTIVE, COMPUTE, LEFT, MEMORY, MESSAGE, WAIT, Kind, Sheet, Unpriceable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Memory(NamedTuple):
    """Bytes of an action, beside what the device holds before it."""

    peak: int
    change: int


class SheetCosts:
    """The costs of the rows of one sheet, which `Forms` takes apart."""

    def __init__(self, sheet: Sheet, forms: Forms) -> None:
        self.sheet, self.forms = sheet, forms
        self._computes: dict[Any, float] | None = None
        self._each: Floats = np.zeros(0)
        """The seconds of each compute, once they are known."""

    # -- memory --------------------------------------------------------------------------------------------------------

    @memoized
    def memory(self, place: int, kind: str, blocks: int) -> Memory:
        """Of an action of a stage of so many blocks; of a backward with what is computed again."""
        label = place, kind
        before = self.memory(place, "R", blocks) if kind in "BI" and ((place, 2), "R") in self.sheet.sections else None
        most, level = self._peak(label, blocks)
        level += self._grown((place, "kept", kind), blocks)
        own = Memory(max(most, level), level)
        if before is None:
            return own
        return Memory(max(before.peak, before.change + own.peak), before.change + own.change)

    @memoized
    def end_peak(self, place: int, blocks: int) -> int:
        """The most bytes that the end of a device with so many blocks takes, beside what the device holds."""
        return self._peak((place, "end"), blocks)[0]

    @memoized
    def held(self, place: int, blocks: int, category: str) -> int:
        """Bytes that a device holds during the whole step."""
        return self._grown((place, "held", category), blocks)

    @memoized
    def received(self, place: int, kind: str) -> int:
        """The bytes of the message that an action takes; 0 if it takes none."""
        return self.sheet.size(((place, 1), "received"), kind)

    @memoized
    def exchanged(self, place: int) -> int:
        """The bytes of the gradients of shared weights."""
        kinds, numbers = self.sheet.rows(((place, 1), "end"))
        return sum(int(row[0]) for kind, row in zip(kinds, numbers, strict=True) if kind.what == MESSAGE)

    def _grown(self, what: tuple[int, str, str], blocks: int) -> int:
        place, section, name = what
        def of(n: int) -> int:
            if section == "kept":
                return self.sheet.size(((place, n), name, "kept"), "kept")
            return self.sheet.size(((place, n), section), name)
        one = of(1)
        return one + (blocks - 1) * (of(2) - one)

    def _peak(self, label: tuple[int, str], blocks: int) -> tuple[int, int]:
        return self._growth(label).peak(blocks)

    @memoized
    def _growth(self, label: tuple[int, str]) -> Growth:
        place, action = label
        one, two = (self._changes[self.sheet.sections[(place, n), action]] for n in (1, 2))
        return Growth.of(self.forms.segments(self.sheet, label), one, two)

    @cached_property
    def _changes(self) -> Ints:
        """By row, the change of memory."""
        changes: Ints = np.where(self._rows.memory, self.sheet.numbers[:, 0], 0).astype(np.int64)
        return changes

    # -- seconds -------------------------------------------------------------------------------------------------------

    def seconds(self, prices: RowPrices, layout: Layout) -> SheetSeconds:
        """The seconds of all sections on a mesh."""
        if self._computes is None:
            self._each = prices.computes(self.sheet, self._first(self._rows.computes))[self.sheet.alike]
            self._computes = self._sums(self._each)
        rows, different, number = self._collectives
        seconds = np.zeros(len(self.sheet.kinds))
        if len(rows):
            seconds[rows] = np.array([prices.collective(*each, layout) for each in different])[number]
            seconds = seconds[self.sheet.alike]
        sums = self._sums(seconds) if len(rows) else {}
        found = {name: sums.get(name, 0.0) + own for name, own in self._computes.items()}
        share = prices.hardware.collective_share
        found |= {name: _beside(self.sheet.kinds[at], self._each[at], seconds[at], share)
                  for name, at in self._with_waits.items()}
        return SheetSeconds(self.sheet, found)

    @property
    def _rows(self) -> Rows:
        return self.forms.of(self.sheet.kinds)

    def _first(self, rows: Ints) -> Ints:
        """Of these rows the first of those that are alike."""
        found: Ints = rows[self.sheet.alike[rows] == rows]
        return found

    @cached_property
    def _collectives(self) -> tuple[Ints, list[tuple[Kind, float]], list[int]]:
        """The rows of collectives, the first of those that are alike; the different ones; and for each row its number
        among them."""
        rows = self._first(self._rows.collectives)
        different: dict[tuple[Kind, float], int] = {}
        number = [different.setdefault((self.sheet.kinds[row], payload), len(different)) for row, payload in zip(
            rows.tolist(), self.sheet.numbers[rows, 0].astype(np.float64).tolist(), strict=True)]
        return rows, [*different], number

    @cached_property
    def _with_waits(self) -> dict[Any, slice]:
        """The sections in which a collective is waited for later."""
        waits = self._rows.waits
        found = {name: rows for name, rows in self.sheet.sections.items() if waits[rows].any()} if waits.any() else {}
        if ends := [name for name in found if name[1] == "end"]:
            raise Unpriceable(f"collectives of the end of {ends[0]} run beside its update")
        return found

    def _sums(self, seconds: Floats) -> dict[Any, float]:
        """The seconds of each section; of an end under ``before`` those before its gradients are exchanged."""
        found: dict[Any, float] = {}
        for name, rows in self.sheet.sections.items():
            if name[1] == "end":
                at = rows.start + int(self._rows.messages[rows].argmax()) if rows.stop > rows.start else rows.start
                found[name[0], "before"] = float(seconds[rows.start:at].sum())
                rows = slice(at, rows.stop)
            found[name] = float(seconds[rows].sum())
        return found


def _beside(kinds: Sequence[Kind], computes: Floats, collectives: Floats, share: float) -> float:
    """The seconds of events in order, of which some collectives run beside others: as in `parallelism.timeline.replay`,
    one follows the other, and each holds the device for a share of its seconds."""
    clock, stream, before = 0.0, 0.0, 0
    ends: list[float] = []
    for place in (place for place, kind in enumerate(kinds) if kind.what in (COLLECTIVE, WAIT)):
        clock, before = clock + float(computes[before:place].sum()), place + 1
        if kinds[place].what == WAIT:
            clock = max(clock, ends[-kinds[place].later])
            continue
        stream = max(clock, stream) + float(collectives[place])
        if kinds[place].later:
            ends.append(stream)
            clock += share * float(collectives[place])
        else:
            clock = stream
    return clock + float(computes[before:].sum())


@dataclass(frozen=True)
class SheetSeconds:
    """The seconds of the sections of a sheet."""

    sheet: Sheet
    sums: Mapping[Any, float]

    def action(self, place: int, kind: str, blocks: int) -> float:
        """Of an action of a stage of so many blocks; of a backward with what is computed again."""
        own = self._grown(place, kind, blocks)
        again = kind in "BI" and ((place, 1), "R") in self.sums
        return own + self._grown(place, "R", blocks) if again else own

    def end(self, place: int, blocks: int) -> tuple[float, float]:
        """Of the end of a device, before its gradients are exchanged, and after."""
        return self.sums[(place, 1), "before"], self._grown(place, "end", blocks)

    def _grown(self, place: int, section: str, blocks: int) -> float:
        one = self.sums[(place, 1), section]
        return one + (blocks - 1) * (self.sums[(place, 2), section] - one)


class Rows(NamedTuple):
    """The rows of sheets with the same kinds."""

    kinds: tuple[Kind, ...]
    memory: Bools
    """By row, whether it is a change of memory."""
    collectives: Ints
    computes: Ints
    waits: Bools
    """By row, whether it waits for a collective."""
    messages: Bools


class Forms:
    """How the sections of sheets grow with the blocks of a stage; of sheets that differ in numbers alone the same."""

    def __init__(self) -> None:
        self._segments: dict[Any, tuple[Segment, ...]] = {}
        self._rows: dict[int, Rows] = {}

    def of(self, kinds: tuple[Kind, ...]) -> Rows:
        """Where the rows of each sort are.  Sheets of one pattern share their kinds."""
        found = self._rows.get(id(kinds))
        if found is None:
            what = np.array([kind.what for kind in kinds])
            found = self._rows[id(kinds)] = Rows(           # which keeps the kinds, and so their id
                kinds, np.isin(what, (MEMORY, LEFT)), np.flatnonzero(what == COLLECTIVE),
                np.flatnonzero(what == COMPUTE), what == WAIT, what == MESSAGE)
        return found

    def segments(self, sheet: Sheet, label: tuple[int, str]) -> tuple[Segment, ...]:
        """Where the events of a section repeat."""
        place, action = label
        key = label, id(self.of(sheet.kinds).kinds)
        if key not in self._segments:
            one, two = (self._tokens(sheet, ((place, n), action)) for n in (1, 2))
            self._segments[key] = segments_between(one, two)
        return self._segments[key]

    @staticmethod
    def _tokens(sheet: Sheet, section: Any) -> list[Any]:
        """What events are compared by; of memory that is freed at the end, with all blocks together, the kind alone."""
        kinds, numbers = sheet.rows(section)
        plain = numbers.astype(np.float64).tolist()
        return [(kind, None if kind.what == LEFT else plain[i]) for i, kind in enumerate(kinds)]
