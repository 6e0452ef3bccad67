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
    bodies = _bodies(function, blocks)
    classes = _Classes(function)
    if not bodies:
        return Alike(tuple(classes.number(("op", at)) for at in range(len(function.ops))), classes.inputs)
    classes.add_bodies(bodies)
    classes.add_inputs()
    classes.add_other_ops()
    return Alike(tuple(classes.ops[at] for at in range(len(function.ops))), classes.inputs)


def _bodies(function: Function, blocks: str | None) -> dict[str, list[int]]:
    """The ops of each block, forward and backward apart, by its region."""
    found: dict[str, list[int]] = {}
    if blocks is None:
        return found
    for at, op in enumerate(function.ops):
        region = _block(op, blocks)
        if region is not None:
            found.setdefault(region, []).append(at)
    return found


class _Classes:
    """The numbers of the classes of ops and inputs, while they are found."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._numbers: dict[Hashable, int] = {}
        self.ops: dict[int, int] = {}
        self.inputs = {value.name: self.number(("input", value.name)) for value in function.inputs}

    def number(self, key: Hashable) -> int:
        """A number for each different key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def add_bodies(self, bodies: dict[str, list[int]]) -> None:
        """Ops at the same place of blocks with the same ops are alike."""
        for region, places in bodies.items():
            forms = [_form(self.function.ops[at]) for at in places]
            body = self.number((region.startswith(f"{MARK}."), *forms))
            for place, at in enumerate(places):
                self.ops[at] = self.number((body, place))

    def add_inputs(self) -> None:
        """Inputs that ops of one class use first are alike, and so is what the optimizer keeps of them."""
        fresh = set(self.inputs)
        for at, op in enumerate(self.function.ops):
            for place, value in enumerate(op.inputs):
                if value.name in fresh and at in self.ops:
                    self.inputs[value.name] = self.number(("first used", self.ops[at], place))
                    fresh.remove(value.name)
        for name in fresh:                                      # "mean.w" is alike if "w" is
            kept, _, owner = name.partition(".")
            if owner in self.inputs:
                self.inputs[name] = self.number((kept, self.inputs[owner]))

    def add_other_ops(self) -> None:
        """Ops outside of blocks are alike if they are of one form and take values that are alike."""
        made = dict(self.inputs)
        for at, op in enumerate(self.function.ops):
            own = self.ops.setdefault(at, self.number((_form(op), *(made[value.name] for value in op.inputs))))
            for place, value in enumerate(op.outputs):
                made[value.name] = self.number(("made", own, place))


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
