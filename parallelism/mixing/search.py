"""`find_mixed`: every plan over two parts is timed without shared links, and the best are simulated fully."""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Floats
from parallelism.hardware import MixedHardware, Reserve, mixed
from parallelism.mixing.arrangements import Stages
from parallelism.mixing.dealt_blocks import dealt
from parallelism.mixing.plans import Alone, MixedPlan, MixedPlans
from parallelism.mixing.replicas_search import ReplicasSearch
from parallelism.mixing.uneven_stages import SCHEDULE, PartOfPlans, UnevenStages, part_task
from parallelism.models import TransformerSpec
from parallelism.planning import Plans, find_plan
from parallelism.planning.explanation import need_text
from parallelism.planning.plan import Task
from parallelism.planning.search import Progress, logged, memory_of, reserve_of, usable_bytes
from parallelism.planning.settings import AXES
from parallelism.planning.space import Choices, choices, different_programs
from parallelism.planning.trained import TrainedModel
from parallelism.rarely_collected import rarely_collected
from parallelism.symbolic.events import Unpriceable
from parallelism.training.training_run import ADAM_W
from parallelism.transforms import SGD, Adam, MixedPrecision

_log = logging.getLogger("parallelism")
MOST_WAYS = 1024
"""The most ways to deal blocks to the stages of one plan that are timed."""
KEPT, ALIKE = 64, 8
"""The most plans that are kept to be simulated, in all and with equal settings."""
HOPELESS, PATIENCE = 1.5, 50_000
"""A plan over both that takes `HOPELESS` times as long as the faster part alone is timed only among the first `PATIENCE`."""
TWICE = 2
"""The number of plans with equal settings that are simulated before others are."""
WORSE = 1.2
"""Plans with replicas in both parts are timed if they may take at most so many times as long as the best pipeline."""


@rarely_collected()
def find_mixed(
    model: TransformerSpec | str,
    *,
    hardware: MixedHardware,
    batch: int,
    memory: float | str | None = None,
    reserve: Reserve | float | str | None = None,
    optimizer: SGD | Adam | None = None,
    gradients: npt.DTypeLike = "float32",
    state: Mapping[str, npt.DTypeLike] | None = None,
    precision: MixedPrecision | None = None,
    simulations: int | None = 8,
    progress: Progress | None = None,
    **fixed: Any,
) -> MixedPlans:
    """The plans of ``model`` over all devices of two parts, the best first, and the best plan of each part alone.

    >>> from parallelism import Hardware, models
    >>> from parallelism.hardware import mixed
    >>> spec = models.TransformerSpec(layers=6, width=256, heads=8, vocabulary=512, sequence=128)
    >>> both = mixed(Hardware.preset("dgx-a100:1"), Hardware.preset("dgx-h100:1"))
    >>> find_mixed(spec, hardware=both, batch=16, tp=8, microbatch=1, simulations=1).found[0].parts_text
    'layers 4 on dgx-h100, then 2 on dgx-a100'

    The arguments are those of `parallelism.planning.find_plan`.  A plan over both parts is one of two.  `Stages`: a
    pipeline under 1F1B whose first stages lie in one part and whose last in the other; either part may be first.  All
    stages have the same width, and are split in the same way; each has blocks of its own number.  For each combination
    of settings the numbers of blocks are searched: all, or the `MOST_WAYS` whose slowest stage has least work.
    `Replicas`: some replicas of a pipeline lie in one part, and some in the other; a microbatch has rows of its own
    number in each part, and all ways to deal the batch so are searched which may be among the best.

    Plans are timed as if nothing shared links, which is a lower bound of their time, and simulated fully in this order
    until no other can be better, or ``simulations`` are made: `MixedPlans.gap` says what is not proved.

    ``ValueError``, ``TypeError`` as from `find_plan`; also for a program that is no Transformer, another schedule, and an
    ``order`` in which stages are not outermost; with an ``order`` there are no replicas in both parts.
    """
    optimizer = ADAM_W if optimizer is None else optimizer
    trained = TrainedModel.of(model, optimizer, gradients, state, precision)
    if not isinstance(trained.model, TransformerSpec):
        raise ValueError(
            f"plans over two kinds of nodes are for Transformers; {trained.model.name} is a program"
        )
    wanted = _checked(fixed)
    task = Task(trained, batch, hardware, hardware.devices)
    told = progress or logged
    options: dict[str, Any] = {
        "batch": batch,
        "memory": memory,
        "reserve": reserve,
        "optimizer": optimizer,
        "gradients": gradients,
        "state": state,
        "precision": precision,
        "simulations": simulations,
        "progress": progress,
        **fixed,
    }
    alone = tuple(_alone(model, hardware, part, options) for part in range(2))
    best_alone = min((each.plan.seconds for each in alone if each.plan is not None), default=np.inf)
    search = _Search(task, told, HOPELESS * best_alone)
    possible = search.possible(wanted)
    search.time(possible, _usable(hardware, memory, reserve, possible))
    if "order" not in fixed:
        search.time_replicas(wanted, partial(_usable, hardware, memory, reserve))
    found, simulated, gap = search.simulated(simulations)
    _log.info("%d plans over both parts timed, %d simulated", search.timed, simulated)
    return MixedPlans(tuple(found), alone, search.timed, simulated, gap, search.refused)


