"""`UnevenStages`: what each stage of a pipeline over two parts takes and holds, for any number of blocks.

The stages of a plan have one width: they lie on equally many devices, split in the same way.  A stage lies in one part, and
the stages of a part follow each other.  So every piece is priced on the hardware of its part, by the functions that put
together the plans of one part (`parallelism.planning.plan_costs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from parallelism.arrays import Floats
from parallelism.cost import MixedCosts
from parallelism.hardware import MixedHardware
from parallelism.memoized import memoized
from parallelism.mixing.dealt_blocks import least_load
from parallelism.pipelining.generators import SCHEDULES
from parallelism.planning.plan import Task
from parallelism.planning.plan_costs import PlanCosts
from parallelism.planning.space import Choices
from parallelism.symbolic.event_prices import MeshOnHardware
from parallelism.symbolic.orders import FIRST, Ends, Order, order_of, place_of

SCHEDULE = "1f1b"
"""The schedule of pipelines over two parts."""


@dataclass(frozen=True, eq=False)
class PartOfPlans:
    """The pieces of all plans of a space on one part."""

    table: PlanCosts
    usable: Floats
    """By plan, the bytes that tensors may use on a device of this part."""

    @classmethod
    def of(cls, task: Task, possible: Choices, usable: Floats) -> PartOfPlans:
        """The pieces on the hardware of a task, which is a part."""
        return cls(PlanCosts(task, possible), usable)

    @memoized
    def layout(self, row: int, stages: int) -> MeshOnHardware:
        """The mesh of so many stages of a plan in this part."""
        return MeshOnHardware(self.table.task.mesh({**self.table.settings(row), "pp": stages}))

    @memoized
    def seconds(self, row: int, stages: int, place: int, counts: range) -> dict[str, Floats]:
        """Those of a stage at a place for these numbers of blocks: of its ``F`` and ``B``, and of its end ``before`` and
        ``after`` gradients are exchanged."""
        layout, table = self.layout(row, stages), self.table
        blocks = [table.alike(count, place) for count in counts]
        found = {}
        for kind in "FB":
            actions = table.seconds_of(table.actions(row, kind), layout)
            found[kind] = np.array([actions.action(place, kind, each) for each in blocks])
        ends = table.seconds_of(table.ends(row, in_stages=True), layout)
        found["before"], found["after"] = np.array([ends.end(place, each) for each in blocks]).T
        return found

    @memoized
    def held(self, row: int, place: int, counts: range) -> dict[str, Floats]:
        """The bytes of a stage at a place for these numbers of blocks: ``held`` during the step, ``gradients``, those at
        the ``end``, the peaks of ``F`` and ``B``, and what a microbatch keeps, ``kept``."""
        table = self.table
        end = table.ends(row, in_stages=True)
        rows = []
        for count in counts:
            blocks = table.alike(count, place)
            categories = table.held_by_category(row, end, place, blocks)
            gradients = categories.pop("gradients")
            forward, backward = (table.actions(row, kind).memory(place, kind, blocks) for kind in "FB")
            held = sum(categories.values())
            rows.append(
                (held, gradients, end.end_peak(place, blocks), forward.peak, backward.peak, forward.change)
            )
        names = "held", "gradients", "end", "F", "B", "kept"
        return dict(zip(names, np.array(rows, np.float64).T, strict=True))


class UnevenStages:
    """The stages of one plan over two parts, of which those of ``hardware.parts[0]`` come first.

    Arrays have the axes ``[stage, blocks - 1]``.
    """

    def __init__(
        self, hardware: MixedHardware, parts: Sequence[PartOfPlans], row: int, settings: Mapping[str, Any]
    ) -> None:
        self.parts, self.row, self.settings = parts, row, settings
        task = parts[0].table.task
        self.microbatches = task.microbatches(settings)
        self.stages = int(settings["pp"])
        self.width = hardware.devices // self.stages
        self.hardware = hardware.dealt(self.width)
        self.of_parts = [part.devices // self.width for part in hardware.parts]
        """How many stages each part has."""
        self.blocks = task.model.blocks
        self.counts = range(1, self.blocks - self.stages + 2)
        """The numbers of blocks that a stage may have."""

    def part_of(self, stage: int) -> int:
        """The part that a stage lies in."""
        return int(stage >= self.of_parts[0])

    @cached_property
    def _kinds(self) -> list[tuple[int, int]]:
        """By stage, its part and its place."""
        return [(self.part_of(stage), place_of(stage, self.stages)) for stage in range(self.stages)]

    @cached_property
    def seconds(self) -> dict[str, Floats]:
        """By name the seconds of `PartOfPlans.seconds`."""
        known = {}
        for part, place in dict.fromkeys(self._kinds):
            counts = self.alike_counts(place)
            known[part, place] = self.parts[part].seconds(self.row, self.of_parts[part], place, counts)
        found = {}
        for name in ("F", "B", "before", "after"):
            by_stage = [_in_front(known[kind][name], len(self.counts)) for kind in self._kinds]
            found[name] = np.stack(by_stage)
        return found

    def alike_counts(self, place: int) -> range:
        """The numbers of blocks that a stage at a place may have: the first has those that are like no others, and one."""
        first = self.parts[0].table.task.model.first_alike if place == FIRST else 0
        return range(first + 1, self.counts.stop)

    @cached_property
    def bytes_held(self) -> Floats:
        """The bytes of the fullest device of a stage: under 1F1B stage s of p keeps p - s microbatches at most."""
        adds_up = self.parts[0].table.adds_up(self.parts[0].table.shape(self.row))
        rows = []
        for stage, (part, place) in enumerate(self._kinds):
            stage_bytes = self.parts[part].held(self.row, place, self.alike_counts(place))
            kept = min(self.stages - stage, self.microbatches)
            actions = np.maximum(
                (kept - 1) * stage_bytes["kept"] + stage_bytes["F"],
                kept * stage_bytes["kept"] + stage_bytes["B"],
            )
            during = actions + (stage_bytes["gradients"] if adds_up else 0)
            rows.append(
                _in_front(
                    stage_bytes["held"] + np.maximum(during, stage_bytes["gradients"] + stage_bytes["end"]),
                    len(self.counts),
                )
            )
        return np.stack(rows)

    @cached_property
    def busy(self) -> Floats:
        """The seconds of all microbatches on a stage; infinite for numbers of blocks that do not fit."""
        usable = np.array([self.parts[part].usable[self.row] for part, _ in self._kinds])[:, None]
        work = self.microbatches * (self.seconds["F"] + self.seconds["B"])
        found: Floats = np.where(self.bytes_held <= usable, work, np.inf)
        return found

    @cached_property
    def waits(self) -> Floats:
        """By stage, the seconds of one microbatch on all stages before it at least, which a step lasts beside `busy`."""
        least = (self.seconds["F"] + self.seconds["B"]).min(axis=1)
        found: Floats = np.cumsum(least) - least
        return found

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step_seconds(self, counts: Sequence[Sequence[int]]) -> Floats:
        """The seconds of a step without shared links for each of some numbers of blocks by stage."""
        order, repeats = self._order
        at = np.array(counts).T - 1
        each = np.arange(self.stages)[:, None]
        chosen = {name: seconds[each, at] for name, seconds in self.seconds.items()}
        durations = np.zeros((4 * self.stages, len(counts)))
        durations[0::4], durations[1::4] = chosen["F"], chosen["B"]
        messages = np.repeat(self._messages, len(counts), axis=1)
        ends = Ends(chosen["before"], *self._exchange, chosen["after"])
        seconds = ends.step_seconds(order.ends(durations, messages, repeats))
        found: Floats = np.maximum(seconds, self._crossing_seconds(chosen["F"], chosen["B"]))
        return found

    def _crossing_seconds(self, forward: Floats, backward: Floats) -> Floats:
        """The seconds of a step at least, by what crosses from part to part: one message after the other in each direction.

        The microbatch whose message is the last one there is forwarded by the stages behind, and all its backwards follow.
        That whose gradients are the last ones back was forwarded by all stages, and has backwards in front.
        """
        first = self.of_parts[0]
        there, back = self.crossing
        all_there = (
            forward[:first].sum(axis=0)
            + self.microbatches * there
            + forward[first:].sum(axis=0)
            + backward.sum(axis=0)
        )
        all_back = forward.sum(axis=0) + backward.sum(axis=0) + self.microbatches * back
        found: Floats = np.maximum(all_there + back, all_back + there)
        return found

    @cached_property
    def crossing(self) -> tuple[float, float]:
        """The seconds in which a microbatch's activations, and its gradients, hold what joins the parts."""
        first = self.of_parts[0]
        found = []
        for target, source, kind in ((first, first - 1, "F"), (first - 1, first, "B")):
            place = place_of(target, self.stages)
            nbytes = self.parts[0].table.actions(self.row, kind).received(place, kind)
            path = self.hardware.path(source * self.width, target * self.width)
            found.append(nbytes / path.bytes_per_second)
        return found[0], found[1]

    @property
    def least_seconds(self) -> float:
        """A lower bound of the seconds of a step, however the blocks are dealt; infinite if they cannot be."""
        least = least_load(self.loads, self.blocks)
        return max(least, self.crossing_seconds)

    @property
    def crossing_seconds(self) -> float:
        """How long the messages of all microbatches occupy the link between the parts, in one direction."""
        return self.microbatches * max(self.crossing)

    @property
    def loads(self) -> Floats:
        """The seconds of a step at least by what one stage has; infinite for numbers of blocks that do not fit."""
        return self.busy + self.waits[:, None]

    @cached_property
    def _order(self) -> tuple[Order, int]:
        return order_of(SCHEDULES[SCHEDULE].name, self.stages, self.microbatches, 1, None)

    @cached_property
    def _messages(self) -> Floats:
        """The seconds of the messages of the order, and a zero."""
        table = self.parts[0].table
        found = []
        for source, target, kind in self._order[0].messages:
            place = place_of(target, self.stages)
            nbytes = table.actions(self.row, kind).received(place, kind)
            found.append(self._message(nbytes, source, target))
        return np.array([*found, 0.0])[:, None]

    @cached_property
    def _exchange(self) -> tuple[float, float]:
        """The seconds of the gradients of shared weights, from the first stage to the last and back."""
        nbytes = self.parts[0].table.ends(self.row, in_stages=True).exchanged(FIRST)
        if not nbytes:
            return -np.inf, -np.inf
        last = self.stages - 1
        return self._message(nbytes, 0, last), self._message(nbytes, last, 0)

    def _message(self, nbytes: int, source: int, target: int) -> float:
        """The seconds of a message from a stage to another: of the nearest two devices."""
        here, there = source * self.width, target * self.width
        return min(
            self._costs.message_seconds(nbytes, here + device, there + device) for device in range(self.width)
        )

    @cached_property
    def _costs(self) -> MixedCosts:
        return MixedCosts(self.hardware)


def _in_front(values: Floats, length: int) -> Floats:
    """The values behind as many infinite ones as make them so many."""
    return np.concatenate([np.full(length - len(values), np.inf), values])


def part_task(task: Task, hardware: MixedHardware, part: int) -> Task:
    """The task on a part of the hardware."""
    return replace(task, hardware=hardware.parts[part], devices=hardware.parts[part].devices)
