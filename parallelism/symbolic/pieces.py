"""The events of a step's pieces, in which the rows of a microbatch and the devices along an axis are symbols.

The pieces are the actions of each stage and the end of the step on each device.  Their programs are those that run
(`parallelism.execution`), laid out once for any numbers of rows and devices.  Parts are assumed to be even; `splits`
says which extents must divide by which devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from parallelism.execution.device_program import (
    GRADIENTS,
)
from parallelism.execution.endings import (
    Ending,
    Endings,
    ExchangeShared,
    SumLoss,
    Update,
)
from parallelism.execution.last_backward import gradients_of
from parallelism.execution.overlapping import arranged
from parallelism.ir import Expression, Function, TensorType, Value
from parallelism.ir.core import Extent, symbol
from parallelism.ir.core.derived import checked_op
from parallelism.ir.core.extents import divided, names_in, rounded_up
from parallelism.ir.passes import Kinds, donations
from parallelism.ir.passes.fusion import space_of
from parallelism.ir.passes.joined_calls import joined
from parallelism.layouts import Devices, Localized, localize
from parallelism.layouts.stages.laid_out_stages import laid_out_stages
from parallelism.symbolic.events import (
    COLLECTIVE,
    MESSAGE,
    SIZE,
    Event,
    EventKind,
    SymbolicProgram,
)
from parallelism.symbolic.stages import (
    ANY,
    Inside,
    Section,
    Split,
    SymbolicStage,
    at_first_number,
    layer_in,
    nbytes_of,
    splits_of,
)
from parallelism.training.layer_blocks import EACH_LAYER, LayerBlocks
from parallelism.transforms import Step, carried, categories
from parallelism.transforms.parts import NEXT


@dataclass(frozen=True, eq=False)
class StepPieces:
    """The pieces of a step with one stage at each position of the pipeline.

    ``inside`` are the axes inside a stage.
    """

    step: Step
    count: int
    """The number of stages."""
    inside: Inside
    fused: bool | str = False
    overlapping: bool = False
    known: dict[Any, SymbolicStage] = field(default_factory=dict)
    """The different stages, also those of other pieces, by what they are made of."""
    layer_blocks: LayerBlocks = EACH_LAYER

    @property
    def made_of(self) -> Any:
        """All that its programs are made of: pieces for which this is equal are the same."""
        step = self.step
        return (
            step.of_one_replica,
            step.pipeline,
            step.again,
            tuple([value.name for value in step.parts.parameters]),
            tuple(self.sums.items()),
            self.count,
            tuple(self.inside.items()),
        )

    @cached_property
    def stages(self) -> list[SymbolicStage]:
        """The programs of each stage."""
        parts = self.step.stages(self.count)
        laid = laid_out_stages(parts, self.inside, self.sums, pending=True) if self.inside else parts
        inside: Any = dict(self.inside) or None
        found = []
        for functions in laid.functions:
            stage = SymbolicStage(
                functions,
                parts.batch,
                0,
                inside,
                sums=self.sums,
                fused=self.fused,
                overlapping=self.overlapping,
            )
            stage.layer_blocks = self.layer_blocks
            sums = tuple(map(self.sums.get, functions.trained))
            found.append(self.known.setdefault((functions, sums, tuple(self.inside.items())), stage))
        return found

    @cached_property
    def sums(self) -> dict[str, Any]:
        """The dtypes in which gradients are added up, by the names of weights."""
        return self.step.sum_dtypes

    def actions(self, labels: Sequence[Any], kinds: Sequence[str], *, several: bool) -> Iterator[Section]:
        """The sections of all stages in a step of ``several`` microbatches, or of one: see `SymbolicStage.sections`."""
        for label, stage in zip(labels, self.stages, strict=True):
            own = stage if several else stage.of_one_microbatch
            yield from own.sections(label, kinds, last=stage is self.stages[-1])

    def splits(self, kinds: str) -> set[Split]:
        """What must be even in the actions."""
        return set[Split]().union(*(stage.splits(kinds) for stage in self.stages))


class _NeededBy(NamedTuple):
    """Which parameters' updates need each op and value of a program, as integers with a bit for each parameter."""

    bits: Mapping[str | None, int]
    """By parameter; None stands for what belongs to none, which every update needs."""
    ops: Sequence[int]
    values: Mapping[str, int]
    """By name."""

    def those_of(self, names: Iterable[str]) -> int:
        """The bits of these parameters, and that of what belongs to none."""
        found = self.bits.get(None, 0)
        for name in names:
            found |= self.bits.get(name, 0)
        return found


