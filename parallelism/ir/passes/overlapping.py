"""The order in which a device with overlap runs a program: where its collectives start, and which are one call.

The order is the same on all devices, because each device of a group must make its calls in one order.  It is a rule on
the ops of the program alone (`parallelism.transforms.Overlap` says it in words), so sizes that differ between devices
do not matter.  Where a device waits for a collective follows from the order (`parallelism.ir.passes.waiting`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

from parallelism.ir.core import Function, Op
from parallelism.ir.core.regions import inside
from parallelism.ir.passes.delayed_products import with_delays
from parallelism.ir.passes.gradients import UPDATE
from parallelism.ir.passes.waiting import LAYERS_UNDER_WAY, UNDER_WAY

ASYNCHRONOUS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
"""The kinds of collectives that can be waited for later."""
BUCKET_BYTES, AHEAD = "overlap_bucket_bytes", "overlap_ahead"
"""The attributes by which a function says that devices run it with overlap, and how."""


class Sizes(Protocol):
    """The two sizes of `parallelism.transforms.Overlap`."""

    @property
    def bucket_bytes(self) -> int:
        """The bytes of a bucket of sums."""

    @property
    def ahead(self) -> int:
        """How many layers ahead of their use parameters are gathered."""


class SaidSizes(NamedTuple):
    """`Sizes` that are read from the attributes of a function."""

    bucket_bytes: int
    ahead: int


def said(function: Function) -> SaidSizes | None:
    """The sizes in the attributes of a function; None if it is not overlapped."""
    told = dict(function.attributes)
    return SaidSizes(told[BUCKET_BYTES], told[AHEAD]) if BUCKET_BYTES in told and AHEAD in told else None


class Order(NamedTuple):
    """An order of the ops of a program."""

    ops: tuple[int, ...]
    """The numbers of the ops in the program, in the order in which they run or start."""
    calls: tuple[tuple[int, ...], ...]
    """The collectives that start and are waited for later: their places in ``ops``, those of one call together."""
    early: frozenset[int] = frozenset()
    """The numbers of the ops of the update that run in the backward: they make of a gradient what is summed."""
    at_once: bool = False
    """Whether each call is waited for as soon as it has started."""

    def numbered(self, numbers: Sequence[int]) -> Order:
        """The order in the numbers that the ops have in another program."""
        ops = tuple(numbers[number] for number in self.ops)
        return self._replace(ops=ops, early=frozenset(numbers[number] for number in self.early))

    def of(self, function: Function) -> Function:
        """The function with its ops in this order, in which it computes the same."""
        return replace(function, ops=tuple(function.ops[number] for number in self.ops))

    def made_early(self, function: Function) -> list[str]:
        """The names of what the early ops make of gradients."""
        made = (function.ops[number] for number in self.early)
        return [value.name for op in made if op.inputs for value in op.outputs]


def overlapped(program: Function, overlap: Sizes) -> Order:
    """The order for the programs of all devices, by the ``program`` of one of them.

    The ops of all programs differ in shapes and places only.
    """
    numbers = with_delays(program)
    order = _Ordering(replace(program, ops=tuple(program.ops[number] for number in numbers)), overlap).order()
    return order.numbered(numbers)


class _Ordering:
    def __init__(self, program: Function, overlap: Sizes) -> None:
        self.overlap = overlap
        self.ops, self.count = program.ops, len(program.ops)
        self.made = {value.name: number for number, op in enumerate(self.ops) for value in op.outputs}
        """The number of the op that makes a value; an input is not in it."""
        self.readers: dict[str, list[int]] = defaultdict(list)
        for number, op in enumerate(self.ops):
            for value in op.inputs:
                self.readers[value.name].append(number)
        self.collectives = [
            number for number, op in enumerate(self.ops) if op.kind in ASYNCHRONOUS and op["group"] != 1
        ]
        self.started = {*self.collectives}
        updates = [number for number, op in enumerate(self.ops) if inside(op, UPDATE)]
        self.update = updates[0] if updates else self.count
        """The number of the first op of the update."""
        self.early: dict[int, list[int]] = {}
        """By the number of a sum: the ops that bring a gradient, which is not summed, to it: they run as soon as it is
        there.  (The gradient of a cast of all weights, for example, is at the end of the backward.)"""
        self.sums = self._sums()
        self.late = self._late()
        self.collectives = [
            number for number in self.collectives if number in self.sums or number not in self.late
        ]
        self.started = {*self.collectives}

    def order(self) -> Order:
        slots: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """By number of an op: the calls that start before it."""
        for slot, call in (
            *self._buckets(),
            *self._gathers(),
            *self._updated_gathers,
            *self._others(),
        ):
            slots[slot].append(call)
        moved: dict[int, list[int]] = defaultdict(list)
        """By number of an op: the early and the late ops that run before it."""
        held_back = self._slots_of_additions(slots)
        for number in self.late - self.sums:
            moved[min(self._first_reader(number), held_back.get(number, self.count))].append(number)
        for number, early in self.early.items():
            moved[self._ready(number)] += early
        for slot, call in self._gathers():
            for number in call:
                moved[slot] += self._views_behind(number)
        ops: dict[int, None] = {}
        calls: list[tuple[int, ...]] = []
        for number in range(self.count + 1):
            waiting = self._run_ready(ops, sorted(moved[number]))
            for call in sorted(slots[number], key=lambda call: (max(map(self._sums_before, call)), call)):
                calls.append(tuple(range(len(ops), len(ops) + len(call))))
                ops.update(dict.fromkeys(call))
                # A late op may read a sum that starts here: a gradient that is summed over two axes, one by one.
                waiting = self._run_ready(ops, waiting)
            if number < self.count and number not in self.started and number not in self.late:
                ops.setdefault(number)
        return Order(tuple(ops), tuple(calls), frozenset().union(*self.early.values()))

    def _run_ready(self, ops: dict[int, None], waiting: Sequence[int]) -> list[int]:
        """Adds to ``ops`` those ``waiting`` whose inputs are made there; returns the others."""
        others: list[int] = []
        for number in waiting:
            makers = (self.made.get(value.name) for value in self.ops[number].inputs)
            if all(maker is None or maker in ops for maker in makers):
                ops.setdefault(number)
            else:
                others.append(number)
        return others

    def _slots_of_additions(self, slots: Mapping[int, Sequence[tuple[int, ...]]]) -> dict[int, int]:
        """By number of an op that adds a reduce_scattered gradient to a buffer: before which op it runs at the latest.

        It runs when so many calls later over the same axes as are under way at one time start: its term is there by then,
        and no more of them wait in memory.
        """
        scatters: dict[Sequence[str], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        for slot in sorted(slots):
            for call in sorted(slots[slot]):
                op = self.ops[call[0]]
                if call[0] in self.sums and op.kind == "reduce_scatter":
                    scatters[op["axes"]].append((slot, call))
        found: dict[int, int] = {}
        for axes, each in scatters.items():
            behind = UNDER_WAY if self._gathered_axes.isdisjoint(axes) else LAYERS_UNDER_WAY
            for (_, call), (later, _) in zip(each, each[behind:], strict=False):
                after = chain.from_iterable(map(self._after, call))
                found |= dict.fromkeys(self.late.intersection(after), later)
        return found

    # -- sums of gradients ---------------------------------------------------------------------------------------------

    def _sums(self) -> set[int]:
        """The sums of gradients: those that only the update needs, or the caller.

        The update may scale a gradient before it is summed; but a sum of what it makes of sums is none.
        """
        wanted: set[int] = set()
        """Ops of the update, and those that only bring their results to it."""
        sums = {
            number
            for number in self.collectives
            if self.ops[number].kind in ("all_reduce", "reduce_scatter") and self.ops[number]["op"] == "sum"
        }
        for number in reversed(range(self.count)):
            op = self.ops[number]
            brings = number in sums or op.operator.view or op.kind in ("convert", "widen", "all_slice")
            brings |= self._adds_up(number, sums)
            if inside(op, UPDATE) or (brings and wanted.issuperset(self._after(number))):
                wanted.add(number)
        found: set[int] = set()
        for number in sorted(sums & wanted):
            behind = self._behind(number, wanted)
            summed = self.started.intersection(behind)
            if not summed:
                found.add(number)
                if behind:
                    self.early[number] = behind
            elif summed <= found and (self._made(number) in found or max(behind) < self.update):
                found.add(number)  # a sum of a sum
        return found

    def _adds_up(self, number: int, sums: set[int]) -> bool:
        """Whether an op adds a sum of this microbatch to those of the microbatches before."""
        op = self.ops[number]
        return op.kind == "accumulate" and self.made.get(op.inputs[1].name) in sums

    def _behind(self, number: int, wanted: set[int]) -> list[int]:
        """The ops among those ``wanted`` that make the input of a sum, in order, up to collectives."""
        behind, new = set[int](), [self._made(number)]
        while new:
            each = new.pop()
            if each in wanted and each not in behind:
                behind.add(each)
                if each not in self.started:
                    new += [self.made.get(value.name, -1) for value in self.ops[each].inputs]
        return sorted(behind)

    def _late(self) -> set[int]:
        """The ops of the backward that need the sum of a gradient: they run where the update needs them."""
        late: set[int] = set()
        for number, op in enumerate(self.ops):
            made = (self.made.get(value.name) for value in op.inputs)
            if not inside(op, UPDATE) and any(each in self.sums or each in late for each in made):
                late.add(number)
        return late

    def _buckets(self) -> list[tuple[int, tuple[int, ...]]]:
        """The calls that sum gradients, with the number of the op before which each starts.

        The gradients of a layer whose parameters are gathered are one call, as these are (`_gathers`).  Others, and those
        in no region, are cut by their bytes.
        """
        ready = sorted((self._ready(number), number) for number in self.sums)
        calls: list[tuple[int, tuple[int, ...]]] = []
        open_: dict[object, tuple[int, list[int]]] = {}

        def close(key: object) -> None:
            slot, members = open_.pop(key)
            calls.append((slot, tuple(members)))

        for slot, number in ready:
            op = self.ops[number]
            reduction = dict(op.attributes).get("op")
            layer = layer_of(op) if self._is_of_gathered(number) else None
            key = op.kind, op["axes"], op.inputs[0].type.dtype, reduction, self._chained(number), layer
            _, members = open_.get(key, (0, []))
            open_[key] = slot, [*members, number]
            nbytes = sum(int(self.ops[each].inputs[0].type.nbytes) for each in open_[key][1])
            if layer is None and nbytes >= self.overlap.bucket_bytes:
                close(key)
        for unfilled in [*open_]:
            close(unfilled)
        return calls

    def _is_of_gathered(self, number: int) -> bool:
        """Whether a sum is of the gradient of a parameter that is gathered over the same axes, as it is there."""
        return not self._chained(number) and not self._gathered_axes.isdisjoint(self.ops[number]["axes"])

    @cached_property
    def _gathered_axes(self) -> set[str]:
        """The axes over which parameters are shared out, and gathered where they are read."""
        gathers = (self.ops[number] for number in self.collectives if self._of_parameter(number))
        return {axis for op in gathers if op.kind == "all_gather" for axis in op["axes"]}

    def _chained(self, number: int) -> bool:
        """Whether the sum is one of a sum before."""
        made = self._made(number)
        return made in self.sums or made in self.late

    def _ready(self, number: int) -> int:
        """The number of the op before which the input of a sum is there."""
        if self._chained(number):
            return self.update
        early = self.early.get(number, [number])
        made = (self.made.get(value.name, -1) for each in early for value in self.ops[each].inputs)
        return 1 + max((each for each in made if each not in early and each < self.update), default=-1)

    # -- gathers -------------------------------------------------------------------------------------------------------

    def _gathers(self) -> list[tuple[int, tuple[int, ...]]]:
        """The gathers of parameters, each with the number of the op before which it starts.

        Those that follow each other in one layer start together, as one call, as in FSDP (Zhao
        et al., *PyTorch FSDP*, 2023, arXiv:2304.11277, section 4.2.1).  A gather in no region is a layer of its own.  The
        views that are gathered are made where their gather starts.
        """
        layers: list[list[int]] = []
        last: str | None = None
        for number in self.collectives:
            if self._of_parameter(number):
                layer = layer_of(self.ops[number])
                if layer is None or layer != last:
                    layers.append([])
                last = layer
                layers[-1].append(number)
        starts = [layers[max(0, place - self.overlap.ahead)][0] for place in range(len(layers))]
        return [
            (start, call)
            for start, layer in zip(starts, layers, strict=True)
            for call in self._joined_gathers(layer)
        ]

    def _joined_gathers(self, layer: Sequence[int]) -> list[tuple[int, ...]]:
        """The gathers of a layer as calls: those over the same axes, of one dtype, are one."""
        calls: dict[object, list[int]] = defaultdict(list)
        for number in layer:
            op = self.ops[number]
            calls[(op["axes"], op.inputs[0].type.dtype) if op.kind == "all_gather" else number].append(number)
        return [*map(tuple, calls.values())]

    def _of_parameter(self, number: int) -> bool:
        """Whether a collective outside of the update gives an input, or a view of it, in another layout."""
        if number in self.sums or inside(self.ops[number], UPDATE):
            return False
        first = (self._views_behind(number) or [number])[-1]
        return self.ops[first].inputs[0].name not in self.made

    def _views_behind(self, number: int) -> list[int]:
        """The ops, the last one first, that make the input of a collective by views alone."""
        views = list[int]()
        made = self._made(number)
        while made >= 0 and self.ops[made].operator.view:
            views.append(made)
            made = self._made(made)
        return views

    def _others(self) -> list[tuple[int, tuple[int, ...]]]:
        """The other collectives: each starts where the one before it is needed, if its input is there."""
        calls: list[tuple[int, tuple[int, ...]]] = []
        before = -1
        updated = {number for _, call in self._updated_gathers for number in call}
        for number in self.collectives:
            if number in self.sums:
                continue
            if number not in updated and not self._of_parameter(number):
                made = self._made(number)
                late = made in self.started or made in self.late
                calls.append((number if late else max(made, before) + 1, (number,)))
            before = number
        return calls

    @cached_property
    def _updated_gathers(self) -> list[tuple[int, tuple[int, ...]]]:
        """The gathers of what the update returns, in buckets as sums are: each starts where the last of it is ready."""
        calls: list[tuple[int, tuple[int, ...]]] = []
        open_: dict[object, list[int]] = {}
        for number in self.collectives:
            op = self.ops[number]
            if op.kind != "all_gather" or not inside(op, UPDATE) or not self._is_returned(number):
                continue
            key = op["axes"], op.inputs[0].type.dtype
            bucket = open_.setdefault(key, [])
            bucket.append(number)
            nbytes = sum(int(self.ops[each].outputs[0].type.nbytes) for each in bucket)
            if nbytes >= self.overlap.bucket_bytes:
                calls.append((self._made(bucket[-1]) + 1, tuple(open_.pop(key))))
        calls += [(self._made(bucket[-1]) + 1, tuple(bucket)) for bucket in open_.values()]
        return calls

    def _is_returned(self, number: int) -> bool:
        """Whether what a gather makes is only returned: no op but a view or a cast reads it."""
        behind = self._after(number)
        return all(
            self.ops[each].operator.view or (self.ops[each].kind == "convert" and self._is_returned(each))
            for each in behind
        )

    # -- the program ---------------------------------------------------------------------------------------------------

    def _made(self, number: int) -> int:
        """The number of the op that makes the first input of an op; -1 if it is an input of the program."""
        return self.made.get(self.ops[number].inputs[0].name, -1)

    def _sums_before(self, number: int) -> int:
        """How many sums of gradients, one of the other, make the input of a collective."""
        before = (self.made.get(value.name, -1) for value in self.ops[number].inputs)
        return max(
            (
                self._sums_before(each) + (each in self.sums)
                for each in before
                if each in self.sums or each in self.late
            ),
            default=0,
        )

    def _after(self, number: int) -> list[int]:
        """The numbers of the ops that read the outputs of an op."""
        return [reader for value in self.ops[number].outputs for reader in self.readers[value.name]]

    def _first_reader(self, number: int) -> int:
        """The number of the first op that reads what a late op makes and is not late itself."""
        first = self.count
        for each in self._after(number):
            if each in self.sums:
                each = self.update
            elif each in self.late:
                each = self._first_reader(each)
            first = min(first, each)
        return first


def layer_of(op: Op) -> str | None:
    """The layer that an op is in: its region up to the first number, ``gradient.block.3``; None if it is in none."""
    names = op.region.split(".") if op.region else []
    for place, path in zip(names, accumulate(names, "{}.{}".format), strict=True):
        if place.isdecimal():
            return path
    return op.region
