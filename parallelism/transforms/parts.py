"""A training step taken apart, and put together again.

A step has three parts.  The *forward* computes the loss.  The backward computes for each parameter ``p`` the value
``grad.p``.  The *update* computes from these the value ``next.x`` of each parameter and each array of the optimizer's
state.  Transforms change the forward and the update; the backward is derived from the forward anew.  Which op belongs
to which part follows from the names ``grad.`` and ``next.`` alone, so a step that was read from text is one, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

from parallelism.dtypes import is_floating
from parallelism.ir.core import Builder, Function, Op, TensorType, Value
from parallelism.ir.core.derived import with_values
from parallelism.ir.core.regions import each
from parallelism.ir.passes.gradients import GRADIENT, MARK, gradient
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.sharding import TensorSharding

NEXT = "next."
"""The prefix of what an input is in the next step: the output ``next.x`` for the input ``x``."""
UPDATE = "update"
"""The region of the update."""
AGAIN = "again."
"""The prefix of a value of the forward that the backward computes once more."""


@dataclass(frozen=True)
class Parts:
    """The parts of a training step; of any other program, ``forward`` is all of it and ``update`` is None."""

    name: str
    forward: Function
    """It takes the parameters and the batch, and returns the loss (and whatever else is no ``next.`` value)."""
    update: Function | None
    """It takes parameters, their gradients and the state of the optimizer, and returns the ``next.`` of each parameter
    and each array of the state."""
    again: bool = False
    """Whether the backward computes values of the forward once more."""

    @classmethod
    def of(cls, function: Function) -> Parts:
        """The parts of ``function``.

        ``ValueError`` if its update reads values of the forward; ``TypeError`` if it is no function.
        """
        if not isinstance(function, Function):
            raise TypeError(f"a Function is transformed, got {type(function).__name__}; a Pipeline comes last")
        nexts = [value for value in function.outputs if value.name.startswith(NEXT)]
        if not nexts:
            return cls(function.name, function, None)
        results = [value for value in function.outputs if not value.name.startswith(NEXT)]
        names = {value.name for value in function.inputs}
        grads = [value for value in function.values if value.name.startswith(GRADIENT)
                 and value.name.removeprefix(GRADIENT) in names]
        forward = needed(function.ops, results)
        update = needed(function.ops, nexts, grads)
        made = {value for op in update for value in op.outputs}
        read = {value for op in update for value in op.inputs} - made
        if inner := {value for op in forward for value in op.outputs} & read:
            raise ValueError(f"@{function.name}: its update reads %{min(v.name for v in inner)}, which its forward "
                             "computes; it may read parameters, gradients and the state of the optimizer alone")
        trained = {value.name.removeprefix(GRADIENT) for value in grads}
        kept = {value.name.removeprefix(NEXT) for value in nexts}
        kept -= trained
        state = tuple(value for value in function.inputs if value.name in kept)
        parameters = tuple(value for value in function.inputs if value.name in trained)
        others = tuple(value for value in function.inputs if value.name not in kept)
        parts = cls(
            function.name, Function(function.name, others, tuple(forward), tuple(results)),
            Function(function.name, (*parameters, *grads, *state), tuple(update), tuple(nexts)),
            any(value.name.startswith(AGAIN) for value in function.values))
        return parts._without_derived()

    @cached_property
    def parameters(self) -> tuple[Value, ...]:
        """The inputs of the forward that are trained; without an update those of `first_argument`."""
        if self.update is None:
            return first_argument(self.forward)
        trained = {value.name.removeprefix(GRADIENT) for value in self.gradients}
        return tuple(value for value in self.forward.inputs if value.name in trained)

    @cached_property
    def gradients(self) -> tuple[Value, ...]:
        """The inputs of the update that are gradients."""
        return () if self.update is None else tuple(
            value for value in self.update.inputs if value.name.startswith(GRADIENT))

    @cached_property
    def state(self) -> tuple[Value, ...]:
        """The inputs of the update that are the state of the optimizer."""
        if self.update is None:
            return ()
        known = {*self.parameters, *self.gradients}
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

    def laid(self, forward: Mapping[str, TensorSharding], update: Mapping[str, TensorSharding] | None = None) -> Parts:
        """The parts with layouts on values of the forward, and on inputs of the update, by name."""
        return replace(
            self, forward=laid_out(self.forward, forward),
            update=self.update and laid_out(self.update, update or {}))

    def joined(self) -> Function:
        """The whole step.  Its inputs are those of the forward, then the state; its outputs the loss, then ``next.``.

        A gradient is converted to the dtype in which the update takes it.  It has the layout of its parameter, unless
        the update says otherwise; so has an array of the state.  What is kept for the next step has the layout of what
        it replaces.  ``ValueError`` if values are computed again (`Recompute`), because the backward is derived anew.
        """
        if self.update is None:
            return self.forward
        if self.again:
            raise ValueError(f"@{self.name} computes values again in its backward: Recompute comes after the other "
                             "transforms, or all in one Strategy")
        parameters = [value.name for value in self.parameters]
        layouts = self.layouts()
        # The backward would bring each gradient into the layout of its parameter; here that of the gradient counts.
        bare = laid_out(self.forward, dict.fromkeys(parameters))
        back = gradient(bare, parameters, keep_outputs=True)
        back, returned = _converted(back, [value.type for value in self.gradients]), len(self.forward.outputs)
        back = with_last_named(back, [f"{GRADIENT}{name}" for name in parameters], MARK)
        results, taken = back.outputs[:returned], {value.name for value in back.values}
        known = {value.name: value for value in back.values}
        state = {value.name: value for value in self.state}
        values = {value: known.get(value.name) or state[value.name] for value in self.update.inputs}
        free = (name for name in map(str, count()) if name not in taken)
        for value in (value for op in self.update.ops for value in op.outputs):
            values[value] = replace(value, name=next(free)) if value.name in taken else value
            taken.add(values[value].name)
        ops = [op.with_values(each(op.inputs, values), each(op.outputs, values)) for op in self.update.ops]
        whole = Function(self.name, (*back.inputs, *state.values()), (*back.ops, *ops),
                         (*results, *each(self.update.outputs, values)))
        return laid_out(whole, layouts)

    def _without_derived(self) -> Parts:
        """The parts without the layouts that `joined` gives to gradients and state anyway."""
        assert self.update is not None
        of = {value.name: value.layout for value in self.parameters}
        owners = {value.name: value.name.removeprefix(GRADIENT) for value in self.gradients}
        owners |= {value.name: owner for value in self.state if (owner := self.owner(value))}
        derived = {value.name: None for value in self.update.inputs
                   if value.name in owners and value.layout == of[owners[value.name]]}
        kept = dict.fromkeys(value.name for value in self.update.outputs)
        return replace(self, update=laid_out(self.update, derived | kept))

    def layouts(self) -> dict[str, TensorSharding | None]:
        """The layouts of parameters, gradients and state, and of what each is in the next step, by name."""
        assert self.update is not None
        layouts = {value.name: value.layout for value in self.parameters}
        # A gradient that the update brings into a layout itself has none before: its sum may still be pending.
        waiting = {value for op in self.update.ops if op.kind == "reshard" for value in op.inputs}
        for value in self.gradients:
            given = None if value in waiting else layouts[value.name.removeprefix(GRADIENT)]
            layouts[value.name] = value.layout or given
        for value in self.state:
            owner = self.owner(value)
            layouts[value.name] = value.layout or (layouts[owner] if owner else None)
        kept = {value.name: layouts[value.name.removeprefix(NEXT)] for value in self.update.outputs}
        return layouts | kept


def first_argument(function: Function) -> tuple[Value, ...]:
    """The floating-point inputs under the name of the first one, ``p`` for ``p.w``: the parameters of a recorded model.

    None if that name has no parts.
    """
    prefix, dot, _ = function.inputs[0].name.partition(".") if function.inputs else ("", "", "")
    return tuple(value for value in function.inputs
                 if dot and value.name.startswith(f"{prefix}.") and is_floating(value.type.dtype))


def needed(ops: Iterable[Op], values: Iterable[Value], given: Iterable[Value] = ()) -> list[Op]:
    """The ops that compute these values from inputs and from ``given`` values, in order."""
    cut, needed, kept = set(given), {*values}, list[Op]()
    for op in reversed([*ops]):
        if not needed.isdisjoint(op.outputs) and cut.isdisjoint(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]


def _converted(function: Function, types: Sequence[TensorType]) -> Function:
    """The function whose last outputs are converted to the dtypes of these types, in the regions of their ops."""
    kept = len(function.outputs) - len(types)
    regions = {value: op.region for op in function.ops for value in op.outputs}
    builder = Builder()
    builder.copy(function)
    outputs = [*function.outputs[:kept]]
    for value, type in zip(function.outputs[kept:], types, strict=True):
        with builder.region(regions.get(value)):
            outputs.append(value if value.type.dtype == type.dtype else
                           builder.emit("convert", [value], {"dtype": type.dtype})[0])
    return builder.function(function.name, outputs)


def with_last_named(function: Function, names: Sequence[str], region: str) -> Function:
    """The function whose last outputs have these names.

    An output that is an input, or is returned twice, is returned as a view of itself; the view's op is in ``region``.
    """
    kept = function.outputs[:len(function.outputs) - len(names)]
    fixed, new = {*function.inputs, *kept}, dict[Value, Value]()
    outputs, views = [*kept], list[Op]()
    for value, name in zip(function.outputs[len(kept):], names, strict=True):
        if value in fixed or value in new:
            view = Value(name, value.type)
            views.append(Op("reshape", (value,), (("shape", value.type.shape),), (view,), region))
            outputs.append(view)
        else:
            new[value] = replace(value, name=name)
            outputs.append(value)
    whole = replace(function, ops=(*function.ops, *views), outputs=tuple(outputs))
    return with_values(whole, {value.name: new.get(value, value) for value in whole.values})
