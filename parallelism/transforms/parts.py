"""A training step taken apart, and put together again.

A step has three parts.  The *forward* computes the loss.  The backward computes for each parameter ``p`` the value
``grad.p``.  The *update* computes from these the value ``next.x`` of each parameter and each array of the optimizer's
state.  Transforms change the forward and the update; the backward is derived from the forward anew.  Which op belongs
to which part follows from the names ``grad.`` and ``next.`` alone, so a step that was read from text is one, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from typing import Any

import numpy as np

from parallelism.dtypes import bits_of, is_floating, is_integer
from parallelism.ir.core import Attributes, Builder, Function, Op, TensorType, Value
from parallelism.ir.core.derived import derived_later, laid_value, renamed_value, with_values
from parallelism.ir.passes.frozen import frozen_inputs
from parallelism.ir.passes.gradients import GRADIENT, MARK, UPDATE as UPDATE, gradient
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.sharding import TensorSharding
from parallelism.transforms.dims import DimClasses, Place, batch_class, orders_of, sequence_class
from parallelism.transforms.products import Views, experts_of, views_of

NEXT = "next."
"""The prefix of what an input is in the next step: the output ``next.x`` for the input ``x``."""
AGAIN = "again."
"""The prefix of a value of the forward that the backward computes once more."""


def check_function(function: object) -> None:
    """``TypeError`` for what is no `Function`, such as the `parallelism.transforms.Step` that a pipeline makes of one."""
    if not isinstance(function, Function):
        raise TypeError(
            f"only a Function can be transformed, got {type(function).__name__}; a Pipeline comes last"
        )


@dataclass(frozen=True)
class Parts:
    """The parts of a training step; of any other program, ``forward`` is all of it and ``update`` is None."""

    name: str
    forward: Function
    """It takes the weights and the batch, and returns the loss, then its metrics (whatever else is no ``next.``)."""
    update: Function | None
    """It takes parameters, their gradients and the state of the optimizer, and returns the ``next.`` of each parameter
    and each array of the state."""
    again: bool = False
    """Whether the backward computes values of the forward once more."""
    attributes: Attributes = ()
    """The attributes of the whole program."""
    _plain_update: Function | None = field(default=None, repr=False, compare=False)
    """The update as `_plain` left it, if it did."""

    @classmethod
    def of(cls, function: Function) -> Parts:
        """The parts of ``function``.

        ``ValueError`` if its update reads values of the forward; ``TypeError`` if it is no function.
        """
        check_function(function)
        if isinstance(function.source, cls):
            return function.source
        nexts = [value for value in function.outputs if value.name.startswith(NEXT)]
        if not nexts:
            return cls(function.name, without_attributes(function), None, attributes=function.attributes)
        results = [value for value in function.outputs if not value.name.startswith(NEXT)]
        known = {value.name: value for value in function.values}
        parameters = [value for value in function.inputs if f"{GRADIENT}{value.name}" in known]
        grads = [known[f"{GRADIENT}{value.name}"] for value in parameters]
        forward = needed(function.ops, results)
        update = needed(function.ops, nexts, grads)
        made = {value for op in update for value in op.outputs}
        read = {value for op in update for value in op.inputs} - made
        if inner := {value for op in forward for value in op.outputs} & read:
            raise ValueError(
                f"@{function.name}: its update reads %{min(v.name for v in inner)}, which its forward "
                "computes; it may read parameters, gradients and the state of the optimizer alone"
            )
        kept = {value.name.removeprefix(NEXT) for value in nexts}
        used = {value for op in forward for value in op.inputs}.union(results, parameters)
        state = tuple(value for value in function.inputs if value.name in kept and value not in used)
        others = tuple(value for value in function.inputs if value not in state)
        copies = tuple(value for value in others if value.name in kept and value not in parameters)
        return cls(
            function.name,
            Function(function.name, others, tuple(forward), tuple(results)),
            Function(function.name, (*parameters, *copies, *grads, *state), tuple(update), tuple(nexts)),
            any(name.startswith(AGAIN) for name in known),
            function.attributes,
        )._plain()

    @cached_property
    def parameters(self) -> tuple[Value, ...]:
        """The inputs of the forward that are trained; without an update those under the name of the first one, as of
        `first_argument`, in 8 bits too, as weights of inference are."""
        if self.update is None:
            function = replace(self.forward, attributes=self.attributes)
            return tuple(value for value in _first_argument(function) if _is_of_weights(value.type.dtype))
        trained = {value.name.removeprefix(GRADIENT) for value in self.gradients}
        return tuple(value for value in self.forward.inputs if value.name in trained)

    @cached_property
    def frozen(self) -> tuple[Value, ...]:
        """The inputs of the forward that are weights and are not trained (`parallelism.ir.passes.frozen`)."""
        return frozen_inputs(self.forward, self.attributes)

    @cached_property
    def weights(self) -> tuple[Value, ...]:
        """All weights of the model in the order of the forward: the `parameters` and what is `frozen`."""
        known = {*self.parameters, *self.frozen}
        return tuple(value for value in self.forward.inputs if value in known)

    @cached_property
    def copies(self) -> tuple[Value, ...]:
        """The inputs of the forward that the update makes of parameters, such as weights in 8 bits with their scales."""
        if self.update is None:
            return ()
        nexts = {value.name for value in self.update.outputs}.difference(
            f"{NEXT}{value.name}" for value in self.parameters
        )
        return tuple(value for value in self.forward.inputs if f"{NEXT}{value.name}" in nexts)

    @cached_property
    def data(self) -> tuple[Value, ...]:
        """The inputs of the forward that are neither `weights` nor `copies` of these: the batch."""
        others = {*self.weights, *self.copies}
        return tuple(value for value in self.forward.inputs if value not in others)

    @cached_property
    def dealt(self) -> tuple[Value, ...]:
        """What the axes of the batch split: the batch, and the orders in which its tokens are dealt."""
        return (*self.data, *orders_of(self.forward))

    @cached_property
    def classes(self) -> DimClasses:
        """The classes of the dims of the forward's values."""
        return DimClasses(self.forward)

    @cached_property
    def views(self) -> Views:
        """The views of weights, these included."""
        return views_of(self.forward, self.weights)

    @cached_property
    def experts(self) -> set[Place]:
        """The classes of the dims that number experts."""
        return experts_of(self.forward, self.views, self.classes)

    @cached_property
    def rows(self) -> Place | None:
        """The class of the rows of the batch; None if there is none."""
        return batch_class(self.forward, self.weights, self.classes)

    @cached_property
    def sequence(self) -> Place | None:
        """The class of the sequences of the batch; None if there is none."""
        return sequence_class(self.forward, self.weights, self.views, self.classes)

    @cached_property
    def gradients(self) -> tuple[Value, ...]:
        """The inputs of the update that are gradients."""
        return (
            ()
            if self.update is None
            else tuple(value for value in self.update.inputs if value.name.startswith(GRADIENT))
        )

    @cached_property
    def state(self) -> tuple[Value, ...]:
        """The inputs of the update that are the state of the optimizer."""
        if self.update is None:
            return ()
        known = {*self.parameters, *self.copies, *self.gradients}
        names = {value.name for value in known}
        return tuple(value for value in self.update.inputs if value.name not in names)

    def owner(self, value: Value) -> str | None:
        """The name of the parameter that an array of the state belongs to; None if it belongs to all."""
        _, dot, name = value.name.partition(".")
        while dot and name not in self._names:
            _, dot, name = name.partition(".")
        return name if dot else None

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(value.name for value in self.parameters)

    def laid(
        self, forward: Mapping[str, TensorSharding], update: Mapping[str, TensorSharding] | None = None
    ) -> Parts:
        """The parts with layouts on values of the forward, and on inputs of the update, by name."""
        return replace(
            self,
            forward=laid_out(self.forward, forward),
            update=self.update and laid_out(self.update, update or {}),
        )

    def joined(self) -> Function:
        """The whole step.  Its inputs are those of the forward, then the state; its outputs the loss, then ``next.``.

        A gradient is converted to the dtype in which the update takes it.  It has the layout of its parameter, unless
        the update says otherwise; so has an array of the state.  What is kept for the next step has the layout of what
        it replaces.  The backward is derived when an op of the step is first used, so several transforms in a row
        derive it once.  ``ValueError`` if values are computed again (`Recompute`): the backward is derived anew.
        """
        if self.update is None:
            return replace(self.forward, attributes=self.attributes) if self.attributes else self.forward
        if self.again:
            raise ValueError(
                f"@{self.name} computes values again in its backward: Recompute comes after the other "
                "transforms, or all in one Strategy"
            )
        return derived_later(self.name, self._plain(), self.attributes)

    def derived(self) -> Function:
        """The whole step, with the backward; see `joined`."""
        assert self.update is not None
        parameters = [value.name for value in self.parameters]
        layouts = self.layouts()
        # The backward would bring each gradient into the layout of its parameter; here that of the gradient counts.
        bare = laid_out(self.forward, dict.fromkeys(parameters))
        back = gradient(bare, parameters, keep_outputs=True, of=bare.outputs[0].name)
        back = _converted(back, [value.type for value in self.gradients])
        back = with_last_named(back, [f"{GRADIENT}{name}" for name in parameters], MARK)
        results = back.outputs[: len(self.forward.outputs)]

        known = {value.name: value for value in (*back.values, *self.state)}
        values = {value.name: known[value.name] for value in self.update.inputs}
        taken = {value.name for value in back.values}
        free = (name for name in map(str, count()) if name not in taken)
        for op in self.update.ops:
            for value in op.outputs:
                is_renamed = value.name.isdecimal() or value.name in taken
                values[value.name] = renamed_value(value, next(free)) if is_renamed else value
                taken.add(values[value.name].name)
        update = with_values(self.update, values)
        state = (values[value.name] for value in self.state)
        whole = Function(
            self.name,
            (*back.inputs, *state),
            (*back.ops, *update.ops),
            (*results, *update.outputs),
            self.attributes,
        )
        return laid_out(whole, layouts)

    def _plain(self) -> Parts:
        """The parts in one form, equal for equal steps: without what `joined` gives them anyway.

        The forward has the ops that its outputs need.  The update takes parameters, gradients in the order of these,
        and state; these have no layouts but such that `layouts` would not derive; its values are numbered.
        """
        assert self.update is not None
        ops = needed(self.forward.ops, self.forward.outputs)
        forward, update = self.forward, self.update
        if len(ops) < len(forward.ops) or forward.name != self.name:
            forward = Function(self.name, forward.inputs, tuple(ops), forward.outputs)
        if update is not self._plain_update or any(value.layout is not None for value in update.inputs):
            update = self._plainly(update)
        return replace(self, forward=forward, update=update, _plain_update=update)

    def _plainly(self, update: Function) -> Function:
        layouts = {value.name: value.layout for value in self.parameters}
        by_name = {value.name: value for value in update.inputs}
        new: dict[str, Value] = {}
        for name, value in by_name.items():
            owner = name if name in layouts else self.owner(value)
            is_derived = name in layouts or (owner is not None and value.layout == layouts[owner])
            new[name] = laid_value(value, None) if is_derived else value

        numbers = (name for name in map(str, count()) if name not in by_name)
        results = {*update.outputs}
        for op in update.ops:
            for value in op.outputs:
                bare = laid_value(value, None) if value in results else value
                name = next(numbers) if value.name.isdecimal() else value.name
                new[value.name] = bare if name == value.name else renamed_value(bare, name)

        plain = with_values(update, new, name=self.name)
        gradients = (f"{GRADIENT}{name}" for name in layouts)
        others = (value.name for value in self.copies), gradients, (value.name for value in self.state)
        order = [*layouts, *chain.from_iterable(others)]
        return plain if [*by_name] == order else replace(plain, inputs=tuple(new[name] for name in order))

    def layouts(self) -> dict[str, TensorSharding | None]:
        """The layouts of parameters, gradients and state, and of what each is in the next step, by name."""
        assert self.update is not None
        layouts = {value.name: value.layout for value in self.parameters}
        # A gradient that the update brings into a layout itself has none before: its sum may still be pending.
        waiting = {value for op in self.update.ops if op.kind == "reshard" for value in op.inputs}
        for value in self.gradients:
            given = None if value in waiting else layouts[value.name.removeprefix(GRADIENT)]
            layouts[value.name] = value.layout or given
        for value in (*self.copies, *self.state):
            owner = self.owner(value)
            layouts[value.name] = value.layout or (layouts[owner] if owner else None)
        kept = {value.name: layouts[value.name.removeprefix(NEXT)] for value in self.update.outputs}
        return layouts | kept


