"""Trees: nested tuples, lists and dicts of arrays and scalars, which are sent as one value."""

from __future__ import annotations

from typing import Any


def leaves(value: Any) -> list[Any]:
    """The leaves of a tree (arrays and scalars), in order."""
    if isinstance(value, dict):
        return [leaf for child in value.values() for leaf in leaves(child)]
    if isinstance(value, tuple | list):
        return [leaf for child in value for leaf in leaves(child)]
    return [value]


def rebuild(value: Any, new_leaves: list[Any]) -> Any:
    """A tree like ``value`` with other leaves, taken from the front of ``new_leaves``."""
    if isinstance(value, dict):
        return {key: rebuild(child, new_leaves) for key, child in value.items()}
    if isinstance(value, tuple | list):
        children = [rebuild(child, new_leaves) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    return new_leaves.pop(0)
