"""`SymbolicEvents`: what the pieces of a step do, for any rows and devices.  `Events`: with their numbers.

They are the events, and the sizes, of actions and of the end of a step (`parallelism.symbolic.pieces`).  Of an event
only numbers depend on the rows of a microbatch and on the devices along the axes: flops, bytes and payloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Bools, Ints
from parallelism.execution.chains import Chain, DeclaredCost, declared_cost, in_chains
from parallelism.execution.device_program import (
    ACTIVATIONS,
    DeviceProgram,
    Held,
    ProgramStep,
    StartStep,
    WaitStep,
    communicates,
)
from parallelism.ir import Expression, Op, TensorType, Value
from parallelism.ir.core import Attributes, Extent, meaning, specialized
from parallelism.ir.passes import freed_after
from parallelism.ir.passes.donation import owners
from parallelism.ir.passes.overlapping import ASYNCHRONOUS
from parallelism.ir.passes.waiting import Run as RunStep, Start, Wait, owners_overlapped
from parallelism.layouts import Devices
from parallelism.memoized import memoized

Exact = npt.NDArray[np.longdouble]

MEMORY, COMPUTE, COLLECTIVE = "memory", "compute", "collective"
WAIT, MESSAGE, SIZE = "wait", "message", "size"
LEFT = "left"
"""What an action frees at its end, that of all blocks together.  The size that it keeps says how many bytes."""


class EventKind(NamedTuple):
    """What an event is, without its numbers."""

    what: str
    name: str | None = None
    """Of an op, of a collective, or of a category of memory."""
    dtype: str | None = None
    axes: tuple[str, ...] = ()
    """Of a collective."""
    others: tuple[str, ...] = ()
    """Of a compute event, the dtypes of its other bytes."""
    extents: int = 0
    """Of a compute event, the number of extents in its shape."""
    seconds: float | None = None
    later: int = 0
    """Of a collective, 1 if it is waited for later; of such a wait, for which: 1 for the last that started before it,
    2 for the one before."""
    joined: bool = False
    """Whether a collective is a part of a call: those of one kind in a section are one, with all payloads together."""
    again: bool = False
    """Whether a compute runs again in the backward."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Of a permute, what moves: the positions of source and target."""
    op: str | None = None
    """Of a collective that reduces, how."""
    algorithm: str | None = None
    """Of a collective that names one."""


class Unpriceable(ValueError):
    """A step that cannot be put together from pieces."""


class Event(NamedTuple):
    """An event, or a size, of a piece."""

    kind: EventKind
    extents: Sequence[Extent]
    block: int | None = None
    """The block of the model to which it belongs; None for what belongs to no block.  In an update it is the block of
    the parameter; in an action a block ends with its last product."""


def repeated(events: Sequence[Event], *, at_end: bool = False, first: int = 0) -> list[bool]:
    """By event of two blocks, whether every further block does it once more.  Blocks before the ``first`` are others,
    which come once.

    In an action this is the work of the second of the two blocks: every block but the first does the same, between the
    same neighbours.  At the end of a step it is that of the first block, because memory that all parameters share is
    freed after the last block.
    """
    of_blocks = [event for event in events if event.block is not None and event.block >= first]
    if at_end:
        of_blocks.reverse()
    else:
        of_blocks.sort(key=is_made_early)
    once = of_blocks[0].block if of_blocks else None
    return [event.block is not None and event.block >= first and event.block != once for event in events]


def is_made_early(event: Event) -> bool:
    """Whether an event may be of a block that begins later: constants of all blocks stand before a backward."""
    return event.kind.what == MEMORY or event.kind.name == "constant"


class Run(NamedTuple):
    """Events of two blocks that follow each other."""

    events: slice
    is_repeated: bool
    """Whether every further block does them once more."""


