"""Writing into traced arrays: the array object stands for a new value afterwards.

The values of a program never change.  In NumPy a write into an array is visible in its views, and a write into a view
is visible in the array.  So a view keeps its base and is recomputed after the base has changed.  A write into a part
that an index selected is written into the base, too.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from parallelism.ir.core import Value
from parallelism.ir.tracing.refusing import refuse


class View(NamedTuple):
    """The base of a view, and how the view is computed from it."""

    base: Callable[[], Any]
    """Returns the base array, or None if it no longer exists."""
    compute: Callable[[Any], Any]
    """Computes the view from its base."""
    key: tuple[Any, ...] = ()
    """The key of the index that selected the view, as a tuple of one; empty if a function returned the view."""


class Writable:
    """The value of a traced array, and the arrays that share its memory."""

    __slots__ = ("__weakref__", "_changed", "_sharing", "_value", "_view")

    def __init__(self, value: Value) -> None:
        self._value = value
        self._view: View | None = None
        self._sharing: list[ref[Any]] | None = None
        self._changed: Any = None

    @property
    def value(self) -> Value:
        """The value that the array stands for now."""
        if self._changed is not None and self._view is not None:
            base, self._changed = self._changed, None
            self._value = self._view.compute(base).value
        return self._value

    @property
    def is_view(self) -> bool:
        return self._view is not None

    def lies_in(self, base: Any, compute: Callable[[Any], Any], *key: Any) -> Any:
        """Mark this array as a view of ``base`` and return it.  ``key`` is that of an index, if one selected it."""
        if self is not base:
            if base._sharing is None:
                base._sharing = [ref(base)]
            base._sharing.append(ref(self))
            self._sharing = base._sharing
            # A view between an array and this view must live as long as this view.
            self._view = View(ref(base) if base._view is None else lambda: base, compute, key)
        return self

    def is_part(self, base: Any, key: Any) -> bool:
        """Whether this array is the view ``base[key]``."""
        return self._view is not None and self._view.base() is base and bool(self._view.key == (key,))

    def become(self, new: Any) -> Any:
        """Stand for the value of ``new``, converted to this array's dtype, and update base and views."""
        me: Any = self
        if new.shape != me.shape:
            refuse(f"changing an array of shape {me.shape} in place into one of shape {new.shape}")
        if not np.can_cast(new.dtype, me.dtype, "same_kind"):
            refuse(f"changing an array of {me.dtype} in place into one of {new.dtype}")
        value = new.astype(me.dtype).value
        chain = [me]
        while chain[-1]._view is not None and (base := chain[-1]._view.base()) is not None:
            chain.append(base)
        others = [other for reference in self._sharing or () if (other := reference()) is not None
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
