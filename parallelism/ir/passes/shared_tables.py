"""Tables, such as masks and angles of positions: what ops compute that depend on no input of the program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallelism.ir.core import Function, Op, Value, operator


def tables(function: Function) -> set[Value]:
    """The values that depend on no input, without those of collectives and messages."""
    found = set[Value]()
    for op in function.ops:
        if found.issuperset(op.inputs) and operator(op.kind).received is None:
            found.update(op.outputs)
    return found


def with_tables_once(function: Function) -> Function:
    """The function, in which equal tables of a region are computed once.

    A layer that makes the angles of its positions by itself repeats them for each layer; XLA computes them once, too.
    """
    fixed = tables(function)
    first = dict[Any, Op]()
    same = dict[Value, Value]()
    ops = list[Op]()
    for op in function.ops:
        own = replace(op, inputs=tuple([same.get(value, value) for value in op.inputs])) if same else op
        if op.outputs and fixed.issuperset(op.outputs):
            # 1, 1.0 and True are equal as keys of a dict, but they are different constants.
            key = op.region, op.kind, own.inputs, op.attributes, repr(op.attributes)
            equal = first.setdefault(key, own)
            if equal is not own:
                same.update(zip(own.outputs, equal.outputs, strict=True))
                continue
        ops.append(own)
    outputs = tuple([same.get(value, value) for value in function.outputs])
    return replace(function, ops=tuple(ops), outputs=outputs) if same else function
