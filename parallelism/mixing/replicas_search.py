"""The plans whose replicas lie in two parts: which there may be, and a lower bound of the seconds of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from parallelism.arrays import Floats
from parallelism.hardware import MixedHardware, mixed
from parallelism.mixing.arrangements import Replicas
from parallelism.mixing.plans import MixedPlan
from parallelism.mixing.uneven_replicas import ORDER, ReplicaCosts
from parallelism.models import TransformerSpec
from parallelism.planning.plan import Task
from parallelism.planning.space import Choices, choices, different_programs
from parallelism.symbolic.events import Unpriceable

MOST_DEALT = 3000
"""The most ways to deal rows to replicas that are timed, over all settings."""


class Way(NamedTuple):
    """A way to deal rows to the replicas of some settings."""

    least_seconds: float
    """A lower bound: the floating-point operations of its products at the highest rate that they reach in the slower part."""
    row: int
    """The settings."""
    replicas: Replicas


class FoundReplicas(NamedTuple):
    """Plans with replicas in two parts."""

    plans: list[MixedPlan]
    timed: int
    others: float
    """A lower bound of the seconds of all others."""
    refused: dict[str, int]
    """By reason, the combinations that cannot be."""


@dataclass(frozen=True)
class ReplicasSearch:
    """The plans of a task; ``usable`` is by part what tensors may use of a device in a plan of a space."""

    task: Task

    @property
    def hardware(self) -> MixedHardware:
        """Both parts."""
        assert isinstance(self.task.hardware, MixedHardware)
        return self.task.hardware

    def possible(self, wanted: Mapping[str, Any]) -> Choices:
        """The settings of all plans, with microbatches of one row: those whose replicas fill both parts."""
        devices = self.task.devices
        given = {**wanted, "order": ORDER, "microbatch": 1}
        found = choices(self.task.model, devices, devices, given, copied=False)
        replica = devices // found["dp"]
        fits = (found["dp"] > 1) & (found["zero"] < 3) & (found["instances"] == 1)
        for part in self.hardware.parts:
            fits &= part.devices % replica == 0
        found = found.take(fits)
        return found.take(different_programs(found)[0])

    def ways(self, possible: Choices, microbatch: Sequence[int] | None, limit: float = inf) -> list[Way]:
        """The ways to deal rows under all settings whose bounds are below a limit, those with the least first."""
        found = [way for row in range(len(possible)) for way in self._of_row(possible, row, microbatch)]
        return sorted((way for way in found if way.least_seconds < limit), key=lambda way: way.least_seconds)

    def _of_row(self, possible: Choices, row: int, microbatch: Sequence[int] | None) -> Iterator[Way]:
        dp, ep = int(possible["dp"][row]), int(possible["ep"][row])
        if self.task.batch % ep:
            return
        first, second = (dp * part.devices // self.hardware.devices for part in self.hardware.parts)
        rows = self.task.batch // ep
        settings = possible.settings(row)
        again = self._again if settings["recompute"] == "full" else 1.0

        def factor(count: int) -> float:
            return again * filling(settings["pp"], count)

        for count in _divisors(rows):
            for other in range(1, (rows // count - first) // second + 1):
                own, left = divmod(rows // count - second * other, first)
                allowed = microbatch is None or (own in microbatch and other in microbatch)
                if not left and allowed:
                    replicas = Replicas(count, (first, second), (own, other))
                    yield Way(self._least_seconds(replicas, rows) * factor(count), row, replicas)

    @property
    def _spec(self) -> TransformerSpec:
        spec = self.task.model.model
        assert isinstance(spec, TransformerSpec)
        return spec

    @cached_property
    def _flops(self) -> float:
        """Those of a step, without the scores of attention."""
        spec = self._spec
        return float(replace(spec, sequence=1).flops(self.task.batch * spec.sequence))

    @cached_property
    def _again(self) -> float:
        """How many times as much is computed where all blocks run again: a forward of three parts, without the head."""
        spec = self._spec
        head = 6 * spec.vocabulary * spec.width * self.task.batch * spec.sequence
        return 1 + max(0.0, 1 - head / self._flops) / 3

    def _least_seconds(self, replicas: Replicas, rows: int) -> float:
        flops = self._flops
        products = self.task.model.products
        shares = [
            count * own * replicas.microbatches / rows
            for count, own in zip(replicas.counts, replicas.rows, strict=True)
        ]
        return max(
            share * flops / (part.devices * part.peak(products) * part.efficiency(products))
            for share, part in zip(shares, self.hardware.parts, strict=True)
        )

    def find(
        self,
        possible: Choices,
        usable: Sequence[Floats],
        microbatch: Sequence[int] | None,
        limit: float = inf,
    ) -> FoundReplicas:
        """The plans that fit, each with a bound of its seconds; all that take less than the limit are among them, unless
        ``others`` is below it."""
        pricing = _Pricing(self.task, possible, self.hardware, usable)
        plans, timed, others = list[MixedPlan](), 0, inf
        for way in self.ways(possible, microbatch, limit):
            if timed == MOST_DEALT:
                others = way.least_seconds
                break
            if pricing.is_too_large(way):
                continue
            timed += 1
            plan = pricing.plan(way)
            plans += [plan] if plan is not None else []
        return FoundReplicas(plans, timed, others, pricing.refused)


class _Pricing:
    """The bounds and the memory of ways, from the pieces of each part."""

    def __init__(
        self, task: Task, possible: Choices, hardware: MixedHardware, usable: Sequence[Floats]
    ) -> None:
        self.task, self.possible, self.hardware, self.usable = task, possible, hardware, usable
        self.refused: dict[str, int] = {}
        self._tables: dict[Any, ReplicaCosts] = {}
        self._too_large: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By settings and part, the rows of a microbatch and the microbatches that did not fit: more do not, either."""

    def is_too_large(self, way: Way) -> bool:
        """Whether a part cannot hold it, as it cannot hold less."""
        found = any(
            way.replicas.rows[part] >= rows and way.replicas.microbatches >= count
            for part in range(2)
            for rows, count in self._too_large.get((way.row, part), ())
        )
        if found:
            self._refuse("memory")
        return found

    def _refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def plan(self, way: Way) -> MixedPlan | None:
        """The plan with its bound; None if it does not fit, or is not put together from pieces."""
        width = self.hardware.devices // int(self.possible["dp"][way.row])
        seconds, held = 0.0, [0, 0]
        try:
            for part in range(2):
                table, row = self._row(way, part, width)
                table.prepare(row)
                shape = table.shape(row)
                held[part] = int(table.peaks(shape, [row])[0])
                if held[part] > self.usable[part][way.row]:
                    too_large = self._too_large.setdefault((way.row, part), [])
                    too_large.append((way.replicas.rows[part], way.replicas.microbatches))
                    self._refuse("memory")
                    return None
                seconds = max(seconds, float(table.seconds([row])[0]))
        except Unpriceable as error:
            self._refuse(str(error))
            return None
        task = replace(self.task, hardware=self.hardware.dealt(width))
        return MixedPlan(task, self.possible.settings(way.row), way.replicas, seconds, (held[0], held[1]))

    def _row(self, way: Way, part: int, width: int) -> tuple[ReplicaCosts, int]:
        """The costs in a part, and the row there."""
        lanes = width if self.hardware.across is not None else 1
        if (part, lanes) not in self._tables:
            parts = self.hardware.parts if part == 0 else self.hardware.parts[::-1]
            hardware = mixed(*parts, across=self.hardware.across, lanes=lanes)
            self._tables[part, lanes] = ReplicaCosts(replace(self.task, hardware=hardware), self.possible)
        settings = {**self.possible.settings(way.row), "microbatch": way.replicas.rows[part]}
        table = self._tables[part, lanes]
        return table, table.row_of(settings, way.replicas.microbatches)


def filling(stages: int, microbatches: int) -> float:
    """By what factor a pipeline takes longer at least than if all of its devices always worked.

    Stage s works for M T(s), after a microbatch has passed the stages before it, and before it comes back there: a step
    lasts at least T(0) + ... + T(s - 1) + M T(s).  The largest of these is least where all are equal.

    >>> filling(1, 8), round(filling(4, 4), 3)
    (1.0, 1.463)
    """
    return stages / microbatches / (1 - (1 - 1 / microbatches) ** stages)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
