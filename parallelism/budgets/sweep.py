"""`Sweep`: the best plan on each hardware of each size, and what a training run by it takes and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallelism.budgets import table
from parallelism.budgets.budget import Budget
from parallelism.budgets.failures import Survival
from parallelism.budgets.measures import Measures

DAY_SECONDS = 86_400.0
HOURS = 24
"""The hours of a day."""
FIELDS = (
    *("hardware", "devices", "batch", "seconds", "days", "tokens_per_second", "mfu", "device_hours", "cost"),
    *("energy_kwh", "carbon_kg", "goodput", "plan", "reason", "failures", "hint", "degraded"),
)
"""What the JSON of a cell has."""


@dataclass(frozen=True)
class Cell:
    """One hardware of one size, with the best plan on it.  What was not asked for, or is not known, is None."""

    budget: Budget
    hardware: str
    devices: int | None
    """None: it is not known, because there is no such hardware."""
    batch: int
    """The rows of a step."""
    step_tokens: int
    plan: Mapping[str, Any] | None
    """What is told of the plan, the fields of `Figures.json` among it.  None: there is none."""
    reason: str = ""
    """Why there is no plan."""
    measures: Measures | None = None
    """What the plan draws and keeps; None: it is not known."""
    degraded: Mapping[str, Any] | None = None
    """On an imperfect cluster, what its faults cost; the fields of `Degraded.json`."""
    is_refused: bool = False
    """Whether nothing was searched, because of the reason."""

    @property
    def seconds(self) -> float | None:
        """The seconds of a step."""
        if self.degraded is not None:
            return float(self.degraded["seconds"])
        return None if self.plan is None else float(self.plan["seconds"])

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens per second of all devices together."""
        return None if self.seconds is None else self.step_tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """The MFU of a step on the devices that the plan uses."""
        if self.plan is None or self.seconds is None:
            return None
        return float(self.plan["mfu"]) * float(self.plan["seconds"]) / self.seconds

    @property
    def survival(self) -> Survival | None:
        """The cost of failures; None if nobody asked, or without a plan."""
        asked, found = self.budget.failures, self.measures
        if asked is None or found is None or self.devices is None:
            return None
        return asked.of(self.devices, found.checkpoint_bytes, found.stall_seconds)

    @property
    def goodput(self) -> float | None:
        """The part of the time that brings the run forward."""
        if self.plan is None:
            return None
        return 1.0 if self.survival is None else self.survival.goodput

    @property
    def failures(self) -> dict[str, Any] | None:
        """The cost of failures as plain values, and how many the run meets."""
        if self.survival is None or self.days is None:
            return None
        count = self.days * DAY_SECONDS / self.survival.between_seconds
        return {"interruptions": count, **self.survival.json()}

    @property
    def days(self) -> float | None:
        """The days of the whole run: its tokens are ``days * 86400 * tokens_per_second * goodput``."""
        if self.tokens_per_second is None or not self.goodput:  # a run that always fails is never done
            return None
        return self.budget.tokens / (self.tokens_per_second * self.goodput) / DAY_SECONDS

    @property
    def device_hours(self) -> float | None:
        """The hours of all devices together for the whole run; None where the time is not known."""
        return None if self.days is None or self.devices is None else self.days * HOURS * self.devices

    @property
    def cost(self) -> float | None:
        """The price of the whole run, in the currency of the prices; None where one is not known."""
        price = self.budget.price(self.hardware)
        return None if price is None or self.device_hours is None else price * self.device_hours

    @property
    def energy_kwh(self) -> float | None:
        """The energy of the whole run, devices and nodes; None where the hardware has no power figures."""
        if self.measures is None or self.measures.watts is None or self.days is None:
            return None
        return self.measures.watts / 1000 * self.days * HOURS

    @property
    def carbon_kg(self) -> float | None:
        """The kilograms of CO2 that `energy_kwh` causes; None if it or the carbon of the electricity is not known."""
        grams = self.budget.carbon_grams_per_kwh
        return None if grams is None or self.energy_kwh is None else grams * self.energy_kwh / 1000

    @property
    def slower(self) -> float | None:
        """How much longer a step takes than on the perfect cluster, as a part of that."""
        return None if self.degraded is None else float(self.degraded["slowdown"]) - 1

    @property
    def hint(self) -> str | None:
        """The next batch that the devices divide, if no split into pipelines and replicas is likely to divide this one.

        That is where an odd factor of the devices does not divide the batch.
        """
        if self.devices is None:
            return None
        odd = self.devices // (self.devices & -self.devices)
        if self.batch % odd == 0:
            return None
        fits = -(-self.batch // self.devices) * self.devices
        return f"{self.devices} devices do not divide a batch of {self.batch}; they divide {fits}"

    @property
    def meets(self) -> bool:
        """Whether the run is done in the days; any number of them is right if none was asked for."""
        return self.days is not None and (self.budget.days is None or self.days <= self.budget.days)

    def json(self) -> dict[str, Any]:
        """The cell as plain values."""
        return {name: getattr(self, name) for name in FIELDS}


@dataclass(frozen=True)
class Sweep:
    """The cells of a sweep, in the order in which they were asked for."""

    budget: Budget
    cells: tuple[Cell, ...]

    @property
    def fastest(self) -> Cell | None:
        """The cell with the fewest days; None if no cell has a plan."""
        return min((cell for cell in self.cells if cell.days is not None), key=days_of, default=None)

    @property
    def cheapest(self) -> Cell | None:
        """The cell with the least cost of those that meet the days; None if none does, or if there are no prices."""
        return min(
            (cell for cell in self.cells if cell.meets and cell.cost is not None), key=_cost, default=None
        )

    @property
    def meets(self) -> bool:
        """Whether a cell meets the days, or simply has a plan where no number of days was asked for."""
        return any(cell.meets for cell in self.cells)

    def json(self) -> dict[str, Any]:
        """The sweep as plain values; the cheapest and the fastest cell are repeated there."""
        return {
            "sweep": [cell.json() for cell in self.cells],
            "cheapest": self.cheapest and self.cheapest.json(),
            "fastest": self.fastest and self.fastest.json(),
            "tokens": self.budget.tokens,
            "days_asked": self.budget.days,
        }

    def __str__(self) -> str:
        return "\n".join(table.lines(self))


def days_of(cell: Cell) -> float:
    """The days of a cell that has a plan."""
    assert cell.days is not None
    return cell.days


def _cost(cell: Cell) -> float:
    assert cell.cost is not None
    return cell.cost
