"""Trees: nested tuples, lists and dicts of arrays and scalars, which are sent as one value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any


def leaves(value: Any) -> list[Any]:
    """The leaves of a tree (arrays and scalars), in order."""
    if not isinstance(value, dict | tuple | list):
        return [value]
    children = list(value.values()) if isinstance(value, dict) else [*value]
    return children if _are_leaves(children) else [leaf for child in children for leaf in leaves(child)]


def leaf_types(value: Any) -> set[type]:
    """The types of the leaves.  It does not visit each leaf in Python: a list of 100,000 numbers takes one step."""
    if not isinstance(value, dict | tuple | list):
        return {type(value)}
    children = value.values() if isinstance(value, dict) else value
    types = set(map(type, children))
    return types if not _has_tree(types) else set().union(*map(leaf_types, children))


def rebuild(value: Any, new_leaves: Iterable[Any]) -> Any:
    """A tree like ``value`` with other leaves, taken from the front of ``new_leaves``."""
    return _rebuilt(value, iter(new_leaves))


def _rebuilt(value: Any, left: Iterator[Any]) -> Any:
    if isinstance(value, dict):
        return {key: _rebuilt(child, left) for key, child in value.items()}
    if isinstance(value, tuple | list):
        children = (
            list(islice(left, len(value)))
            if _are_leaves(value)
            else [_rebuilt(child, left) for child in value]
        )
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    return next(left)


def _are_leaves(children: Iterable[Any]) -> bool:
    """Whether no child is a tree."""
    return not _has_tree(set(map(type, children)))


def _has_tree(types: Iterable[type]) -> bool:
    return any(issubclass(kind, dict | tuple | list) for kind in types)
