"""Frozen dataclasses with slots that are unpickled quickly."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type[Any])


def unpickled_quickly(cls: Class) -> Class:
    """A decorator above ``@dataclass(frozen=True, slots=True)``: the fields are set by their slots.

    A class may have a method ``state`` that gives the values of its fields as they are pickled.  (Early versions of Python
    3.11 write over a ``__getstate__`` of such a dataclass.)

    What `dataclasses` provides looks up the fields of the class for each instance.  Programs have thousands, and every
    device unpickles its own.
    """
    slots: tuple[Callable[[Any, Any], None], ...] = tuple(
        getattr(cls, each.name).__set__ for each in fields(cls)
    )

    def set_state(self: Any, state: Sequence[Any]) -> None:
        for put, value in zip(slots, state, strict=True):
            put(self, value)

    type.__setattr__(cls, "__setstate__", set_state)
    if "state" in vars(cls):
        type.__setattr__(cls, "__getstate__", cls.state)
    return cls
