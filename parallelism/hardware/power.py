"""`Power`: what a device and its share of a node draw."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from parallelism.hardware import fields as checked


@dataclass(frozen=True)
class Power:
    """The power of a device, busy and idle, and of what a node has besides its devices.

    >>> from parallelism import Hardware
    >>> power = Hardware.preset("dgx-h100").power
    >>> power.watts(busy=1.0), power.watts(busy=0.5)
    (1275.0, 960.0)
    """

    busy_watts: float
    """The power of a device that computes."""
    idle_watts: float
    """The power of a device that waits."""
    node_watts: float = 0.0
    """The power of a node's processors, memory, adapters, fans and losses, divided by its devices."""

    def __post_init__(self) -> None:
        watts = partial(checked.number, of="of watts")
        checked.check(self, busy_watts=partial(watts, above=0), idle_watts=watts, node_watts=watts)
        if self.idle_watts > self.busy_watts:
            raise ValueError(
                f"idle_watts must be at most the {self.busy_watts:g} busy_watts; got {self.idle_watts:g}"
            )

    def watts(self, busy: float) -> float:
        """The power of a device that computes in this part of the time, with its share of the node."""
        return self.node_watts + self.idle_watts + (self.busy_watts - self.idle_watts) * busy

    @property
    def text(self) -> str:
        """The power in words."""
        return f"{self.busy_watts:g} W a device, {self.idle_watts:g} W idle; {self.node_watts:g} W of the node for each"


def checked_power(field: str, value: Any) -> Power | None:
    """A `Power` or None; ``TypeError`` for anything else."""
    if value is not None and not isinstance(value, Power):
        raise TypeError(f"{field} must be a Power or None; got {checked.shown(value)}")
    return value
