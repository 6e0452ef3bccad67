"""Sums over microbatches: a function adds each of its results into a buffer as soon as the result is there.

So a device holds the sums of all gradients of a stage, and of a microbatch one gradient at a time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from parallelism.ir import Function, Op, TensorType, Value
from parallelism.ir.core import Attributes
from parallelism.ir.passes.donation import owners
from parallelism.layouts.localization.local_program import free_name


def added_into_buffers(
    function: Function,
    first: int,
    names: Sequence[str],
    dtypes: Sequence[np.dtype[Any]],
    largest: Collection[str] = (),
) -> Function:
    """The function that adds its outputs from number ``first`` on into buffers.

    The buffers are its last inputs: one for each of these outputs, of its shape and of its dtype in ``dtypes``, called
    by its name in ``names``.  The sums lie in the memory of the buffers, and are returned in place of the outputs.  Of those
    that are ``largest`` sizes, by name, the larger one is kept.
    """
    taken = {value.name for value in function.values}

    def values(end: str) -> list[Value]:
        return [
            Value(free_name(f"{name}{end}", taken), TensorType(dtype, term.type.shape))
            for name, dtype, term in zip(names, dtypes, function.outputs[first:], strict=True)
        ]

    buffers, sums = values(""), values(".sum")
    how: dict[Value, Attributes] = dict.fromkeys(buffers, ())
    for name, buffer in zip(names, buffers, strict=True):
        if name in largest:
            how[buffer] = (("op", "max"),)
    of_term: dict[str, list[tuple[Value, Value]]] = {}
    for term, buffer, total in zip(function.outputs[first:], buffers, sums, strict=True):
        of_term.setdefault(term.name, []).append((buffer, total))

    def adding(terms: Sequence[Value], region: str | None) -> list[Op]:
        return [
            Op("accumulate", (buffer, term), how[buffer], (total,), region)
            for term in terms
            for buffer, total in of_term.get(term.name, ())
        ]

    ops = adding(function.inputs, None)
    for op in function.ops:
        ops += [op, *adding(op.outputs, op.region)]
    return Function(
        function.name, (*function.inputs, *buffers), tuple(ops), (*function.outputs[:first], *sums)
    )


def owns_results(function: Function, first: int) -> bool:
    """Whether each output from number ``first`` on has memory of its own: that of no input and of no other output.

    A value that is resharded lies in the memory of the one before, as on devices that have the same part of both.
    """
    owner = owners(function)
    found = [owner[value] for value in function.outputs[first:]]
    return len({*found}) == len(found) and {*found}.isdisjoint(
        {*function.inputs} | {owner[value] for value in function.outputs[:first]}
    )


def converted_results(function: Function, first: int, dtypes: Sequence[np.dtype[Any]]) -> Function:
    """The function whose outputs from number ``first`` on have these dtypes.  Each is converted as soon as it is there."""
    taken, outputs = {value.name for value in function.values}, [*function.outputs]
    after: dict[Value, Op] = {}
    for place, dtype in enumerate(dtypes, first):
        value = outputs[place]
        if value.type.dtype == dtype:
            continue
        outputs[place] = Value(
            free_name(f"{value.name}.converted", taken), TensorType(dtype, value.type.shape)
        )
        after[value] = Op("convert", (value,), (("dtype", dtype),), (outputs[place],))
    ops: list[Op] = []
    for op in function.ops:
        ops.append(op)
        ops += [replace(after[value], region=op.region) for value in op.outputs if value in after]
    return replace(function, ops=tuple(ops), outputs=tuple(outputs))


def summed_in(function: Function, first: int, dtypes: Sequence[np.dtype[Any] | None]) -> Function:
    """The function whose outputs from number ``first`` on are widened to ``dtypes``; None leaves one as it is.

    If an output is a resharded value, that value is widened, so that a sum in the resharding has the wider dtype.
    """
    taken = {value.name for value in function.values}
    outputs = list(function.outputs)
    after: dict[Value, list[Op]] = {}
    gone: set[Value] = set()
    maker = {value: op for op in function.ops for value in op.outputs}
    read = {value for op in function.ops for value in op.inputs}
    for place, dtype in enumerate(dtypes, first):
        value = outputs[place]
        made = maker.get(value)
        if dtype is None or value.type.dtype.itemsize >= dtype.itemsize or made is None:
            continue
        source = made.inputs[0] if made.kind == "reshard" and value not in read else value
        type = TensorType(dtype, value.type.shape)
        wide = Value(free_name(f"{source.name}.wide", taken), type)
        ops = [Op("widen", (source,), (("dtype", dtype),), (wide,), made.region)]
        if source is not value:
            wide = replace(value, type=type)
            ops.append(made.with_values((ops[0].outputs[0],), (wide,)))
            gone.add(value)
        outputs[place] = wide
        after.setdefault(source, []).extend(ops)
    kept = [op for op in function.ops if gone.isdisjoint(op.outputs)]
    ops = [each for value in function.inputs for each in after.get(value, ())]
    for op in kept:
        ops += [op, *(each for value in op.outputs for each in after.get(value, ()))]
    return replace(function, ops=tuple(ops), outputs=tuple(outputs))


def widened(maker: Mapping[str, Op], output: Value) -> tuple[Value, Value | None]:
    """The narrow value of which an output of `summed_in` is made, and that value widened; None if it is not.

    ``maker`` has the op of each value, by the names of the values.
    """
    op = maker.get(output.name)
    if op is not None and op.kind == "reshard":
        op = maker.get(op.inputs[0].name)
    return (op.inputs[0], op.outputs[0]) if op is not None and op.kind == "widen" else (output, None)
