"""The core to which a device goes when it waits.

Who is woken may find itself on the core of who woke it, or of another device, and there they take turns while another
core idles, until the system notices, some milliseconds later: longer than many a run takes.  So a device goes to the
core that is its own by its number when it waits for the first time in a run, and sleeps there when it sleeps for
another device.  What runs may use all cores, as ever.  For its next program a device waits where it is: the host is
awake then, and at home it would take turns with it.
"""

from __future__ import annotations

import os
from contextlib import suppress


class HomeCore:
    """That of one device's process; nothing happens where there is but one core, or where nobody can choose."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._allowed: set[int] = set()
        """The cores that the process may use when it is not at home."""

    def stay(self) -> None:
        """Go there, and stay until `leave`."""
        if not self._allowed and hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # what may be used has just changed
                allowed = os.sched_getaffinity(0)
                if len(allowed) > 1:
                    os.sched_setaffinity(0, {sorted(allowed)[self._number % len(allowed)]})
                    self._allowed = allowed

    def leave(self) -> None:
        """Be free to run anywhere that it was allowed to before `stay`."""
        if self._allowed:
            with suppress(OSError):
                os.sched_setaffinity(0, self._allowed)
            self._allowed = set()