def without_attributes(function: Function) -> Function:
    """The function without what is said about the whole of it."""
    return replace(function, attributes=()) if function.attributes else function


def first_argument(function: Function) -> tuple[Value, ...]:
    """The floating-point inputs under the name of the first one, ``p`` for ``p.w``: the parameters of a recorded model.

    Frozen weights are none of them.  None if the name of the first other input has no parts.
    """
    return tuple(value for value in _first_argument(function) if is_floating(value.type.dtype))


def _first_argument(function: Function) -> list[Value]:
    """The inputs under the name of the first one that is not frozen, whatever their dtypes."""
    frozen = {*frozen_inputs(function, function.attributes)}
    inputs = [value for value in function.inputs if value not in frozen]
    prefix, dot, _ = inputs[0].name.partition(".") if inputs else ("", "", "")
    return [value for value in inputs if dot and value.name.startswith(f"{prefix}.")]


def _is_of_weights(dtype: np.dtype[Any]) -> bool:
    """Whether weights may have a dtype: that of floating-point numbers, or of integers in at most 8 bits."""
    return is_floating(dtype) or (is_integer(dtype) and bits_of(dtype) <= 8)


def needed(ops: Iterable[Op], values: Iterable[Value], given: Iterable[Value] = ()) -> list[Op]:
    """The ops that compute these values from inputs and from ``given`` values, in order."""
    cut, needed, kept = set(given), {*values}, list[Op]()
    for op in reversed([*ops]):
        if not needed.isdisjoint(op.outputs) and cut.isdisjoint(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]


