"""Arrays of a program that are changed: the name stands for another value from then on, for all who hold the array.

A program has values only, none of which changes.  What NumPy does to the memory of an array is seen by its views, too,
and what it does to a view by the array: so a view knows what it is a view of, and is made anew when that has changed; a
part that an index made, when it is changed, is written into what it is a part of.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from parallelism.ir.core import Value
from parallelism.ir.tracing.refusing import refuse


class View(NamedTuple):
    """What an array is a view of, and how it is made of it."""

    base: Callable[[], Any]
    """The array, or None when nobody holds it any more."""
    made: Callable[[Any], Any]
    key: tuple[Any, ...] = ()
    """That of the index that made it, alone; nothing if a function made it."""


class Writable:
    """What a recorded array knows of those that share its memory."""

    __slots__ = ("__weakref__", "_changed", "_sharing", "_value", "_view")

    def __init__(self, value: Value) -> None:
        self._value = value
        self._view: View | None = None
        self._sharing: list[ref[Any]] | None = None
        self._changed: Any = None

    @property
    def value(self) -> Value:
        """What it stands for now."""
        if self._changed is not None and self._view is not None:
            base, self._changed = self._changed, None
            self._value = self._view.made(base).value
        return self._value

    @property
    def is_view(self) -> bool:
        return self._view is not None

    def lies_in(self, base: Any, made: Callable[[Any], Any], *key: Any) -> Any:
        """It is a view of ``base``, ``made`` of it, by this key of an index or by a function."""
        if self is not base:
            if base._sharing is None:
                base._sharing = [ref(base)]
            base._sharing.append(ref(self))
            self._sharing = base._sharing
            # what stands between an array and its view lives as long as the view
            self._view = View(ref(base) if base._view is None else lambda: base, made, key)
        return self

    def is_part(self, base: Any, key: Any) -> bool:
        """Whether it is what this key of an index made of ``base``."""
        return self._view is not None and self._view.base() is base and bool(self._view.key == (key,))

    def become(self, made: Any) -> Any:
        """``made`` in its place, in its dtype; what it is a part of changes, too."""
        me: Any = self
        if made.shape != me.shape:
            refuse(f"changing an array of shape {me.shape} in place into one of shape {made.shape}")
        if not np.can_cast(made.dtype, me.dtype, "same_kind"):
            refuse(f"changing an array of {me.dtype} in place into one of {made.dtype}")
        value = made.astype(me.dtype).value
        chain = [me]
        while chain[-1]._view is not None and (base := chain[-1]._view.base()) is not None:
            chain.append(base)
        others = [other for found in self._sharing or () if (other := found()) is not None
                  and not any(other is one for one in chain)]
        owned = chain[-1]._view is None
        if (owned and not all(part._view.key for part in chain[:-1])) or (others and not owned):
            refuse("changing a view of an array in place (x.T, x.reshape(...), a part of np.split)",
                   "write x = x + y, or change a copy")
        self._value, self._changed = value, None
        for part, whole in pairwise(chain if owned else ()):
            whole._value, whole._changed = whole.written(part._view.key[0], part).value, None
        for other in others:
            other._changed = other._view.base()
        return self
