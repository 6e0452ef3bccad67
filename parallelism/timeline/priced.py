"""How the virtual time of a trace was found, and a warning where that leaves out too much."""

from __future__ import annotations

import warnings
from typing import NamedTuple

TOLD_ABOVE = 0.01
"""Of all compute, what may be undeclared without a warning."""
NOT_WORTH_TELLING_SECONDS = 2e-3
"""Of each device: what Python itself takes between calls when it first makes them."""


class Priced(NamedTuple):
    """How the virtual time of a trace was found; see `parallelism.timeline.pricing`."""

    compute: str = "measured"
    priced_dtype: str | None = None
    link_sharing: bool = True
    undeclared_seconds: float = 0.0
    left_out_seconds: float = 0.0
    """Of these, what belongs to events that the trace does not have."""


class UndeclaredComputeWarning(UserWarning):
    """A modelled trace leaves out more than a little of what was computed."""


def warn_of_undeclared(undeclared_seconds: float, compute_seconds: float, devices: int) -> None:
    """Where more than a little has no price; the warning stands at the line that asked `Trace` for it."""
    if undeclared_seconds > max(TOLD_ABOVE * compute_seconds, NOT_WORTH_TELLING_SECONDS * devices):
        warnings.warn(
            f"{undeclared_seconds:.3g} of {compute_seconds:.3g} s of compute have no price in this modelled trace; "
            "device.compute(flops=, nbytes=) or seconds= gives one, device.matmul counts by itself",
            UndeclaredComputeWarning, stacklevel=4,
        )
