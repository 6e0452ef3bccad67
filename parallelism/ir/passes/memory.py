"""Lifetimes of values and the memory that they need, computed from types alone.

Inputs stay in memory because the caller owns them, and outputs stay, too.  Any other value is freed after the last op
that reads it, or that reads a view of it (``reshape`` makes views) or what was accumulated in its memory.  While an op
runs, its inputs and its outputs are in memory.
"""

from collections.abc import Collection, Mapping

from parallelism.ir.core import Extent, Function, Op, Value, largest


def owns_nothing(op: Op) -> bool:
    """Whether the outputs of an op lie in the memory of its first input."""
    return op.operator.view or op.operator.reuses


def owners(function: Function) -> dict[Value, Value]:
    """For each value, the value in whose memory it lies: itself, or an earlier one."""
    owner = {value: value for value in function.inputs}
    for op in function.ops:
        owner.update((value, owner[op.inputs[0]] if owns_nothing(op) else value) for value in op.outputs)
    return owner


def freed_after(function: Function) -> tuple[tuple[Value, ...], ...]:
    """For each op, the values whose memory is freed after it.  A view owns no memory and is in no list."""
    owner = owners(function)
    return _last_used(function, owner, {owner[value] for value in (*function.inputs, *function.outputs)})


def unread_after(function: Function) -> tuple[tuple[Value, ...], ...]:
    """For each op, its inputs and outputs that no later op reads and the function does not return."""
    return _last_used(function, {value: value for value in function.values}, {*function.outputs})


def _last_used(
    function: Function, owner: Mapping[Value, Value], kept: Collection[Value]
) -> tuple[tuple[Value, ...], ...]:
    """For each op, the owners of values that it is the last op to use, without those that are ``kept``."""
    last = {owner[value]: number for number, op in enumerate(function.ops) for value in (*op.inputs, *op.outputs)}
    used: list[list[Value]] = [[] for _ in function.ops]
    for value, number in last.items():
        if value not in kept:
            used[number].append(value)
    return tuple(map(tuple, used))


def live_bytes(function: Function) -> tuple[Extent, ...]:
    """The bytes in use while each op runs."""
    held: Extent = sum((value.type.nbytes for value in function.inputs), 0)
    live = []
    for op, freed in zip(function.ops, freed_after(function), strict=True):
        if not owns_nothing(op):
            held = held + sum((value.type.nbytes for value in op.outputs), 0)
        live.append(held)
        held = held - sum((value.type.nbytes for value in freed), 0)
    return tuple(live)


def peak_bytes(function: Function) -> Extent:
    """The largest number of bytes in use at one time; an expression if shapes are symbolic."""
    return largest(sum((value.type.nbytes for value in function.inputs), 0), *live_bytes(function))
