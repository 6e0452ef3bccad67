"""Where the description of this machine lies, if it has been calibrated: what ``hardware="host"`` stands for.

`python -m vcluster calibrate` writes it.  It is the file that the environment variable ``VCLUSTER_HOST_HARDWARE``
names (empty: none at all), else ``vcluster/host.json`` among the user's settings: below ``$XDG_CONFIG_HOME``, or
``~/.config`` (XDG Base Directory Specification 0.8).
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "VCLUSTER_HOST_HARDWARE"
CALIBRATED = "this-machine"
"""The name of what a calibration describes."""


def host_file() -> Path | None:
    """Where it is, or would be; None if there is to be none."""
    told = os.environ.get(VARIABLE)
    if told is not None:
        return Path(told) if told else None
    settings = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not settings.is_absolute():      # the specification: such a one is to be ignored
        try:
            settings = Path("~/.config").expanduser()
        except RuntimeError:            # nobody's home
            return None
    return settings / "vcluster" / "host.json"


def is_calibrated() -> bool:
    """Whether there is such a file."""
    path = host_file()
    return path is not None and os.access(path, os.F_OK)


def told() -> str:
    """What ``hardware="host"`` stands for, in a line."""
    if is_calibrated():
        return f"this machine, as {host_file()} has it"
    why = f"{VARIABLE} is empty" if host_file() is None else "python -m vcluster calibrate"
    return f"not calibrated, messages free: {why}"
