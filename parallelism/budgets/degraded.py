"""A search on an imperfect cluster, beside that on the perfect one: what the faults cost, which plan suffers least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from parallelism.budgets.imperfect import Imperfections
from parallelism.budgets.measures import BUSY
from parallelism.display.quantities import plural
from parallelism.hardware import Hardware, sized_hardware
from parallelism.planning import Plan, Plans
from parallelism.training import Figures, figures

TOP = 5
"""Of so many of the first plans it is told which one suffers least; as many are simulated where none is proved best."""
Search = Callable[[Hardware, int], Plans]


@dataclass(frozen=True)
class Degraded:
    """The plans on an imperfect cluster, and on the perfect one.  Both have plans."""

    imperfections: Imperfections
    plans: Plans
    perfect: Plans

    @cached_property
    def seconds(self) -> float:
        """The seconds of a step of the best plan, with the jitter."""
        return self._jittered(best_of(self.plans).figures)

    @cached_property
    def perfect_seconds(self) -> float:
        """The seconds of a step of the best plan on the perfect cluster."""
        return best_of(self.perfect).figures.seconds

    @cached_property
    def suffering(self) -> dict[str, float]:
        """By the words of some of the first plans, how many times as long each takes as on the perfect cluster."""
        return {
            plan.split: self._jittered(plan.figures) / figures(plan.run, self._whole(plan)).seconds
            for plan in islice(self.plans.programs(), TOP)
        }

    def json(self) -> dict[str, Any]:
        """The cost of the faults as plain values."""
        least = min(self.suffering, key=self.suffering.__getitem__)
        return {
            "seconds": self.seconds,
            "perfect_seconds": self.perfect_seconds,
            "slowdown": self.seconds / self.perfect_seconds,
            "devices": self.plans.task.devices,
            "suffers_least": least,
            "suffers": self.suffering[least],
        }

    @property
    def text(self) -> str:
        """The cost of the faults in words."""
        found = self.json()
        lost = self.imperfections.lost_devices
        used = f" on {plural(found['devices'], 'device')} of those that are left" if lost else ""
        return (
            f"A step takes {found['slowdown'] - 1:.1%} longer than on the perfect cluster{used}"
            f"{', with the jitter' if self.imperfections.jitter else ''}. Of the first plans, "
            f"{found['suffers_least']} suffers least: {found['suffers'] - 1:.1%}."
        )

    def _whole(self, plan: Plan) -> Hardware:
        """The perfect cluster with as many devices as a plan has."""
        return sized_hardware(self.perfect.task.hardware, plan.task.devices)

    def _jittered(self, found: Figures) -> float:
        split = found.step.step_split[found.step.slowest]
        busy = sum(getattr(split, part) for part in BUSY)
        return self.imperfections.seconds(found.seconds, busy, found.run.mesh.size)


def search_degraded(
    search: Search, hardware: Hardware | str, devices: int | None, batch: int, imperfections: Imperfections
) -> Degraded | Plans:
    """The plans on a cluster with faults and on the one without; only the plans where one of them has none.

    Where devices are lost, all of the whole nodes that are left are tried, and as many as divide the batch.
    """
    whole = sized_hardware(hardware, devices)
    count = devices or whole.ranks
    perfect = search(whole, count)
    node = whole.inside(len(whole.links) - 1)
    found = [
        search(imperfections.on(sized_hardware(hardware, left), left), left)
        for left in imperfections.left(count, node, batch)
    ]
    best = min(found, key=lambda plans: best_of(plans).figures.seconds if len(plans) else float("inf"))
    return Degraded(imperfections, best, perfect) if len(best) and len(perfect) else best


def best_of(plans: Plans) -> Plan:
    """The first plan that the command would tell: if it is not proved to be the best, its first ones are simulated."""
    if not plans.gap:
        return plans.best
    return min(islice(plans.programs(), TOP), key=lambda plan: plan.figures.seconds)