@dataclass(frozen=True)
class Events:
    """Events by section, with numbers.

    A search has thousands of these, and of their events most have equal numbers: each number is kept once.
    """

    symbolic: SymbolicEvents
    values: Exact = field(repr=False)
    """By formula."""

    def numbers(self, events: Ints) -> Exact:
        """By event: bytes, flops, bytes of other dtypes, and a shape."""
        return self.values[self.symbolic.index[events]]

    def nbytes(self, events: Ints | slice) -> Exact:
        """The first number of some events: bytes, or the payload of a collective."""
        return self.values[self.symbolic.index[events, 0]]

    def size(self, section: Any, name: str) -> int:
        """The number of the event of a section that has this name; 0 if there is none."""
        event = self.symbolic.named(section).get(name)
        return 0 if event is None else int(self.values[self.symbolic.index[event, 0]])


@dataclass(frozen=True)
class SymbolicEvents:
    """Events by section, whose numbers are extents with symbols."""

    kinds: tuple[EventKind, ...]
    sections: Mapping[Any, slice]
    formulas: Formulas
    index: Ints = field(repr=False)
    """By event, the numbers of its extents among the formulas."""
    repeated: Bools = field(repr=False)
    """By event: see the function `repeated`."""

    @classmethod
    def of(cls, sections: Iterable[tuple[Any, Sequence[Event]]], *, first: int = 0) -> SymbolicEvents:
        """Of events by section; ``first`` is the first block that is like all further ones."""
        slices: dict[Any, slice] = {}
        different: dict[EventKind, EventKind] = {}
        kinds: list[EventKind] = []
        number: dict[Extent, int] = {0: 0}
        row_of: dict[
            int, int
        ] = {}  # many events have the same list of extents, and the sections keep all of them
        rows: list[list[int]] = []
        index: list[int] = []
        again: list[bool] = []
        for section, events in [*sections]:
            again += repeated(events, at_end=section[-1] == "end", first=first)
            slices[section] = slice(len(kinds), len(kinds) + len(events))
            for kind, given, _ in events:
                kinds.append(different.setdefault(kind, kind))
                if (row := row_of.setdefault(id(given), len(rows))) == len(rows):
                    rows.append([number.setdefault(extent, len(number)) for extent in given])
                index.append(row)
        most = max(2, *map(len, rows))
        padded = np.array([each + [0] * (most - len(each)) for each in rows], np.int64).reshape(-1, most)
        return cls(tuple(kinds), slices, Formulas(tuple(number)), padded[index], np.array(again, np.bool_))

    def __reduce__(self) -> tuple[type[SymbolicEvents], tuple[Any, ...]]:
        return SymbolicEvents, (self.kinds, self.sections, self.formulas, self.index, self.repeated)

    @property
    def made_of(self) -> Any:
        """All that they are: events for which this is equal are the same."""
        sections = tuple([(name, events.start, events.stop) for name, events in self.sections.items()])
        return self.kinds, sections, self.formulas.extents, self.index.tobytes(), self.repeated.tobytes()

    def at(self, numbers: Mapping[str, int]) -> Events:
        """The events with these numbers for the symbols."""
        return Events(self, self.formulas.at(numbers))

    @memoized
    def are(self, what: str) -> Bools:
        """By event, whether it is of this sort."""
        return np.array([kind.what == what for kind in self.kinds], np.bool_)

    @memoized
    def named(self, section: Any) -> Mapping[str | None, int]:
        """The first event of a section with each name."""
        events = self.sections[section]
        return {self.kinds[event].name: event for event in reversed(range(events.start, events.stop))}

    @memoized
    def runs(self, section: Any) -> list[Run]:
        """The runs of a section of two blocks."""
        events = self.sections[section]
        again = self.repeated[events]
        changes = (events.start + 1 + np.flatnonzero(again[1:] != again[:-1])).tolist()
        bounds = [events.start, *changes, events.stop]
        return [
            Run(slice(start, stop), bool(self.repeated[start]))
            for start, stop in pairwise(bounds)
            if start < stop
        ]

    @memoized
    def first(self, what: str) -> Ints:
        """Of the events of a sort the first of those that are alike."""
        events = np.flatnonzero(self.are(what))
        found: Ints = events[self.alike[events] == events]
        return found

    @cached_property
    def parts(self) -> list[tuple[Any, slice]]:
        """The sections; an end in two: up to the exchange of its gradients under ``before``, the rest under its name."""
        found: list[tuple[Any, slice]] = []
        for name, events in self.sections.items():
            at = events.start
            if name[1] == "end":
                at += int(self.are(MESSAGE)[events].argmax()) if events.start < events.stop else 0
                found.append(((name[0], "before"), slice(events.start, at)))
            found.append((name, slice(at, events.stop)))
        return found

    @memoized
    def parts_with(self, what: str) -> list[tuple[Any, slice]]:
        """Those of the parts that have events of a sort."""
        are = self.are(what)
        return [(name, events) for name, events in self.parts if are[events].any()]

    @cached_property
    def joined(self) -> Mapping[Any, list[int]]:
        """By section, its events that are parts of a call."""
        found: dict[Any, list[int]] = {}
        for name, events in self.sections.items():
            if own := [event for event in range(events.start, events.stop) if self.kinds[event].joined]:
                found[name] = own
        return found

    @cached_property
    def with_waits(self) -> dict[Any, slice]:
        """The sections in which a collective is waited for later."""
        waits = self.are(WAIT)
        return {name: events for name, events in self.sections.items() if waits[events].any()}

    @cached_property
    def communication(self) -> dict[Any, list[tuple[int, EventKind]]]:
        """The collectives and waits of each section in `with_waits`."""
        found: dict[Any, list[tuple[int, EventKind]]] = {}
        for name, events in self.with_waits.items():
            found[name] = []
            for event in range(events.start, events.stop):
                kind = self.kinds[event]
                if kind.what in (COLLECTIVE, WAIT):
                    found[name].append((event, kind))
        return found

    @cached_property
    def alike(self) -> Ints:
        """By event, the first event that is equal to it for any rows of a microbatch and any devices."""
        first: dict[Any, int] = {}
        return np.array(
            [
                first.setdefault(event, number)
                for number, event in enumerate(zip(self.kinds, map(tuple, self.index.tolist()), strict=True))
            ],
            np.int64,
        )


