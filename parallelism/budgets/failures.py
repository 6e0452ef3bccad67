"""Failures and checkpoints: how often a run is to save what it has, and which part of its time brings it forward.

Devices fail at random moments, each as likely as any other (a Poisson process), also while checkpoints are written and
while a run starts again.  Then the time that a piece of x seconds takes until it is through without a failure has the
mean (M + r) (exp(x / M) - 1), where M are the mean seconds between failures of the cluster and r = M (exp(R / M) - 1)
those of a restart of R seconds that is itself begun again at each failure: J. T. Daly, *A higher order estimate of the
optimum checkpoint interval for restart dumps*, Future Generation Computer Systems 22 (2006), 303-312, equation 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import exp, expm1, inf, sqrt
from typing import Any, NamedTuple

from parallelism.hardware import fields as checked

RESTART_SECONDS = 600.0
STORAGE_BYTES_PER_SECOND = 10e9
"""What is assumed of storage that nobody described."""
HALVINGS = 80
"""The steps of the golden-section search: the interval is then known to all digits."""
MOST_FAILURES = 600.0
"""More failures in one interval are no run: the exponential function has no number for them."""


@dataclass(frozen=True)
class Failures:
    """How often devices fail, and how fast checkpoints are written and read."""

    device_seconds: float
    """The mean time between failures of one device, with its part of all else that may fail."""
    storage_bytes_per_second: float = STORAGE_BYTES_PER_SECOND
    """What all devices together write to storage, and read from it."""
    restart_seconds: float = RESTART_SECONDS
    """From a failure to the moment at which a checkpoint is read: it is noticed, devices are replaced, processes begin."""

    def __post_init__(self) -> None:
        above = partial(checked.number, above=0)
        checked.check(
            self,
            device_seconds=above,
            storage_bytes_per_second=above,
            restart_seconds=checked.seconds,
        )

    def of(self, devices: int, checkpoint_bytes: float, stall_seconds: float) -> Survival:
        """The cost of these failures to a run on so many devices.

        ``stall_seconds`` are those in which devices stand still for an asynchronous checkpoint: they copy their part of
        it to the memory of their host.
        """
        between = self.device_seconds / devices
        write = checkpoint_bytes / self.storage_bytes_per_second
        restart = self.restart_seconds + write
        interval = daly_interval(write, between)
        beside = best_asynchronous_interval(stall_seconds, write, restart, between)
        return Survival(
            between,
            checkpoint_bytes,
            write,
            interval,
            goodput(interval, write, restart, between),
            beside,
            asynchronous_goodput(beside, stall_seconds, write, restart, between),
        )


class Survival(NamedTuple):
    """The cost of failures to a run."""

    between_seconds: float
    """The mean time between failures of the cluster."""
    checkpoint_bytes: float
    checkpoint_seconds: float
    """How long it takes to write a checkpoint."""
    interval_seconds: float
    """The work between two checkpoints."""
    goodput: float
    """The part of the time that brings the run forward; devices wait while checkpoints are written."""
    asynchronous_interval_seconds: float
    asynchronous_goodput: float
    """The same where checkpoints are written beside the next steps."""

    def json(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict()


def young_interval(write_seconds: float, between_seconds: float) -> float:
    """The work between checkpoints, to first order: the root of twice their product.

    J. W. Young, *A first order approximation to the optimum checkpoint interval*, CACM 17 (1974), 530-531.
    """
    return sqrt(2 * write_seconds * between_seconds)


def daly_interval(write_seconds: float, between_seconds: float) -> float:
    """The work between checkpoints that is best to a higher order: Daly (2006), equation 37.

    >>> daly_interval(write_seconds=60.0, between_seconds=24 * 3600.0) < young_interval(60.0, 24 * 3600.0)
    True
    """
    if write_seconds >= 2 * between_seconds:
        return between_seconds
    part = sqrt(write_seconds / (2 * between_seconds))
    return young_interval(write_seconds, between_seconds) * (1 + part / 3 + part**2 / 9) - write_seconds


def goodput(
    interval_seconds: float, write_seconds: float, restart_seconds: float, between_seconds: float
) -> float:
    """The part of the time that brings a run forward which writes a checkpoint after each ``interval_seconds`` of work."""
    taken = _until_through(interval_seconds + write_seconds, restart_seconds, between_seconds)
    return interval_seconds / taken


def asynchronous_goodput(
    interval_seconds: float,
    stall_seconds: float,
    write_seconds: float,
    restart_seconds: float,
    between_seconds: float,
) -> float:
    """`goodput` with asynchronous checkpoints: devices wait for ``stall_seconds`` only, and work while one is written.

    A checkpoint counts once it is written as a whole, and the next one begins after that: the interval and a stall are at
    least ``write_seconds`` long.  In a run without a failure a checkpoint becomes whole after each interval and stall; the
    first one after a failure only ``write_seconds`` later.
    """
    each = interval_seconds + stall_seconds
    fails = -expm1(-each / between_seconds)
    again = _until_through(each + write_seconds, restart_seconds, between_seconds)
    restart = between_seconds * _grown(restart_seconds / between_seconds)
    return interval_seconds / (between_seconds * fails + fails * (restart + again))


def best_asynchronous_interval(
    stall_seconds: float, write_seconds: float, restart_seconds: float, between_seconds: float
) -> float:
    """The work between checkpoints with the largest `asynchronous_goodput`, by the golden section."""
    found = partial(
        asynchronous_goodput,
        stall_seconds=stall_seconds,
        write_seconds=write_seconds,
        restart_seconds=restart_seconds,
        between_seconds=between_seconds,
    )
    low = max(write_seconds - stall_seconds, 1e-9 * between_seconds)
    high = max(2 * low, 4 * between_seconds)
    part = (sqrt(5) - 1) / 2
    for _ in range(HALVINGS):
        left = high - part * (high - low)
        right = low + part * (high - low)
        if found(left) >= found(right):
            high = right
        else:
            low = left
    return low


def _until_through(seconds: float, restart_seconds: float, between_seconds: float) -> float:
    """The mean time until a piece of so many seconds is through without a failure."""
    factor = exp(min(restart_seconds / between_seconds, MOST_FAILURES))
    return between_seconds * factor * _grown(seconds / between_seconds)


def _grown(failures: float) -> float:
    """exp(x) - 1; infinite where that is no number."""
    return expm1(failures) if failures < MOST_FAILURES else inf
