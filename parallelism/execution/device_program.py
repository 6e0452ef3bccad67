"""The program of one device: what each op declares, what it holds in memory, and how it is run.

`DeviceProgram.run` runs it on any `Device`: on one with numbers each op by its kernel, and on one that only records
(`parallelism.simulation.typed_device`) with types for results.  So a run and a simulation have the same events.  A
step holds the memory of its outputs, computes or communicates, and then frees the values that no later op reads:

    memory +     one event for each category of the outputs; a view, a sum in a buffer, and an output in the memory of
                 a donated input own no memory
    compute      has the name of the op, its flops, bytes and dtype; an op that costs nothing has no event
    collective   or a send or recv, in place of compute
    memory -     one event for each category of the freed values

Flops are counted where there are floats; an op on integers or bools is counted by its bytes.

With overlap (`parallelism.execution.overlapping`) some collectives start in one step and are waited for in another:

    memory +     the outputs, when they start; a sum that may replace its input takes its memory
    collective   one for all that are one call
    ...          other steps
    wait         before the first op that reads an output, or that writes over an input
    memory -     the freed values, inputs of the collectives among them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.dtypes import is_floating
from parallelism.execution.chains import (
    Chain,
    DeclaredCost,
    bytes_of_others,
    declared_cost,
    in_chains,
    inner_values,
    moved_values,
    name_of,
    number,
    whole_number,
)
from parallelism.execution.device_calls import METHODS, Later, StartedCall, UnderWay, one_call, started
from parallelism.execution.typed_arrays import ArrayMaker, TypedArray
from parallelism.ir import Function, Op, Value
from parallelism.ir.operators.contractions import factor_dtype, product_shape
from parallelism.ir.passes import MARK, Donated, freed_after, taken_by, unread_after, written_inputs
from parallelism.ir.passes.chunked_collectives import side_by_side
from parallelism.ir.passes.donation import owners
from parallelism.ir.passes.given_arrays import without_number
from parallelism.ir.passes.interpreter import contiguous as own_array, run as run_kernel, written_into
from parallelism.ir.passes.waiting import Run, Start, Wait, in_steps, owners_overlapped
from parallelism.operation import Device
from parallelism.transforms.parts import AGAIN

Held = tuple[tuple[str, int], ...]
"""Categories of memory with their bytes."""

CALLS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
    "group_collective",
    "send",
    "recv",
)
INPUTS, ACTIVATIONS, OUTPUTS, GRADIENTS = "inputs", "activations", "outputs", "gradients"
RECOMPUTED = "R"
"""The phase of what the backward computes again."""
REGION_PHASES = {"forward": "F", "backward": "B", "recomputed": RECOMPUTED, MARK: "B"}
"""The phases of regions: of programs that were differentiated elsewhere, as by JAX, and of a backward made here."""


class Running:
    """A run of a program on a device."""

    __slots__ = (
        "again",
        "arrays",
        "awaited",
        "compute",
        "hold",
        "marks",
        "places",
        "run_array_op",
        "under_way",
        "values",
    )

    def __init__(self, device: Device, values: dict[str, Any], marks: dict[str, Any]) -> None:
        self.values, self.marks = values, marks
        """The values that are there, by name; and the marks of every event."""
        self.places = {name: mark for name, mark in marks.items() if name != "phase"}
        self.again = {**marks, "phase": RECOMPUTED}
        self.arrays = array_maker(device)
        self.run_array_op, self.compute, self.hold = self.arrays.run_op, device.compute, device.hold
        self.under_way: dict[int, UnderWay] = {}
        """The calls that were started, by number."""
        self.awaited = {name for name, array in values.items() if isinstance(array, Later)}
        """The inputs that are there later."""

    def run_op(self, op: Op, names: Sequence[str | None]) -> None:
        """Runs an op; ``names`` are those of the values in whose memory its outputs lie."""
        values = self.values
        into = [name and values[name] for name in names] if names else ()
        outputs = self.run_array_op(op, [values[value.name] for value in op.inputs], into)
        values.update((value.name, array) for value, array in zip(op.outputs, outputs, strict=True))

    def wait_for(self, ops: Sequence[Op]) -> None:
        """Waits for what these ops read, in their order."""
        for late in {each.name: each for op in ops for each in op.inputs if each.name in self.awaited}:
            for category, nbytes in self.values[late].call.freed():
                self.hold(category, -nbytes, **self.places)
            self.values[late] = self.values[late].wait()
            self.awaited.remove(late)


class ChainedOp(NamedTuple):
    """An op that runs in the same kernel as the op of its step, before that."""

    op: Op
    into: tuple[str | None, ...]


class ProgramStep(NamedTuple):
    """One op of a program, with its events; or a chain of ops that run as one, with the events of one."""

    op: Op
    """The last op of a chain."""
    cost: DeclaredCost | None
    """None if the op costs nothing or communicates."""
    held: Held
    """Memory that its outputs take."""
    freed: Held
    """Memory of the values that no later op reads."""
    unread: tuple[str, ...]
    """Names of the values that no later op reads."""
    into: tuple[str | None, ...]
    """For each output the name of the donated input in whose memory it is to lie, or None; empty if all are None."""
    again: bool = False
    """Whether it runs again in the backward: then its phase is ``R``, whatever the action."""
    name: str = ""
    """The name of its compute: the kind of the op, or the different kinds of a chain."""
    before: tuple[ChainedOp, ...] = ()
    """The other ops of a chain."""
    phase: str | None = None
    """The phase of its compute where the run says none: forward, backward or again, in a program that has a gradient."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of the chain."""
        return (*(op for op, _ in self.before), self.op)

    def run(self, run: Running) -> None:
        """Computes or communicates."""
        op, cost, held, freed, unread, into, again, name, before, phase = self
        hold, places = run.hold, run.places
        marks = run.again if again else run.marks
        if phase is not None and "phase" not in marks:
            marks = {**marks, "phase": phase}
        for category, nbytes in held:
            hold(category, nbytes, **places)
        if cost is None:
            for earlier in before:
                run.run_op(*earlier)
            run.run_op(op, into)
        else:
            flops, traffic, dtype, seconds, others, shape = cost
            with run.compute(
                name,
                flops=flops,
                nbytes=traffic,
                dtype=dtype,
                seconds=seconds,
                other_bytes=others,
                shape=shape,
                **marks,
            ):
                for earlier in before:
                    run.run_op(*earlier)
                run.run_op(op, into)
        for name in unread:
            del run.values[name]
        for category, nbytes in freed:
            hold(category, -nbytes, **places)


