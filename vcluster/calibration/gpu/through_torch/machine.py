"""What is measured, in words: the GPU, its driver, its clocks and power, and the software."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

_QUERY = (
    "name",
    "driver_version",
    "pstate",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "memory.total",
    "clocks_event_reasons.active",
)


def described(torch: Any, device: str) -> dict[str, Any]:
    """The machine by names that JSON has."""
    found: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "torch": str(torch.__version__),
        "device": device,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if not device.startswith("cuda"):
        return {**found, "gpu": f"{platform.machine()} processor"}
    properties = torch.cuda.get_device_properties(device)
    return {
        **found,
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cache_bytes": int(getattr(properties, "L2_cache_size", 0)),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **queried(),
    }


def queried() -> dict[str, str]:
    """What nvidia-smi tells of the first GPU by its names; empty where it tells nothing."""
    told = _answer(*_QUERY)
    if not told:  # an old driver refuses a list with a name that it does not know
        told = {name: answer[name] for name in _QUERY if name in (answer := _answer(name))}
    return {f"nvidia_smi.{name}": value for name, value in told.items()}


def load_now() -> str:
    """The clock, the power and the heat of the first GPU at this moment, in one line; empty if unknown."""
    told = _answer("clocks.sm", "power.draw", "temperature.gpu")
    return ", ".join(f"{name} {value}" for name, value in told.items())


def clock_and_power(torch: Any, device: str) -> dict[str, float]:
    """The clock in MHz and the power in W at this moment, without a wait for the GPU; empty if unknown."""
    found: dict[str, float] = {}
    with suppress(Exception):  # PyTorch asks a library of the driver, which need not be there
        found["clock_mhz"] = float(torch.cuda.clock_rate(device))
        found["power_watts"] = torch.cuda.power_draw(device) / 1e3
    return found


def _answer(*names: str) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = told.strip().splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}
