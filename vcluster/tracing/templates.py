"""The description of an event in a record: a `Template`, which many events share, or a `Row` of its own."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

from parallelism.dtypes import as_dtype
from parallelism.events import Event

FIELDS = tuple(field.name for field in fields(Event))[1:]
INDEX = {name: i for i, name in enumerate(FIELDS)}
DEFAULTS: list[Any] = [None, None] + [field.default for field in fields(Event)[3:]]


Row = list[Any]
Template = tuple[str, str, dict[str, Any]]
"""Kind, name and fields of events that differ only in line and time."""


def row_of(what: Row | Template) -> Row:
    """All fields of an event, as far as its description gives them."""
    if type(what) is list:
        return what
    kind, name, values = what
    row = DEFAULTS.copy()
    row[0], row[1] = kind, name
    for key, value in values.items():
        row[INDEX[key]] = value
    return row


def message_template(kind: str, peer: int, tag: int, nbytes: int, dtype: str | None = None) -> Template:
    """The description that all messages of one size in one channel share."""
    counted = {"bytes_sent": nbytes, "messages": 1} if kind == "send" else {"bytes_received": nbytes}
    return kind, kind, {"peer": peer, "tag": tag, "dtype": dtype, **counted}


@lru_cache(maxsize=64)
def dtype_name(dtype: Any) -> str:
    """``dtype.name``, cached, because NumPy computes it at every access."""
    return str(as_dtype(dtype).name)
