"""Tables of records that can be added to from outside, and that travel to the devices of a cluster.

A record is frozen, and checked before it stands in a table.  What was added from outside (`outside`) goes with every
run to devices that are processes, and is put in place there by `install`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

Record = TypeVar("Record")


class RegistrationError(ValueError):
    """A record is incomplete, contradicts itself, or has the name of another.

    >>> from parallelism import CollectiveKind, register_kind
    >>> try:
    ...     register_kind(CollectiveKind("all_reduce", "another one", "reduced"))
    ... except ValueError as error:
    ...     print(type(error).__name__, error)
    RegistrationError kind 'all_reduce' is part of the package
    """


def refuse(what: str, *checks: tuple[object, str]) -> None:
    """Raises `RegistrationError` with the reason of the first of ``checks`` that is true: pairs (is wrong, reason)."""
    for is_wrong, reason in checks:
        if is_wrong:
            raise RegistrationError(f"{what}: {reason}")


class Registry(Generic[Record]):
    """Records by key; ``keys`` gives those of a record."""

    def __init__(self, what: str, keys: Callable[[Record], Sequence[Hashable]]) -> None:
        self._what, self._keys = what, keys
        self.records: dict[Any, Record] = {}
        self.outside: tuple[Record, ...] = ()
        """What was registered, in this order."""
        TABLES.append(self)

    def add_own(self, *records: Record) -> None:
        """Add records of this package; the tests check them."""
        for record in records:
            self.records.update(dict.fromkeys(self._keys(record), record))

    def register(self, record: Record, check: Callable[[Record], object], replace: bool = False) -> None:
        """Add a record that passes the check; one that says the same as that of its name changes nothing.

        The check may look the record up.  `RegistrationError` where the name is taken.
        """
        known = [self.records[key] for key in self._keys(record) if key in self.records]
        if known and all(_same(record, other) for other in known):
            return
        own = next((other for other in known if other not in self.outside), None)
        if own is not None or (known and not replace):
            why = (
                "is part of the package" if own is not None else "is registered; replace=True takes its place"
            )
            raise RegistrationError(f"{self._what} {self._keys(record)[0]!r} {why}")
        before = dict(self.records), self.outside
        self._put(record)
        _changed()
        try:
            check(record)
        except BaseException:
            self.records, self.outside = before
            _changed()
            raise

    def forget(self, record: Record) -> None:
        """Take out a record that was registered."""
        self.outside = tuple(other for other in self.outside if other is not record)
        self.records = {key: other for key, other in self.records.items() if other is not record}
        _changed()

    def install(self, records: Sequence[Record]) -> None:
        """Make these all that is registered; they have been checked where they were."""
        for record in self.outside:
            self.forget(record)
        for record in records:
            self._put(record)

    def _put(self, record: Record) -> None:
        keys = self._keys(record)
        self.outside = (*(other for other in self.outside if not set(keys) & set(self._keys(other))), record)
        self.records.update(dict.fromkeys(keys, record))


TABLES: list[Registry[Any]] = []
ON_CHANGE: list[Callable[[], object]] = []
"""Called after each change: they forget what was derived from records."""
_version = 0


def version() -> int:
    """How often the tables have changed."""
    return _version


def registered() -> tuple[tuple[Any, ...], ...]:
    """By table, what was registered from outside."""
    return tuple(table.outside for table in TABLES)


def install(records: Sequence[Sequence[Any]]) -> None:
    """In a device: the records that the host has."""
    for table, own in zip(TABLES, records, strict=True):
        table.install(own)
    _changed()


def _changed() -> None:
    global _version
    _version += 1
    for forget in ON_CHANGE:
        forget()


def _same(a: Any, b: Any) -> bool:
    """Whether two records say the same: equal values, functions of the same code."""
    return type(a) is type(b) and all(_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def _equal(a: Any, b: Any) -> bool:
    if a is b or not callable(a) or not callable(b):
        return bool(a is b or a == b)
    code, other = getattr(a, "__code__", None), getattr(b, "__code__", None)
    return code is not None and code == other and all(map(_equal, _closed_over(a), _closed_over(b)))


def _closed_over(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]