class Formulas:
    """Extents with symbols, all of which are evaluated at once."""

    def __reduce__(self) -> tuple[type[Formulas], tuple[Sequence[Extent]]]:
        return Formulas, (self.extents,)

    def __init__(self, extents: Sequence[Extent]) -> None:
        self.extents = extents
        monomials: dict[Any, int] = {}
        terms: list[tuple[int, Any]] = []
        starts: list[int] = []
        for extent in extents:
            starts.append(len(terms))
            of = extent.terms if isinstance(extent, Expression) else (((), extent),)
            terms += [(monomials.setdefault(monomial, len(monomials)), factor) for monomial, factor in of]
        self.monomials = tuple(monomials)
        self.calls = {
            atom: Expression(((((atom, 1),), 1),))
            for monomial in monomials
            for atom, _ in monomial
            if not isinstance(atom, str)
        }
        self.starts = np.array(starts, np.int64)
        """By extent, its first term."""
        self.monomial_of = np.array([monomial for monomial, _ in terms], np.int64)
        ratios = [factor.as_integer_ratio() for _, factor in terms]
        above, below = (np.array(side, np.longdouble) for side in zip(*ratios, strict=True))
        self.factors = above / below
        """By term."""

    def at(self, numbers: Mapping[str, int], given: Mapping[Any, int] | None = None) -> Exact:
        """The values of all extents; some atoms have the values that are ``given``."""
        known: dict[Any, Any] = {name: np.longdouble(number) for name, number in numbers.items()}
        known |= {call: np.longdouble(specialized(extent, numbers)) for call, extent in self.calls.items()}
        known |= {atom: np.longdouble(number) for atom, number in (given or {}).items()}
        products = []
        for monomial in self.monomials:
            powers = (known[atom] ** power for atom, power in monomial)
            products.append(prod(powers, start=np.longdouble(1)))
        values = np.array(products, np.longdouble)
        found: Exact = np.rint(np.add.reduceat(self.factors * values[self.monomial_of], self.starts))
        return found


# -- the events of programs --------------------------------------------------------------------------------------------


