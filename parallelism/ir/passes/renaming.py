"""Functions that differ in names alone: the form that they share, and the names of one put in place of another's.

What is computed from a function, such as its gradient or its layouts, is the same for all functions of one `Form`
except for the names of values and regions.  So it is computed once, and `Renaming` gives it the other names.  The seeds
of random numbers are names, too: each layer of a model has its own, and only which are equal counts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parallelism.ir.core import Function, Value
from parallelism.ir.core.derived import derived_later, renamed_value, with_values
from parallelism.ir.core.table import Attributes
from parallelism.ir.core.types import TensorType
from parallelism.ir.passes.gradients import GRADIENT, MARK
from parallelism.sharding import TensorSharding

_MARKED = f"{MARK}."
_SEED = "seed"
"""The attribute of an op that selects its random numbers."""


class Form:
    """What functions are without their names: equal for functions that differ in names of values and regions or seeds.

    Kinds, attributes, types, layouts, and which op uses which value are parts of it; so is which of the ``functions``
    share the name of a value.  ``names`` are lists of names of values, and ``more`` is anything else to tell apart.
    The names of the functions do not count.
    """

    __slots__ = ("_hash", "_key")

    def __init__(
        self, functions: Iterable[Function | None], names: Iterable[Sequence[str]] = (), more: Any = None
    ) -> None:
        numbers = _Numbers()
        ops = [numbers.key(function) for function in functions]
        named = list(map(numbers.named, names))
        self._key = *ops, *named, tuple(numbers.kinds), tuple(numbers.texts), more
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Form) and self._hash == other._hash and self._key == other._key
        )


class _Numbers:
    """Numbers what occurs in functions, in the order in which each thing first occurs."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.regions: dict[str, int] = {}
        self.seeds: dict[Any, int] = {}
        self.kinds: dict[tuple[TensorType, TensorSharding | None], int] = {}
        """Types with layouts."""
        self.texts: dict[str, int] = {}
        """Attributes.  As texts, because 1, 1.0 and True are equal, but not as attributes."""
        self._known: dict[Any, int] = {}
        """Numbers of kinds and texts by the ids of objects, which the functions keep alive."""

    def key(self, function: Function | None) -> Any:
        """The function in numbers."""
        if function is None:
            return None
        inputs = self.named([value.name for value in function.inputs]), tuple(map(self.kind, function.inputs))
        ops = []
        for op in function.ops:
            ops.append(
                (
                    op.kind,
                    self.named([value.name for value in op.inputs]),
                    self.text(op.attributes),
                    self.named([value.name for value in op.outputs]),
                    *map(self.kind, op.outputs),
                    self.region(op.region),
                )
            )
        return inputs, tuple(ops), self.named([value.name for value in function.outputs])

    def named(self, names: Sequence[str]) -> tuple[int, ...]:
        """The numbers of names."""
        numbers = self.names
        return tuple([numbers.setdefault(name, len(numbers)) for name in names])

    def kind(self, value: Value) -> int:
        """The number of the type and the layout of a value."""
        own = id(value.type), id(value.layout)
        number = self._known.get(own)
        if number is None:
            number = self._known[own] = self.kinds.setdefault((value.type, value.layout), len(self.kinds))
        return number

    def text(self, attributes: Attributes) -> int:
        """The number of the attributes of an op."""
        number = self._known.get(id(attributes))
        if number is None:
            numbered = _with_seeds(attributes, lambda seed: self.seeds.setdefault(seed, len(self.seeds)))
            number = self._known[id(attributes)] = self.texts.setdefault(repr(numbered), len(self.texts))
        return number

    def region(self, path: str | None) -> Any:
        """The marks of a region, and the number of its path."""
        if path is None:
            return None
        marks, path = _unmarked(path)
        return marks, self.regions.setdefault(path, len(self.regions))


def _with_seeds(attributes: Attributes, seed: Callable[[Any], Any]) -> Attributes:
    """The attributes with ``seed(s)`` in place of a seed s."""
    if all(name != _SEED for name, _ in attributes):
        return attributes
    numbered = dict(attributes)
    numbered[_SEED] = seed(numbered[_SEED])
    return tuple(numbered.items())


def _unmarked(region: str) -> tuple[str, str]:
    """The marks of a backward before a path of a region, and the path; it is empty for a backward of no region."""
    marks = 0
    while region.startswith(_MARKED, marks):
        marks += len(_MARKED)
    return (region, "") if region[marks:] == MARK else (region[:marks], region[marks:])


