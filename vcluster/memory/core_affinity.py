"""Each device has a home core, to which it moves when it waits.

A device that is woken may run on the core of the device that woke it, or of a third one. The two then share that core
while another idles, until the system notices after some milliseconds, which is longer than many runs take. So a device
moves to its home core when it waits for the first time in a run, and sleeps there whenever it sleeps for another
device. A running device may use all cores. A device that waits for its next program stays where it is: the host is
awake then, and on the home core it could compete with the host.
"""

import os
from contextlib import suppress


class HomeCore:
    """The home core of one device's process. It has no effect if there is only one core or no affinity control."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._allowed: set[int] = set()
        """The cores that the process may use away from home. Empty while it is away."""

    def stay(self) -> None:
        """Move to the home core until `leave`."""
        if not self._allowed and hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # the allowed cores have just changed
                allowed = os.sched_getaffinity(0)
                if len(allowed) > 1:
                    os.sched_setaffinity(0, {sorted(allowed)[self._number % len(allowed)]})
                    self._allowed = allowed

    def leave(self) -> None:
        """Allow all cores that were allowed before `stay`."""
        if self._allowed:
            with suppress(OSError):
                os.sched_setaffinity(0, self._allowed)
            self._allowed = set()
