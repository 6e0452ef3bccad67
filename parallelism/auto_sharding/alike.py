"""Ops and values of repeated blocks, which get one layout together.

Ops at the same place of blocks with the same ops are alike, forward and backward.  So are the inputs that they use
first, what an optimizer keeps of those, and what the update does with them.  The layouts of one block are thus those of
all, and the stream from block to block lies at the end of a block as at its beginning.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from parallelism.ir import Function, Op
from parallelism.ir.passes import MARK


@dataclass(frozen=True)
class Alike:
    """For each op, and for each input by name, the number of its class."""

    ops: tuple[int, ...]
    inputs: dict[str, int]


def alike(function: Function, blocks: str | None) -> Alike:
    """The classes; ``blocks`` is a pattern of regions such as ``block.*``.  None: nothing is alike."""
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    inputs = {value.name: number(("input", value.name)) for value in function.inputs}
    bodies: dict[str, list[int]] = {}
    for at, op in enumerate(function.ops):
        region = None if blocks is None else _block(op, blocks)
        if region is not None:
            bodies.setdefault(region, []).append(at)
    if not bodies:
        return Alike(tuple(number(("op", at)) for at in range(len(function.ops))), inputs)
    found: dict[int, int] = {}
    for region, places in bodies.items():
        body = number((region.startswith(f"{MARK}."), *(_form(function.ops[at]) for at in places)))
        found.update((at, number((body, place))) for place, at in enumerate(places))
    fresh = set(inputs)
    for at, op in enumerate(function.ops):
        for place, value in enumerate(op.inputs):
            if value.name in fresh and at in found:
                inputs[value.name] = number(("first used", found[at], place))
                fresh.remove(value.name)
    for name in fresh:                                      # "mean.w" is alike if "w" is
        kept, _, owner = name.partition(".")
        if owner in inputs:
            inputs[name] = number((kept, inputs[owner]))
    made = dict(inputs)
    for at, op in enumerate(function.ops):
        own = found.setdefault(at, number((_form(op), *(made[value.name] for value in op.inputs))))
        made.update((value.name, number(("made", own, place))) for place, value in enumerate(op.outputs))
    return Alike(tuple(found[at] for at in range(len(function.ops))), inputs)


def _form(op: Op) -> Hashable:
    return op.kind, op.attributes, op.types, tuple(value.type for value in op.outputs)


def _block(op: Op, pattern: str) -> str | None:
    """The region of the block that an op lies in, with the mark of the backward; None if it lies in none."""
    mark, _, path = op.region.rpartition(f"{MARK}.") if op.region is not None else ("", "", "")
    del mark
    region = ".".join(path.split(".")[:len(pattern.split("."))])
    if not fnmatchcase(region, pattern):
        return None
    return region if op.region == path else f"{MARK}.{region}"
