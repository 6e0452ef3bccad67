"""Stacks: inputs that hold the weights of all layers, one behind another, of which each layer reads its own.

``jax.lax.scan`` over layers takes such weights, as MaxText and ``flax.linen.scan`` do.  A stage of a pipeline holds the
layers that it computes, not the whole stack, so plans are of programs that have an input for each layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from parallelism.ir.core import Function, Op, TensorType, Value

SLICE, RESHAPE = "slice", "reshape"


def unstacked(function: Function) -> Function:
    """The function, in which each stack is an input for each of its rows: ``p.q`` of 12 rows is ``p.q.0`` to ``p.q.11``.

    A stack is an input without symbols that is read by slices of one row along its first dim alone, and each of whose rows
    is read.  So it is no data, whose batch has a symbol.  It is the same function where there is no stack.  Arrays of
    stacks are still taken by name: see `rows_of_stacks`.
    """
    stacks = _stacks(function)
    if not stacks:
        return function
    inputs = list[Value]()
    for value in function.inputs:
        inputs.extend(stacks.get(value, [value]))
    row_of = dict[Value, Value]()
    for op in function.ops:
        if _is_row(op) and op.inputs[0] in stacks:
            row_of[op.outputs[0]] = stacks[op.inputs[0]][op["begin"]]
    same = dict[Value, Value]()  # what is a row in the function that is made
    for op in function.ops:
        row = row_of.get(op.inputs[0]) if op.kind == RESHAPE else None
        if row is not None and op.outputs[0].type == row.type:
            same[op.outputs[0]] = row
    ops = list[Op]()
    for op in function.ops:
        if not same.keys().isdisjoint(op.outputs):
            continue
        if row_of.keys().isdisjoint(op.outputs):
            ops.append(replace(op, inputs=tuple([same.get(value, value) for value in op.inputs])))
        else:
            (part,) = op.outputs
            shape = ("shape", part.type.shape)
            ops.append(replace(op, kind=RESHAPE, inputs=(row_of[part],), attributes=(shape,)))
    outputs = tuple([same.get(value, value) for value in function.outputs])
    made = replace(function, inputs=tuple(inputs), ops=tuple(ops), outputs=outputs)
    return _without_unread(made, {*row_of})


def rows_of_stacks(names: Iterable[str], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays by name, in which those of stacks are their rows, as the inputs ``names`` of a function want them."""
    wanted, found = {*names}, dict[str, Any]()
    for name, array in arrays.items():
        if name in wanted or _row_name(name, 0) not in wanted or not getattr(array, "ndim", 0):
            found[name] = array
            continue
        rows = [_row_name(name, row) for row in range(len(array))]
        found.update(zip(rows, array, strict=True) if wanted.issuperset(rows) else {name: array})
    return found


def _row_name(name: str, row: int) -> str:
    return f"{name}.{row}"


def _is_row(op: Op) -> bool:
    """Whether an op takes one row along the first dim of its input."""
    if op.kind != SLICE or op["axis"] != 0 or op["step"] != 1:
        return False
    return isinstance(op["begin"], int) and op["end"] == op["begin"] + 1


def _stacks(function: Function) -> dict[Value, list[Value]]:
    """The rows of each input that is a stack."""
    read = {value: set[int]() for value in function.inputs if _may_be_stack(value.type)}
    for value in function.outputs:
        read.pop(value, None)
    for op in function.ops:
        for value in op.inputs:
            if value not in read:
                continue
            if _is_row(op):
                read[value].add(op["begin"])
            else:
                del read[value]
    taken = {value.name for value in function.values}
    found = dict[Value, list[Value]]()
    for value, rows in read.items():
        count = value.type.shape[0]
        type = TensorType(value.type.dtype, value.type.shape[1:])
        made = [Value(_row_name(value.name, row), type) for row in sorted(rows)]
        if len(rows) == count and value.layout is None and taken.isdisjoint([row.name for row in made]):
            found[value] = made
    return found


def _may_be_stack(type: TensorType) -> bool:
    return not type.symbols and type.ndim > 0 and int(type.shape[0]) > 1


def _without_unread(function: Function, values: set[Value]) -> Function:
    """The function without the ops that make some ``values`` which nothing reads."""
    read = {value for op in function.ops for value in op.inputs}.union(function.outputs)
    unread = values.difference(read)
    ops = [op for op in function.ops if unread.isdisjoint(op.outputs)]
    return replace(function, ops=tuple(ops))