class SymbolicProgram(DeviceProgram):
    """A `DeviceProgram` that may have symbols, so it cannot run: its steps say what they cost.

    Ops of one kind on arrays of equal types cost the same, which is computed once.
    """

    def __post_init__(self) -> None:
        pass

    def _cost(self, op: Op) -> DeclaredCost | None:
        return None if communicates(op) or op.operator.view else _cost_of(op.kind, op.types, op.attributes)

    def _held(self, values: Sequence[Value]) -> Held:
        held: dict[str, Any] = {}
        for value in values:
            category = self._category.get(value.name, ACTIVATIONS)
            held[category] = held.get(category, 0) + nbytes_of_one(value.type)
        return tuple((category, nbytes) for category, nbytes in held.items() if nbytes)

    def events_of(
        self, wanted: Sequence[bool], blocks: tuple[int | None, ...], devices: Devices | None
    ) -> Iterator[Event]:
        """The events of some of the ops, by their numbers: those of a program that has no others.  ``blocks`` are those
        of all ops."""
        later = self._freed_early(wanted)
        for parts, ops in zip(self._parts_in_blocks(blocks, devices), self._numbers, strict=True):
            for number, events in parts:
                if wanted[number]:
                    yield from events
            for number in ops if later else ():
                if wanted[ops[-1]] or len(parts) > 1:
                    yield from later.get(number, ())

    @memoized
    def _parts_in_blocks(
        self, blocks: tuple[int | None, ...], devices: Devices | None
    ) -> list[list[tuple[int, list[Event]]]]:
        """`_parts_of_steps`, with the events as those of blocks."""
        return [
            [(number, [*of_block(events, blocks[number])]) for number, events in parts]
            for parts in self._parts_of_steps(devices)
        ]

    @memoized
    def _parts_of_steps(self, devices: Devices | None) -> list[list[tuple[int, list[Event]]]]:
        """The events of each step, by the number of the op to which they belong: of a chain, its last one."""
        found = []
        steps = zip(self._steps_with_calls, events_by_step(self.steps, devices), self._numbers, strict=True)
        for step, events, ops in steps:
            if isinstance(step, Start | Wait):
                found.append(list(self._parts_of_call(step, devices)))
            else:
                found.append([(ops[-1], events)])
        return found

    def _parts_of_call(
        self, step: Start | Wait, devices: Devices | None
    ) -> Iterator[tuple[int, list[Event]]]:
        """The events of a call, or of the wait for it, by the number of the collective that they are of."""
        number = {op.outputs: place for place, op in enumerate(self.function.ops)}
        member = {self._memory[op.inputs[0]]: op for op in step.ops}
        values = step.taken if isinstance(step, Start) else step.freed
        sign = 1 if isinstance(step, Start) else -1
        for value in values:
            op = member.get(value) or next(op for op in step.ops if value in op.outputs)
            for category, nbytes in self._held([value]):
                yield number[op.outputs], [Event(EventKind(MEMORY, category), [sign * nbytes])]
        if isinstance(step, Start):
            for op in step.ops:
                yield number[op.outputs], list(_call(op, devices, joined=True))

    @cached_property
    def _memory(self) -> Mapping[Value, Value]:
        """For each value, the value in whose memory it lies."""
        started = {number for call in self.calls for number in call}
        return owners_overlapped(self.function, started, self.donated, self.given_up, at_once=self.at_once)

    @cached_property
    def _steps_with_calls(self) -> Sequence[Chain | Start | Wait]:
        """The steps, with the values that each takes memory for and frees."""
        if self.chains:
            return in_chains(self._steps_of_values, self.chains)
        return [[each] if isinstance(each, RunStep) else each for each in self._steps_of_values]

    @cached_property
    def _numbers(self) -> list[range]:
        """The numbers of the ops of each step; a wait has none."""
        counts = []
        for step in self.steps:
            match step:
                case ProgramStep(before=before):
                    counts.append(len(before) + 1)
                case StartStep(ops=ops):
                    counts.append(len(ops))
                case _:
                    counts.append(0)
        return [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]

    def _freed_early(self, wanted: Sequence[bool]) -> dict[int, list[Event]]:
        """By the last op of those that are wanted, the memory of values that others use after it."""
        found: dict[int, list[Event]] = {}
        for value, users in self._shared:
            used = [op for op in users if wanted[op]]
            if used and not wanted[users[-1]]:
                found.setdefault(used[-1], []).extend(
                    Event(EventKind(MEMORY, category), [-nbytes]) for category, nbytes in self._held([value])
                )
        return found

    @cached_property
    def _shared(self) -> list[tuple[Value, list[int]]]:
        """The values that are freed after an op, with the ops that use them, if there are several."""
        owner, users = owners(self.function), dict[Value, list[int]]()
        for number, op in enumerate(self.function.ops):
            for value in dict.fromkeys(owner[value] for value in (*op.inputs, *op.outputs)):
                users.setdefault(value, []).append(number)
        return [
            (value, users[value])
            for freed in freed_after(self.function, self.given_up)
            for value in freed
            if len(users[value]) > 1
        ]


