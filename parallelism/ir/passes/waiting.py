"""The steps of a program in which some collectives are waited for later: starts, waits, and the lifetimes of values.

A device waits for a call before the first op that reads one of its outputs, and before an op that writes into the
memory of its inputs.  Of the calls by reduce_scatter over the same axes at most `UNDER_WAY` are under way at a time,
because their inputs are larger than their outputs and stay in memory until then; where parameters are gathered over these
axes, so that a call has all gradients of a layer, `LAYERS_UNDER_WAY`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set as AbstractSet
from typing import NamedTuple

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.core.regions import inside
from parallelism.ir.passes.donation import Donated, kept, owns_nothing
from parallelism.ir.passes.gradients import UPDATE

UNDER_WAY = 2
LAYERS_UNDER_WAY = 1
"""As in FSDP (``reduce_scatter_max_input_buffers`` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)."""


class Run(NamedTuple):
    """One op."""

    op: Op
    taken: tuple[Value, ...] = ()
    """The outputs that take memory of their own."""
    freed: tuple[Value, ...] = ()
    """The values whose memory is freed afterwards."""
    unread: tuple[Value, ...] = ()
    """The values that nothing reads afterwards."""


class Start(NamedTuple):
    """The start of collectives that are one call.  What is freed is freed later, by who waits for them."""

    number: int
    ops: tuple[Op, ...]
    taken: tuple[Value, ...] = ()
    freed: tuple[Value, ...] = ()
    unread: tuple[Value, ...] = ()


class Wait(NamedTuple):
    """The wait for a call."""

    number: int
    ops: tuple[Op, ...]
    taken: tuple[Value, ...] = ()
    freed: tuple[Value, ...] = ()
    unread: tuple[Value, ...] = ()


Step = Run | Start | Wait


def in_steps(
    function: Function,
    calls: Sequence[Sequence[int]],
    donated: Donated,
    left: Collection[str] = (),
    given_up: Collection[str] = (),
    *,
    at_once: bool = False,
) -> list[Step]:
    """The steps of a function; ``calls`` are the numbers of the ops that start together and are waited for later, or
    ``at_once``.

    Calls whose outputs are all ``left``, by name, are under way at the end.  The caller keeps the inputs, except those
    ``given_up``, by name.
    """
    started = {number for call in calls for number in call}
    owner = owners_overlapped(function, started, donated, given_up, at_once=at_once)
    steps = _with_waits(function, calls, owner, left, at_once=at_once)
    last: dict[Value, int] = {}
    """By owner: the last step that uses its memory."""
    last_read: dict[Value, int] = {}
    for place, step in enumerate(steps):
        used = [*_inputs(step), *_outputs(step)]
        last.update((owner[value], place) for value in used)
        last_read.update((value, place) for value in used)
        last_read.update((donated[value], place) for value in _outputs(step) if value in donated)
    freed = _by_place(last, kept(function, owner, given_up))
    unread = _by_place(last_read, {*function.outputs})
    found: list[Step] = []
    for place, step in enumerate(steps):
        gone = freed.get(place, ())
        if isinstance(step, Wait):
            found.append(Wait(*step[:2], (), gone, unread.get(place, ())))
            continue
        taken = tuple([value for value in _outputs(step) if owner[value] is value])
        if isinstance(step, Start):
            found.append(Start(*step[:2], taken, gone))
        else:
            found.append(Run(step.op, taken, gone, unread.get(place, ())))
    return found


def _with_waits(
    function: Function,
    calls: Sequence[Sequence[int]],
    owner: Mapping[Value, Value],
    left: Collection[str],
    *,
    at_once: bool,
) -> list[Step]:
    call_of = {number: which for which, call in enumerate(calls) for number in call}
    waits = _Waits(owner, {*function.inputs}, _gathered_axes(function, calls, owner))
    for number, op in enumerate(function.ops):
        which = call_of.get(number)
        if which is None:
            over = (
                {owner[value] for value in op.outputs if owner[value] is not value}
                if not op.operator.view
                else ()
            )
            waits.wait_for(op.inputs, over)
            waits.steps.append(Run(op))
        elif number == calls[which][0]:
            waits.start(which, tuple(function.ops[each] for each in calls[which]))
            if at_once:
                waits.wait(which)
    for which, ops in [*waits.under_way.items()]:
        if not all(value.name in left for op in ops for value in op.outputs):
            waits.wait(which)
    return waits.steps


def _gathered_axes(
    function: Function, calls: Sequence[Sequence[int]], owner: Mapping[Value, Value]
) -> set[str]:
    """The axes over which the caller's arrays are gathered: parameters that are shared out."""
    inputs = {*function.inputs}
    started = (function.ops[number] for call in calls for number in call)
    gathers = (op for op in started if op.kind == "all_gather" and not inside(op, UPDATE))
    return {axis for op in gathers if owner[op.inputs[0]] in inputs for axis in op["axes"]}


