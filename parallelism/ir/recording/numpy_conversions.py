"""``numpy.asarray`` and the like of recorded arrays.

NumPy gives these functions no protocol by which an array could say what they return: they ask for numbers.  So while a
function is being recorded, NumPy's names stand for functions that return recorded arrays as they are, and that pass all
other arguments on.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from parallelism.ir.recording.numpy_calls import of_one_dtype
from parallelism.ir.tracing import Traced
from parallelism.ir.tracing.memory_order import is_by_rows, place_of

_NAMES = ("array", "asarray", "asanyarray", "ascontiguousarray")
_NUMPY = f"{Path(np.__file__).parent}{os.sep}"
"""Where NumPy's own calls of these functions come from, which need numbers."""
_LOCK = Lock()
_OWN: dict[str, Callable[..., Any]] = {}
"""NumPy's own functions by name, while recordings are in progress."""
_RECORDINGS: list[object] = []


@contextmanager
def conversions_recorded() -> Iterator[None]:
    """Within this context `numpy.asarray` and the like take recorded arrays, and lists of them."""
    me = object()
    with _LOCK:
        if not _RECORDINGS:
            _OWN.update({name: getattr(np, name) for name in _NAMES})
            for name in _NAMES:
                setattr(np, name, _taking_recorded(name, _OWN[name]))
        _RECORDINGS.append(me)
    try:
        yield
    finally:
        with _LOCK:
            _RECORDINGS.remove(me)
            if not _RECORDINGS:
                for name in _NAMES:
                    setattr(np, name, _OWN.pop(name))


def _taking_recorded(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    word = "object" if name == "array" else "a"

    @wraps(own)
    def convert(*args: Any, **options: Any) -> Any:
        given = args[0] if args else options.get(word)
        if not _has_recorded(given) or sys._getframe(1).f_code.co_filename.startswith(_NUMPY):
            return own(*args, **options)
        others = {each: value for each, value in options.items() if each != word}
        return _converted(name, given, *args[1:2], **others)

    return convert


def _has_recorded(a: Any) -> bool:
    if isinstance(a, list | tuple):
        return any(map(_has_recorded, a))
    return isinstance(a, Traced)


def _converted(
    name: str, a: Any, dtype: Any = None, *, copy: bool | None = None, order: str | None = None, **_: Any
) -> Any:
    if isinstance(a, Traced):
        found, is_new = a, False
    else:
        found, is_new = _joined(a), True
    if dtype is not None and np.dtype(dtype) != found.dtype:
        return found.astype(dtype)
    copies = copy is True or (copy is None and name == "array")
    if copies and not is_new:
        return found.copy()
    if name == "ascontiguousarray" and found._order is not None:
        return _by_rows(found)
    return found


def _by_rows(x: Any) -> Any:
    """The array itself if it lies by rows, or else a copy; where that is not known, one whose change is refused."""
    is_view = is_by_rows(place_of(x))
    if is_view:
        return x
    result = x.copy()
    result._order = None
    return result if is_view is False else result.lies_in(x, _copied, is_view=_unknown)


def _copied(x: Any) -> Any:
    return x.copy()


def _unknown() -> None:
    """Whether the result of `_by_rows` is a view."""


def _joined(parts: Any) -> Any:
    """An array of the elements of nested lists."""
    each = [_joined(part) if isinstance(part, list | tuple) else part for part in parts]
    return np.stack(of_one_dtype("numpy.array", *map(_as_array, each)))


def _as_array(x: Any) -> Any:
    return x if isinstance(x, Traced) else np.asarray(x)
