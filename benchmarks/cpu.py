"""CPU time of processes, to the nanosecond where Linux tells it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil


def cpu_seconds(pids: Iterable[int]) -> float:
    """What these processes have used so far, all threads of each, in user and system mode."""
    return sum(_of(pid) for pid in pids)


def _of(pid: int) -> float:
    try:
        return sum(
            int((task / "schedstat").read_text(encoding="utf-8").split()[0]) * 1e-9
            for task in Path(f"/proc/{pid}/task").iterdir()
        )
    except (OSError, ValueError, IndexError):
        times = psutil.Process(pid).cpu_times()  # in ticks of ten milliseconds
        return float(times.user + times.system)