class StartStep(NamedTuple):
    """The start of collectives that are one call."""

    number: int
    """The number of the call in the program."""
    call: Op
    """What they are together."""
    ops: tuple[Op, ...]
    held: Held
    """Memory that their outputs take."""
    at_once: bool = False
    """Whether they are over when the step is."""
    freed: Held = ()
    freed_later: Held = ()
    """Memory of what nothing reads after them, if another program waits for them: then it is freed."""

    def run(self, run: Running) -> None:
        """Starts them."""
        for category, nbytes in self.held:
            run.hold(category, nbytes, **run.places)
        inputs = [run.values[op.inputs[0].name] for op in self.ops]
        started = run.arrays.start(self.call, self.ops, inputs, at_once=self.at_once)
        run.under_way[self.number] = UnderWay(run.arrays, started, self.ops, self.freed_later)


class WaitStep(NamedTuple):
    """The wait for a call."""

    number: int
    ops: tuple[Op, ...]
    freed: Held
    unread: tuple[str, ...]
    into: tuple[str | None, ...]
    """As in `ProgramStep`, for the output of each op."""
    held: Held = ()

    def run(self, run: Running) -> None:
        """Waits for them."""
        into = [run.values[name] if name else None for name in self.into]
        found = run.under_way.pop(self.number).wait(into)
        run.values.update((op.outputs[0].name, array) for op, array in zip(self.ops, found, strict=True))
        for name in self.unread:
            del run.values[name]
        del found, into
        for category, nbytes in self.freed:
            run.hold(category, -nbytes, **run.places)


