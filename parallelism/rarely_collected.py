"""Work that makes very many objects which nearly all live to its end."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 500_000
"""New objects between two looks of the collector of cycles."""
ALMOST_ALL_LAST = 20 * OBJECTS
"""The same where one object in a hundred is left over in a cycle: looking for it would free next to nothing."""


@contextmanager
def rarely_collected(objects: int = OBJECTS) -> Iterator[None]:
    """The collector of cycles runs seldom inside, after so many new ``objects``: otherwise it looks at the same lasting
    objects again and again.

    Afterwards all objects count as old ones, which it looks at now and then.  As new ones it would look at them at once.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(objects, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)
