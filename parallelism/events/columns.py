"""Events by columns: a million events in tens of megabytes, summed and picked out without an object for each.

A column holds one field of all events: numbers as an array, words and tuples as a table of the different values with an
index for every event.  A field that is everywhere at its default has no column.  None among integers is `ABSENT`.
What fits neither (a forged trace may have a text for a number) is a table, too: the events come out as they went in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array, Bools, Floats, Ints, distinct
from parallelism.events.event import Event

ABSENT = int(np.iinfo(np.int64).min)
"""None, in a column of integers."""

NAMES = tuple(field.name for field in fields(Event))
DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(Event) if field.default is not MISSING
}

_DTYPES = {"int": np.dtype(np.int64), "int | None": np.dtype(np.int64), "float": np.dtype(np.float64)}
NUMBERS = {field.name: _DTYPES[str(field.type)] for field in fields(Event) if str(field.type) in _DTYPES}
_VALUES = attrgetter(*NAMES)
_STORES = {name: vars(Event)[name].__set__ for name in NAMES}
"""Stores a field in an event that is being made.  The constructor of a frozen class takes 2.5 times as long."""
_EXACT = 2**53
"""Every integer up to this is a float."""
_EVENTS_AT_ONCE = 4096

Numbers = Array


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A column of words or tuples: ``values[index[i]]`` is that of event i."""

    values: tuple[Any, ...]
    index: npt.NDArray[np.int32]


Column = Numbers | Table


@dataclass(frozen=True, eq=False)
class Columns:
    """``length`` events; a field that is at its default everywhere has no entry in ``columns``."""

    length: int
    columns: Mapping[str, Column]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Columns:
        """The columns of events."""
        return cls.of_rows(map(_VALUES, events))

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[Any]], names: Sequence[str] = NAMES) -> Columns:
        """The columns of events given as the values of the fields ``names``, the others at their defaults."""
        lists = list(zip(*rows, strict=True)) or [()] * len(names)
        return cls(len(lists[0]), {}).with_columns(
            **dict(zip(names, map(column_of, names, lists), strict=True))
        )

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        """The events of all parts, one part after the other."""
        columns: dict[str, Column] = {}
        for name in NAMES:
            if any(name in part.columns for part in parts):
                columns[name] = _joined(name, [part[name] for part in parts])
        return cls(sum(part.length for part in parts), columns)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, name: str) -> Column:
        """The column of a field, made if all of it is the default."""
        found = self.columns.get(name)
        if found is not None:
            return found
        if name not in NUMBERS:
            return Table(
                (DEFAULTS[name],) if self.length or name in DEFAULTS else (), np.zeros(self.length, np.int32)
            )
        default = DEFAULTS[name] if self.length else 0
        return np.full(self.length, ABSENT if default is None else default, NUMBERS[name])

    def with_columns(self, **columns: Column | None) -> Columns:
        """The same events but for these columns; None: all at the default."""
        return Columns(
            self.length,
            {name: column for name, column in {**self.columns, **columns}.items() if column is not None},
        )

    def only(self, *names: str) -> Columns:
        """The events as far as these fields tell, the others at their defaults; so that `take` copies no more."""
        return Columns(self.length, {name: column for name, column in self.columns.items() if name in names})

    def take(self, selected: slice | Array) -> Columns:
        """The events of a slice, a mask or an array of places."""
        if isinstance(selected, slice):
            length = len(range(*selected.indices(self.length)))
        else:
            length = int(np.count_nonzero(selected)) if selected.dtype == np.bool_ else len(selected)
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            if isinstance(column, Table):
                columns[name] = Table(column.values, column.index[selected])
            else:
                columns[name] = column[selected]
        return Columns(length, columns)

    # As Python's values

    def values(self, name: str) -> list[Any]:
        """The values of a field, by event."""
        column = self.columns.get(name)
        return [DEFAULTS[name]] * self.length if column is None else as_values(column)

    def events(self) -> Iterator[Event]:
        """The events, made as they are asked for."""
        for start in range(0, self.length, _EVENTS_AT_ONCE):
            part = self.take(slice(start, start + _EVENTS_AT_ONCE)) if self.length > _EVENTS_AT_ONCE else self
            events = list(map(object.__new__, repeat(Event, part.length)))
            for name, store in _STORES.items():
                values = part.values(name) if name in part.columns else repeat(DEFAULTS[name])
                deque(map(store, events, values), maxlen=0)
            yield from events

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        return self.length == other.length and all(
            _equal(self[name], other[name]) for name in {*self.columns, *other.columns}
        )

    def __hash__(self) -> int:
        return hash(self.length)

    # As arrays

    def numbers(self, name: str) -> Numbers:
        """The numbers of a field; of Python's own kind if they are none of NumPy's."""
        column = self[name]
        return np.array(as_values(column), object) if isinstance(column, Table) else column

    def distinct(self, name: str) -> set[Any]:
        """The values that occur in a field."""
        column = self[name]
        if isinstance(column, Table):
            return {column.values[i] for i in _occurring(column.index)}
        values: set[Any] = set(_occurring(column) if column.dtype == np.int64 else distinct(column).tolist())
        return {*values, None} - {ABSENT} if ABSENT in values else values

    def mapped(self, name: str, function: Callable[[Any], Any], dtype: npt.DTypeLike) -> Array:
        """For each event, ``function`` of the value of a field; called once for each different value."""
        column = self[name]
        if not isinstance(column, Table):
            values, index = np.unique(column, return_inverse=True)
            column = Table(tuple(as_values(values)), index.astype(np.int32))
        return np.array([function(value) for value in column.values], dtype)[column.index]

    def isin(self, name: str, wanted: Collection[Any]) -> Bools:
        """For each event, whether its field has one of these values."""
        column = self.columns.get(name)
        if column is None:
            return np.full(self.length, self.length > 0 and DEFAULTS[name] in wanted)
        if isinstance(column, Table):
            return self.mapped(name, wanted.__contains__, np.bool_)
        return np.isin(column, _as_numbers([value for value in self.distinct(name) if value in wanted]))

    def present(self, name: str) -> Bools:
        """For each event, whether its field has a value, rather than None."""
        column = self.columns.get(name)
        return ~self.isin(name, (None,)) if column is None or isinstance(column, Table) else column != ABSENT

    def key(self, *names: str) -> Ints:
        """A number from 0 for each event, the same for two just if they agree in all these fields."""
        return combined(*(codes(self[name]) for name in names))