def _decimals(names: Iterable[str]) -> list[int]:
    """The names that are numbers, sorted."""
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def names_between(old: Iterable[Function | None], new: Iterable[Function | None]) -> dict[str, str]:
    """The names of values of ``new`` by those in ``old``; the functions are of one `Form`."""
    return {
        before.name: after.name
        for was, now in zip(old, new, strict=True)
        if was and now
        for before, after in zip(was.values, now.values, strict=True)
    }


@dataclass
class Renaming:
    """Other names for values and regions, and other seeds: ``names``, ``regions`` and ``seeds``, each by the old one.

    The name of a value that was derived from these is derived from the new names in the same way: ``grad.x``, ``x.1``,
    and for a number, as `Builder` gives them, the number that comes as many free numbers later.
    """

    names: dict[str, str]
    regions: Mapping[str, str]
    seeds: Mapping[Any, Any] = field(default_factory=dict)
    _taken: tuple[list[int], list[int]] = field(init=False, repr=False)
    """The old names that are numbers; and for each new one the number of free numbers before it."""

    def __post_init__(self) -> None:
        new = _decimals(self.names.values())
        self._taken = _decimals(self.names), [taken - count for count, taken in enumerate(new)]
        self._values: dict[int, tuple[Value, Value]] = {}

    @classmethod
    def between(cls, old: Iterable[Function | None], new: Iterable[Function | None]) -> Renaming:
        """The names of ``new`` in place of those of ``old``, which are of one `Form`."""
        both = [(was, now) for was, now in zip(old, new, strict=True) if was and now]
        paths = {
            before.region: after.region
            for was, now in both
            for before, after in zip(was.ops, now.ops, strict=True)
        }
        regions = {
            _unmarked(before)[1]: _unmarked(after)[1] for before, after in paths.items() if before and after
        }
        seeds = {
            old: new
            for was, now in both
            for before, after in zip(was.ops, now.ops, strict=True)
            for (name, old), (_, new) in zip(before.attributes, after.attributes, strict=True)
            if name == _SEED
        }
        return cls(names_between(*zip(*both, strict=True)), regions, seeds)

    def name(self, old: str) -> str:
        """The new name of a value."""
        new = self.names.get(old)
        if new is None:
            if old.startswith(GRADIENT):
                new = f"{GRADIENT}{self.name(old[len(GRADIENT) :])}"
            elif old.isdecimal():
                new = str(self._number(int(old)))
            else:
                base, _, last = old.rpartition(".")
                new = f"{self.name(base)}.{last}" if base else old
            self.names[old] = new
        return new

    def _number(self, old: int) -> int:
        """The number that is preceded by as many free numbers as ``old`` was."""
        taken, free_before = self._taken
        free = old - bisect_left(taken, old)
        return free + bisect_right(free_before, free)

    def region(self, old: str | None) -> str | None:
        """The new path of a region."""
        if old is None:
            return None
        marks, path = _unmarked(old)
        return f"{marks}{self.regions[path]}" if path else marks

    def value(self, old: Value) -> Value:
        """The value under its new name."""
        known = self._values.get(id(old))
        if known is None:
            known = self._values[id(old)] = old, renamed_value(old, self.name(old.name))
        return known[1]

    def function_later(self, old: Function, name: str) -> Function:
        """The function under the ``name``, with the new names; made at the first use of an op.

        ``ValueError`` if two values would have one name.
        """
        names = [value.name for value in old.values]
        if len(set(map(self.name, names))) < len(names):
            raise ValueError(f"two values of @{old.name} would have the same name")
        return derived_later(name, _Renamed(self, old, name), old.attributes)

    def function(self, old: Function, name: str) -> Function:
        """The function under the ``name``, with the new names, which differ."""
        values = {value.name: self.value(value) for value in old.values}
        return with_values(
            old, values, name=name, region=self.region, attributes=self._attributes if self.seeds else None
        )

    def _attributes(self, old: Attributes) -> Attributes:
        return _with_seeds(old, self.seeds.__getitem__)


class _Renamed(NamedTuple):
    """A function with other names, before it is made."""

    renaming: Renaming
    old: Function
    name: str

    def derived(self) -> Function:
        return self.renaming.function(self.old, self.name)