@dataclass(frozen=True)
class DeviceProgram:
    """A function of local shapes, and the categories that the memory of its values is counted in.

    ``categories`` has the categories of values by their names.  Of the other values the inputs are ``inputs``, the
    outputs ``outputs``, and the rest ``activations``.  ``seconds(op)`` are the seconds of an op, in place of its flops
    and bytes.  ``donated`` has the values that lie in the memory of donated inputs.  ``calls`` has the collectives that
    are waited for later, by their numbers among the ops; those of one call follow each other.  ``chains`` are the
    numbers of ops that run as one, in order (`parallelism.ir.passes.fusion.chained`); empty: every op by itself.  A
    chain declares what it reads and writes, and holds no memory for the values inside.  ``ValueError`` for a function
    with symbols.
    """

    function: Function
    categories: Mapping[str, str]
    seconds: Callable[[Op], float] | None = None
    donated: Donated = field(default_factory=dict)
    calls: tuple[tuple[int, ...], ...] = ()
    chains: tuple[int, ...] = ()
    left: frozenset[str] = frozenset()
    """The names of outputs that need not be waited for: `run` may return each as `Later`, which `run` of another
    program takes for an array."""
    given_up: frozenset[str] = frozenset()
    """The names of inputs that the caller does not keep: their memory is free after the last op that reads them."""
    at_once: bool = False
    """Whether each of the calls is waited for as soon as it has started."""

    def __post_init__(self) -> None:
        if self.function.symbols:
            raise without_number(self.function.name, self.function.symbols)

    @cached_property
    def held(self) -> Held:
        """The memory of the inputs."""
        return self._held(self.function.inputs)

    @cached_property
    def steps(self) -> tuple[ProgramStep | StartStep | WaitStep, ...]:
        """The ops in their order."""
        if not self.chains:
            steps = []
            for each in self._steps_of_values:
                steps.append(self._step([each] if isinstance(each, Run) else each))
            return tuple(steps)
        chains = in_chains(self._steps_of_values, self.chains)
        inner = inner_values(chains, self.function.outputs)
        return tuple(self._step(each, inner) for each in chains)

    @cached_property
    def _steps_of_values(self) -> Sequence[Run | Start | Wait]:
        """The ops in their order, with the values that each takes memory for and frees."""
        function, donated = self.function, self.donated
        if self.calls:
            return in_steps(function, self.calls, donated, self.left, self.given_up, at_once=self.at_once)
        memory = (
            taken_by(function, donated),
            freed_after(function, self.given_up),
            unread_after(function, donated),
        )
        return [Run(*each) for each in zip(function.ops, *memory, strict=True)]

    @cached_property
    def freed_inputs(self) -> Held:
        """The memory of the inputs that it frees: those that are given up and that an op reads."""
        freed = (value for step in self._steps_of_values for value in step.freed)
        return self._held([value for value in freed if value.name in self.given_up])

    def _step(
        self, step: Chain | Start | Wait, inner: Collection[Value] = ()
    ) -> ProgramStep | StartStep | WaitStep:
        """The step of a chain, of whose values the ``inner`` ones take no memory, or of a call."""
        match step:
            case Start(number, ops):
                return StartStep(
                    number,
                    one_call(ops, at_once=self.at_once),
                    ops,
                    self._held(step.taken),
                    self.at_once,
                    freed_later=self._held(step.freed),
                )
            case Wait(number, ops):
                into = self._into(tuple(op.outputs[0] for op in ops))
                return WaitStep(
                    number, ops, self._held(step.freed), tuple(value.name for value in step.unread), into
                )
        chain = [each.op for each in step]
        places = [self._into(op.outputs) for op in chain]
        taken = [value for each in step for value in each.taken if value not in inner]
        freed = [value for each in step for value in each.freed if value not in inner]
        return ProgramStep(
            chain[-1],
            self._cost_of_chain(chain, inner) if chain[1:] else self._cost(chain[0]),
            self._held(taken),
            self._held(freed),
            tuple(value.name for each in step for value in each.unread),
            places[-1],
            runs_again(chain[-1]),
            name_of(chain),
            tuple(map(ChainedOp, chain[:-1], places)),
            self._phase(chain[-1]),
        )

    def _phase(self, op: Op) -> str | None:
        """The phase that a program says itself: by the region of an op, and forward before the first backward op."""
        found = REGION_PHASES.get(_outermost(op))
        is_forward = any(value in self._before_gradient for value in op.outputs)
        return found or ("F" if is_forward else None)

    @cached_property
    def _before_gradient(self) -> frozenset[Value]:
        """What the ops before the first one of a backward compute; empty if there is none."""
        ops = self.function.ops
        first = next((number for number, op in enumerate(ops) if _outermost(op) == MARK), 0)
        return frozenset(value for op in ops[:first] for value in op.outputs)

    def _into(self, outputs: Sequence[Value]) -> tuple[str | None, ...]:
        """For each output the name of the donated input whose memory it takes; empty if none does."""
        if self.donated.keys().isdisjoint(outputs):
            return ()
        return tuple(self.donated[value].name if value in self.donated else None for value in outputs)

    @cached_property
    def written(self) -> frozenset[str]:
        """The names of the inputs into whose memory an op writes."""
        return frozenset(value.name for value in written_inputs(self.function, self.donated))

    def own(self, arrays: Sequence[Array]) -> list[Array]:
        """The inputs of `run`: contiguous, and copies of those that are written into although they are read-only."""
        return [
            contiguous(array, writeable=value.name in self.written)
            for value, array in zip(self.function.inputs, arrays, strict=True)
        ]

    def run(self, device: Device, arrays: Sequence[Array], **marks: Any) -> tuple[Array, ...]:
        """The outputs, from this device's inputs; ``marks`` (stage, microbatch, phase) go to every event.

        **Communication**: that of its collectives and messages.
        """
        values: dict[str, Any] = {
            value.name: array for value, array in zip(self.function.inputs, arrays, strict=True)
        }
        del arrays  # what is given up is freed as soon as nothing reads it, if the caller has no list of it
        run = Running(device, values, marks)
        for step in self.steps:
            if run.awaited:
                run.wait_for(step.ops)
            step.run(run)
        for call in run.under_way.values():
            values.update((op.outputs[0].name, Later(call, place)) for place, op in enumerate(call.ops))
        return tuple(values[value.name] for value in self.function.outputs)

    def _cost(self, op: Op) -> DeclaredCost | None:
        cost = None if communicates(op) or op.operator.view else self._declared(op)
        beside = cost and self._beside.get(op.outputs[0])
        return cost._replace(shape=beside) if cost and beside else cost

    def _declared(self, op: Op) -> DeclaredCost | None:
        """What an op declares, computed once for all ops of its kind on values of its types: equal blocks have many."""
        if self.seconds is not None:
            return declared_cost(op, self.seconds)
        outputs = tuple([value.type for value in op.outputs])
        same = tuple(map(op.inputs.index, op.inputs))
        key = op.kind, op.types, op.attributes, outputs, same
        if key not in self._costs:
            self._costs[key] = declared_cost(op)
        return self._costs[key]

    @cached_property
    def _costs(self) -> dict[Any, DeclaredCost | None]:
        return {}

    @cached_property
    def _beside(self) -> Mapping[Value, tuple[Any, ...]]:
        """Of products of chunks, the shape of those that are computed at once, by their result."""
        shapes = side_by_side(self.function.ops)
        return {value: tuple(map(whole_number, shape)) for value, shape in shapes.items()}

    def _cost_of_chain(self, ops: Sequence[Op], inner: Collection[Value]) -> DeclaredCost | None:
        """The flops of all ops; the bytes of what they read from others, and of what others use."""
        moved = moved_values(ops, inner)
        flops = number(sum(whole_number(cost.flops) for cost in map(self._cost, ops) if cost is not None))
        nbytes = number(sum((value.type.nbytes for value in moved), 0))
        if not flops and not nbytes:
            return None
        product = next(filter(product_shape, ops), None)
        if product is None:
            shape = None
            values = (value for op in reversed(ops) for value in (*op.outputs, *op.inputs))
            dtypes = [value.type.dtype for value in values]
        else:  # what follows a product ends its kernel
            shape = self._beside.get(product.outputs[0], product_shape(product))
            own = (*product.inputs, *product.outputs)
            dtypes = [factor_dtype(product), *(value.type.dtype for value in own)]
        dtype = next(filter(is_floating, dtypes), dtypes[0])
        seconds = None if self.seconds is None else sum(map(self.seconds, ops))
        return DeclaredCost(
            flops,
            nbytes,
            dtype.name,
            seconds,
            bytes_of_others(moved, dtype),
            shape and tuple(map(whole_number, shape)),
        )

    def _held(self, values: Sequence[Value]) -> Held:
        held: Counter[str] = Counter()
        for value in values:
            held[self._category.get(value.name, ACTIVATIONS)] += whole_number(value.type.nbytes)
        return tuple((category, nbytes) for category, nbytes in held.items() if nbytes)

    @cached_property
    def _category(self) -> dict[str, str]:
        """The category of the memory that begins as a value, by name: that of the last value in it that has one."""
        inputs = {value.name: INPUTS for value in self.function.inputs}
        own = {value.name: OUTPUTS for value in self.function.outputs} | inputs | dict(self.categories)
        started = {number for call in self.calls for number in call}
        owner = (
            owners_overlapped(self.function, started, self.donated, self.given_up, at_once=self.at_once)
            if started
            else owners(self.function, self.donated)
        )
        found = {owner[value].name: own[value.name] for value in self.function.values if value.name in own}
        return found | {name: own[name] for name in inputs}


