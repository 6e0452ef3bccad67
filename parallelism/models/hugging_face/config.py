"""`Config`: the fields of a `config.json`, each read with the type that it must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from parallelism.display.quantities import shortened

MOST = 2**40
"""The largest whole number that a field may have."""
MOST_LAYERS = 10_000
TOLD = 60
"""So many characters of a wrong value are told."""


@dataclass(frozen=True)
class Config:
    """The fields of a file, and those of the class of its architecture where the file has none.

    Every method raises ``ValueError`` with the field, what it must be, and what came.
    """

    name: str
    """The file, for messages."""
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Those of the configuration class in transformers."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Further names of fields, in old files."""

    def get(self, name: str) -> Any:
        """The value of a field, None where it is null or nowhere."""
        for each in (name, self.others.get(name, name)):
            if each in self.values:
                return self.values[each]
        return self.defaults.get(name)

    def whole(self, name: str, least: int = 1, most: int = MOST) -> int:
        """A whole number."""
        value = self.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least:,} to {most:,}", value)
        return value

    def whole_or_none(self, name: str) -> int | None:
        """A whole number, or null."""
        return None if self.get(name) is None else self.whole(name)

    def number(self, name: str, otherwise: float | None = None) -> float:
        """A finite number; ``otherwise`` where the field is null or missing."""
        value = self.get(name)
        if value is None and otherwise is not None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.wrong(name, "a number", value)
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A finite number, or null."""
        return None if self.get(name) is None else self.number(name)

    def switch(self, name: str) -> bool:
        """True or false; null is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return bool(value)

    def text(self, name: str) -> str:
        """A word."""
        value = self.get(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a word", value)
        return value

    def group(self, name: str) -> Mapping[str, Any]:
        """An object; empty where the field is null or missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "an object", value)
        return value or {}

    def listed(self, name: str, entries: int, kinds: tuple[type, ...]) -> Sequence[Any] | None:
        """A list with an entry of these types for each of so many; None where it is null, missing or empty."""
        value = self.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list | tuple) or len(value) != entries:
            raise self.wrong(name, f"a list of {entries}", value)
        if not all(isinstance(each, kinds) for each in value):
            raise self.wrong(name, f"a list of {' or '.join(kind.__name__ for kind in kinds)}", value)
        return value

    def numbers(self, name: str) -> set[int]:
        """A list of whole numbers; empty where it is null or missing."""
        value = self.get(name)
        if value is None:
            return set()
        if not isinstance(value, list | tuple) or not all(type(each) is int for each in value):
            raise self.wrong(name, "a list of whole numbers", value)
        return set(value)

    def must(self, name: str, *allowed: Any) -> None:
        """Refuses a field that changes the arithmetic in a way that is not modelled: any value but these."""
        value = self.get(name)
        if value not in allowed:
            told = " or ".join("null" if each is None else repr(each).lower() for each in allowed)
            raise ValueError(
                f"{self.name}: {name}={_shown(value)} changes the arithmetic and is not modelled; it can be {told}"
            )

    def with_fields(self, **fields: Any) -> Config:
        """The same file with other values of these fields."""
        return replace(self, values={**self.values, **fields})

    def within(self, name: str, defaults: Mapping[str, Any]) -> Config:
        """The fields of an object in a field."""
        return Config(f"{self.name}, {name}", self.group(name), defaults)

    def wrong(self, name: str, expected: str, value: Any) -> ValueError:
        """That a field must be something else."""
        got = "nothing" if value is None else _shown(value)
        return ValueError(f"{self.name}: {name} must be {expected}, got {got}")


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return "null" if value is None else shortened(value, TOLD)
