"""`Budget`: what is asked of a training run beside its model: how many tokens, in how many days, at which prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from parallelism.budgets.failures import Failures
from parallelism.hardware import fields as checked


@dataclass(frozen=True)
class Budget:
    """A training run of so many ``tokens``.  ``ValueError`` or ``TypeError``, naming the field, for what cannot be.

    >>> Budget(tokens=1e12, days=30, prices={"": 2.5, "h200-node": 3.5}).price("h200-node:4")
    3.5
    """

    tokens: float
    """The tokens that are trained on, each as often as it is met."""
    days: float | None = None
    """The days in which the run is to be done; None: any number."""
    prices: Mapping[str, float] | None = None
    """What an hour of a device costs, by the name of a hardware, in any currency; under an empty name that of all
    others.  None: nobody asked."""
    carbon_grams_per_kwh: float | None = None
    """The grams of CO2 of a kilowatt hour; None: nobody asked."""
    failures: Failures | None = None
    """How often devices fail; None: never."""

    def __post_init__(self) -> None:
        above = partial(checked.number, above=0)
        checked.check(self, tokens=above)
        given = [name for name in ("days", "carbon_grams_per_kwh") if getattr(self, name) is not None]
        checked.check(self, **dict.fromkeys(given, above))
        if self.prices is not None:
            checked.store(
                self,
                prices=checked.Table({name: above("a price", each) for name, each in self.prices.items()}),
            )

    def price(self, hardware: str) -> float | None:
        """The price of a hardware: under its whole name, that of its preset, or that of all; None if there is none."""
        names = (hardware, *names_of(hardware), "")
        prices = self.prices or {}
        return next((prices[name] for name in names if name in prices), None)


def names_of(hardware: str) -> tuple[str, ...]:
    """The names that a hardware goes by besides its whole one: without its stack, and without its number of nodes.

    >>> names_of("dgx-h100:8+megatron-h100")
    ('dgx-h100:8', 'dgx-h100')
    """
    preset = hardware.partition("+")[0]
    return preset, preset.partition(":")[0]
