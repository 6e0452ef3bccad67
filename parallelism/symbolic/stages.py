"""`SymbolicStage`: the events of the actions of a stage, in which rows and devices are symbols.

Its programs are those that run (`parallelism.execution`), laid out once for any numbers of rows and devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import takewhile
from typing import Any

from parallelism.execution.device_program import (
    ACTIVATIONS,
    DeviceProgram,
    ProgramStep,
    StartStep,
    WaitStep,
)
from parallelism.execution.overlapping import arranged, beside_products
from parallelism.execution.stage_code import StagePrograms, cached
from parallelism.ir import Function, TensorType, Value
from parallelism.ir.core import Extent
from parallelism.ir.operators.contractions import PRODUCTS
from parallelism.ir.passes.overlapping import Order
from parallelism.layouts import Devices, Localized, localize
from parallelism.layouts.localization.local_program import moves_of
from parallelism.layouts.stages import Part
from parallelism.memoized import memoized
from parallelism.pipelining.actions import BEFORE
from parallelism.symbolic.events import (
    LEFT,
    MEMORY,
    MESSAGE,
    SIZE,
    Event,
    EventKind,
    SymbolicProgram,
    events_by_step,
    is_made_early,
    nbytes_of_one,
    of_block,
)
from parallelism.training.layer_blocks import EACH_LAYER, WHOLE, LayerBlocks

Section = tuple[Any, Sequence[Event]]
Inside = Mapping[str, Extent]
"""The number of devices along each axis inside a stage, or of replicas: a symbol, or a number above 1."""
Split = tuple[Extent, tuple[str, ...]]
"""An extent, and the axes over whose devices it is divided."""

OF_EVERY_BLOCK = PRODUCTS | {"attention"}
"""Kinds of ops that are in no chain, and of which every block has one."""
ALIKE = "F", "R"
"""The kinds of actions that do the same where gradients are added up and where they are not."""
ANY: Part = 0, 0
"""Stands for every part of the batch."""


class SymbolicStage(StagePrograms):
    """The programs of a stage for any number of rows, on any number of devices."""

    laid: SymbolicStage | None = None
    """The stage of several microbatches, whose layouts are those of this one; None: this is it."""
    layer_blocks = EACH_LAYER

    @cached_property
    def devices(self) -> Devices | None:
        """Those inside the stage; None if it is on one."""
        inside: Any = self.inside
        return Devices.of(inside) if inside else None

    def numbers(self, part: Part) -> dict[str, int]:
        """None: the rows stay symbols."""
        return {}

    def alike(self, part: Part) -> Part:
        """The part, of which there is one."""
        return part

    def local_function(
        self, kind: str, part: Part, *, place: int | None = None
    ) -> tuple[Function, Mapping[str, str]]:
        """As `StagePrograms.local_function`."""
        if self.laid is not None and kind in ALIKE:
            return self.laid.local_function(kind, part)
        return super().local_function(kind, part, place=place)

    @cached
    def program(self, kind: str, part: Part) -> DeviceProgram:
        """As `StagePrograms.program`, with symbols."""
        if self.laid is not None and kind in ALIKE:
            return self.laid.program(kind, part)
        function, categories = self.local_function(kind, part)
        function, calls, chains = arranged(function, self.order(kind, part), fused=self.fused)
        given_up = self.freed_inputs(kind, part, function)
        categories = {**categories, **dict.fromkeys(given_up, ACTIVATIONS)}
        return SymbolicProgram(function, categories, calls=calls, chains=chains, given_up=given_up)

    def order(self, kind: str, part: Part) -> Order | None:
        """As `StagePrograms.order`."""
        if not (self.inside and (self.overlapping or self._has_rings)):
            return None
        return beside_products(self.local_function(kind, part)[0], products=self.overlapping)

    def _local(self, value: Value, numbers: Mapping[str, int]) -> TensorType:
        return local_type(value, self.devices)

    @cached
    def localized(self, kind: str, part: Part) -> Localized | None:
        """The function of an action, laid out."""
        if self.laid is not None:
            return self.laid.localized(kind, part)
        return localize(self.function(kind, part), self.inside) if self.inside else None

    @cached_property
    def of_one_microbatch(self) -> SymbolicStage:
        """The same stage in a step of one microbatch, which does not add gradients up.  ``ValueError`` if it does."""
        stage = copy(self)
        stage.laid, stage.several, stage._cache = self, False, {}
        for name in ("adds_up", "_events", "splits"):
            stage.__dict__.pop(name, None)
        if stage.adds_up:
            raise ValueError("gradients that share memory are added up, also those of one microbatch")
        return stage

    # -- what a stage does ---------------------------------------------------------------------------------------------

    def sections(self, label: Any, kinds: Sequence[str], *, last: bool) -> Iterator[Section]:
        """The events of the actions of these kinds, under ``(label, kind)``; what the stage keeps more after each,
        and the bytes of what it kept that the action frees; and the messages that it takes, under ``(label, "received")``."""
        again = ("R",) if self.functions.recompute else ()
        for kind in (*kinds, *again):
            yield (label, kind), self._events(kind, last=last)
            before = "R" if again and kind in "BI" else BEFORE.get(kind)
            kept: Any = self.held(kind, ANY) - self.held(before, ANY)
            freed: Any = self.freed(kind, ANY)
            sizes = {"kept": kept, "freed": freed}
            yield (
                (label, kind, "kept"),
                [Event(EventKind(SIZE, name), [each]) for name, each in sizes.items()],
            )
        received = []
        for kind in kinds:
            types = self.message(kind, ANY, last=last)
            if types:
                dtype = types[0].dtype.name if len(types) == 1 else "uint8"
                received.append(Event(EventKind(MESSAGE, kind, dtype), [nbytes_of(types)]))
        yield (label, "received"), received

    @memoized
    def _events(self, kind: str, *, last: bool) -> list[Event]:
        """The events of an action, as `parallelism.execution.ProgramStage` leaves them."""
        if self.laid is not None and kind in ALIKE:
            return self.laid._events(kind, last=last)
        received = nbytes_of(self.message(kind, ANY, last=last))
        events = [*events_of_blocks(self.program(kind, ANY).steps, self.devices, self.layer_blocks)]
        events += [Event(EventKind(LEFT, category), []) for category, _ in self.left(kind, ANY)]
        if not received:
            return events
        held = EventKind(MEMORY, ACTIVATIONS)
        return [Event(held, [received]), *events, Event(held, [-received])]

    @memoized
    def splits(self, kinds: str) -> set[Split]:
        """The splits of dims that must be even, so that the events of these kinds of actions hold for every device."""
        found: set[Split] = set()
        for kind in (*kinds, *(("R",) if self.functions.recompute else ())):
            localized = self.localized(kind, ANY)
            found |= splits_of(localized) if localized is not None else set()
        return found


def events_of_blocks(
    steps: Sequence[ProgramStep | StartStep | WaitStep],
    devices: Devices | None,
    layer_blocks: LayerBlocks = EACH_LAYER,
) -> list[Event]:
    """The events of an action.  A block ends with its last product, and the next one begins behind that.

    What follows the last product of a block, such as the sum with the residual, may be in one chain with what
    begins the next block; a product is in no chain.  But what is done for a block long before it begins is its own:
    a second half of a backward begins with sums over devices that the first half left.  ``ValueError`` if a block
    has no product.
    """
    found: list[Iterator[Event]] = []
    next_end: int | None = None
    later_ends, met = set[int](), set[int]()
    for step, events in reversed([*zip(steps, events_by_step(steps, devices), strict=True)]):
        own = own_block(step, layer_blocks)
        if own is not None and own not in later_ends and has_product(step):
            later_ends.add(own)
            next_end = own
        if own is not None and events:
            met.add(own)
        found.append(of_block(events, own if own in later_ends else next_end))
    if without := met - later_ends:
        raise ValueError(f"block {min(without)} has no product in an action, so nothing says where it ends")
    return [event for events in reversed(found) for event in events]


def with_second_block(own: Sequence[Event], second: Iterable[Event], *, first: int = 0) -> list[Event]:
    """The events of two blocks: those of one, and behind its block, the ``first`` that is like all further ones, what a
    ``second`` block does.  The constants of both stand in front."""
    ends, more = [0], [*second]
    for number, event in enumerate(own, 1):
        if event.block is not None and event.block >= first:
            ends.append(number)
    end, mine, others = ends[-1], _constants_in_front(own), _constants_in_front(more)
    return [*own[:mine], *more[:others], *own[mine:end], *more[others:], *own[end:]]


def _constants_in_front(events: Sequence[Event]) -> int:
    """The number of events up to the last constant that stands before all other work."""
    found = 0
    for number, event in enumerate(takewhile(is_made_early, events), 1):
        if event.kind.name == "constant":
            found = number
    return found


def has_product(step: ProgramStep | StartStep | WaitStep) -> bool:
    """Whether a step, or a chain, has a product."""
    if not isinstance(step, ProgramStep):
        return False
    ops = [step.op, *(each.op for each in step.before)]
    return any(op.kind in OF_EVERY_BLOCK for op in ops)


def own_block(step: ProgramStep | StartStep | WaitStep, layer_blocks: LayerBlocks) -> int | None:
    """The block of the op of a step; of a gradient that another action has computed that of the parameter."""
    if not isinstance(step, ProgramStep) or layer_blocks == WHOLE:
        return None
    if step.op.kind != "accumulate":
        return layer_blocks.block_in(step.op.region)
    layer = layer_in(step.op.outputs[0].name)
    return None if layer is None else layer_blocks.block_of(layer)


def layer_in(name: str | None) -> int | None:
    """The number of the layer in the name of a parameter; None for those of no layer."""
    return at_first_number(name or "")[1]


def at_first_number(name: str) -> tuple[str, int | None, str]:
    """What stands in a name before its first part that is a number, the number, and what stands behind it.

    >>> at_first_number("p.layers.3.up"), at_first_number("p.last")
    (('p.layers.', 3, '.up'), ('p.last', None, ''))
    """
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdecimal():
            before, behind = words[:place], words[place + 1 :]
            return ".".join([*before, ""]), int(word), ".".join(["", *behind])
    return name, None, ""


def nbytes_of(types: Iterable[TensorType]) -> Any:
    """The bytes of arrays of these types."""
    return sum(map(nbytes_of_one, types), 0)


def local_type(value: Value, devices: Devices | None) -> TensorType:
    """The type of a device's part of a value."""
    if devices is None or value.layout is None:
        return value.type
    place = dict.fromkeys(devices.shape, 0)
    return TensorType(
        value.type.dtype,
        [
            devices.part(extent, dim.axes, place)[1]
            for extent, dim in zip(value.type.shape, value.layout.dims, strict=True)
        ],
    )


def splits_of(localized: Localized) -> set[Split]:
    """Which extents of a program must divide by the devices along which axes."""
    function: Function = localized.function
    values = {
        (id(value.type), id(value.layout)): value for value in function.values
    }  # the function keeps them alive
    laid: list[tuple[Any, Any]] = [(value.type.shape, value.layout) for value in values.values()]
    laid += [
        (op.outputs[0].type.shape, move.after)
        for op in function.ops
        for move in moves_of(op, localized.devices)
    ]
    return {
        (extent, dim.axes)
        for shape, layout in laid
        if layout is not None
        for extent, dim in zip(shape, layout.dims, strict=True)
        if dim.axes
    }