def _usable(
    hardware: MixedHardware,
    memory: float | str | None,
    reserve: Reserve | float | str | None,
    possible: Choices,
) -> list[Floats]:
    """By part and plan, the bytes that tensors may use on a device."""
    return [
        usable_bytes(reserve_of(reserve, memory, part), memory_of(memory, part), possible)
        for part in hardware.parts
    ]


def _checked(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of plans over two parts.  ``ValueError`` for some that these cannot have."""
    wanted = dict(fixed)
    for name, only in (("schedule", SCHEDULE), ("chunks", 1), ("balanced", False)):
        if wanted.get(name, only) not in (only, [only]):
            raise ValueError(f"plans over two kinds of nodes have {name}={only}; got {wanted[name]!r}")
    order = wanted.get("order", " ".join(AXES))
    if not isinstance(order, str) or not order.startswith("pp"):
        raise ValueError(f"in plans over two kinds of nodes pp is outermost; got order={order!r}")
    return {**wanted, "schedule": SCHEDULE, "chunks": 1, "balanced": False}


def _alone(model: Any, hardware: MixedHardware, number: int, options: Mapping[str, Any]) -> Alone:
    """The best plan on a part alone."""
    part, label = hardware.parts[number], hardware.labels[number]
    try:
        plans: Plans = find_plan(model, hardware=part, devices=part.devices, **options)
    except ValueError as error:
        return Alone(label, part.devices, None, str(error))
    if len(plans):
        return Alone(label, part.devices, plans.best)
    if plans.tightest is None:
        return Alone(label, part.devices, None, plans.refusals)
    need = need_text([plans.tightest.need], plans.memory, plans.reserve.text)
    return Alone(label, part.devices, None, f"no plan fits: {need}")


@dataclass
class _Search:
    """The plans over both parts of a task."""

    task: Task
    told: Progress
    hopeless: float
    """Once `PATIENCE` plans were timed, none is looked for that takes as long or longer."""
    kept: list[MixedPlan] = field(default_factory=list)
    """The best by their bounds."""
    others: float = np.inf
    """A lower bound of the seconds of all plans that were neither kept nor timed."""
    timed: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def hardware(self) -> MixedHardware:
        assert isinstance(self.task.hardware, MixedHardware)
        return self.task.hardware

    def possible(self, wanted: Mapping[str, Any]) -> Choices:
        """The settings of all plans: those whose stages fill both parts."""
        found = choices(self.task.model, self.task.devices, self.task.batch, wanted, copied=False)
        self._refuse({reason: each.count for reason, each in found.refused.items()})
        width = self.task.devices // found["pp"]
        fills = np.ones(len(found), np.bool_)
        for part in self.hardware.parts:
            fills &= part.devices % width == 0
        self._refuse({"the width of a stage does not divide the devices of both parts": int((~fills).sum())})
        found = found.take(fills)
        return found.take(different_programs(found)[0])

    def _refuse(self, counts: Mapping[str, int]) -> None:
        for reason, count in counts.items():
            if count:
                self.refused[reason] = self.refused.get(reason, 0) + count

    def time(self, possible: Choices, usable: list[Floats]) -> None:
        """Times all plans, the most promising settings first."""
        both = self.hardware
        parts = [
            PartOfPlans.of(part_task(self.task, both, part), possible, usable[part]) for part in range(2)
        ]
        turned = mixed(*both.parts[::-1], across=both.across)
        waiting: list[tuple[float, int, UnevenStages]] = []
        for row in range(len(possible)):
            self.told("prepared", row, len(possible))
            for hardware, in_order in ((both, parts), (turned, parts[::-1])):
                stages = UnevenStages(hardware, in_order, row, possible.settings(row))
                if (least := self._least(stages, row)) is not None:
                    waiting.append((least, len(waiting), stages))
        waiting.sort()
        for done, (least, _, stages) in enumerate(waiting):
            self.told("timed", done, len(waiting))
            if least >= self.limit or (self.timed >= PATIENCE and least >= self.hopeless):
                self.others = min(self.others, least)
                return
            self._time(stages)

    def time_replicas(self, wanted: Mapping[str, Any], usable: Callable[[Choices], list[Floats]]) -> None:
        """Times the plans with replicas in both parts."""
        search = ReplicasSearch(self.task)
        possible = search.possible(wanted)
        given = wanted.get("microbatch")
        only = [given] if isinstance(given, int) else given
        limit = min(self.limit, WORSE * self.kept[0].bound_seconds) if self.kept else np.inf
        found = search.find(possible, usable(possible), only, limit)
        self.others = min(self.others, limit)
        self._refuse(found.refused)
        self.timed += found.timed
        self.others = min(self.others, found.others)
        for plan in found.plans:
            self.add(plan)

    def _least(self, stages: UnevenStages, row: int) -> float | None:
        """A lower bound of the seconds of all plans with some settings; None if there are none, which is counted."""
        try:
            for part in stages.parts:
                part.table.held(row)
            least = stages.least_seconds
        except Unpriceable as error:
            self._refuse({str(error): 1})
            return None
        if not np.isfinite(least):
            self._refuse({"memory": 1})
            return None
        return least

    @property
    def limit(self) -> float:
        """Plans that take as long or longer are not kept."""
        return self.kept[-1].bound_seconds if len(self.kept) >= KEPT else np.inf

    def _time(self, stages: UnevenStages) -> None:
        """Times the ways to deal blocks to the stages under some settings."""
        ways = dealt(stages.loads, stages.blocks, MOST_WAYS, self.limit)
        self.others = min(self.others, max(ways.others, stages.crossing_seconds))
        if not ways.counts:
            return
        seconds = stages.step_seconds(ways.counts)
        self.timed += len(seconds)
        best = np.argsort(seconds, kind="stable")
        for place in best[:ALIKE].tolist():
            if seconds[place] >= self.limit:
                break
            self._keep(stages, ways.counts[place], float(seconds[place]))
        if len(best) > ALIKE:
            self.others = min(self.others, float(seconds[best[ALIKE]]))

    def _keep(self, stages: UnevenStages, counts: tuple[int, ...], seconds: float) -> None:
        peaks = [0, 0]
        for stage, count in enumerate(counts):
            part = stages.part_of(stage)
            peaks[part] = max(peaks[part], int(stages.bytes_held[stage, count - 1]))
        task = replace(self.task, hardware=stages.hardware)
        arrangement = Stages(counts, task.model.layer_blocks)
        self.add(MixedPlan(task, stages.settings, arrangement, seconds, (peaks[0], peaks[1])))

    def add(self, plan: MixedPlan) -> None:
        """Keeps a plan if it is one of the best."""
        insort(self.kept, plan, key=attrgetter("bound_seconds"))
        if len(self.kept) > KEPT:
            self.others = min(self.others, self.kept.pop().bound_seconds)

    def simulated(self, most: int | None) -> tuple[list[MixedPlan], int, float]:
        """The plans that were kept, those first that were simulated; how many were; and the gap of `MixedPlans`."""
        full, rest, best = list[MixedPlan](), list(self.kept), np.inf
        tried = Counter[int]()
        while rest and rest[0].bound_seconds < best and (most is None or len(full) < most):
            self.told("simulated", len(full), most or len(self.kept))
            # Plans of one kind differ little, and their bounds may be low alike: others come first.
            place = next((i for i, plan in enumerate(rest) if tried[id(plan.settings)] < TWICE), 0)
            tried[id(rest[place].settings)] += 1
            full.append(rest.pop(place).simulated())
            best = min(best, full[-1].seconds)
        least = min([self.others, *(plan.bound_seconds for plan in rest[:1])])
        gap = 0.0
        if self.kept and least < best:
            gap = float(1 - least / best) if full else 1.0
        return [*sorted(full, key=attrgetter("seconds")), *rest], len(full), gap
