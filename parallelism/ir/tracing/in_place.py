"""Writing into traced arrays: the array object stands for a new value afterwards.

The values of a program never change.  In NumPy a write into an array is visible in its views, and a write into a view
is visible in the array.  So a view keeps its base and is recomputed after the base has changed.  A write into a part
that an index selected is written into the base, too.

``reshape`` makes a view or a copy.  Which of them is decided at the first write, from the order of the memory.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from parallelism.ir.core import TensorType, Value
from parallelism.ir.core.lines import Line
from parallelism.ir.tracing.memory_order import Order
from parallelism.ir.tracing.refusing import recorded_line, refuse


class View(NamedTuple):
    """The base of a view, and how the view is computed from it."""

    base: Callable[[], Any]
    """Returns the base array, or None if it no longer exists."""
    compute: Callable[[Any], Any]
    """Computes the view from its base."""
    key: tuple[Any, ...] = ()
    """The key of the index that selected the view, as a tuple of one; empty if a function returned the view."""
    is_view: Callable[[], bool | None] | None = None
    """Says whether it is a view, and not a copy; None if that is not known.  Without it, it is a view."""
    read_only: str = ""
    """The name of the function, if NumPy does not allow to write into what it returned."""


def _is_in(array: Any, arrays: Sequence[Any]) -> bool:
    """Whether an array is one of these: NumPy's ``==`` compares elements."""
    return any(each is array for each in arrays)


class Writable:
    """The value of a traced array, and the arrays that share its memory."""

    __slots__ = ("__weakref__", "_changed", "_order", "_sharing", "_value", "_view", "is_number")

    def __init__(self, value: Value) -> None:
        self._value = value
        self._view: View | None = None
        self._sharing: list[ref[Any]] | None = None
        self._changed: Any = None
        """The base, after it was changed in place; for what may be a copy of it, the line that changed it."""
        self._order: Order | None = None
        self.is_number = False
        """Whether NumPy returns a number here, which does not change, and not an array without dims."""

    @property
    def type(self) -> TensorType:
        return self._value.type  # Writing in place never changes the type.

    @property
    def value(self) -> Value:
        """The value that the array stands for now."""
        if isinstance(self._changed, Line):
            refuse(
                "changing an array in place of which numpy.reshape or ravel has made one that is used later",
                "whether NumPy copies it is open here: write .copy() after reshape, or change a copy",
                self._changed,
            )
        if self._changed is not None and self._view is not None:
            base, self._changed = self._changed, None
            self._value = self._view.compute(base).value
        return self._value

    def lies_in(
        self,
        base: Any,
        compute: Callable[[Any], Any],
        *key: Any,
        is_view: Callable[[], bool | None] | None = None,
        read_only: str = "",
    ) -> Any:
        """Mark this array as a view of ``base`` and return it.  ``key`` is that of an index, if one selected it."""
        if self is not base:
            if base._sharing is None:
                base._sharing = [ref(base)]
            base._sharing.append(ref(self))
            self._sharing = base._sharing
            # A view between an array and this view must live as long as this view.
            self._view = View(
                ref(base) if base._view is None else lambda: base, compute, key, is_view, read_only
            )
        return self

    def is_part(self, base: Any, key: Any) -> bool:
        """Whether this array is the view ``base[key]``."""
        return self._view is not None and self._view.base() is base and bool(self._view.key == (key,))

    def become(self, new: Any) -> Any:
        """Stand for the value of ``new``, converted to this array's dtype, and update base and views."""
        me: Any = self
        if self.is_number:
            refuse(
                "changing a number of NumPy's in place, such as x[0] or x.sum()", "only arrays can be changed"
            )
        if new.shape != me.shape:
            refuse(f"changing an array of shape {me.shape} in place into one of shape {new.shape}")
        if not np.can_cast(new.dtype, me.dtype, "same_kind"):
            refuse(f"changing an array of {me.dtype} in place into one of {new.dtype}")
        value = new.astype(me.dtype).value
        self._part_with_copies()
        chain = self._bases()
        for part in chain:
            if part._view is not None and part._view.read_only:
                refuse(
                    f"changing what {part._view.read_only} returned in place",
                    "it cannot be changed in NumPy either: change a copy",
                )
        chain[-1]._inherit()
        others = [other for other in self._those_who_share() if not _is_in(other, chain)]
        owned = chain[-1]._view is None
        if (owned and not all(part._view.key for part in chain[:-1])) or (others and not owned):
            refuse(
                "changing a view of an array in place (x.T, x.reshape(...), a part of np.split)",
                "write x = x + y, or change a copy",
            )
        self._value, self._changed = value, None
        for part, whole in pairwise(chain if owned else ()):
            whole._value, whole._changed = whole.written(part._view.key[0], part).value, None
        for other in others:
            other._changed = other._view.base() if other._view.is_view is None else recorded_line()
        return self

    def _bases(self) -> list[Any]:
        """This array, its base, the base of this one and so on, as far as they exist."""
        chain: list[Any] = [self]
        while chain[-1]._view is not None and (base := chain[-1]._view.base()) is not None:
            chain.append(base)
        return chain

    def _those_who_share(self) -> list[Any]:
        return [other for reference in self._sharing or () if (other := reference()) is not None]

    def _part_with_copies(self) -> None:
        """Decide for all who share this memory whether they are views, and part with those who are not."""
        for other in self._those_who_share():
            if other._view is None or other._view.is_view is None:
                continue
            is_view = other._view.is_view()
            if is_view:
                other._view = other._view._replace(is_view=None)
            elif is_view is not None:
                other.own_memory()

    def _inherit(self) -> None:
        """Own the memory, if the base is gone and all who share the memory are views of this array."""
        if self._view is not None and all(_is_in(self, other._bases()) for other in self._those_who_share()):
            self._view = None

    def own_memory(self) -> None:
        """Become an array of its own, with its views."""
        if self._view is None:
            return
        mine: list[Any] = []
        rest: list[Any] = []
        for other in self._those_who_share():
            (mine if _is_in(self, other._bases()) else rest).append(other)
        assert self._sharing is not None
        self._sharing[:] = map(ref, rest)
        own = list(map(ref, mine))
        for other in mine:
            other._sharing = own
        self._view = None
