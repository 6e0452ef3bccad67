"""`shared_results`: what many plans of one program have in common is made once, as long as a block lasts.

Plans that are simulated one after another have the same stages, whose programs, events and updates are the same.  Outside of
such a block nothing is kept.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Result = TypeVar("Result")
Kept = dict[str, OrderedDict[Hashable, tuple[Any, Any]]]

MOST = 6
"""The most results of a kind that are kept, those that were asked for last: a program has thousands of ops."""

_KEPT: ContextVar[Kept | None] = ContextVar("_KEPT", default=None)


@contextmanager
def shared_results() -> Iterator[None]:
    """Inside, `shared` makes equal results once."""
    before = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(before)


def shared(what: str, make: Callable[[], Result], *of: object, by: Hashable = (), most: int = MOST) -> Result:
    """The result of ``make``, which depends on the objects ``of`` which it is made and on ``by`` alone.

    It is made once for the same objects and equal ``by``, inside of `shared_results`; elsewhere for each call.
    """
    kept = _KEPT.get()
    if kept is None:
        return make()
    found = kept.setdefault(what, OrderedDict())
    key = by, tuple(map(id, of))
    if key not in found:
        found[key] = make(), of  # which keeps the objects alive, and so their numbers
        if len(found) > most:
            found.popitem(last=False)
    found.move_to_end(key)
    result: Result = found[key][0]
    return result
