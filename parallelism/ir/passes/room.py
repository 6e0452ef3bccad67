"""A program that deals tokens to experts without dropping any, as it runs: with room for every token.

The slots of such a program (`parallelism.ir.operators.dispatch`) are those of a mean load, which is what a simulation
counts with.  No number of slots is enough for every routing but one for each token.  So what runs has that many: the
program below differs from the one that is simulated in this extent alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.core.table import meaning
from parallelism.ir.passes.gradients import MARK

DEALING = ("dispatch", "combine", "dispatch_gates", "collect_gates")
"""The operators that deal."""


def with_room(function: Function) -> Function:
    """The function with a slot for each token at each expert, where it must not drop any; else itself.

    A slot that holds no token is zero, and so is what an expert without biases makes of it.  Another number of slots
    changes neither what the program returns nor which collectives it has.
    """
    return _with_room(function) if any(_lacks_room(op) for op in function.ops) else function


def _lacks_room(op: Op) -> bool:
    return op.kind in DEALING and not op["drops"] and op["each"] != _inside(op)


def _inside(op: Op) -> Any:
    """The tokens of a chunk: an op with as many slots of each expert drops none."""
    slots = op["shape"][2] if "shape" in dict(op.attributes) else op.inputs[0].type.shape[2]
    chunks = slots // op["each"]
    return op.inputs[1].type.shape[1] // chunks


@lru_cache(maxsize=16)
def _with_room(function: Function) -> Function:
    values = {value.name: value for value in function.inputs}
    ops: list[Op] = []
    for op in function.ops:
        if summed := _slots_summed(op, values):
            ops.append(summed)
            op = replace(op, inputs=summed.outputs)
        ops.append(_roomy(op, values))
    return replace(function, ops=tuple(ops), outputs=tuple(values[value.name] for value in function.outputs))


def _slots_summed(op: Op, values: dict[str, Value]) -> Op | None:
    """The sum over slots of a gradient that needed none where an expert had one slot; None for other ops.

    The gradient of what is added to all rows of an expert, its bias, is their sum.  Of one row that is a reshape alone.
    """
    if op.kind != "reshape" or (op.region or "").split(".")[0] != MARK:
        return None
    old, rows = op.inputs[0], values[op.inputs[0].name]
    grown = tuple(
        dim
        for dim, (one, many) in enumerate(zip(old.type.shape, rows.type.shape, strict=True))
        if one != many
    )
    if not grown or any(old.type.shape[dim] != 1 for dim in grown):
        return None
    attributes = (("axes", grown), ("keepdims", True))
    (type,) = meaning("sum", (rows.type,), attributes).outputs
    total = Value(f"{rows.name}.slots", type, rows.layout)
    values[total.name] = total
    return Op("sum", (rows,), attributes, (total,), op.region, op.line)


def _roomy(op: Op, values: dict[str, Value]) -> Op:
    """The op on the new values, to which its outputs are added."""
    inputs = tuple(values[value.name] for value in op.inputs)
    attributes = tuple(sorted(_attributes(op, inputs)))
    made = meaning(op.kind, tuple(value.type for value in inputs), attributes).outputs
    outputs = []
    for value, type in zip(op.outputs, made, strict=True):
        outputs.append(value if value.type == type else Value(value.name, type, value.layout))
    values.update((value.name, value) for value in outputs)
    return Op(op.kind, inputs, attributes, tuple(outputs), op.region, op.line)


def _attributes(op: Op, inputs: Sequence[Value]) -> Iterator[tuple[str, Any]]:
    """The attributes of the op: of one that deals and must not drop, with a slot for each token; shapes with these slots."""
    is_tight = _lacks_room(op)
    for name, given in op.attributes:
        if is_tight and name == "each":
            yield name, 1
        elif is_tight and name == "shape":
            yield name, (*given[:2], op.inputs[1].type.shape[1], *given[3:])
        elif name == "shape" and op.kind not in DEALING:
            yield name, _grown(op, inputs, given)
        else:
            yield name, given


def _grown(op: Op, inputs: Sequence[Value], shape: Sequence[Any]) -> tuple[Any, ...]:
    """The shape that an op gives its output, where dims of its inputs have other extents than before."""
    old = tuple(value.type for value in op.inputs)
    if all(value.type == type for value, type in zip(inputs, old, strict=True)):
        return tuple(shape)
    now = inputs[0].type.shape
    kept = _leading(old[0].shape, shape)
    if op.kind == "reshape" and now[kept:] == old[0].shape[kept:]:
        return (*now[:kept], *shape[kept:])
    rule = meaning(op.kind, old, op.attributes).rule
    extents = dict(rule.extents)
    for dims, value, type in zip(rule.inputs, inputs, old, strict=True):
        for dim, before, after in zip(dims, type.shape, value.type.shape, strict=True):
            if after != before:
                (letter,) = dim  # rows of experts stay one dim
                extents[letter] = after
    return replace(rule, extents=extents).shape(rule.outputs[0])


def _leading(shape: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of first dims that have the same extents in two shapes: a reshape keeps them."""
    count = 0
    while count < min(len(shape), len(other)) and shape[count] == other[count]:
        count += 1
    return count
