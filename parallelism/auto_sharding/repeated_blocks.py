"""Classes of ops and values of repeated blocks: all members of a class get one layout.

Ops at the same position of blocks with the same ops form a class, forward and backward apart.  So do the inputs that
they use first, the optimizer's state of those, and the ops of their update.  So one block's layouts are those of all
blocks, and the stream between blocks has one layout at the beginning and at the end of each block.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from parallelism.ir import Function, Op
from parallelism.ir.passes import MARK


@dataclass(frozen=True)
class LayoutClasses:
    """The number of the class of each op, and of each input by its name."""

    ops: tuple[int, ...]
    inputs: dict[str, int]


def layout_classes(function: Function, blocks: str | None) -> LayoutClasses:
    """The classes; ``blocks`` is a pattern of regions such as ``block.*``.  None: each op is a class of its own."""
    bodies = _bodies(function, blocks)
    classes = _Numbering(function)
    if not bodies:
        return LayoutClasses(
            tuple(classes.number(("op", at)) for at in range(len(function.ops))), classes.inputs
        )
    classes.add_bodies(bodies)
    classes.add_inputs()
    classes.add_other_ops()
    return LayoutClasses(tuple(classes.ops[at] for at in range(len(function.ops))), classes.inputs)


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


class _Numbering:
    """Numbers the classes of ops and inputs, step by step."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._numbers: dict[Hashable, int] = {}
        self.ops: dict[int, int] = {}
        self.inputs = {value.name: self.number(("input", value.name)) for value in function.inputs}

    def number(self, key: Hashable) -> int:
        """A number for each different key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def add_bodies(self, bodies: dict[str, list[int]]) -> None:
        """Numbers ops of blocks: those at the same position of blocks with the same ops form a class."""
        for region, members in bodies.items():
            signatures = [_signature(self.function.ops[at]) for at in members]
            body = self.number((region.startswith(f"{MARK}."), *signatures))
            for position, at in enumerate(members):
                self.ops[at] = self.number((body, position))

    def add_inputs(self) -> None:
        """Numbers inputs by the class of the op that uses them first, and the optimizer's state by its parameter."""
        fresh = set(self.inputs)
        for at, op in enumerate(self.function.ops):
            for position, value in enumerate(op.inputs):
                if value.name in fresh and at in self.ops:
                    self.inputs[value.name] = self.number(("first used", self.ops[at], position))
                    fresh.remove(value.name)
        for name in fresh:
            moment, _, parameter = name.partition(".")  # The class of "mean.w" follows from that of "w".
            if parameter in self.inputs:
                self.inputs[name] = self.number((moment, self.inputs[parameter]))

    def add_other_ops(self) -> None:
        """Numbers ops outside of blocks by their signature and by the classes of the values that they take."""
        made = dict(self.inputs)
        for at, op in enumerate(self.function.ops):
            taken = [made[value.name] for value in op.inputs]
            own = self.ops.setdefault(at, self.number((_signature(op), *taken)))
            for position, value in enumerate(op.outputs):
                made[value.name] = self.number(("made", own, position))


def _signature(op: Op) -> Hashable:
    return op.kind, op.attributes, op.types, tuple(value.type for value in op.outputs)


def _block(op: Op, pattern: str) -> str | None:
    """The region of the block that an op lies in, with the mark of the backward; None if it lies in none."""
    path = (op.region or "").rpartition(f"{MARK}.")[2]
    region = ".".join(path.split(".")[: len(pattern.split("."))])
    if not fnmatchcase(region, pattern):
        return None
    return region if op.region == path else f"{MARK}.{region}"