def _outermost(op: Op) -> str:
    """The name of the outermost region of an op; empty if it is in none."""
    return (op.region or "").partition(".")[0]


def runs_again(op: Op) -> bool:
    """Whether an op of a backward computes a value of the forward once more."""
    return any(value.name.startswith(AGAIN) for value in op.outputs)


def communicates(op: Op) -> bool:
    """Whether an op is a collective or a message."""
    return op.kind in CALLS or (op.kind == "relayout" and op["step"] != "slice")


def contiguous(x: Any, *, writeable: bool = False) -> Any:
    """An array with contiguous elements: ``x`` itself or a copy; a scalar becomes an array of no dims."""
    if isinstance(x, TypedArray | Later):
        return x
    array = np.asarray(x)
    return own_array(array, own=writeable and not array.flags.writeable)


# -- what makes the arrays ---------------------------------------------------------------------------------------------


def array_maker(device: Device) -> ArrayMaker:
    """The device itself if it makes arrays, else `KernelArrays` on it."""
    return device if isinstance(device, ArrayMaker) else KernelArrays(device)


@dataclass(frozen=True)
class KernelArrays:
    """Makes NumPy's arrays: runs ops by their kernels, and collectives and messages by the methods of the device."""

    device: Device

    def full(self, shape: Sequence[int], value: float, dtype: npt.DTypeLike) -> Array:
        """An array of this shape in which every element is ``value``."""
        return np.full(shape, value, dtype) if value else np.zeros(shape, dtype)

    def run_op(self, op: Op, inputs: Sequence[Array], into: Sequence[Array | None] = ()) -> tuple[Array, ...]:
        """Runs an op and returns its outputs: contiguous arrays that own their memory, except for views.

        **Communication**: what the op itself communicates.
        """
        if op.kind == "recv":
            return written_into([np.asarray(self.device.recv(op["source"], tag=op["tag"]))], into)
        if op.kind == "send":
            self.device.send(inputs[0], op["destination"], tag=op["tag"])
            return ()
        if op.kind not in METHODS:
            return run_kernel(op, inputs, in_place=True, into=into)
        array = np.asarray(METHODS[op.kind](self.device, op, inputs[0]))
        if into:
            return written_into([array], into)
        if np.may_share_memory(array, inputs[0]) or not array.flags.c_contiguous:
            array = np.array(array, order="C")
        return (array,)

    def start(
        self, call: Op, ops: Sequence[Op], inputs: Sequence[Array], *, at_once: bool = False
    ) -> StartedCall:
        """Starts collectives as one call; ``at_once``: returns when they are over."""
        return started(self.device, call, ops, inputs, at_once=at_once)

    def wait(self, work: StartedCall, into: Sequence[Array | None] = ()) -> tuple[Array, ...]:
        """The outputs of the collectives."""
        return written_into(work.wait(), into)
