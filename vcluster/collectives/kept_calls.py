"""The calls that a device keeps: of more than fit, some are still found again.

A loop over a few more calls than are kept would find none of them if the oldest were dropped each time.  So any one is
dropped, and the loop finds most of them.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Generic, TypeVar

Kept = TypeVar("Kept")

MOST_CALLS = 4096
"""Each takes about 6 KB."""


class KeptCalls(dict[Hashable, Kept], Generic[Kept]):
    """At most `MOST_CALLS` values by their keys; `keep` adds one."""

    def __init__(self) -> None:
        self._keys: list[Hashable] = []
        self._places = random.Random(0)

    def keep(self, key: Hashable, kept: Kept) -> None:
        """Keep a new value, in place of another when there are too many."""
        if len(self._keys) < MOST_CALLS:
            self._keys.append(key)
        else:
            place = self._places.randrange(MOST_CALLS)
            del self[self._keys[place]]
            self._keys[place] = key
        self[key] = kept

    def clear(self) -> None:
        super().clear()
        self._keys.clear()
