"""The fields of a description, checked: what is wrong names the field, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import inf, isfinite
from typing import Any, TypeVar

import numpy as np

from parallelism.spelling import did_you_mean

Value = TypeVar("Value")

SMALLEST, LARGEST = 1e-36, 1e36
"""Between these are all numbers of a description but 0.  A product or quotient of several is then a finite float."""


def store(described: object, **values: Any) -> None:
    """Replaces fields of a frozen description, from its ``__post_init__``."""
    for field, value in values.items():
        object.__setattr__(described, field, value)


def changed(described: Value, **values: Any) -> Value:
    """A copy of a frozen description with other values of some fields, which must be right: they are not checked."""
    copied: Value = object.__new__(type(described))
    copied.__dict__.update(described.__dict__, **values)
    return copied


def check(described: object, **checks: Callable[[str, Any], Any]) -> None:
    """Replaces fields of a frozen description by what these functions make of a field's name and its value."""
    store(described, **{field: check(field, getattr(described, field)) for field, check in checks.items()})


def number(
    field: str, value: Any, of: str = "", *, least: float = 0, above: float | None = None, most: float = inf
) -> float:
    """A checked number: at least ``least`` or above ``above``, at most ``most``; and 0, or in the bounds of all."""

    def wanted() -> str:
        bounds = f"at least {least:g}" if above is None else f"above {above:g}"
        if most < inf:
            bounds += f" and at most {most:g}"
        return f"{field} must be a number{of and f' {of}'}, {bounds}"

    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{wanted()}; got {shown(value)}")
    try:
        checked = float(value)
    except OverflowError:
        checked = inf
    if not isfinite(checked) or checked > most or (checked < least if above is None else checked <= above):
        raise ValueError(f"{wanted()}; got {shown(value)}")
    if checked and not SMALLEST <= abs(checked) <= LARGEST:
        raise ValueError(
            f"{wanted()}, and from {SMALLEST:g} to {LARGEST:g}: times on such hardware would be no numbers; "
            f"got {shown(value)}"
        )
    return checked


def numbers(
    field: str,
    values: Any,
    names: Collection[str],
    of: str = "",
    *,
    what: str,
    least: int = 0,
    most: float = inf,
) -> Table[float]:
    """A checked table of numbers above 0, at least so many, by some of these names; ``what`` describes the table."""
    if not isinstance(values, Mapping) or len(values) < least:
        raise TypeError(
            f"{field} must be a table of {what}{', not empty' if least else ''}; got {shown(values)}"
        )
    for name in values:
        if name not in names:
            raise ValueError(
                f"{field} must be of {', '.join(names)}; got {shown(name)}{did_you_mean(name, names)}"
            )
    return Table(
        {name: number(f"{field}.{name}", value, of, above=0, most=most) for name, value in values.items()}
    )


def whole_number(field: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """A checked whole number."""
    wanted = (
        f"{field} must be a whole number of at least {least}{'' if most is None else f' and at most {most}'}"
    )
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{wanted}; got {shown(value)}")
    checked: int = value.__index__()
    if checked < least or (most is not None and checked > most):
        raise ValueError(f"{wanted}; got {shown(value)}")
    return checked


def text(field: str, value: Any, most: int = 80) -> str:
    """A checked text of one printable line."""
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{field} must be a line of 1 to {most} printable characters; got {shown(value)}")
    return value


def text_or_none(field: str, value: Any, most: int = 80) -> Any:
    """A checked text of one printable line, or an empty one."""
    return value and text(field, value, most)


def switch(field: str, value: Any, others: Sequence[str] = ()) -> Any:
    """A checked bool, or one of the texts that may stand in its place."""
    if not isinstance(value, bool) and value not in others:
        words = "".join(f' or "{other}"' for other in others)
        raise TypeError(f"{field} must be true or false{words}; got {shown(value)}")
    return value


def texts(field: str, values: Any, most: int) -> Table[str]:
    """A checked table of texts by name."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{field} must be a table of texts; got {shown(values)}")
    return Table(
        {
            text(f"a name in {field}", name): text(f"{field}.{name}", value, most)
            for name, value in values.items()
        }
    )


def each(field: str, values: Any, kind: type[Value]) -> tuple[Value, ...]:
    """A checked tuple of values of one kind."""
    if not isinstance(values, Sequence) or not all(isinstance(value, kind) for value in values):
        raise TypeError(f"{field} must be a sequence of {kind.__name__}; got {shown(values)}")
    return tuple(values)


def places(placement: Any, devices: int) -> tuple[int, ...]:
    """A checked tuple of different places by rank, each one of so many devices."""
    if not isinstance(placement, Sequence) or isinstance(placement, str):
        raise TypeError(f"placement must be a list of places by rank; got {shown(placement)}")
    found = tuple(whole_number("placement", place, least=0) for place in placement)
    if found and max(found) >= devices:
        raise ValueError(f"placement must name places 0 to {devices - 1}; got {max(found)}")
    if len(set(found)) < len(found):
        raise ValueError(f"placement must give each rank a place of its own; got {shown(found)}")
    return found


def shown(value: Any) -> str:
    """A value in a short text; the value may be of any size."""
    try:
        words = ascii(value)
    except (ValueError, RecursionError):  # an integer with too many digits, a list too deep
        return f"a {type(value).__name__} too large to print"
    return words if len(words) <= 60 else f"{words[:60]}..."


seconds = partial(number, of="of seconds")
bandwidth = partial(number, of="of bytes a second", above=0)
share = partial(number, above=0, most=1)
"""A checked part of a whole, above 0."""


class Table(Mapping[str, Value]):
    """A read-only mapping from names that can be hashed and pickled."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Value]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Value:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)
