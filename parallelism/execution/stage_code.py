"""The programs of a stage on one device: one for each kind of action and each size of a microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial, wraps
from typing import Any, TypeVar

import numpy as np

from parallelism.execution.chains import whole_number
from parallelism.execution.device_program import ACTIVATIONS, GRADIENTS, DeviceProgram, Held
from parallelism.execution.overlapping import arranged, beside_products, has_ring
from parallelism.ir import Function, TensorType, Value
from parallelism.ir.core.derived import laid_value
from parallelism.ir.passes.chunked_collectives import CHUNKED
from parallelism.ir.passes.gradients import DELAYED
from parallelism.ir.passes.overlapping import Order, overlapped
from parallelism.layouts.localization.localized import localize
from parallelism.layouts.stages import GRADIENT, Part, StageFunctions, gradient_layout
from parallelism.layouts.stages.stages import with_numbers
from parallelism.layouts.stages.sums import added_into_buffers, converted_results, owns_results
from parallelism.mesh import Mesh
from parallelism.transforms import Overlap

_SOURCES = {"F": "F", "R": "FR", "I": "FRI"}
"""For each kind of action, the actions that computed or received the values that are kept after it."""

_KEPT_BEFORE: dict[str, str | None] = {"F": None, "R": None, "B": "F", "I": "F", "W": "I"}
"""For each kind of action, the one that keeps the values which it gives up; None: it gives up none.  In a stage that
recomputes, R stands for F."""

MemoryKey = tuple[str, str]
"""A kind of action, and the name of the value in its program that begins the memory."""

Result = TypeVar("Result")


def cached(answer: Callable[..., Result], *, names: bool = True) -> Callable[..., Result]:
    """A method of `StagePrograms` that is called once for all parts of the batch that have the same programs.

    Without ``names`` in its results, it is called once for all stages that differ in names alone.
    """

    @wraps(answer)
    def once(self: StagePrograms, *arguments: Any, **options: Any) -> Result:
        if not names:
            self = self.first
        *kind, given = arguments
        part = given if names and self._counts_values else self.alike(given)
        key = answer.__name__, *kind, part, *options.values()
        if key not in self._cache:
            self._cache[key] = answer(self, *kind, part, **options)
        result: Result = self._cache[key]
        return result

    return once


cached_without_names = partial(cached, names=False)


class StagePrograms:
    """The programs of one stage, for one place on the mesh of the axes ``inside`` it.

    ``functions`` have no symbols except those of the ``batch``, which has ``whole`` rows; if there is a mesh inside,
    every value has a layout.  The kinds are those of actions (F, B, I, W), and R for recomputation.  Every answer is
    cached, because a schedule asks once for each microbatch, and most of these are of one size.  ``like`` are the
    programs of another stage that differ in names alone, from which answers without names are taken.  ``sums`` has the
    dtypes in which gradients are added up, by the names of weights; else it is that of the weight.  ``fused``: chains
    of elementwise ops run as one.  With ``overlap`` collectives are waited for later, as it says; else if
    ``overlapping`` those that may run beside a product.  ``several``: gradients of several microbatches are added up, or
    one half of a backward may leave gradients to the other half.  ``chunked``: the collectives over this axis are cut
    (`parallelism.ir.passes.chunked_collectives`).
    """

    def __init__(
        self,
        functions: StageFunctions,
        batch: str,
        whole: int,
        inside: Mesh | None = None,
        place: int = 0,
        like: StagePrograms | None = None,
        sums: Mapping[str, np.dtype[Any]] | None = None,
        fused: bool | str = False,
        overlap: Overlap | None = None,
        overlapping: bool = False,
        *,
        several: bool = True,
        chunked: str | None = None,
    ) -> None:
        self.like, self.sums, self.fused = like, sums or {}, fused
        self.several, self.chunked = several, chunked
        self.overlap, self.overlapping = overlap, overlapping
        self.functions = functions
        self.batch = batch
        self.whole = whole
        self.inside = inside
        self.place = place
        self._cache: dict[Any, Any] = {}

    @cached_property
    def _counts_places(self) -> bool:
        """Whether parts of the batch of equal sizes differ in the work that they are."""
        return f"{self.batch}_first" in self.functions.symbols_of_work

    @cached_property
    def _counts_values(self) -> bool:
        """Whether they differ in values at least."""
        return f"{self.batch}_first" in self.functions.symbols

    @cached_property
    def _has_rings(self) -> bool:
        """Whether blocks of keys and values travel round a ring in the stage."""
        return has_ring(self.functions.forward)

    def alike(self, part: Part) -> Part:
        """The first of the parts of the batch for which the programs do the same work, and differ in values at most."""
        return part if self._counts_places else (0, part[1])

    def all_alike(self, parts: Sequence[Part]) -> list[Part]:
        """`alike` for each of the parts."""
        return list(parts) if self._counts_places else [(0, rows) for _, rows in parts]

    @property
    def first(self) -> StagePrograms:
        """The programs of the first stage that differs from this one in names alone; this, if there is none before."""
        return self.like or self

    @cached
    def function(self, kind: str, part: Part) -> Function:
        """The function of an action of this kind, of whole tensors, for some rows of the batch."""
        stage = self.functions
        again = stage.recompute or Function(f"{stage.forward.name}.nothing", (), (), ())
        function = {
            "F": stage.forward,
            "B": stage.backward,
            "I": stage.backward_input,
            "W": stage.backward_weights,
            "R": again,
        }[kind]
        found = with_numbers(function, self.numbers(part))
        return found if self.chunked is None else replace(found, attributes=((CHUNKED, self.chunked),))

    def numbers(self, part: Part) -> dict[str, int]:
        """The numbers of the symbols for some rows of the batch."""
        first, rows = part
        return {self.batch: rows, f"{self.batch}_whole": self.whole, f"{self.batch}_first": first}

    @cached
    def program(self, kind: str, part: Part) -> DeviceProgram:
        """This device's part of it.  Its results count as activations, and the gradients of weights as gradients.

        If the stage `adds_up`, B and W take one more input for each trained weight, the sum of its gradients so far, and
        add to it in place.
        """
        function, categories = self.local_function(kind, part)
        function, calls, chains = arranged(function, self.order(kind, part), fused=self.fused)
        given_up = self.freed_inputs(kind, part, function)
        categories = {**categories, **dict.fromkeys(given_up, ACTIVATIONS)}
        return DeviceProgram(function, categories, calls=calls, chains=chains, given_up=given_up)

    def order(self, kind: str, part: Part) -> Order | None:
        """The order of `program`; None: that of the function."""
        if self.inside is None or not (self.overlap or self.overlapping or self._has_rings):
            return None
        # One order for all devices of the stage: that of the first class of them.
        first = localize(self.function(kind, part), self.inside).classes[0].rank
        alike, _ = self.local_function(kind, part, place=first)
        if self.overlap is None:
            return beside_products(alike, products=self.overlapping)
        return overlapped(alike, self.overlap)

    @cached
    def local_function(
        self, kind: str, part: Part, *, place: int | None = None
    ) -> tuple[Function, Mapping[str, str]]:
        """The function of `program`, and the categories of memory of its values; of this place, or of another one."""
        function = self.function(kind, part)
        if self.inside is not None:
            function = localize(function, self.inside).program(self.place if place is None else place)
        categories = {value.name: ACTIVATIONS for value in function.outputs}
        if kind in ("B", "W"):
            first = self.first_gradient(kind)
            categories.update((value.name, GRADIENTS) for value in function.outputs[first:])
            dtypes = [type.dtype for type in self.sum_types]
            if self.adds_up:
                names = {name: f"sum.{name}" for name in self.functions.trained}
                largest = {buffer for name, buffer in names.items() if name.startswith(DELAYED)}
                function = added_into_buffers(function, first, [*names.values()], dtypes, largest)
            else:
                function = converted_results(function, first, dtypes)
                categories.update((value.name, GRADIENTS) for value in function.outputs[first:])
        return function, categories

    @cached_property
    def adds_up(self) -> bool:
        """Whether gradients are added up in buffers.

        Those of a single microbatch are sums already.  They are kept as they are, if each has memory of its own.
        """
        return self.several or not owns_results(self.functions.backward, self.first_gradient("B"))

    def first_gradient(self, kind: str) -> int:
        """The number of the first output of a B or W that is the gradient of a weight."""
        return len(self.functions.returned) if kind == "B" else 0

    @cached_property
    def sum_types(self) -> tuple[TensorType, ...]:
        """The types of this device's sums of gradients, in the order of ``trained``."""
        if self.like is not None:
            return self.like.sum_types
        trained = self.functions.trained
        return tuple(
            TensorType(self.sums.get(name, type.dtype), type.shape)
            for name, type in zip(trained, self.types(self.functions.forward.inputs, trained), strict=True)
        )

    @cached_property
    def weight_types(self) -> tuple[TensorType, ...]:
        """The types of this device's parts of the weights, in their order."""
        if self.like is not None:
            return self.like.weight_types
        return self.types(self.functions.forward.inputs, self.functions.weights)

    @cached_without_names
    def left(self, kind: str, part: Part) -> Held:
        """The memory that the program still holds at its end: that of its outputs, except gradients."""
        program = self.program(kind, part)
        left: Counter[str] = Counter(dict(program.freed_inputs))
        for step in program.steps:
            left.update(dict(step.held))
            left.subtract(dict(step.freed))
        return tuple(
            (category, nbytes) for category, nbytes in left.items() if nbytes and category != GRADIENTS
        )

    @cached_without_names
    def freed(self, kind: str, part: Part) -> int:
        """The bytes of what a microbatch kept before an action that the program of the action frees itself."""
        return sum(nbytes for _, nbytes in self.program(kind, part).freed_inputs)

    @cached_without_names
    def held(self, kind: str | None, part: Part) -> int:
        """Bytes that a microbatch keeps after an action of this kind (None: before the first), without its data."""
        if kind not in _SOURCES:
            return 0
        memory = self._memory_after(kind, part)
        return sum(dict(memory[name] for name in self._kept_after(kind)).values())

    def _kept_after(self, kind: str) -> list[str]:
        """The names of the values that a microbatch keeps after an action of this kind, without its data."""
        stage = self.functions
        again = tuple(value.name for value in stage.recompute.outputs) if stage.recompute else ()
        names = {"F": stage.saved, "R": stage.saved + again, "I": stage.between}.get(kind, ())
        return [name for name in names if name not in stage.data]

    def _memory_after(self, kind: str, part: Part) -> dict[str, tuple[MemoryKey, int]]:
        """By the name of a value that is there after an action: the memory that it lies in, and its bytes.

        Values of one action that are one value on this device lie in one memory.
        """
        stage = self.functions
        memory: dict[str, tuple[MemoryKey, int]] = {
            f"{GRADIENT}{name}": (("", name), whole_number(type.nbytes))
            for name, type in zip(stage.answered, self.answers(part), strict=True)
        }
        for source in _SOURCES[kind]:
            function = self.function(source, part)
            own = self.local_function(source, part)[0]
            of_inputs = {}
            for value, local in zip(function.inputs, own.inputs, strict=True):
                taken = (source, local.name), whole_number(local.type.nbytes)
                of_inputs[local.name] = memory.setdefault(value.name, taken)
            for value, local in zip(function.outputs, own.outputs, strict=True):
                computed = (source, local.name), whole_number(local.type.nbytes)
                memory.setdefault(value.name, of_inputs.get(local.name, computed))
        return memory

    @cached
    def given_up(self, kind: str, part: Part) -> Mapping[str, tuple[str, MemoryKey]]:
        """The values that an action takes and no later one reads, by name: their names in its program, and the memory
        that they lie in."""
        before = _KEPT_BEFORE[kind]
        if before == "F" and self.functions.recompute is not None:
            before = "R"
        if before is None:
            return {}
        memory = self._memory_after(before, part)
        stay = {memory[name][0] for name in self._kept_after(kind) if name in memory}
        function = self.function(kind, part)
        own = self.local_function(kind, part)[0]
        taken = dict(
            zip((value.name for value in function.inputs), own.inputs, strict=False)
        )  # then come the sums of gradients
        return {
            name: (taken[name].name, memory[name][0])
            for name in self._kept_after(before)
            if name in taken and memory[name][0] not in stay
        }

    def taken_out(self, kind: str, part: Part) -> Sequence[str]:
        """The names of those `given_up`, found once for all stages that differ in names alone."""
        names = self.first.given_up(kind, part)
        return list(names) if self.like is None else [self.names[name] for name in names]

    def freed_inputs(self, kind: str, part: Part, arranged: Function) -> frozenset[str]:
        """The inputs of the program of an action that it frees: of those `given_up` in one memory the last one read."""
        last = {value.name: number for number, op in enumerate(arranged.ops) for value in op.inputs}
        by_memory: dict[MemoryKey, str] = {}
        for name, memory in sorted(
            self.given_up(kind, part).values(), key=lambda each: last.get(each[0], -1)
        ):
            by_memory[memory] = name
        return frozenset(by_memory.values())

    @cached_without_names
    def data(self, part: Part) -> tuple[TensorType, ...]:
        """The types of this device's parts of the data."""
        return self.types(self.functions.forward.inputs, self.functions.data, part)

    @cached_without_names
    def message(self, kind: str, part: Part, *, last: bool) -> tuple[TensorType, ...]:
        """The types of this device's parts of the values that an action receives, in the order of the message."""
        stage = self.functions
        if kind == "F":
            return self.types(stage.forward.inputs, stage.received, part)
        return self.answers(part) if kind in ("B", "I") and not last else ()

    def answers(self, part: Part) -> tuple[TensorType, ...]:
        """The types of this device's parts of the gradients of the values that are sent."""
        gradients = []
        for value in self.functions.forward.outputs:
            layout = value.layout and gradient_layout(value.layout)
            gradients.append(laid_value(value, layout) if layout else value)
        return self.types(gradients, self.functions.answered, part)

    def types(
        self, values: Sequence[Value], names: Sequence[str], part: Part | None = None
    ) -> tuple[TensorType, ...]:
        """The types of this device's parts of values, by their names; without a ``part``, of values without rows."""
        by_name = {value.name: value for value in values}
        numbers = self.numbers(part) if part else {}
        return tuple(self._local(by_name[name], numbers) for name in names)

    def _local(self, value: Value, numbers: Mapping[str, int]) -> TensorType:
        type = value.type.specialize(numbers)
        if self.inside is None or value.layout is None:
            return type
        shape = [int(extent) for extent in type.shape]
        return TensorType(type.dtype, value.layout.local_shape(shape, self.inside, self.place))

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The names of values in the programs of the `first` stage, and the names that the values have in these."""
        to = self.first.functions.renaming_of(self.functions)
        return {
            value.name: to.name(value.name)
            for function in self.first.functions.functions
            if function is not None
            for value in function.values
        }
