"""Measures items one after the other: guarded, within a time, and kept from the first on.

What cannot be measured is in its table with the reason; the others go on.  After an interrupt (Ctrl-C) what was
measured until then is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from parallelism.whole_files import written_whole
from vcluster.calibration.gpu.items import Given, Item

Row = dict[str, Any]
Measure = Callable[[Item], Mapping[str, Any]]
Say = Callable[[str], None]

NOT_MEASURED = "not_measured"
"""The name in a row of the reason why there are no figures in it."""
OUT_OF_TIME, INTERRUPTED = "out of time", "interrupted"


@dataclass
class Tables:
    """Rows by table: what an item was given, and its figures or why it has none."""

    machine: dict[str, Any]
    rows: dict[str, list[Row]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    """What else was found: constants that were fitted, steps that were predicted."""
    interrupted: bool = False

    def add(self, item: Item, figures: Mapping[str, Any]) -> None:
        """Adds the row of an item."""
        self.rows.setdefault(item.table, []).append({**item.given, **figures})

    def measured(self, table: str, **given: Any) -> list[Row]:
        """The rows of a table that have figures, and these values."""
        rows = [row for row in self.rows.get(table, ()) if NOT_MEASURED not in row]
        for name, value in given.items():
            rows = [row for row in rows if row.get(name) == value]
        return rows

    def missing(self) -> list[tuple[str, Row]]:
        """The rows without figures, with the names of their tables."""
        return [(name, row) for name, rows in self.rows.items() for row in rows if NOT_MEASURED in row]

    def save(self, path: Path) -> None:
        """Writes everything as JSON, a row a line."""
        tables = []
        for name, rows in self.rows.items():
            lines = ",\n".join(f"   {_compact(row)}" for row in rows)
            tables.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
        all_tables = ",\n".join(tables)
        notes = json.dumps(_rounded(self.notes), indent=1).replace("\n", "\n ")
        text = (
            f'{{\n "machine": {json.dumps(self.machine, indent=2)},\n "notes": {notes},\n'
            f' "tables": {{\n{all_tables}\n }}\n}}\n'
        )
        with written_whole(path, encoding="utf-8") as file:
            file.write(text)

    @classmethod
    def load(cls, path: Path) -> Tables:
        """What `save` wrote."""
        return cls.read(path.read_text(encoding="utf-8"), str(path))

    @classmethod
    def read(cls, text: str, origin: str) -> Tables:
        """Tables from the text of a file.  ``ValueError`` for one that `save` did not write; ``origin`` is its name."""
        try:
            told = json.loads(text)
            return cls(told["machine"], told["tables"], told["notes"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{origin} must be tables that calibrate --gpu wrote beside a stack, with machine, notes "
                "and tables; got something else"
            ) from None


def _compact(row: Row) -> str:
    return json.dumps(_rounded(row), allow_nan=False)


def _rounded(value: Any) -> Any:
    """Figures with six digits: more were not measured."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass
class Budget:
    """A limit of time: so many seconds in all, from now on."""

    seconds: float
    now: Callable[[], float] = monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.now()

    @property
    def spent(self) -> float:
        """The seconds since it began."""
        return self.now() - self.began

    @property
    def left(self) -> float:
        """The seconds until it ends; below 0 after that."""
        return self.seconds - self.spent


def measure_all(
    tables: Tables,
    items: Sequence[Item],
    measure: Measure,
    budget: Budget,
    *,
    reserve: float = 0.0,
    say: Say,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Measures the items into ``tables`` until ``reserve`` seconds of the budget are left.

    ``say`` is told each table as it begins, and each item that could not be measured.  ``keep`` is called after each
    table, to write what there is.
    """
    reason, table = "", ""
    for number, item in enumerate(items):
        if reason or budget.left < reserve:
            reason = reason or OUT_OF_TIME
            tables.add(item, {NOT_MEASURED: reason})
            continue
        if item.table != table:
            keep()
            table = item.table
            say(f"{budget.spent:4.0f} s  {table}: {number + 1} of {len(items)}")
        try:
            tables.add(item, measure(item))
        except KeyboardInterrupt:
            reason, tables.interrupted = INTERRUPTED, True
            tables.add(item, {NOT_MEASURED: reason})
        except Exception as error:  # whatever a library refuses: the others go on
            tables.add(item, {NOT_MEASURED: reason_of(error)})
            say(f"{budget.spent:4.0f} s  not measured: {item}: {reason_of(error)}")
    if reason:
        say(f"{budget.spent:4.0f} s  {reason}: {_skipped(tables, reason)}")
    keep()


def _skipped(tables: Tables, reason: str) -> str:
    counts: dict[str, int] = {}
    for name, row in tables.missing():
        if row[NOT_MEASURED] == reason:
            counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} of {name}" for name, count in counts.items()) + " left out"


def reason_of(error: BaseException) -> str:
    """An exception in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:200]


def of_tables(items: Iterable[Item], *names: str) -> list[Item]:
    """The items of these tables."""
    return [item for item in items if item.table in names]


def given_of(row: Row, *names: str) -> Given:
    """Some values of a row."""
    return {name: row[name] for name in names if name in row}
