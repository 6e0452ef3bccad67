"""`UnevenStep`: the step of a plan over two parts as an operation that can be simulated, put together from pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from parallelism.hardware import MixedHardware
from parallelism.memoized import memoized
from parallelism.planning.assembled_steps import AssembledStage, AssembledStep, alone
from parallelism.planning.plan import Task
from parallelism.planning.plan_costs import PlanCosts
from parallelism.planning.two_block_steps import Uneven
from parallelism.symbolic.orders import place_of
from parallelism.symbolic.stage_costs import StageCosts


class UnevenStep(AssembledStep):
    """The step of a `parallelism.mixing.MixedPlan`: a stage has as many blocks as ``counts`` says, and runs as the software
    of its part runs it.

    `Unpriceable` as for `AssembledStep`.
    """

    def __init__(self, task: Task, settings: Mapping[str, Any], counts: Sequence[int]) -> None:
        super().__init__(task, settings)
        assert isinstance(task.hardware, MixedHardware)
        self.counts = tuple(counts)
        self.part_of = [task.hardware.number_of_part(rank) for rank in self.mesh.group(0, AXIS)]
        """By stage, the part that it lies in."""
        self.of_parts = [
            PlanCosts(replace(task, hardware=part), alone(settings)) for part in task.hardware.parts
        ]

    def _costs_at(self, position: int) -> PlanCosts:
        return self.of_parts[self.part_of[position]]

    def _end_at(self, position: int, smaller: frozenset[Uneven]) -> tuple[StageCosts, int, int]:
        costs = self._costs_at(position)
        place = place_of(position, self.shape.stages)
        end = costs.ends(0, in_stages=True, smaller=smaller)
        return end, place, costs.alike(self.counts[position], place)

    def _stage_at(self, number: int) -> AssembledStage:
        return self._uneven(self.part_of[number], self.counts[number], place_of(number, self.shape.stages))

    @memoized
    def _uneven(self, part: int, blocks: int, place: int) -> AssembledStage:
        """A stage of so many blocks in a part."""
        return AssembledStage(self.of_parts[part], blocks, place)


AXIS = AssembledStep.pipeline_axis
"""The axis of the stages."""
