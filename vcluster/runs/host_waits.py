"""Waits between host and devices that may never end.

Devices may wait for the host while only another thread of the host can serve them. Maybe it will, so that is a warning. The
host may wait for a device while no run is in progress. If another thread of its own may start one, that is a warning, too;
else it is an error.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from math import inf

from parallelism.events import HOST
from parallelism.operation import DeadlockError, ranks_in_words
from vcluster.code import HostWaitWarning
from vcluster.memory import Status
from vcluster.messages import Endpoint
from vcluster.messages.tasks import Awaited
from vcluster.runs.deadlock import find_deadlock

PATIENCE_SECONDS = 1.0
"""Seconds of waiting before the warning."""


class HostWaits:
    """Warns once in a run."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """By rank, the time at which it was first seen to wait."""
        self._warned = False

    def check(self, status: Status, size: int, now: float) -> None:
        """Check all devices. ``now`` is the time in seconds."""
        if self._warned:
            return
        found = find_deadlock(status, size, host_may_act=False)
        stuck = {stick.rank: stick for stick in found if HOST in stick.waits_for}
        self._since = {rank: self._since.get(rank, now) for rank in stuck}
        late = [stuck[rank] for rank, since in sorted(self._since.items()) if now - since >= PATIENCE_SECONDS]
        if late:
            self._warned = True
            first = late[0]
            filename, _, line = first.location.rpartition(":")
            verb = "waits" if len(late) == 1 else "wait"
            warnings.warn_explicit(
                f"{ranks_in_words([stick.rank for stick in late])} {verb} for the host in {first.text} at "
                f"{first.location}, and run() sends and receives nothing; another thread of the host must call "
                f"cluster.channel({first.rank})",
                HostWaitWarning,
                filename or "<kernel>",
                int(line) if line.isdigit() else 0,
            )


class WaitsOfTheHost:
    """Watches what the host waits for.  Between runs all messages of devices have arrived, and no device sends.

    So a wait for a device can end only if another thread of the host starts a run: this warns of such a wait.  If no
    other thread can do so, it raises a `DeadlockError`.
    """

    def __init__(self, endpoint: Endpoint, runs: Callable[[], bool]) -> None:
        """``endpoint`` is the host's. ``runs`` says whether a run is in progress."""
        self._tasks, self._runs = endpoint.tasks, runs
        self._seen: tuple[Awaited, float] | None = None
        """What the host waits for, and since when."""
        endpoint.signals.note_awaited = self._note
        endpoint.signals.publish_awaited = self._refuse

    def _note(self) -> Awaited:
        awaited, now = self._tasks.blocked_on(), time.monotonic()
        if self._seen is None or self._seen[0] != awaited or self._runs():
            self._seen = awaited, now
        elif awaited.operations and now - self._seen[1] >= PATIENCE_SECONDS:
            self._seen = awaited, inf  # it warns once
            filename, _, line = awaited.location.rpartition(":")
            warnings.warn_explicit(
                _told(awaited), HostWaitWarning, filename or "<host>", int(line) if line.isdigit() else 0
            )
        return awaited

    def _refuse(self, awaited: Awaited) -> None:
        """`vcluster.memory.Signals` calls this only where no other thread may act."""
        if self._runs() or not awaited.operations:
            return
        raise DeadlockError(
            f"deadlock: {_told(awaited)}",
            ranks=(_peer(awaited),),
            operation="recv",
            locations=(awaited.location,),
        )


def _told(awaited: Awaited) -> str:
    rank = _peer(awaited)
    return (
        f"the host waits for rank {rank}, and devices send only while a run is in progress; call run() first, or in "
        f"another thread\n  the host in {awaited.operations[0].text} at {awaited.location}, waiting for rank {rank}"
    )


def _peer(awaited: Awaited) -> int:
    """The device for which the host waits. It only receives: between host and devices no send waits."""
    return next((need.peer for need in awaited.operations[0].needs or ()), HOST)
