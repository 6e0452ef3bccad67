"""Methods that remember their results on their object."""

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Concatenate, ParamSpec, TypeVar, cast

Self = TypeVar("Self")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def memoized(
    method: Callable[Concatenate[Self, Parameters], Result],
) -> cached_property[Callable[Parameters, Result]]:
    """The method with a memory of its results, kept as long as the object lives.

    `functools.cache` on a method would keep the object itself for ever.  The memory cannot be pickled: a class whose
    objects are pickled needs a ``__reduce__``.
    """
    return cached_property(lambda self: cast(Callable[Parameters, Result], cache(partial(method, self))))
