"""Traces as files: JSON by columns, which loads as it was saved.

A column holds one field of all events; a field that is everywhere at its default has none.  Numbers are
written as they are, words and tuples once each with an index for every event, so a million events stay small:

    "columns": {"rank": [0, 1], "name": {"values": ["all_reduce"], "index": [0, 0]}, ...}

What a field may hold follows from its annotation in `parallelism.trace.Event`.  Everything is checked, when
saved and when loaded, because a file may come from anywhere; nothing in it is ever executed.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import repeat
from math import inf, isfinite
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from parallelism.trace import Event, Trace

FORMAT, VERSION = "vcluster trace", 1
LARGEST_SIZE = 2**16
"""The most devices a file may speak of, so that a forged one cannot ask for endless memory."""
LARGEST_INTEGER = 2**53 - 1
"""The largest integer that every reader of JSON keeps exactly."""
LARGEST_FLOAT = float(np.finfo(np.float64).max)

_LOWEST = {"peer": -1, "tag": -LARGEST_INTEGER, "nbytes": -inf, "start_seconds": -inf, "wall_start_seconds": -inf}
_RANK_FIELDS = frozenset(("rank", "peer", "group"))


def save(path: str | PathLike[str], trace: Trace, event_type: type[Event], kinds: Sequence[str]) -> None:
    """Writes ``trace``; ``ValueError`` that names event and field for a value that could not be loaded again."""
    header = {
        "format": FORMAT, "version": VERSION, "size": trace.size,
        "ranks": None if len(trace.ranks) == trace.size else trace.ranks,
        "mesh_shape": trace.mesh_shape, "hardware": trace.hardware, "host_traffic": trace.host_traffic,
    }
    columns: list[str] = []
    for field in fields(event_type):
        column: list[Any] = [getattr(event, field.name) for event in trace.events]
        if field.default is not MISSING and column.count(field.default) == len(column):
            continue
        rule = _rule(path, field.name, str(field.type), trace.size, kinds)
        columns.append(f"{json.dumps(field.name)}:{json.dumps(rule.encode(column), separators=(',', ':'))}")
    with Path(path).open("w", encoding="ascii") as file:     # only now: a trace that cannot be saved spoils no file
        file.write("{" + "".join(f"{json.dumps(key)}:{json.dumps(_plain(value))},\n" for key, value in header.items()))
        file.write('"columns":{\n')
        for i, text in enumerate(columns):
            file.write(",\n" if i else "")
            file.write(text)
        file.write("}}\n")


def load(
    path: str | PathLike[str], event_type: type[Event], kinds: Sequence[str],
) -> tuple[list[Event], dict[str, Any]]:
    """The events in ``path``, and the other arguments of its trace; ``ValueError`` if it holds no such thing."""
    try:
        document = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a {FORMAT}, got what is no JSON: {error}") from None
    if type(document) is not dict or document.get("format") != FORMAT:
        raise ValueError(f'{path}: expected a {FORMAT}, got JSON that does not begin with "format": "{FORMAT}"')
    if type(document.get("version")) is not int or document["version"] != VERSION:
        raise ValueError(f"{path}: expected version {VERSION} of the {FORMAT}, got {_show(document.get('version'))}")
    header = _header(path, document)
    columns = document.get("columns")
    if type(columns) is not dict:
        raise ValueError(f"{path}: expected an object of columns, got {_show(columns)}")
    if unknown := columns.keys() - {field.name for field in fields(event_type)}:
        raise ValueError(f"{path}: an event has no field {_show(min(unknown))}")
    length: int | None = None
    decoded: list[Any] = []
    for field in fields(event_type):
        if field.name in columns:
            rule = _rule(path, field.name, str(field.type), header["size"], kinds)
            values = rule.decode(columns[field.name])
            length = len(values) if length is None else length
            if len(values) != length:
                raise rule.error(min(length, len(values)), f"{length} values, one for each event", len(values))
            decoded.append(values)
        elif field.default is MISSING:
            raise ValueError(f"{path}: event 0, field {field.name!r}: the column is missing")
        else:
            decoded.append(repeat(field.default))
    return list(map(event_type, *decoded)), header


def _header(path: str | PathLike[str], document: dict[str, Any]) -> dict[str, Any]:
    header = {key: document.get(key) for key in ("size", "ranks", "mesh_shape", "hardware", "host_traffic")}
    size: Any = header["size"]
    if not _integers(0, LARGEST_SIZE)([size]):
        raise ValueError(f"{path}: size should be an integer from 0 to {LARGEST_SIZE}, got {_show(size)}")
    ranks, axes = _lists(_integers(0, size - 1)), _lists(_pairs(_texts, _integers(1, size)))
    for key, expected, is_right in (
        ("ranks", f"a list of ranks below {size}, or null", _optional(ranks)),
        ("mesh_shape", "a list of axes with their sizes, or null", _optional(axes)),
        ("hardware", "a name or null", _optional(_texts)),
        ("host_traffic", "true or false", lambda column: type(column[0]) is bool),
    ):
        if not is_right([header[key]]):
            raise ValueError(f"{path}: {key} should be {expected}, got {_show(header[key])}")
    return header


_Check = Callable[[Sequence[Any]], bool]
"""Whether all of a column is right: of a whole column, so that the usual case costs little for each event."""


@dataclass(frozen=True)
class _Rule:
    """What the column of one field may hold, and how it is written."""

    path: str | PathLike[str]
    field: str
    expected: str
    check: _Check
    is_table: bool

    def encode(self, column: list[Any]) -> Any:
        if self.is_table:
            place = {value: i for i, value in enumerate(dict.fromkeys(column))}
            table = {"values": [_plain(value) for value in place], "index": [place[value] for value in column]}
            self._verify_table(table)
            return table
        if not self.check(column):
            column = [_plain(value) for value in column]
            self._verify(column)
        return column

    def decode(self, column: Any) -> list[Any]:
        if not self.is_table:
            if type(column) is not list:
                raise self.error(0, "a list with a value for each event", column)
            self._verify(column)
            return column
        if type(column) is not dict or column.keys() != {"values", "index"} or {*map(type, column.values())} != {list}:
            raise self.error(0, "a table of two lists, values and index", column)
        count = len(column["values"])
        index = _Rule(self.path, self.field, f"an index into {count} values", _integers(0, count - 1), False)
        index._verify(column["index"])
        self._verify_table(column)
        values = [_frozen(value) for value in column["values"]]
        return [values[i] for i in column["index"]]

    def _verify(self, column: list[Any]) -> None:
        if not self.check(column):
            event = next(i for i, value in enumerate(column) if not self.check([value]))
            raise self.error(event, self.expected, column[event])

    def _verify_table(self, table: dict[str, Any]) -> None:
        for i, value in enumerate(table["values"]):
            if not self.check([value]):
                raise self.error(table["index"].index(i) if i in table["index"] else None, self.expected, value)

    def error(self, event: int | None, expected: str, got: Any) -> ValueError:
        where = "no event" if event is None else f"event {event}"
        return ValueError(f"{self.path}: {where}, field {self.field!r}: expected {expected}, got {_show(got)}")


def _rule(path: str | PathLike[str], field: str, annotation: str, size: int, kinds: Sequence[str]) -> _Rule:
    lowest = _LOWEST.get(field, 0)
    integers = _integers(lowest, size - 1 if field in _RANK_FIELDS else LARGEST_INTEGER)
    span = f" from {lowest} to {size - 1}" if field in _RANK_FIELDS else " from 0 up" if lowest == 0 else ""
    sources = _pairs(_integers(0, size - 1), _integers(0, LARGEST_INTEGER))
    expected, check, is_table = {
        "int": (f"an integer{span}", integers, False),
        "float": (f"a finite number{span}", _numbers(lowest), False),
        "str": ("a text", _texts, True),
        "tuple[int, ...]": (f"a list of integers{span}", _lists(integers), True),
        "tuple[str, ...]": ("a list of texts", _lists(_texts), True),
        "tuple[tuple[int, int], ...]": ("a list of ranks with their bytes", _lists(sources), True),
    }[annotation.removesuffix(" | None")]
    if field == "kind":
        expected, check = f"one of {', '.join(kinds)}", lambda column: _texts(column) and set(column) <= set(kinds)
    if annotation.endswith(" | None"):
        expected, check = f"{expected} or null", _optional(check)
    return _Rule(path, field, expected, check, is_table)


def _integers(lowest: float, highest: int) -> _Check:
    return lambda column: not column or (
        {*map(type, column)} == {int} and lowest <= min(column) and max(column) <= highest)


def _numbers(lowest: float) -> _Check:
    return lambda column: not column or (        # bounds first: isfinite raises for integers beyond the floats
        {*map(type, column)} <= {int, float} and max(lowest, -LARGEST_FLOAT) <= min(column)
        and max(column) <= LARGEST_FLOAT and all(map(isfinite, column)))


def _texts(column: Sequence[Any]) -> bool:
    return not column or {*map(type, column)} == {str}


def _lists(check: _Check) -> _Check:
    return lambda column: all(type(value) is list and check(value) for value in column)


def _pairs(first: _Check, second: _Check) -> _Check:
    return lambda column: all(
        type(pair) is list and len(pair) == 2 and first(pair[:1]) and second(pair[1:]) for pair in column)


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
