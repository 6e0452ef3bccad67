"""The program of a training step, from that of a loss: gradients, and the update of parameters by an optimizer.

step = train_step(models.mlp((64, 128, 10), batch=32), Adam(1e-3))
inputs = first_state(step, parameters) | batch
for _ in range(3):
    outputs = ir.interpret(step, inputs).outputs            # the loss, then what is next
    inputs |= following(step, outputs)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from math import inf
from typing import Any, TypeVar

import numpy as np

from parallelism.arrays import Array
from parallelism.dtypes import is_floating
from parallelism.ir.core import Attributes, Builder, Function, Op, TensorType, Value, frozen_attributes
from parallelism.ir.core.derived import renamed_value, repeated_op
from parallelism.ir.passes.frozen import frozen_inputs, with_frozen
from parallelism.ir.passes.gradients import DELAYED, GRADIENT, MARK, depending
from parallelism.ir.passes.stacked_weights import rows_of_stacks
from parallelism.ir.tracing.current import recording
from parallelism.ir.tracing.tracing import Traced, lift
from parallelism.kernels.optimizers import SGD, Adam, AdamState, AdamW, clipped
from parallelism.layouts.localization.local_program import free_name
from parallelism.transforms.parts import (
    AGAIN,
    NEXT,
    UPDATE,
    Parts,
    first_argument,
    with_last_named,
    without_attributes,
)
from parallelism.transforms.pipelines import Step
from parallelism.transforms.scaled_products import HISTORY, frozen_in_float8, names_of, quantized_once

T = TypeVar("T")

__all__ = ["SGD", "Adam", "AdamW", "carried", "categories", "first_state", "following", "train_step"]

UPDATES, VELOCITY, MEAN, SQUARE = "updates", "velocity.", "mean.", "square."
"""The state of the optimizers: the number of updates so far, and prefixes of what belongs to a parameter."""
MAIN = "main."
"""The prefix of the copy of a parameter in a wider dtype, from which the parameter is rounded."""


def _check_function(loss: Any) -> None:
    """``TypeError`` for what is no program, as a model by its figures."""
    if not isinstance(loss, Function):
        hint = (
            "; its loss is a Function, as function(batch=8)"
            if callable(getattr(loss, "function", None))
            else ""
        )
        raise TypeError(f"train_step takes the Function of a loss, got {type(loss).__name__}{hint}")


def train_step(
    loss: Function,
    optimizer: SGD | Adam,
    *,
    parameters: str | Sequence[str] | None = None,
    clip: float | None = None,
    loss_scale: float | None = None,
) -> Function:
    """The program of a training step: the loss, its gradients, and the update of the parameters.

    It takes the inputs of ``loss``, then the state of the optimizer: ``velocity.p`` for each parameter p with momentum;
    ``mean.p``, ``square.p`` and ``updates``, the number of updates so far, for `Adam` and `AdamW`.  It returns what
    ``loss`` returns, the loss first and then its metrics, and for each parameter and each array of the state x the value
    ``next.x``.  The gradient of p is the value
    ``grad.p``, and the ops of the update are in the region ``update``.

    ``parameters`` names the inputs to train, or a prefix of their names (``p`` for ``p.w`` and ``p.b``); None stands
    for the prefix of the first input: the first argument of the recorded function, a dict.  Other floating-point inputs
    with such a prefix are frozen weights, as are those that `frozen` names: they have neither gradients nor state, and a
    step does not change them.  ``clip`` is the largest norm of all gradients together
    (`parallelism.kernels.clipped`).  ``loss_scale`` is what the loss is multiplied by before it is differentiated, so
    that small gradients are no zeros in float16; the update divides the gradients by it first (Micikevicius et al.,
    *Mixed Precision Training*, 2018, arXiv:1710.03740, section 3.2).  The value ``grad.p`` is the scaled one.  The loss
    that is returned is not scaled.

    ``ValueError`` for a function that does not return one floating-point number first, for parameters that do not
    exist, and for a function that is a training step already.
    """
    _check_function(loss)
    trained = _trained(loss, parameters)
    if not isinstance(optimizer, SGD | Adam):
        raise TypeError(f"the optimizer of a program must be an SGD, Adam or AdamW, got {optimizer!r}")
    if clip is not None and not 0 < clip < inf:
        raise ValueError(f"clip must be above 0 and finite, or None, got {clip!r}")
    if loss_scale is not None and not 0 < loss_scale < inf:
        raise ValueError(f"loss_scale must be above 0 and finite, or None, got {loss_scale!r}")
    forward = (
        without_attributes(loss) if loss_scale is None else _scaled(without_attributes(loss), loss_scale)
    )
    step = Parts(
        f"{loss.name}.step",
        forward,
        _update(trained, optimizer, clip, loss_scale),
        attributes=_with_frozen(loss, trained),
    ).joined()
    learning = depending(forward, trained)
    if any(op.operator.derivative is None for op in forward.ops if not learning.isdisjoint(op.outputs)):
        _ = step.ops  # derived here, because that may be refused
    return step


def first_state(step: Function | Step, parameters: Mapping[str, Any]) -> dict[str, Array]:
    """The weights and the state of the optimizer before the first step, by the names of inputs.

    ``parameters`` has the arrays of all weights by name, frozen ones too; they are rounded to the dtypes of the program.
    The state is zero, but main copies of parameters (`MixedPrecision`) are the given arrays.
    """
    step = _whole(step)
    parts = Parts.of(step)
    kept = frozen_in_float8(parts)
    names = {value.name for value in given_weights(step)}
    parameters = rows_of_stacks(names, parameters)
    if names != parameters.keys():
        has = "has the weights" if parts.frozen else "trains"
        raise ValueError(
            f"@{step.name} {has} {', '.join(sorted(names)) or 'no parameters'}; got "
            f"{', '.join(sorted(parameters)) or 'none'}"
        )
    first = {
        value.name: np.asarray(parameters[value.name]).astype(value.type.dtype)
        for value in parts.weights
        if value.name in names and value.name not in kept
    }
    for name, how in kept.items():
        narrow = np.asarray(parameters[name]).astype(np.float32)
        first |= quantized_once(name, narrow, how)
    for value in parts.weights:
        if value.name.startswith(DELAYED):
            first[value.name] = np.ones((), value.type.dtype)
    for value in parts.state:
        owner = parts.owner(value)
        if value.name.startswith(HISTORY):
            first[value.name] = np.zeros([int(extent) for extent in value.type.shape], value.type.dtype)
            continue
        if owner and value.name == f"{MAIN}{owner}":
            first[value.name] = np.asarray(parameters[owner]).astype(value.type.dtype)
        else:
            shape = np.shape(parameters[owner]) if owner else value.type.shape
            first[value.name] = np.zeros(shape, value.type.dtype)
    return first | _first_copies(parts, first)


def given_weights(step: Function | Step) -> tuple[Value, ...]:
    """The weights that `first_state` takes: all but the scales of frozen ones, which follow from these."""
    parts = Parts.of(_whole(step))
    kept = frozen_in_float8(parts)
    scales = {
        each for name, how in kept.items() for each in names_of(name, dict(how).get("recipe", "tensor"))[1:]
    }
    weights = (value for value in parts.weights if value.name not in scales)
    return tuple(value for value in weights if not value.name.startswith(DELAYED))


def _first_copies(parts: Parts, first: Mapping[str, Array]) -> dict[str, Array]:
    """What is quantized of parameters before the first step, made as the update makes it, with a scale of 1 before."""
    found: dict[str, Array] = {}
    scales = {value.name: np.ones((), np.float32) for value in parts.copies if not value.type.ndim}
    known = {**scales, **first, **{f"{NEXT}{name}": array for name, array in first.items()}}
    for op in parts.update.ops if parts.update and parts.copies else ():
        if op.kind not in _OF_COPIES or not all(each.name in known for each in op.inputs):
            continue
        made = op.operator.run([known[each.name] for each in op.inputs], op.attributes)
        arrays = made if isinstance(made, tuple) else (made,)
        for each, array in zip(op.outputs, arrays, strict=True):
            known[each.name] = array
            if each.name.startswith(NEXT):
                found[each.name.removeprefix(NEXT)] = array
    return found


_OF_COPIES = frozenset(("quantize", "scale_of", "quantize_by", "recorded"))
"""The operators that make copies of weights in few bits, with their scales and the histories of these."""


def following(step: Function | Step, outputs: Sequence[Any]) -> dict[str, Any]:
    """The parameters and the state for the next step, by the names of inputs, from the outputs of a step."""
    step = _whole(step)
    if len(step.outputs) != len(outputs):
        raise ValueError(f"@{step.name} returns {len(step.outputs)} values, got {len(outputs)}")
    return {
        value.name.removeprefix(NEXT): output
        for value, output in zip(step.outputs, outputs, strict=True)
        if value.name.startswith(NEXT)
    }


def carried(step: Function | Step) -> tuple[str, ...]:
    """The names of the parameters and the state, which a step replaces: what is donated to `parallelism.Executable`.

    The new arrays then lie in the memory of the old ones, as in any training that updates in place.
    """
    return tuple(
        value.name.removeprefix(NEXT) for value in _whole(step).outputs if value.name.startswith(NEXT)
    )


def categories(step: Function | Step) -> dict[str, str]:
    """The category of memory of each input and each gradient, by name, as `parallelism.Executable` takes them.

    They are ``weights``, ``gradients``, ``optimizer`` and ``inputs``.
    """
    parts = Parts.of(_whole(step))
    found = {value.name: "inputs" for value in parts.forward.inputs}
    for values, category in (
        ((*parts.weights, *parts.copies), "weights"),
        (parts.gradients, "gradients"),
        (parts.state, "optimizer"),
    ):
        found |= {value.name: category for value in values}
    return found


def _whole(step: Function | Step) -> Function:
    """The program of a step; of one that is cut into a pipeline, that of the whole."""
    if not isinstance(step, Function | Step):
        raise TypeError(f"a training step must be a Function or a Step, got {type(step).__name__}")
    return step.function if isinstance(step, Step) else step


def _trained(loss: Function, names: str | Sequence[str] | None) -> list[Value]:
    """The inputs to train."""
    first = loss.outputs[0].type if loss.outputs else None
    if first is None or first.shape or not is_floating(first.dtype):
        raise ValueError(
            f"the first output of @{loss.name} must be one floating-point number, a loss; it returns "
            f"{', '.join(str(value.type) for value in loss.outputs) or 'nothing'}; without one it can be simulated"
        )
    for value in loss.values:
        if value.name.startswith((NEXT, GRADIENT, AGAIN)):
            raise ValueError(
                f"@{loss.name} has a value %{value.name}: names that begin with {GRADIENT}, {NEXT} or "
                f"{AGAIN} are those of a training step"
            )
    if reserved := [path for path in loss.regions if path in (UPDATE, MARK)]:
        raise ValueError(
            f"@{loss.name} has a region {reserved[0]!r}, which a training step gives to its own ops"
        )
    frozen = {*frozen_inputs(loss, loss.attributes)}
    floating = [value for value in loss.inputs if is_floating(value.type.dtype) and value not in frozen]
    if names is None:
        chosen = [*first_argument(loss)]
        missing = [] if chosen else ["p.w"]
    elif isinstance(names, str):
        chosen = [value for value in floating if value.name == names or value.name.startswith(f"{names}.")]
        missing = [] if chosen else [names]
    else:
        chosen = [value for value in floating if value.name in names]
        missing = sorted({*names} - {value.name for value in chosen}) or ([] if chosen else ["no parameters"])
    if missing:
        known = ", ".join(value.name for value in floating) or "none"
        raise ValueError(f"@{loss.name} has no floating-point input {missing[0]!r} to train; it has {known}")
    return chosen


def _with_frozen(loss: Function, trained: Sequence[Value]) -> Attributes:
    """The attributes of a loss of which these inputs are trained: other weights beside them are frozen."""
    known = {*trained, *frozen_inputs(loss, loss.attributes)}
    beside = {value.name.partition(".")[0] for value in trained if "." in value.name}
    others = [
        value.name
        for value in loss.inputs
        if value not in known and is_floating(value.type.dtype) and value.name.partition(".")[0] in beside
    ]
    return with_frozen(loss.attributes, others)


def _scaled(loss: Function, scale: float) -> Function:
    """The function with the same loss, whose gradients are ``scale`` times as large."""
    output = loss.outputs[0]
    taken = {value.name for value in loss.values}
    region = next((op.region for op in loss.ops if output in op.outputs), None)
    ops = list(loss.ops)

    def op(kind: str, inputs: Sequence[Value], **attributes: Any) -> Value:
        value = Value(free_name(f"{output.name}.scaled", taken), output.type)
        ops.append(Op(kind, tuple(inputs), frozen_attributes(attributes), (value,), region))
        return value

    scaled = op(
        "multiply", [output, op("constant", (), dtype=output.type.dtype, shape=(), value=float(scale))]
    )
    nothing = op("subtract", [scaled, op("stop_gradient", [scaled])])
    told = op("add", [op("stop_gradient", [output]), nothing])
    return Function(loss.name, loss.inputs, tuple(ops), (told, *loss.outputs[1:]), loss.attributes)


def _update(
    parameters: Sequence[Value], optimizer: SGD | Adam, clip: float | None, loss_scale: float | None
) -> Function:
    """The update: it takes parameters, gradients and state, and returns what is next of parameters and state.

    Parameters of one type are updated alike.  So it is recorded for two of each type, and repeated for the others.
    """
    by_type: dict[TensorType, list[Value]] = {}
    for value in parameters:
        by_type.setdefault(value.type, []).append(value)
    few = [value for value in parameters if value in by_type[value.type][:2]]
    update = _recorded_update(few, optimizer, clip, loss_scale)
    if len(few) < len(parameters):
        update = _repeated(update, few, parameters) or _recorded_update(
            parameters, optimizer, clip, loss_scale
        )
    return update


def _recorded_update(
    parameters: Sequence[Value], optimizer: SGD | Adam, clip: float | None, loss_scale: float | None
) -> Function:
    builder = Builder()

    def inputs(prefix: str) -> list[Any]:
        return [Traced(builder, builder.input(f"{prefix}{value.name}", value.type)) for value in parameters]

    with recording(builder), builder.region(UPDATE):
        weights, gradients = inputs(""), inputs(GRADIENT)
        state, prefixes = _state(optimizer, builder, inputs)
        if loss_scale is not None:
            gradients = [gradient * np.asarray(1 / loss_scale, gradient.dtype) for gradient in gradients]
        if clip is not None:
            gradients = clipped(gradients, clip)
        made: Any
        made, after = optimizer.update(weights, gradients, state)
        nexts = [*made, *_flat(after)]
        outputs = [lift(x, builder=builder).value for x in nexts]
    names = [f"{NEXT}{value.name}" for value in parameters] + [f"{NEXT}{name}" for name in prefixes]
    return with_last_named(builder.function(UPDATE, outputs), names, UPDATE)


def _repeated(update: Function, few: Sequence[Value], parameters: Sequence[Value]) -> Function | None:
    """The update of all ``parameters``, as it would be recorded, from that of a ``few``: the first two of each type.

    An optimizer goes over the parameters several times.  Where it comes to another one, it does what it does with the
    second of its type; with the first it also makes what all use.  None if a value depends on several parameters.
    """
    places = {value.name: place for place, value in enumerate(few)}
    firsts: dict[TensorType, int] = {}
    seconds: dict[TensorType, int] = {}
    for place, value in enumerate(few):
        firsts.setdefault(value.type, place)
        seconds[value.type] = place
    repeats = [places.get(value.name, seconds[value.type]) for value in parameters]
    names = {value.name: value.name for value in few}
    names |= {f"{prefix}{name}": name for name in places for prefix in (GRADIENT, VELOCITY, MEAN, SQUARE)}
    names |= {f"{NEXT}{each}": name for each, name in names.items()}
    owner = {value.name: places.get(names.get(value.name, "")) for value in (*update.inputs, *update.outputs)}
    for op in update.ops:
        owners = {owner[value.name] for value in op.inputs} - {None}
        if len(owners) > 1:
            return None
        owner.update((value.name, next(iter(owners), None)) for value in op.outputs)
    rounds = _rounds(update.ops, lambda op: owner[op.outputs[0].name])
    for place, ops in chain.from_iterable(each.items() for each in rounds):
        if place != firsts[few[place].type]:
            owner.update((value.name, place) for op in ops for value in op.outputs)
    known: list[dict[str, Value]] = [{} for _ in (*parameters, None)]
    """By parameter, then for what all use: the values, by the names that they have in the update of the few."""
    numbers = count()

    def new(value: Value, place: int) -> Value:
        here = known[-1 if owner[value.name] is None else place]
        if value.name not in here:
            name = _name_for(parameters[place], value.name, names.get(value.name), numbers)
            here[value.name] = renamed_value(value, name)
        return here[value.name]

    def values(side: Sequence[Value]) -> tuple[Value, ...]:
        repeated = _repeats(_rounds(side, lambda value: owner[value.name]), repeats)
        return tuple([new(value, place) for value, place in repeated])

    inputs = values(update.inputs)
    ops = []
    for op, place in _repeats(rounds, repeats):
        taken = [new(value, place) for value in op.inputs]
        made = [new(value, place) for value in op.outputs]
        ops.append(repeated_op(op, taken, made))
    return Function(update.name, inputs, tuple(ops), values(update.outputs))


def _name_for(parameter: Value, name: str, of: str | None, numbers: Iterator[int]) -> str:
    """The name, for another parameter, of a value with this ``name``; ``of`` is the parameter that it stands for."""
    if of:
        return name.removesuffix(of) + parameter.name
    return str(next(numbers)) if name.isdecimal() else name


def _rounds(items: Sequence[T], owner: Callable[[T], int | None]) -> list[dict[int, list[T]]]:
    """The items by their owners, in rounds over all owners; an item of none goes with the next one that is owned."""
    rounds: list[dict[int, list[T]]] = [{}]
    waiting, last = list[T](), -1
    for item in items:
        waiting.append(item)
        place = owner(item)
        if place is not None:
            if place < last:
                rounds.append({})
            rounds[-1].setdefault(place, []).extend(waiting)
            waiting, last = [], place
    return [*rounds, {0: waiting}]


def _repeats(rounds: Sequence[Mapping[int, Sequence[T]]], owners: Sequence[int]) -> Iterator[tuple[T, int]]:
    """In each round, for each place the items of its owner; with the place."""
    for each in rounds:
        for place, owner in enumerate(owners):
            for item in each.get(owner, ()):
                yield item, place


def _state(optimizer: SGD | Adam, builder: Builder, inputs: Any) -> tuple[Any, list[str]]:
    """The state of an optimizer as inputs of a program, and their names in order."""
    before = len(builder.inputs)
    state: Any = None
    if isinstance(optimizer, Adam):
        updates: Any = Traced(builder, builder.input(UPDATES, TensorType(np.int64, ())))
        state = AdamState(updates, inputs(MEAN), inputs(SQUARE))
    elif optimizer.momentum:
        state = inputs(VELOCITY)
    return state, [value.name for value in builder.inputs[before:]]


def _flat(state: Any) -> list[Any]:
    if state is None:
        return []
    flat: list[Any] = []
    for part in state:
        flat += part if isinstance(part, list) else [part]
    return flat