@dataclass(frozen=True)
class Updates:
    """The update of a step of one stage with two blocks, laid out once; and what of it each stage of others does.

    What is done to a parameter depends on no other one, so the update of some parameters is a part of that of all.
    """

    step: Step
    layouts: tuple[tuple[str, Any], ...]
    """Of the parameters inside a stage, by name: see `numbered`."""
    pending: tuple[tuple[str, tuple[str, ...]], ...]
    """The axes inside a stage over which gradients are summed once, by the names of parameters."""
    inside: Inside
    replicas: Inside
    fused: bool | str = False
    layer_blocks: LayerBlocks = EACH_LAYER

    @cached_property
    def devices(self) -> Inside:
        """The devices of an update."""
        return {**self.replicas, **self.inside} or {"one": 1}

    @cached_property
    def laid_out(self) -> Localized:
        """The update of all parameters."""
        if self.step.sums_over_stages:
            raise ValueError("the update needs numbers of all stages")
        names = [value.name for value in self.step.parts.parameters]
        devices: Any = self.devices
        function = self.step.update(
            names, dict(self.layouts), replicas=tuple(self.replicas), pending=dict(self.pending)
        )
        return localize(function, devices)

    @cached_property
    def splits(self) -> set[Split]:
        """What must be even inside a stage."""
        found = set()
        for extent, axes in splits_of(self.laid_out):
            inside = tuple(axis for axis in axes if axis not in self.replicas)
            found.add((extent, inside))
        return found

    @cached_property
    def splits_of_replicas(self) -> set[tuple[Extent, tuple[str, ...], Extent]]:
        """What is split over replicas, and the part of the first of them."""
        devices = Devices.of(self.devices)
        return {
            (extent, axes, rounded_up(divided(extent, devices.along(axes))))
            for extent, axes in splits_of(self.laid_out)
            if {*axes} & {*self.replicas}
        }

    @cached_property
    def several(self) -> set[Split]:
        """Of what no device of the first replica may have a part of one element: of ops that reduce rows, those with one
        row are in other chains."""
        if not self.fused:
            return set()
        reduces = any(op.rule.whole or op.rule.reduced for op in self.local.ops if space_of(op) is not None)
        return splits_of(self.laid_out) if reduces else set()

    def _of_first(self, extent: Any) -> Any:
        """The extent at the first of the replicas, whose part is the largest where parts are uneven."""
        return rounded_up(extent) if names_in(extent) & self.replicas.keys() else extent

    @cached_property
    def local(self) -> Function:
        """The program of the first device."""
        local = self.laid_out.program()
        types_of_values = {value.type for value in local.values}
        types = {type: TensorType(type.dtype, map(self._of_first, type.shape)) for type in types_of_values}
        given = {given for op in local.ops for _, given in op.attributes if isinstance(given, Expression)}
        if all(type == first for type, first in types.items()) and all(
            self._of_first(each) == each for each in given
        ):
            return local
        first = {value: Value(value.name, types[value.type], value.layout) for value in local.values}
        ops = []
        for op in local.ops:
            inputs = (first[value] for value in op.inputs)
            attributes = tuple((name, self._of_first(given)) for name, given in op.attributes)
            outputs = (first[value] for value in op.outputs)
            ops.append(checked_op(op.kind, inputs, attributes, outputs, op.region))
        return Function(
            local.name,
            tuple(first[value] for value in local.inputs),
            tuple(ops),
            tuple(first[value] for value in local.outputs),
        )

    @cached_property
    def program(self) -> SymbolicProgram:
        """The update of all parameters on the first device."""
        whole = self.laid_out.function
        order = joined(self.local)
        function, calls, chains = arranged(self.local, order, fused=self.fused)
        known = {value.name for value in function.values}
        kinds = Kinds(
            [(value.type, value.layout) for value in whole.inputs],
            [(value.type, value.layout) for value in whole.outputs],
        )
        return SymbolicProgram(
            function,
            {name: kind for name, kind in categories(self.step.function).items() if name in known},
            donated=donations(function, carried(whole), kinds),
            calls=calls,
            chains=chains,
            given_up=gradients_of(whole, function),
            at_once=order.at_once,
        )

    @cached_property
    def _needed_by(self) -> _NeededBy:
        """What the update of each parameter needs."""
        whole, function, own = self.laid_out.function, self.program.function, self.step.owners
        outputs = zip(function.outputs, whole.outputs, strict=True)
        inputs = zip(function.inputs, whole.inputs, strict=True)
        returned = [(at_device.name, value.name) for at_device, value in outputs]
        kept = {value.name: at_device.name for at_device, value in inputs}
        bits = {name: 1 << number for number, name in enumerate(dict.fromkeys(own.values()))}
        values = defaultdict[str, int](int)
        for at_device, name in returned:
            values[at_device] |= bits[own[name]]
        ops = []
        for op in reversed(function.ops):
            mask = 0
            for value in op.outputs:
                mask |= values[value.name]
            for value in op.inputs:
                values[value.name] |= mask
            ops.append(mask)
        for _, name in returned:
            if (input := kept.get(name.removeprefix(NEXT))) is not None:
                values[input] |= bits[own[name]]
        return _NeededBy(bits, ops[::-1], values)

    @cached_property
    def blocks(self) -> tuple[int | None, ...]:
        """By op of the program, the block of the one parameter that needs it; None for what several need."""
        layers = {bit: layer_in(name) for name, bit in self._needed_by.bits.items()}
        block_of_bits = {
            bit: self.layer_blocks.block_of(layer) for bit, layer in layers.items() if layer is not None
        }
        return tuple([block_of_bits.get(bits) for bits in self._needed_by.ops])

    def needed(self, names: Iterable[str]) -> list[bool]:
        """By op of the program, whether the update of the parameters of these names needs it."""
        wanted = self._needed_by.those_of(names)
        return [bool(bits & wanted) for bits in self._needed_by.ops]

    def events(self, names: frozenset[str]) -> list[Event]:
        """The events of the update of these parameters."""
        return list(self.program.events_of(self.needed(names), self.blocks, Devices.of(self.devices)))

    def state(self, names: frozenset[str]) -> Any:
        """The bytes of the state of these parameters."""
        state, wanted = {value.name for value in self.step.parts.state}, self._needed_by.those_of(names)
        return nbytes_of(
            value.type
            for value in self.program.function.inputs
            if value.name in state and self._needed_by.values.get(value.name, 0) & wanted
        )


