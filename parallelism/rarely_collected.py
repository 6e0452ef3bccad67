"""Work that makes very many objects which nearly all live to its end."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 500_000
"""New objects between two looks of the collector of cycles."""
ALMOST_ALL_LAST = 20 * OBJECTS
"""The same where one object in a hundred is left over in a cycle: looking for it would free next to nothing."""
_frozen = False
"""Whether the program was seen to have frozen objects.  It is not asked again: to count millions of them takes as long as a
simulation."""


@contextmanager
def rarely_collected(objects: int = OBJECTS) -> Iterator[None]:
    """The collector of cycles runs seldom inside, after so many new ``objects``: otherwise it looks at the same lasting
    objects again and again.

    Afterwards all objects count as old ones, which it looks at now and then.  As new ones it would look at them at once.
    Objects that the program has frozen stay frozen, and then the new ones stay new.
    """
    global _frozen
    before = gc.get_threshold()
    gc.set_threshold(max(objects, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        _frozen = _frozen or gc.get_freeze_count() > 0
        if not _frozen:
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)
