"""Trees of tuples, lists and dicts whose leaves are arrays and scalars: what travels as one value."""

from __future__ import annotations

from typing import Any


def leaves(value: Any) -> list[Any]:
    """The arrays and scalars of a tree, in order."""
    if isinstance(value, dict):
        return [leaf for child in value.values() for leaf in leaves(child)]
    if isinstance(value, tuple | list):
        return [leaf for child in value for leaf in leaves(child)]
    return [value]
