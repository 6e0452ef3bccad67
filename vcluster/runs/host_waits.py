"""A warning of devices that wait for the host while only another thread of the host can serve them. Maybe it will."""

from __future__ import annotations

import warnings

from parallelism.events import HOST
from parallelism.operation import ranks_in_words
from vcluster.code import HostWaitWarning
from vcluster.memory import Status
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
