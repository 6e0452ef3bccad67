"""What the decorators of `functools` make of a function travels as the function does, and is decorated there anew.

Otherwise a cached function would travel by its name, which a device does not have; `functools.cached_property` holds a
lock before Python 3.12, and `functools.singledispatch` weak references.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

_Cached = type(functools.lru_cache(str))
_DISPATCH_CODE = functools.singledispatch(str).__code__  # type: ignore[attr-defined]


def reduce_decorated(obj: Any) -> tuple[Any, ...] | None:
    """How to pickle an object that a decorator has made; None for others."""
    kind = type(obj)
    if kind is _Cached:
        return _cached, (obj.__wrapped__, obj.cache_parameters())
    if kind is functools.cached_property:
        return _cached_property, (obj.func, obj.attrname)
    if kind is FunctionType and obj.__code__ is _DISPATCH_CODE:
        return _dispatching, (dict(obj.registry),)
    return None


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """With an empty cache."""
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _dispatching(registry: Mapping[type, Callable[..., Any]]) -> Callable[..., Any]:
    made = functools.singledispatch(registry[object])
    for kind, function in registry.items():
        made.register(kind, function)
    return made
