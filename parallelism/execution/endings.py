"""What a device does after the last action of its stages, as values that it runs in their order.

    SumGradients       without an update: the gradients of a stage are summed over the replicas
    SumLoss            the loss and its metrics, on the device of the last stage
    AddUp              the gradients of a stage are those of the device, added to those of its stages before
    ExchangeShared     gradients of weights that stages on other devices have, too
    WaitForLoss
    Update             new parameters and state

A device runs them on its arrays, and a simulation on types.  `parallelism.planning` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.execution.device_calls import waited_for
from parallelism.execution.stage_runner import ProgramStage
from parallelism.layouts.stages import StageFunctions
from parallelism.layouts.stages.stages import holders_of
from parallelism.operation import Device


@dataclass
class StepEnd:
    """A device after its last action."""

    device: Device
    position: int
    stages: Mapping[int, ProgramStage]
    """The stages at this position, by number."""
    exchanged: Callable[[Array, Sequence[str], int, int], Array]
    """Gives the sums of another position for weights of these names, as one array, in exchange for those of this one:
    ``exchanged(mine, names, position, tag)``."""
    updated: Callable[[dict[str, Any]], dict[str, Array]] | None
    """Gives the new parameters and state, from the sums, which it takes out and frees."""
    results: Callable[[Sequence[Array]], tuple[Array, ...]]
    """Gives the loss and the metrics, from the sums that the last stage returns."""
    sums: dict[str, Any] = field(default_factory=dict)
    """The sums of the gradients by the names of weights, and under ``""`` the loss and its metrics; new values after an
    `Update`."""


class SumGradients(NamedTuple):
    """An all_reduce over the replicas for each dtype of a stage's gradients, except those that its last backward
    summed."""

    stage: int
    axes: tuple[str, ...]

    def run(self, end: StepEnd) -> None:
        """Sums them in place."""
        for terms in end.stages[self.stage].unsummed:
            end.device.all_reduce(terms, self.axes, out=terms)


class SumLoss(NamedTuple):
    """The sums of the loss and of its metrics over microbatches and replicas: an all_reduce of each, if
    there are replicas."""

    stage: int
    axes: tuple[str, ...]
    later: bool
    """Whether `WaitForLoss` waits for it."""

    def run(self, end: StepEnd) -> None:
        """Puts the loss and the others, or the `Work` that sums each, among the sums."""
        outputs = end.stages[self.stage].outputs
        columns = zip(*(outputs[microbatch] for microbatch in sorted(outputs)), strict=True)
        totals: list[Any] = [reduce(np.add, column) for column in columns]
        if self.axes:
            options: dict[str, Any] = {"async_op": True} if self.later else {}
            totals = [end.device.all_reduce(total, self.axes, **options) for total in totals]
        end.sums[""] = totals


class AddUp(NamedTuple):
    """The gradients of a stage are added to those of other stages on the device."""

    stage: int
    waits: bool
    """Whether it waits for the gradients that the last backward sums over replicas; else the update takes them."""

    def run(self, end: StepEnd) -> None:
        """Puts them among the sums."""
        stage = end.stages[self.stage]
        for name, gradient in zip(stage.programs.functions.trained, stage.gradients.arrays, strict=True):
            if self.waits and name in stage.summed:
                gradient = waited_for(stage.summed[name])
            if gradient is not None:  # else the last backward has it, and the stage does not keep it
                end.sums[name] = end.sums[name] + gradient if name in end.sums else gradient


class ExchangeShared(NamedTuple):
    """The gradients of weights of one dtype that several positions have: each sends its own to all others, as one
    array, and sums them in the order of the pipeline."""

    names: tuple[str, ...]
    dtype: np.dtype[Any]
    positions: tuple[int, ...]
    tag: int
    """Another one for each exchange of a step."""

    def run(self, end: StepEnd) -> None:
        """Replaces the sums by those over all positions."""
        mine = np.concatenate([end.sums[name].ravel() for name in self.names])
        parts = []
        for other in self.positions:
            is_own = other == end.position
            parts.append(mine if is_own else end.exchanged(mine, self.names, other, self.tag))
        total = reduce(np.add, parts)
        start = 0
        for name in self.names:
            own = end.sums[name]
            end.sums[name] = total[start : start + own.size].reshape(own.shape)
            start += own.size


class WaitForLoss(NamedTuple):
    """The wait for a loss and metrics that are summed `later <SumLoss>`, and what is computed from the sums."""

    def run(self, end: StepEnd) -> None:
        """Puts the loss among the sums, as an array without dims, and the metrics behind it."""
        totals = list(end.sums[""])
        for place, total in enumerate(totals):
            if hasattr(total, "wait"):
                totals[place] = total.wait()
        totals[0] = np.reshape(totals[0], ())
        end.sums[""] = end.results(totals)


class Update(NamedTuple):
    """The update of the parameters of these names, by all stages of the device."""

    names: tuple[str, ...]

    def run(self, end: StepEnd) -> None:
        """Replaces the sums of gradients by new parameters and state."""
        assert end.updated is not None
        losses = {"": end.sums.pop("")} if "" in end.sums else {}
        for stage in end.stages.values():
            end.sums.update(stage.summed)
            stage.summed.clear()
            stage.gradients.give_up(range(len(stage.gradients.arrays)))
        end.sums = end.updated(end.sums) | losses


Ending = SumGradients | SumLoss | AddUp | ExchangeShared | WaitForLoss | Update


@dataclass(frozen=True)
class Endings:
    """The work that the devices of a pipeline do after their last actions."""

    stages: Sequence[StageFunctions]
    placement: Sequence[int]
    """The position of each stage."""
    dtypes: Mapping[str, Any]
    """By name of a weight, the dtype in which its gradient is added up; by default that of the weight."""
    updated: bool
    """Whether the step has an update, which sums the gradients over replicas."""
    later: bool = False
    """Whether collectives overlap."""

    def at(self, position: int, replicas: tuple[str, ...]) -> tuple[Ending, ...]:
        """The endings of a device at a position, in order; the axes ``replicas`` have the replicas."""
        stages = {
            number: stage for number, stage in enumerate(self.stages) if self.placement[number] == position
        }
        last = len(self.stages) - 1
        names = tuple(dict.fromkeys(name for stage in stages.values() for name in stage.trained))
        found: list[Ending] = []
        for number in stages:
            if replicas and not self.updated:
                found.append(SumGradients(number, replicas))
            if number == last:
                found.append(SumLoss(number, replicas, self.later))
            found.append(AddUp(number, waits=not self.updated))
        found += [each for each in self.exchanges if position in each.positions]
        if last in stages:
            found.append(WaitForLoss())
        if self.updated:
            found.append(Update(names))
        return tuple(found)

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that have a copy of each weight."""
        return holders_of(self.stages)

    @cached_property
    def alone(self) -> frozenset[str]:
        """The weights that one stage has alone."""
        return frozenset(name for name, holders in self.holders.items() if len(holders) == 1)

    @cached_property
    def pending(self) -> Mapping[str, tuple[str, ...]]:
        """The axes inside a stage over which the gradients of weights are summed once, in the update, by name."""
        found: dict[str, tuple[str, ...]] = {}
        for stage in self.stages if self.updated else ():
            gradients = stage.backward.outputs[len(stage.returned) :]
            for name, value in zip(stage.trained, gradients, strict=True):
                if value.layout is not None and value.layout.partial:
                    found[name] = value.layout.partial
        return found

    @cached_property
    def exchanges(self) -> list[ExchangeShared]:
        """The sums over positions of the gradients of shared weights.  All positions run them in this order."""
        positions: dict[str, tuple[int, ...]] = {}
        for name, holders in self.holders.items():
            at = tuple(sorted({self.placement[number] for number in holders}))
            if len(at) > 1 and any(name in stage.trained for stage in self.stages):
                positions[name] = at
        found: dict[Any, ExchangeShared] = {}
        for tag, name in enumerate(sorted(positions, key=positions.__getitem__)):
            inputs = self.stages[self.holders[name][0]].forward.inputs
            own = next(value.type.dtype for value in inputs if value.name == name)
            dtype = self.dtypes.get(name, own)
            first = found.setdefault(
                (positions[name], dtype), ExchangeShared((), dtype, positions[name], tag)
            )
            found[positions[name], dtype] = first._replace(names=(*first.names, name))
        return [*found.values()]
