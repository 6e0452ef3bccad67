"""The file that describes this machine after a calibration; ``hardware="host"`` reads it.

`python -m vcluster calibrate` writes it.  The environment variable ``VCLUSTER_HOST_HARDWARE`` names the file (empty:
there is none).  Without the variable it is ``vcluster/host.json`` among the user's settings: in ``$XDG_CONFIG_HOME``,
or in ``~/.config`` (XDG Base Directory Specification 0.8).
"""

from __future__ import annotations

import os
from os.path import expanduser, isabs, join
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "VCLUSTER_HOST_HARDWARE"
CALIBRATED = "this-machine"
"""The name of the hardware that a calibration describes."""


def host_file() -> Path | None:
    """The path of the file, which may not exist; None if the variable is empty, or the user has no home."""
    from pathlib import Path

    return Path(path) if (path := _path()) else None


def _path() -> str | None:
    """`host_file` as text. Each start of a cluster asks for it, and pathlib takes 3 ms to import."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return given
    settings = os.environ.get("XDG_CONFIG_HOME", "")
    if not isabs(settings):  # the specification: ignore relative paths
        settings = expanduser("~/.config")
    return (
        None if settings.startswith("~") else join(settings, "vcluster", "host.json")
    )  # "~": no home directory


def is_calibrated() -> bool:
    """Whether the file exists."""
    path = _path()
    return bool(path and os.access(path, os.F_OK))


def host_summary() -> str:
    """One line that describes the hardware behind ``hardware="host"``."""
    if is_calibrated():
        return f"this machine, as {host_file()} has it"
    why = f"{VARIABLE} is empty" if host_file() is None else "python -m vcluster calibrate"
    return f"not calibrated, messages free: {why}"
