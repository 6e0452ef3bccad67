"""The last backward of a stage with overlap: it sums each gradient over the replicas as soon as it has added it up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from parallelism.execution.device_program import GRADIENTS, DeviceProgram
from parallelism.execution.stage_code import StagePrograms
from parallelism.ir import Function, Op, Value
from parallelism.ir.passes.overlapping import ASYNCHRONOUS
from parallelism.layouts.localization.local_program import free_name
from parallelism.layouts.stages import GRADIENT, Part
from parallelism.mesh import Mesh
from parallelism.transforms.parts import UPDATE

Sums = Mapping[str, tuple[Op, ...]]
"""By the name of a weight: the ops that sum its gradient, each of what the one before returns."""


class Place(NamedTuple):
    """A stage on a rank, in a step with a batch."""

    mesh: Mesh
    rank: int
    number: int
    """The number of the stage."""
    numbers: tuple[tuple[str, int], ...]
    """The numbers of the symbols, except those of the batch."""
    rows: int


@dataclass(frozen=True)
class LastBackward:
    """The action of a stage that adds the last term to its gradients."""

    microbatch: int
    weights: Collection[str]
    """The weights whose gradients it sums over replicas.  It leaves these sums under way."""
    program: Callable[[str, Part], DeviceProgram]
    """Its program, by the kind of the action (B or W) and the part of the batch."""


class LastSums(NamedTuple):
    """The last backward of a stage with the sums over replicas behind it."""

    programs: StagePrograms
    sums: Sums

    @property
    def alike(self) -> Hashable:
        """A key: equal where functions differ in names alone."""

        def form(op: Op) -> Hashable:
            return op.kind, op.attributes, op.outputs[0].type

        chains = (self.sums.get(name, ()) for name in self.programs.functions.trained)
        return self.programs.first, tuple([tuple(map(form, chain)) for chain in chains])

    def function(self, kind: str, part: Part) -> tuple[Function, Mapping[str, str]]:
        """What it computes, and the categories of its values without the sums over replicas."""
        programs, first = self.programs, self.programs.first_gradient(kind)
        function, categories = programs.local_function(kind, part)
        known = dict(categories) | {value.name: GRADIENTS for value in function.outputs[first:]}
        return with_sums(function, first, programs.functions.trained, self.sums), known


def with_sums(function: Function, first: int, weights: Sequence[str], sums: Sums) -> Function:
    """The function that sums its outputs from number ``first`` on, the gradients of these weights, as ``sums`` say."""
    taken = {value.name for value in function.values}
    ops, outputs = [*function.ops], [*function.outputs]
    for place, name in enumerate(weights, first):
        for op in sums.get(name, ()):
            result = op.outputs[0]
            made = Value(free_name(result.name, taken), result.type)
            ops.append(replace(op, inputs=(outputs[place],), outputs=(made,), region=UPDATE))
            outputs[place] = made
    return replace(function, ops=tuple(ops), outputs=tuple(outputs))


def sums_behind(function: Function, numbers: Sequence[int]) -> dict[int, tuple[Op, ...]]:
    """The ops that an update begins with, by the numbers of inputs that are terms of a sum: they bring such an input into
    the layout of the sum.  Inputs without a sum are left out.

    Of several sums the first is among them: those behind it, of norms under sequence parallelism over ``tp``, would wait
    for it.
    """
    readers: dict[str, list[Op]] = defaultdict(list)
    for op in function.ops:
        for each in op.inputs:
            readers[each.name].append(op)
    returned = {each.name for each in function.outputs}
    found = {}
    for number in numbers:
        ops, value = list[Op](), function.inputs[number]
        while value.name not in returned and len(readers[value.name]) == 1:
            (op,) = readers[value.name]
            if op.inputs != (value,) or op.kind not in (*ASYNCHRONOUS, "all_slice", "relayout"):
                break
            if op.kind in ASYNCHRONOUS and any(each.kind in ASYNCHRONOUS for each in ops):
                break
            ops.append(op)
            (value,) = op.outputs
        if any(op.kind in ASYNCHRONOUS for op in ops):
            found[number] = tuple(ops)
    return found


def without_sums(function: Function, chains: Mapping[str, Sequence[Op]]) -> Function:
    """The update without these sums: it takes their results in place of the inputs that they add up, by name."""
    gone = {op.outputs for ops in chains.values() for op in ops}
    sums = {name: ops[-1].outputs[0] for name, ops in chains.items()}
    return replace(
        function,
        inputs=tuple(sums.get(value.name, value) for value in function.inputs),
        ops=tuple(op for op in function.ops if op.outputs not in gone),
    )


def gradients_of(whole: Function, local: Function) -> frozenset[str]:
    """The names of the inputs of a device's update that are gradients: the update frees them."""
    return frozenset(
        own.name
        for value, own in zip(whole.inputs, local.inputs, strict=True)
        if value.name.startswith(GRADIENT)
    )