@dataclass(frozen=True)
class EndPieces:
    """What the devices of a step hold during it, and do after the last action."""

    stages: Sequence[SymbolicStage]
    """Of a step whose stages are laid out on the same axes inside."""
    first: Sequence[int]
    """The number of the first layer of each, from those that all stages of updates begin with."""
    replicas: Inside
    """As of the updates."""
    each: int = 1
    """The layers of a block."""

    @cached_property
    def layouts(self) -> tuple[tuple[str, Any], ...]:
        """The layouts of the parameters of each stage, as if all began with layer 0."""
        found = {
            numbered(value.name, -first): value.layout
            for stage, first in zip(self.stages, self.first, strict=True)
            for value in stage.functions.forward.inputs
            if value.layout is not None
        }
        return _with_second_blocks(found, self.each)

    @property
    def pending(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The axes over which gradients are summed once, as if all stages began with layer 0."""
        found = {
            numbered(name, -first): self._endings.pending[name]
            for stage, first in zip(self.stages, self.first, strict=True)
            for name in stage.functions.trained
            if name in self._endings.pending
        }
        return _with_second_blocks(found, self.each)

    def sections(self, updates: Updates, labels: Sequence[tuple[int, int]]) -> Iterator[Section]:
        """For each stage the bytes that are held, under ``(label, "held")``, of data for one row of a replica; and the
        events at the end, under ``(label, "end")``, also of a stage with one block more.  Labels are those of
        `parallelism.planning.two_block_steps`."""
        for position, (place, blocks) in enumerate(labels):
            stage, first = self.stages[position], self.first[position]
            functions = stage.functions
            names = frozenset(numbered(name, -first) for name in functions.trained)
            held = {
                "weights": nbytes_of(stage.types(functions.forward.inputs, functions.weights)),
                "inputs": nbytes_of(stage.data(ANY)),
                GRADIENTS: nbytes_of(stage.sum_types),
                "optimizer": updates.state(names),
            }
            yield (
                ((place, blocks), "held"),
                [Event(EventKind(SIZE, name), [nbytes]) for name, nbytes in held.items()],
            )
            ends = self._endings.at(position, tuple(self.replicas))
            yield ((place, blocks), "end"), [*self._events_at_end(position, ends, updates)]
            if blocks == 1:
                yield (
                    ((place, 2), "end"),
                    [*self._events_at_end(position, _of_two_blocks(ends, self.each), updates)],
                )

    @cached_property
    def _endings(self) -> Endings:
        """What the devices do after their last actions."""
        functions = [stage.functions for stage in self.stages]
        return Endings(functions, range(len(functions)), self.stages[0].sums, updated=True)

    def _events_at_end(self, position: int, ends: Sequence[Ending], updates: Updates) -> Iterator[Event]:
        """The events of the end of a device."""
        stage = self.stages[position]
        functions = stage.functions
        types = dict(zip(functions.trained, stage.sum_types, strict=True))
        for end in ends:
            match end:
                case SumLoss(axes=axes) if axes:
                    (loss,) = stage.types(functions.forward.outputs, functions.sent, ANY)
                    yield Event(EventKind(COLLECTIVE, "all_reduce", loss.dtype.name, axes), [loss.nbytes])
                case ExchangeShared(names, dtype, positions):
                    sent = Event(
                        EventKind(MESSAGE, "send", dtype.name), [nbytes_of(types[name] for name in names)]
                    )
                    yield from [sent] * (len(positions) - 1)
                case Update(names):
                    yield from updates.events(
                        frozenset(numbered(name, -self.first[position]) for name in names)
                    )


def numbered(name: str, more: int) -> str:
    """The name of a parameter with the number of its layer, if it has one, changed by ``more``."""
    before, layer, behind = at_first_number(name)
    return name if layer is None else f"{before}{layer + more}{behind}"


def _of_two_blocks(ends: Sequence[Ending], each: int) -> list[Ending]:
    """The end of a stage of two blocks of ``each`` layers, from that of one: the update is that of both."""
    *others, update = ends
    assert isinstance(update, Update)
    names = dict.fromkeys([*update.names, *(numbered(name, each) for name in update.names)])
    return [*others, Update(tuple(names))]


def _with_second_blocks(found: Mapping[str, Any], each: int) -> tuple[tuple[str, Any], ...]:
    """What is told by the names of parameters, also for those of a second block of ``each`` layers, which are as those of the
    first."""
    more = {numbered(name, each): told for name, told in found.items()}
    return tuple(sorted((more | dict(found)).items()))


def inside_of(**devices: int) -> Inside:
    """The axes that have several devices: 0 stands for a symbol, which has the name of the axis."""
    return {axis: n or symbol(axis) for axis, n in devices.items() if n != 1}
