"""Which machine and which versions figures belong to: without them they mean nothing."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and how busy it was when this was asked."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": usable,
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "load_average": round(psutil.getloadavg()[0], 2),
    }


def additions_seconds(times: int = 3) -> float:
    """CPU seconds that 10^7 additions take in a loop of Python: how fast this machine is just now.

    Virtual processors have phases in which it takes three times as long; figures compare only within one.
    """
    taken = []
    for _ in range(times):
        start, total = time.process_time(), 0
        for number in range(1_000_000):
            total += number
        taken.append(10 * (time.process_time() - start))
    return min(taken)


def versions() -> dict[str, str]:
    """Of what vcluster runs on."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("vcluster", "cloudpickle"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def in_a_line(values: dict[str, Any], found: dict[str, str]) -> str:
    """Both, for the head of a report."""
    memory = values["memory_bytes"] / (1 << 30)
    return (
        f"{values['processor']}, {values['cores']} cores, {memory:.0f} GiB, {values['system']}, "
        f"load {values['load_average']}; " + ", ".join(f"{name} {version}" for name, version in found.items())
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
