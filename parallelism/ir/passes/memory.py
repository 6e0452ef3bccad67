"""Lifetimes of values and the memory that they need, computed from types alone.

Inputs stay in memory because the caller owns them, and outputs stay, too.  Any other value is freed after the last op
that reads it, or that reads a view of it (``reshape`` makes views) or what was accumulated in its memory.  While an op
runs, its inputs and its outputs are in memory.  The output that takes the memory of a donated input needs no other.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from parallelism.ir.core import Extent, Function, Value, largest
from parallelism.ir.core.extents import OpenCall, atom_of, names_in, specialized
from parallelism.ir.passes.donation import Donated, donations, kept, owners
from parallelism.ir.passes.overlapping import overlapped, said
from parallelism.ir.passes.waiting import in_steps


def taken_by(function: Function, donated: Donated | None = None) -> tuple[tuple[Value, ...], ...]:
    """For each op, the outputs that take memory of their own."""
    owner = owners(function, donated)
    taken = []
    for op in function.ops:
        taken.append(tuple(value for value in op.outputs if owner[value] is value))
    return tuple(taken)


def freed_after(function: Function, given_up: Collection[str] = ()) -> tuple[tuple[Value, ...], ...]:
    """For each op, the values whose memory is freed after it.  A view owns no memory and is in no list.

    The caller keeps the inputs, except those ``given_up``, by name.
    """
    owner = owners(function)
    return _last_used(function, owner, kept(function, owner, given_up))


def unread_after(function: Function, donated: Donated | None = None) -> tuple[tuple[Value, ...], ...]:
    """For each op, its inputs and outputs that no later op reads or writes over, and the function does not return."""
    return _last_used(function, {value: value for value in function.values}, {*function.outputs}, donated)


def written_inputs(function: Function, donated: Donated | None = None) -> frozenset[Value]:
    """The inputs into whose memory an op writes."""
    owner = owners(function)
    return frozenset((donated or {}).values()) | {
        owner[op.inputs[0]] for op in function.ops if op.operator.reuses
    }.intersection(function.inputs)


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
    """The bytes in use while each op runs, one after the other.

    ``donate`` names inputs whose memory outputs may reuse: ``"p.w"``, or ``"p"`` for all that begin with ``p.``.
    """
    held: Extent = sum((value.type.nbytes for value in function.inputs), 0)
    live = []
    for taken, freed in zip(
        taken_by(function, donations(function, donate)), freed_after(function), strict=True
    ):
        held = held + sum((value.type.nbytes for value in taken), 0)
        live.append(held)
        held = held - sum((value.type.nbytes for value in freed), 0)
    return tuple(live)


def peak_bytes(function: Function, donate: str | Iterable[str] = ()) -> Extent:
    """The largest number of bytes in use at one time; an expression if shapes are symbolic.

    ``donate`` has names of inputs, or the beginnings of names before a dot: their memory is taken by outputs.

    Of a device's program under `parallelism.transforms.Overlap` the collectives that are under way count, too: what is
    sent stays in memory until they are over.  Which are one call depends on sizes, so with symbols the expression is a
    ``peak(...)``, which is computed when all of them are numbers.  Parts are assumed to be even: a sum that cannot be
    cut evenly on another device is a call of its own on this one, too, of which its program does not tell.
    """
    if said(function) is not None:
        names = (donate,) if isinstance(donate, str) else tuple(donate)
        if function.symbols:
            return atom_of(_PeakOverlapped("peak", (), function, names))
        return _peak_overlapped(function, names)
    return largest(sum((value.type.nbytes for value in function.inputs), 0), *live_bytes(function, donate))


def _peak_overlapped(function: Function, donate: Iterable[str]) -> int:
    """`peak_bytes` of a program without symbols that runs with overlap."""
    sizes = said(function)
    assert sizes is not None
    order = overlapped(function, sizes)
    function = order.of(function)
    held = peak = sum(int(value.type.nbytes) for value in function.inputs)
    for step in in_steps(function, order.calls, donations(function, donate)):
        held += sum(int(value.type.nbytes) for value in step.taken)
        peak = max(peak, held)
        held -= sum(int(value.type.nbytes) for value in step.freed)
    return peak


@dataclass(frozen=True)
class _PeakOverlapped(OpenCall):
    """The `peak_bytes` of a program with symbols that runs with overlap; some symbols may have values already.

    No formula has it: it stays open until all symbols are numbers.
    """

    function: Function
    donate: tuple[str, ...]
    known: tuple[tuple[str, Extent], ...] = ()
    """Numbers, or expressions of other symbols."""

    @property
    def symbols(self) -> frozenset[str]:
        open_ = self.function.symbols - {name for name, _ in self.known}
        return open_.union(*(names_in(extent) for _, extent in self.known))

    def specialize(self, numbers: Mapping[str, Extent]) -> Extent:
        """It with other numbers in place of symbols."""
        known = {name: specialized(extent, numbers) for name, extent in self.known}
        known |= {name: numbers[name] for name in self.function.symbols & numbers.keys() if name not in known}
        found = replace(self, known=tuple(sorted(known.items())))
        if found.symbols:
            return atom_of(found)
        return _peak_overlapped(self.function.specialize(**known), self.donate)

    def __str__(self) -> str:
        known = [f"{name}={extent}" for name, extent in self.known]
        return f"{self.name}({', '.join([f'@{self.function.name}', *known])})"