def column_of(name: str, values: Sequence[Any]) -> Column | None:
    """The column of a field with these values; None if all are the default."""
    if name in DEFAULTS and values.count(DEFAULTS[name]) == len(values):
        return None
    if name in NUMBERS:
        return _numbers(values, NUMBERS[name])
    try:
        place = {value: number for number, value in enumerate(dict.fromkeys(values))}
    except TypeError:  # a value that cannot be hashed
        return _odd(values)
    return Table(tuple(place), np.fromiter(map(place.__getitem__, values), np.int32, len(values)))


def as_values(column: Column) -> list[Any]:
    """The values of a column, by event."""
    if isinstance(column, Table):
        return list(map(column.values.__getitem__, column.index.tolist()))
    if column.dtype == np.int64:
        absent = column == ABSENT
        if absent.any():
            column = column.astype(object)
            column[absent] = None
    values: list[Any] = column.tolist()
    return values


def codes(column: Column) -> Ints:
    """A number from 0 for each event, the same for equal values."""
    if isinstance(column, Table):
        place: dict[Any, int] = {}
        codes = np.array([place.setdefault(value, len(place)) for value in column.values], np.int64)
        return codes[column.index] if len(codes) else np.zeros(0, np.int64)
    absent = column == ABSENT
    shown = column[~absent]
    low, high = (int(shown.min()), int(shown.max())) if len(shown) else (0, 0)
    if high - low >= -ABSENT // 4 or column.dtype != np.int64:
        return _ranked(column)
    return np.where(absent, 0, column - (low - 1))