class _Waits:
    """The steps so far, and the calls that are under way after them."""

    def __init__(
        self, owner: Mapping[Value, Value], inputs: Collection[Value], gathered: AbstractSet[str]
    ) -> None:
        self.owner, self.inputs, self.gathered = owner, inputs, gathered
        self.steps: list[Step] = []
        self.under_way: dict[int, tuple[Op, ...]] = {}
        self.made: dict[Value, int] = {}
        """The calls that make values, of those under way."""
        self.sent: dict[Value, set[int]] = defaultdict(set)
        """The calls that send what lies in the memory of values, of those under way."""

    def wait(self, which: int) -> None:
        """Waits for a call."""
        ops = self.under_way.pop(which)
        for op in ops:
            for value in op.outputs:
                del self.made[value]
            for value in op.inputs:
                self.sent[self.owner[value]].discard(which)
        self.steps.append(Wait(which, ops))

    def wait_for(self, read: Collection[Value], written: Collection[Value]) -> None:
        """Waits for the calls that make a value that is read, or send one whose memory is written into."""
        needed = {self.made[value] for value in read if value in self.made}
        needed.update(which for value in written if value in self.sent for which in self.sent[value])
        if needed:
            for which in [each for each in self.under_way if each in needed]:
                self.wait(which)

    def start(self, which: int, ops: tuple[Op, ...]) -> None:
        """Starts a call, after those that it needs; few reduce_scatters of gradients that were made just now are under
        way at one time.  Those of buffers that the caller made are not held back: their memory is there anyway."""
        inputs = [value for op in ops for value in op.inputs]
        made = {self.owner[value] for op in ops for value in op.outputs}
        self.wait_for(inputs, made - {self.owner[value] for value in inputs})
        if self._is_held_back(ops):
            axes = ops[0]["axes"]
            scatters = [
                each
                for each, started in self.under_way.items()
                if self._is_held_back(started) and started[0]["axes"] == axes
            ]
            most = UNDER_WAY if self.gathered.isdisjoint(axes) else LAYERS_UNDER_WAY
            for each in scatters[: max(0, len(scatters) - most + 1)]:
                self.wait(each)
        self.under_way[which] = ops
        for op in ops:
            self.made.update(dict.fromkeys(op.outputs, which))
            for value in op.inputs:
                self.sent[self.owner[value]].add(which)
        self.steps.append(Start(which, ops))

    def _is_held_back(self, ops: tuple[Op, ...]) -> bool:
        """Whether a call is a reduce_scatter of which the memory of an input is not the caller's."""
        if ops[0].kind != "reduce_scatter":
            return False
        return any(self.owner[value] not in self.inputs for op in ops for value in op.inputs)


def owners_overlapped(
    function: Function,
    started: Collection[int],
    donated: Donated,
    given_up: Collection[str] = (),
    *,
    at_once: bool = False,
) -> dict[Value, Value]:
    """For each value, the value in whose memory it lies: itself, or an earlier one.

    A started all_reduce takes the memory of its input if nothing else uses that later, and if the caller does not keep
    it, as it keeps inputs that are not ``given_up``.  So does a reduce_scatter that is waited for ``at_once``: what it
    makes is a part of the buffer that it sums, as in Megatron-LM.
    """
    in_place = ("all_reduce", "reduce_scatter") if at_once else ("all_reduce",)
    read: dict[Value, int] = {value: number for number, op in enumerate(function.ops) for value in op.inputs}
    read |= dict.fromkeys(function.outputs, len(function.ops))
    owner = {value: value for value in function.inputs}
    inside: dict[Value, list[Value]] = {value: [value] for value in function.inputs}
    """By owner: the values in its memory."""
    own = {value for value in function.inputs if value.name not in given_up}
    for number, op in enumerate(function.ops):
        for value in op.outputs:
            place = value
            if owns_nothing(op, value):
                place = owner[op.inputs[0]]
                own -= {place} if op.operator.reuses else set()
            elif value in donated:
                place = donated[value]
            elif op.kind in in_place and number in started:
                taken = owner[op.inputs[0]]
                if taken not in own and all(read.get(each, -1) <= number for each in inside[taken]):
                    place = taken
            owner[value] = place
            inside.setdefault(place, []).append(value)
    return owner


def _inputs(step: Step) -> tuple[Value, ...]:
    return step.op.inputs if isinstance(step, Run) else tuple(value for op in step.ops for value in op.inputs)


def _outputs(step: Step) -> tuple[Value, ...]:
    return (
        step.op.outputs if isinstance(step, Run) else tuple(value for op in step.ops for value in op.outputs)
    )


def _by_place(last: Mapping[Value, int], stay: Collection[Value]) -> dict[int, tuple[Value, ...]]:
    """The values by the place of the last step that uses them, without those that ``stay``."""
    found: dict[int, list[Value]] = {}
    for value, place in last.items():
        if value not in stay:
            found.setdefault(place, []).append(value)
    return {place: tuple(values) for place, values in found.items()}
