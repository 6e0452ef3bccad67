"""How the virtual time of a trace was computed, and a warning if too much compute has no price."""

import warnings
from typing import NamedTuple

from parallelism.hardware import Software

WARN_ABOVE = 0.01
"""The part of all compute that may be undeclared without a warning."""
TOLERATED_SECONDS = 2e-3
"""Undeclared seconds of each device without a warning: Python itself takes them between its first calls."""


class Priced(NamedTuple):
    """How the virtual time of a trace was computed; see `parallelism.timeline.pricing`."""

    compute: str = "measured"
    priced_dtype: str | None = None
    link_sharing: bool = True
    undeclared_seconds: float = 0.0
    left_out_seconds: float = 0.0
    """The undeclared seconds of events that are not in the trace."""
    folded: bool = False
    """Whether each device stands for all that are equal to it."""
    pieces: bool = False
    """Whether some compute events stand for several ops, and have the seconds of these on one hardware."""
    software: Software | None = None
    """Of a simulated program whose ops depend on the hardware, the software of this; else None."""


class UndeclaredComputeWarning(UserWarning):
    """A modelled trace has no price for a part of the compute that is too large to ignore."""


def warn_of_undeclared(undeclared_seconds: float, compute_seconds: float, devices: int) -> None:
    """Warns if too much compute has no price; the warning points at the line that called a method of `Trace`."""
    if undeclared_seconds > max(WARN_ABOVE * compute_seconds, TOLERATED_SECONDS * devices):
        warnings.warn(
            f"{undeclared_seconds:.3g} of {compute_seconds:.3g} s of compute have no price in this modelled trace; "
            "device.compute(flops=, nbytes=) or seconds= gives one, device.matmul counts by itself",
            UndeclaredComputeWarning,
            stacklevel=5,
        )
