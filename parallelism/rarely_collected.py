"""Work that makes very many objects which nearly all live to its end."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 500_000
"""New objects between two looks of the collector of cycles."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """The collector of cycles runs seldom inside: otherwise it looks at the same lasting objects again and again."""
    before = gc.get_threshold()
    gc.set_threshold(max(OBJECTS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
