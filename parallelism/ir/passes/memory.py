"""Lifetimes of values and the memory that they need, computed from types alone.

Inputs stay in memory because the caller owns them, and outputs stay, too.  Any other value is freed after the last op
that reads it, or that reads a view of it (``reshape`` makes views) or what was accumulated in its memory.  While an op
runs, its inputs and its outputs are in memory.  The output that takes the memory of a donated input needs no other.
"""

from collections.abc import Collection, Iterable, Mapping

from parallelism.ir.core import Extent, Function, Value, largest
from parallelism.ir.passes.donation import Donated, donations, owners


def taken_by(function: Function, donated: Donated | None = None) -> tuple[tuple[Value, ...], ...]:
    """For each op, the outputs that take memory of their own."""
    owner = owners(function, donated)
    return tuple(tuple(value for value in op.outputs if owner[value] is value) for op in function.ops)


def freed_after(function: Function, given_up: Collection[str] = ()) -> tuple[tuple[Value, ...], ...]:
    """For each op, the values whose memory is freed after it.  A view owns no memory and is in no list.

    The caller keeps the inputs, except those ``given_up``, by name.
    """
    owner = owners(function)
    return _last_used(function, owner, kept(function, owner, given_up))


def kept(function: Function, owner: Mapping[Value, Value], given_up: Collection[str] = ()) -> set[Value]:
    """The values whose memory is in use after the last op: that of outputs, and of inputs that are not ``given_up``."""
    stay = [value for value in function.inputs if value.name not in given_up]
    return {owner[value] for value in (*stay, *function.outputs)}


def unread_after(function: Function, donated: Donated | None = None) -> tuple[tuple[Value, ...], ...]:
    """For each op, its inputs and outputs that no later op reads or writes over, and the function does not return."""
    return _last_used(function, {value: value for value in function.values}, {*function.outputs}, donated)


def written_inputs(function: Function, donated: Donated | None = None) -> frozenset[Value]:
    """The inputs into whose memory an op writes."""
    owner = owners(function)
    return frozenset((donated or {}).values()) | {
        owner[op.inputs[0]] for op in function.ops if op.operator.reuses}.intersection(function.inputs)


def _last_used(
    function: Function, owner: Mapping[Value, Value], kept: Collection[Value], donated: Donated | None = None
) -> tuple[tuple[Value, ...], ...]:
    """For each op, the owners of values that it is the last op to use, without those that are ``kept``."""
    last: dict[Value, int] = {}
    for number, op in enumerate(function.ops):
        last.update((owner[value], number) for value in (*op.inputs, *op.outputs))
        if donated:
            last.update((donated[value], number) for value in op.outputs if value in donated)
    used: list[list[Value]] = [[] for _ in function.ops]
    for value, number in last.items():
        if value not in kept:
            used[number].append(value)
    return tuple(map(tuple, used))


def live_bytes(function: Function, donate: str | Iterable[str] = ()) -> tuple[Extent, ...]:
    """The bytes in use while each op runs.  ``donate`` has names of inputs, or the beginnings of names before a dot."""
    held: Extent = sum((value.type.nbytes for value in function.inputs), 0)
    live = []
    for taken, freed in zip(taken_by(function, donations(function, donate)), freed_after(function), strict=True):
        held = held + sum((value.type.nbytes for value in taken), 0)
        live.append(held)
        held = held - sum((value.type.nbytes for value in freed), 0)
    return tuple(live)


def peak_bytes(function: Function, donate: str | Iterable[str] = ()) -> Extent:
    """The largest number of bytes in use at one time; an expression if shapes are symbolic.

    ``donate`` has names of inputs, or the beginnings of names before a dot: their memory is taken by outputs.
    """
    return largest(sum((value.type.nbytes for value in function.inputs), 0), *live_bytes(function, donate))
