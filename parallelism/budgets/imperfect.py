"""`Imperfections`: a cluster that is not as its data sheet says: slow links, slow and lost devices, and jitter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from math import ceil, erf, exp, pi, sqrt

import numpy as np

from parallelism.hardware import Hardware, LinkFault, Straggler, fields as checked

WIDEST = 12.0
"""Standard deviations, beyond which no device is expected."""
POINTS = 20_001
"""The points at which the density of the largest of many is summed."""


@dataclass(frozen=True)
class SlowLinks:
    """A ``share`` of the ports of one level of links that have only ``bandwidth_factor`` of their bandwidth.

    >>> SlowLinks(Fraction(1, 10), 0.5).ranks(25)
    [0, 10, 20]
    """

    share: Fraction
    bandwidth_factor: float
    level: str | None = None
    """The name of the level; None: the outermost."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1; got {self.share}")
        checked.check(self, bandwidth_factor=checked.share)

    def ranks(self, devices: int) -> list[int]:
        """The ranks whose ports are slow: the share rounded up, evenly spaced from rank 0 on."""
        return [int(place / self.share) for place in range(ceil(self.share * devices))]


@dataclass(frozen=True)
class SlowDevices:
    """``count`` devices that compute at ``speed`` times the speed of the others, evenly spaced from rank 0 on."""

    count: int
    speed: float

    def __post_init__(self) -> None:
        checked.check(self, count=partial(checked.whole_number, least=1), speed=checked.share)

    def ranks(self, devices: int) -> list[int]:
        """The ranks of the slow devices.  ``ValueError`` if there are fewer devices."""
        if self.count > devices:
            raise ValueError(f"{self.count} of {devices} devices cannot be slow")
        return [place * devices // self.count for place in range(self.count)]


@dataclass(frozen=True)
class Imperfections:
    """What is wrong with a cluster."""

    slow_links: tuple[SlowLinks, ...] = ()
    slow_devices: tuple[SlowDevices, ...] = ()
    lost_devices: int = 0
    jitter: float = 0.0
    """The standard deviation of the compute of a step on one device, as a part of it; devices vary apart from each other."""

    def __post_init__(self) -> None:
        checked.check(
            self,
            lost_devices=partial(checked.whole_number, least=0),
            jitter=partial(checked.number, most=1),
        )

    def __bool__(self) -> bool:
        return self != Imperfections()

    def on(self, hardware: Hardware, devices: int) -> Hardware:
        """The hardware with these faults on its first ``devices`` ranks.  ``ValueError`` for a level that it has not."""
        names = [link.name for link in hardware.links]
        faults: list[LinkFault] = []
        for links in self.slow_links:
            level = names[-1] if links.level is None else links.level
            if level not in names:
                raise ValueError(f"{hardware.name} has no links {level}; it has {', '.join(names)}")
            for rank in links.ranks(devices):
                factor = links.bandwidth_factor
                faults.append(LinkFault(source=rank, bandwidth_factor=factor, level=level))
                faults.append(LinkFault(target=rank, bandwidth_factor=factor, level=level))
        slow = [Straggler(rank, 1 / each.speed) for each in self.slow_devices for rank in each.ranks(devices)]
        return replace(
            hardware,
            faults=(*hardware.faults, *faults),
            stragglers=(*hardware.stragglers, *slow),
        )

    def left(self, devices: int, node: int, batch: int) -> list[int]:
        """How many of the devices may be used once some are lost: all of the whole nodes, and as many as divide the batch.

        ``ValueError`` if none are left.
        """
        if not self.lost_devices:
            return [devices]
        rest = devices - self.lost_devices
        if rest < 1:
            raise ValueError(f"{self.lost_devices} of {devices} devices are lost: none are left")
        step = node if rest >= node else 1
        whole = rest // step * step
        dealt = (count for count in range(whole, 0, -step) if batch % _odd(count) == 0)
        return list(dict.fromkeys([whole, next(dealt, whole)]))

    def seconds(self, step_seconds: float, compute_seconds: float, devices: int) -> float:
        """The expected seconds of a step with the jitter: the slowest of the devices is waited for."""
        return step_seconds + self.jitter * compute_seconds * expected_largest(devices)


def _odd(number: int) -> int:
    return number // (number & -number)


@cache
def expected_largest(count: int) -> float:
    """The expected largest of so many independent numbers from the standard normal distribution.

    It is the integral of x d(F(x)^n), by the trapezoid rule; about the root of 2 ln n for many (David and Nagaraja,
    *Order Statistics*, 2003, section 4.2).

    >>> expected_largest(1), round(expected_largest(2), 6), round(expected_largest(1000), 3)
    (0.0, 0.56419, 3.241)
    """
    if count == 1:
        return 0.0
    x = np.linspace(-WIDEST, WIDEST, POINTS)
    below = np.array([0.5 * (1 + erf(each / sqrt(2))) for each in x])
    density = np.array([exp(-each * each / 2) / sqrt(2 * pi) for each in x])
    return float(np.trapezoid(x * count * below ** (count - 1) * density, x))