def combined(first: Ints, *others: Ints) -> Ints:
    """A number for each event, the same for two just if they agree in all of these, which are numbers from 0 on."""
    key = first
    for code in others:
        extent = int(code.max(initial=0)) + 1
        if (int(key.max(initial=0)) + 1) * extent >= -ABSENT:
            key, code = _ranked(key), _ranked(code)
            extent = int(code.max(initial=0)) + 1
        key = key * extent + code
    return key


def operations(events: Columns) -> int:
    """How many operations these are: the events of a collective are one for all members of its group."""
    shared = events.isin("kind", {"collective"}) & events.present("sequence")
    return len(distinct(events.take(shared).key("group", "sequence"))) + int(np.count_nonzero(~shared))


def sums(values: Numbers, places: Array, count: int) -> list[Any]:
    """For each of ``count`` places the sum of its values, added in their order; of integers, exact however large."""
    if values.dtype == np.int64 and len(values):
        largest = max(abs(int(values.min())), abs(int(values.max())))
        values = values.astype(object) if largest * len(values) >= -ABSENT else values
    out = np.zeros(count, values.dtype)
    np.add.at(out, places, values)
    return out.tolist()


def whole_nanoseconds(seconds: Floats) -> Ints | None:
    """Times as integers, if each is the float that is nearest to a whole number of nanoseconds."""
    if not len(seconds) or not np.abs(seconds).max() < _EXACT / 1e9:
        return None
    nanoseconds = np.rint(seconds * 1e9)
    return nanoseconds.astype(np.int64) if np.array_equal(nanoseconds / 1e9, seconds) else None


def _numbers(values: Sequence[Any], dtype: np.dtype[Any]) -> Column:
    """The values as an array; as a table if an array could not give all of them back."""
    types = {*map(type, values)}
    if not types <= {int, float, type(None)}:
        values = list(map(_without_numpy, values))
        types = {*map(type, values)}
    if dtype.kind == "f":
        is_odd = types - {int, float} or (
            int in types and any(abs(v) > _EXACT for v in values if type(v) is int)
        )
    else:
        is_odd = types - {int, type(None)} or ABSENT in values
    if not is_odd:
        with suppress(OverflowError):
            return np.array(_as_numbers(values) if type(None) in types else values, dtype)
    return _odd(values)


def _as_numbers(values: Sequence[Any]) -> list[Any]:
    """The values, with `ABSENT` for None."""
    # A function for each of a million values would take twice as long.
    return [ABSENT if value is None else value for value in values]


def _without_numpy(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _odd(values: Sequence[Any]) -> Table:
    return Table(tuple(values), np.arange(len(values), dtype=np.int32))


def _equal(a: Column, b: Column) -> bool:
    if isinstance(a, Table) or isinstance(b, Table):
        return as_values(a) == as_values(b)
    return np.array_equal(a, b)


def _joined(name: str, parts: Sequence[Column]) -> Column:
    arrays = [part for part in parts if not isinstance(part, Table)]
    if len(arrays) == len(parts):
        return np.concatenate(arrays)
    numbers: dict[Any, int] = {}
    indices = []
    try:
        for table in map(_as_table, parts):
            renumbered = [numbers.setdefault(value, len(numbers)) for value in table.values]
            indices.append(np.array(renumbered, np.int32)[table.index])
    except TypeError:  # a value that cannot be hashed
        indices = []
    if not indices or name in NUMBERS:  # among what should be numbers, True is no 1
        return _odd([*chain.from_iterable(map(as_values, parts))])
    return Table(tuple(numbers), np.concatenate(indices))


def _as_table(column: Column) -> Table:
    return column if isinstance(column, Table) else _odd(as_values(column))


def _occurring(numbers: Array) -> list[int]:
    """The integers that occur; small ones are counted, which is much faster than to sort them."""
    if len(numbers) and numbers.min() >= 0 and numbers.max() < len(numbers) + 1024:
        return np.flatnonzero(np.bincount(numbers)).tolist()
    return list(distinct(numbers).tolist())


def _ranked(numbers: Array) -> Ints:
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)
