"""When a value can be freed, and how much memory that leaves in use: from the types alone.

Inputs stay, since they are the caller's; outputs stay, too; everything else is freed after the last op that reads it,
or lies in its memory (the view that a ``reshape`` is).  While an op runs, its inputs and outputs are both there.
"""

from __future__ import annotations

from parallelism.ir.core import Extent, Function, Value
from parallelism.ir.core.extents import largest


def freed_after(function: Function) -> tuple[tuple[Value, ...], ...]:
    """For each op the values whose memory is free when it has run; a view owns none and is in no list."""
    owner: dict[Value, Value] = {value: value for value in function.inputs}
    last: dict[Value, int] = {}
    for number, op in enumerate(function.ops):
        for value in op.outputs:
            owner[value] = owner[op.inputs[0]] if op.operator.view else value
        for value in (*op.inputs, *op.outputs):
            last[owner[value]] = number
    for value in (*function.inputs, *function.outputs):
        last.pop(owner[value], None)
    freed: list[list[Value]] = [[] for _ in function.ops]
    for value, number in last.items():
        freed[number].append(value)
    return tuple(map(tuple, freed))


def live_bytes(function: Function) -> tuple[Extent, ...]:
    """The bytes in use while each op runs."""
    held: Extent = sum((value.type.nbytes for value in function.inputs), 0)
    found = []
    for op, freed in zip(function.ops, freed_after(function), strict=True):
        if not op.operator.view:
            held = held + sum((value.type.nbytes for value in op.outputs), 0)
        found.append(held)
        held = held - sum((value.type.nbytes for value in freed), 0)
    return tuple(found)


def peak_bytes(function: Function) -> Extent:
    """The most of them, at least the inputs; with symbols in the shapes an expression of them."""
    return largest(sum((value.type.nbytes for value in function.inputs), 0), *live_bytes(function))
