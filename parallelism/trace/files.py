"""Traces as files: JSON by columns, which loads as it was saved.

A column holds one field of all events; a field that is everywhere at its default has none.  Numbers are
written as they are, words and tuples once each with an index for every event, so a million events stay small:

    "columns": {"rank": [0, 1], "name": {"values": ["all_reduce"], "index": [0, 0]}, ...}

The allowed values of a field follow from its annotation in `parallelism.trace.Event`.  Everything is checked, when
saved and when loaded, because a file may come from anywhere; nothing in it is ever executed.
"""

import json
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from math import inf, isfinite
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.events import (
    ABSENT,
    DEFAULTS,
    KINDS,
    NUMBERS,
    Column,
    Columns,
    Event,
    Table,
    as_values,
    column_of,
    whole_nanoseconds,
)
from parallelism.hardware import Software
from parallelism.timeline import Priced
from parallelism.trace.trace import Trace
from parallelism.whole_files import written_whole

FORMAT, VERSION = "vcluster trace", 1
LARGEST_SIZE = 2**16
"""The most devices a file may speak of, so that a forged one cannot ask for endless memory."""
LARGEST_INTEGER = 2**53 - 1
"""The largest integer that every reader of JSON keeps exactly."""
LARGEST_FLOAT = float(np.finfo(np.float64).max)

_ALWAYS_TOLD = Priced._fields.index("folded")
"""The number of parts of `Priced` that stand in every file."""
_LOWEST = {
    "peer": -1,
    "tag": -LARGEST_INTEGER,
    "nbytes": -inf,
    "start_seconds": -inf,
    "wall_start_seconds": -inf,
}
_RANK_FIELDS = frozenset(("rank", "peer", "group"))


