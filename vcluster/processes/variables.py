"""Environment variables that the host sets or removes after its devices have started hold in the devices, too."""

import os
from collections.abc import Mapping

from vcluster.processes.blas_threads import THREAD_VARIABLES

Variables = Mapping[bytes, bytes]
Changes = Mapping[bytes, bytes | None]
"""What was set, with its value, and what was removed, with None."""

KEPT = {os.fsencode(name) for name in (*THREAD_VARIABLES, "PYTEST_CURRENT_TEST")}
"""A device keeps those of its start: it has one BLAS thread, and pytest sets its own anew several times in each test."""


def host_variables() -> Variables:
    """The variables of this process at this moment.

    Each run asks for them. The public ways to copy them decode each, which would take a tenth of the time of an empty run.
    """
    encoded: dict[bytes, bytes] | None = getattr(os.environ, "_data", None)
    return dict(os.environb) if encoded is None else encoded.copy()


def changes(before: Variables, now: Variables) -> Changes:
    """What a device that has got the variables ``before`` lacks."""
    names = sorted((before.keys() | now.keys()) - KEPT)
    return {name: now.get(name) for name in names if before.get(name) != now.get(name)}


def apply_changes(changed: Changes) -> None:
    """In a device: set and remove what the host has set and removed. What a kernel has set besides stays."""
    for name, value in changed.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value