@lru_cache(maxsize=16384)
def _cost_of(kind: str, types: tuple[TensorType, ...], attributes: Attributes) -> DeclaredCost | None:
    """What an op of this kind declares on inputs of these types."""
    made = meaning(kind, types, attributes).outputs
    inputs = tuple(Value(f"x{i}", type) for i, type in enumerate(types))
    outputs = tuple(Value(f"y{i}", type) for i, type in enumerate(made))
    return declared_cost(Op(kind, inputs, attributes, outputs))


@lru_cache(maxsize=16384)
def nbytes_of_one(type: TensorType) -> Any:
    """The bytes of an array of this type."""
    return type.nbytes


def of_block(events: Iterable[Event], block: int | None) -> Iterator[Event]:
    """The events, as those of a block."""
    return (Event(kind, extents, block) for kind, extents, _ in events)


def events_by_step(
    steps: Iterable[ProgramStep | StartStep | WaitStep], devices: Devices | None
) -> Iterator[list[Event]]:
    """The events of each step of a program.  ``ValueError`` for events that have no price of their own."""
    started: list[int] = []
    """The numbers of the collectives that are waited for later."""
    for step in steps:
        events = [Event(EventKind(MEMORY, category), [nbytes]) for category, nbytes in step.held]
        if isinstance(step, StartStep):
            for kind, payload, _ in _call(step.call, devices):
                started.append(step.number)
                events.append(Event(kind._replace(later=1), payload))
        elif isinstance(step, WaitStep):
            if step.number in started:
                events.append(
                    Event(EventKind(WAIT, step.ops[0].kind, later=started[::-1].index(step.number) + 1), [])
                )
        elif communicates(step.op):
            events += _call(step.op, devices)
        else:
            events += _compute(step)
        events += [Event(EventKind(MEMORY, category), [-nbytes]) for category, nbytes in step.freed]
        yield events


def _compute(step: ProgramStep) -> Iterator[Event]:
    cost: Any = step.cost  # its numbers may be extents
    if cost is not None:
        flops, nbytes, dtype, seconds, others, shape = cost
        kind = EventKind(
            COMPUTE,
            step.name,
            dtype,
            others=tuple(other for other, _ in others),
            extents=len(shape or ()),
            seconds=seconds,
            again=step.again,
        )
        yield Event(kind, [nbytes, flops, *(size for _, size in others), *(shape or ())])


def _call(op: Op, devices: Devices | None, *, joined: bool = False) -> Iterator[Event]:
    """A collective.  Its payload is what a member gives, or of an all_gather what it gets.  In a `joined` call all parts
    of an array that is cut have the size of the first, which is the largest."""
    if op.kind not in ASYNCHRONOUS:
        raise ValueError(f"{op.kind} has no price of its own")
    assert devices is not None
    over = tuple(axis for axis in op["axes"] if devices.shape[axis] != 1)
    nbytes: Any = (op.outputs if op.kind == "all_gather" else op.inputs)[0].type.nbytes
    if joined and op.kind != "all_reduce":
        part = op.inputs[0] if op.kind == "all_gather" else op.outputs[0]
        nbytes = prod((devices.shape[axis] for axis in over), start=part.type.nbytes)
    if over:
        pairs = op["pairs"] if op.kind == "permute" else ()
        given = dict(op.attributes)
        how: dict[str, Any] = {"joined": joined, "pairs": pairs, "op": given.get("op")}
        how["algorithm"] = given.get("algorithm")
        kind = EventKind(COLLECTIVE, op.kind, op.inputs[0].type.dtype.name, over, **how)
        yield Event(kind, [nbytes])