def save(path: str | PathLike[str], trace: Trace) -> None:
    """Writes ``trace``; ``ValueError`` that names event and field for a value that could not be loaded again."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "size": trace.size,
        "ranks": None if len(trace.ranks) == trace.size else trace.ranks,
        "mesh_shape": trace.mesh_shape,
        "hardware": trace.hardware,
        "host_traffic": trace.host_traffic,
        "priced": _priced(trace.priced),
    }
    head = "{" + "".join(f"{json.dumps(key)}:{json.dumps(_plain(value))},\n" for key, value in header.items())
    columns = {
        field.name: _rule(path, field.name, str(field.type), trace.size).checked(trace.columns[field.name])
        for field in fields(Event)
        if not _is_default(field.name, trace.columns[field.name])
    }
    with written_whole(path) as file:
        file.write(head + '"columns":{\n')
        for i, (name, column) in enumerate(columns.items()):
            file.write((",\n" if i else "") + f"{json.dumps(name)}:{_text(name, column)}")
        file.write("}}\n")


def _priced(priced: Priced) -> tuple[Any, ...]:
    """How it was priced, without the last parts as far as they are at their defaults: as before there were these."""
    kept = len(priced)
    while kept > _ALWAYS_TOLD and priced[kept - 1] == Priced()[kept - 1]:
        kept -= 1
    return priced[:kept]


def load(path: str | PathLike[str]) -> tuple[Columns, dict[str, Any]]:
    """The events in ``path``, and the other arguments of its trace; ``ValueError`` if it holds no such thing."""
    try:
        document = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a {FORMAT}, got what is no JSON: {error}") from None
    _expect(
        type(document) is dict and document.get("format") == FORMAT,
        f'{path}: expected a {FORMAT}, got JSON that does not begin with "format": "{FORMAT}"',
    )
    version, columns = document.get("version"), document.get("columns")
    _expect(
        type(version) is int and version == VERSION,
        f"{path}: expected version {VERSION} of the {FORMAT}, got {_show(version)}",
    )
    header = _header(path, document)
    _expect(type(columns) is dict, f"{path}: expected an object of columns, got {_show(columns)}")
    unknown = columns.keys() - {field.name for field in fields(Event)}
    _expect(not unknown, f"{path}: an event has no field {_show(min(unknown, default=None))}")
    length: int | None = None
    decoded: dict[str, Column] = {}
    for field in fields(Event):
        if field.name in columns:
            rule = _rule(path, field.name, str(field.type), header["size"])
            column = rule.decode(columns.pop(field.name))
            count = len(column.index if isinstance(column, Table) else column)
            length = count if length is None else length
            if count != length:
                raise rule.error(min(length, count), f"{length} values, one for each event", count)
            decoded[field.name] = column
        elif field.default is MISSING:
            raise ValueError(f"{path}: event 0, field {field.name!r}: the column is missing")
    return Columns(length or 0, decoded), header


def _header(path: str | PathLike[str], document: dict[str, Any]) -> dict[str, Any]:
    header = {"priced": [], **document}
    header = {
        key: header.get(key) for key in ("size", "ranks", "mesh_shape", "hardware", "host_traffic", "priced")
    }
    size: Any = header["size"]
    _expect(
        _integers(0, LARGEST_SIZE)([size]),
        f"{path}: size should be an integer from 0 to {LARGEST_SIZE}, got {_show(size)}",
    )
    ranks = _lists(_integers(0, size - 1))
    axes = _lists(_pairs(_texts, _integers(1, size)))
    for key, expected, is_right in (
        ("ranks", f"a list of ranks below {size}, or null", _optional(ranks)),
        ("mesh_shape", "a list of axes with their sizes, or null", _optional(axes)),
        ("hardware", "a name or null", _optional(_texts)),
        ("host_traffic", "true or false", lambda column: type(column[0]) is bool),
        ("priced", "how compute, dtype and links were priced, and the seconds left out", _is_priced),
    ):
        _expect(is_right([header[key]]), f"{path}: {key} should be {expected}, got {_show(header[key])}")
    return header | {"priced": _with_software(_frozen(header["priced"]))}


def _with_software(priced: tuple[Any, ...]) -> tuple[Any, ...]:
    """The parts of `Priced` as they are in a file, with the software as one value."""
    place = Priced._fields.index("software")
    if priced[place:] in ((), (None,)):
        return priced
    return (*priced[:place], Software(*priced[place]))


def _expect(is_right: bool, error: str) -> None:
    if not is_right:
        raise ValueError(error)


_Check = Callable[[Sequence[Any]], bool]
"""Whether all of a column is right."""


@dataclass(frozen=True)
class _Rule:
    """The values that the column of one field may have."""

    path: str | PathLike[str]
    field: str
    expected: str
    check: _Check
    bounds: tuple[float, float] | None
    """Of numbers, by which an array is checked as a whole; None: the column is a table."""
    optional: bool

    def checked(self, column: Column) -> Column:
        """The column of a trace, if it may be written; a table without the values that do not occur."""
        if self.bounds is not None:
            if isinstance(column, Table):  # what is there instead of numbers
                self._verify([_plain(value) for value in as_values(column)])
            elif not self._fits(column):
                self._verify(as_values(column))
            return column
        if not isinstance(column, Table):
            raise self.error(0, self.expected, column[0])
        used = np.flatnonzero(np.bincount(column.index, minlength=len(column.values)))
        if len(used) < len(column.values):
            place = np.zeros(len(column.values), np.int32)
            place[used] = np.arange(len(used))
            column = Table(tuple(column.values[i] for i in used), place[column.index])
        self._verify_table([_plain(value) for value in column.values], column.index)
        return column

    def decode(self, column: Any) -> Column:
        """The column that a file holds."""
        if self.bounds is not None:
            if type(column) is not list:
                raise self.error(0, "a list with a value for each event", column)
            if not {*map(type, column)} <= {int, float, type(None)}:
                self._verify(column)
            numbers = column_of(self.field, column)
            if isinstance(numbers, Table) or not (numbers is None or self._fits(numbers)):
                self._verify(column)
            if isinstance(numbers, Table):  # integers that are no floats, where floats are meant
                numbers = column_of(self.field, [float(value) for value in column])
            return Columns(len(column), {})[self.field] if numbers is None else numbers
        if (
            type(column) is not dict
            or column.keys() != {"values", "index"}
            or {*map(type, column.values())} != {list}
        ):
            raise self.error(0, "a table of two lists, values and index", column)
        values, count = column["values"], len(column["values"])
        is_index = _integers(0, count - 1)
        if not is_index(column["index"]):
            event = next(i for i, value in enumerate(column["index"]) if not is_index([value]))
            raise self.error(event, f"an index into {count} values", column["index"][event])
        index = np.array(column["index"], np.int32)
        self._verify_table(values, index)
        return Table(tuple(map(_frozen, values)), index)

    def _fits(self, numbers: npt.NDArray[Any]) -> bool:
        assert self.bounds is not None
        if self.optional:
            numbers = numbers[numbers != ABSENT]
        lowest, highest = self.bounds  # not a number is neither
        return not len(numbers) or bool(numbers.min() >= lowest and numbers.max() <= highest)

    def _verify(self, column: Sequence[Any]) -> None:
        if not self.check(column):
            event = next(i for i, value in enumerate(column) if not self.check([value]))
            raise self.error(event, self.expected, column[event])

    def _verify_table(self, values: list[Any], index: npt.NDArray[np.int32]) -> None:
        for i, value in enumerate(values):
            if not self.check([value]):
                events = np.flatnonzero(index == i)
                raise self.error(int(events[0]) if len(events) else None, self.expected, value)

    def error(self, event: int | None, expected: str, got: Any) -> ValueError:
        where = "no event" if event is None else f"event {event}"
        return ValueError(
            f"{self.path}: {where}, field {self.field!r}: expected {expected}, got {_show(got)}"
        )


def _rule(path: str | PathLike[str], field: str, annotation: str, size: int) -> _Rule:
    lowest = _LOWEST.get(field, 0)
    highest = size - 1 if field in _RANK_FIELDS else LARGEST_INTEGER
    integers = _integers(lowest, highest)
    span = ""
    if field in _RANK_FIELDS:
        span = f" from {lowest} to {size - 1}"
    elif lowest == 0:
        span = " from 0 up"
    sources = _pairs(_integers(0, size - 1), _integers(0, LARGEST_INTEGER))
    bounds: tuple[float, float] | None
    expected, check, bounds = {
        "int": (f"an integer{span}", integers, (lowest, highest)),
        "float": (f"a finite number{span}", _numbers(lowest), (max(lowest, -LARGEST_FLOAT), LARGEST_FLOAT)),
        "str": ("a text", _texts, None),
        "tuple[int, ...]": (f"a list of integers{span}", _lists(integers), None),
        "tuple[str, ...]": ("a list of texts", _lists(_texts), None),
        "tuple[tuple[str, int], ...]": (
            "a list of dtypes with their bytes",
            _lists(_pairs(_texts, _integers(0, LARGEST_INTEGER))),
            None,
        ),
        "tuple[tuple[int, int], ...]": ("a list of ranks with their bytes", _lists(sources), None),
    }[annotation.removesuffix(" | None")]
    if field == "pairs":
        expected = "a list of pairs of positions"
        check = _lists(_pairs(_integers(0, size - 1), _integers(0, size - 1)))
    if field == "kind":
        expected = f"one of {', '.join(KINDS)}"
        check = lambda column: _texts(column) and set(column) <= set(KINDS)
    optional = annotation.endswith(" | None")
    if optional:
        expected, check = f"{expected} or null", _optional(check)
    return _Rule(path, field, expected, check, None if annotation == "float | None" else bounds, optional)


def _is_default(name: str, column: Column) -> bool:
    if name not in DEFAULTS:
        return False
    default = DEFAULTS[name]
    if isinstance(column, Table):
        return all(column.values[i] == default for i in np.flatnonzero(np.bincount(column.index)))
    return bool(np.all(column == (ABSENT if default is None else default)))


def _text(name: str, column: Column) -> str:
    """The column of a field in JSON."""
    if isinstance(column, Table) and name not in NUMBERS:
        index = _text("index", column.index)
        return f'{{"values":{json.dumps(_plain(column.values), separators=(",", ":"))},"index":{index}}}'
    if (
        not isinstance(column, Table)
        and column.dtype.kind == "i"
        and len(column)
        and column.min() >= 0
        and column.max() <= 9
    ):
        text = np.full(2 * len(column) + 1, ord(","), np.uint8)
        text[1::2] = column + ord("0")
        text[0], text[-1] = b"[]"
        return text.tobytes().decode("ascii")
    if name.endswith("_seconds") and not isinstance(column, Table):
        nanoseconds = whole_nanoseconds(column)
        if nanoseconds is not None:  # the same numbers, written five times as fast
            return str(nanoseconds.tolist()).replace(", ", "e-9,").replace("]", "e-9]")
    values = as_values(column)
    return (
        str(_plain(values) if isinstance(column, Table) else values).replace(" ", "").replace("None", "null")
    )


def _integers(lowest: float, highest: int) -> _Check:
    return lambda column: (
        not column or ({*map(type, column)} == {int} and lowest <= min(column) and max(column) <= highest)
    )


def _numbers(lowest: float) -> _Check:
    return lambda column: (
        not column
        or (  # bounds first: isfinite raises for integers beyond the floats
            {*map(type, column)} <= {int, float}
            and max(lowest, -LARGEST_FLOAT) <= min(column)
            and max(column) <= LARGEST_FLOAT
            and all(map(isfinite, column))
        )
    )


def _is_priced(column: Sequence[Any]) -> bool:
    match column[0]:
        case []:
            return True
        case ["measured" | "modelled", str() | None, bool(), undeclared, left_out, *simulated]:
            return _numbers(0)([undeclared, left_out]) and _is_of_a_simulation(simulated)
    return False


def _is_of_a_simulation(told: Sequence[Any]) -> bool:
    """Whether these may be `Priced.folded`, ``pieces`` and ``software``, of which the last ones may be left out."""
    flags, software = told[:2], told[2:]
    if not all(type(flag) is bool for flag in flags):
        return False
    match software:
        case [] | [None]:
            return True
        case [[bool() | "elementwise" | "epilogues", *switches]] if (
            1 <= len(switches) <= 2
        ):  # earlier files have one
            return all(type(switch) is bool for switch in switches)
    return False


def _texts(column: Sequence[Any]) -> bool:
    return not column or {*map(type, column)} == {str}


def _lists(check: _Check) -> _Check:
    return lambda column: all(type(value) is list and check(value) for value in column)


def _pairs(first: _Check, second: _Check) -> _Check:
    return lambda column: all(
        type(pair) is list and len(pair) == 2 and first(pair[:1]) and second(pair[1:]) for pair in column
    )


def _optional(check: _Check) -> _Check:
    return lambda column: check([value for value in column if value is not None])


def _plain(value: Any) -> Any:
    """The value as JSON has it: NumPy's scalars as Python's, tuples as lists."""
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(part) for part in value] if isinstance(value, (tuple, list)) else value


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if type(value) is list else value


def _show(value: Any) -> str:
    return reprlib.repr(value)