def _converted(function: Function, types: Sequence[TensorType]) -> Function:
    """The function whose last outputs are converted to the dtypes of these types, in the regions of their ops.

    Sums that are pending in them are computed in the wider one of both dtypes.
    """
    kept = len(function.outputs) - len(types)
    regions = {value: op.region for op in function.ops for value in op.outputs}
    builder = Builder()
    builder.copy(function)
    outputs = [*function.outputs[:kept]]
    for value, type in zip(function.outputs[kept:], types, strict=True):
        with builder.region(regions.get(value)):
            outputs.append(
                value
                if value.type.dtype == type.dtype
                else builder.emit(change_of_dtype(value.type, type), [value], {"dtype": type.dtype})[0]
            )
    return builder.function(function.name, outputs)


def change_of_dtype(before: TensorType, after: TensorType) -> str:
    """The operator that converts a gradient: ``widen`` to a wider dtype, else ``convert``."""
    return "widen" if before.dtype.itemsize < after.dtype.itemsize else "convert"


def with_last_named(function: Function, names: Sequence[str], region: str) -> Function:
    """The function whose last outputs have these names.

    An output that is an input, or is returned twice, is returned as a view of itself; the view's op is in ``region``.
    """
    kept = function.outputs[: len(function.outputs) - len(names)]
    fixed, new = {*function.inputs, *kept}, dict[Value, Value]()
    outputs, views = [*kept], list[Op]()
    for value, name in zip(function.outputs[len(kept) :], names, strict=True):
        if value in fixed or value in new:
            view = Value(name, value.type)
            views.append(Op("reshape", (value,), (("shape", value.type.shape),), (view,), region))
            outputs.append(view)
        else:
            new[value] = replace(value, name=name)
            outputs.append(value)
    whole = replace(function, ops=(*function.ops, *views), outputs=tuple(outputs))
    return with_values(whole, {value.name: new.get(value, value) for value in whole.values})
