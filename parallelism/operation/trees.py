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
