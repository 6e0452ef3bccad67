"""`BlockWeights`: the weights that each block of a program has for itself, and the names that they have in its pieces.

The pieces of a step find the layer of a weight by the first number in its name (`parallelism.symbolic.stages.layer_in`).  A
program may number otherwise, as where blocks were found by what repeats.  Then its weights have other names in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from parallelism.ir import Function, Value
from parallelism.ir.core import Op
from parallelism.ir.passes.frozen import frozen_inputs
from parallelism.symbolic.stages import at_first_number
from parallelism.training.layer_blocks import LayerBlocks

BLOCK = "block"
"""What stands before the number of a block: in names that are made for pieces, and in regions of what repeats."""


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """The weights of blocks that compute alike."""

    function: Function
    layer_blocks: LayerBlocks
    """Whose further blocks these are."""
    by_block: tuple[tuple[Value, ...], ...]
    """Of each block the inputs of the function that it alone reads; those in one place do the same in each block."""

    @classmethod
    def of(
        cls, function: Function, blocks: Sequence[Sequence[Op]], layer_blocks: LayerBlocks
    ) -> BlockWeights | None:
        """The weights of blocks; None if the blocks do not compute alike, or share weights in different ways."""
        inputs, first = set(function.inputs), blocks[0]
        frozen = {*frozen_inputs(function, function.attributes)}
        own: list[Value] | None = None
        by_block = list[tuple[Value, ...]]()
        for block in blocks[1:]:
            given = _matched(first, block, inputs)
            if given is None or any((x in frozen) != (y in frozen) for x, y in given.items()):
                return None
            differing = [x for x, y in given.items() if x != y]
            if own is None:
                own = differing
                by_block.append(tuple(own))
            if own != differing:
                return None
            by_block.append(tuple([given[x] for x in own]))
        every = [value for weights in by_block for value in weights]
        return cls(function, layer_blocks, tuple(by_block)) if len({*every}) == len(every) else None

    def of_blocks(self, count: int) -> list[dict[Value, Value]]:
        """What so many blocks read in place of the weights of the first one, for the first, and of the second one, for each
        further one."""
        found = list[dict[Value, Value]]()
        for number in range(count):
            values = dict[Value, Value]()
            for value, (before, layer, behind) in zip(
                self.by_block[min(number, 1)], self._names, strict=True
            ):
                values[value] = renamed(value, f"{before}{layer + number * self.layer_blocks.each}{behind}")
            found.append(values)
        return found

    @cached_property
    def others(self) -> dict[Value, Value]:
        """The inputs that are no weights of these blocks, as inputs without a number in their names."""
        own = {value for weights in self.by_block for value in weights}
        taken, found = {value.name for value in self.function.inputs}, dict[Value, Value]()
        for value in self.function.inputs:
            if value in own:
                continue
            name = ".".join([f"_{part}" if part.isdecimal() else part for part in value.name.split(".")])
            while name != value.name and name in taken:
                name += "_"
            taken.add(name)
            found[value] = renamed(value, name)
        return found

    @cached_property
    def _names(self) -> list[tuple[str, int, str]]:
        """The names of the weights of the first block, taken apart at the number of their layer."""
        return self._own_names() or [self._made_name(value.name) for value in self.by_block[0]]

    def _own_names(self) -> list[tuple[str, int, str]]:
        """`_names` as they are in the program; empty if their first numbers are not those of the layers."""
        found, each = list[tuple[str, int, str]](), self.layer_blocks.each
        first = self.layer_blocks.layer_of(self.layer_blocks.first)
        for weights in zip(*self.by_block, strict=True):
            before, layer, behind = at_first_number(weights[0].name)
            if layer is None or not first <= layer < first + each:
                return []
            for number, value in enumerate(weights):
                if value.name != f"{before}{layer + number * each}{behind}":
                    return []
            found.append((before, layer, behind))
        return found

    def _made_name(self, name: str) -> tuple[str, int, str]:
        """A name that a weight gets, taken apart: ``p.layers.1.q`` of layer 0 becomes ``p.block.0.layers.1.q``.

        Parameters are what is under the name of the first one, so this stays the first part.
        """
        layer = self.layer_blocks.layer_of(self.layer_blocks.first)
        first, dot, behind = name.partition(".")
        return (f"{first}.{BLOCK}.", layer, f".{behind}") if dot else (f"{BLOCK}.", layer, f".{name}")


def renamed(value: Value, name: str) -> Value:
    """A value with this name; the same if it has it."""
    return value if value.name == name else replace(value, name=name)


def reading(op: Op, values: Mapping[Value, Value]) -> Op:
    """An op that reads other values in place of some."""
    inputs = tuple([values.get(value, value) for value in op.inputs])
    return op if inputs == op.inputs else replace(op, inputs=inputs)


def results(ops: Iterable[Op]) -> list[Value]:
    """The values that ops make, in order."""
    return [value for op in ops for value in op.outputs]


def key_of(op: Op) -> Any:
    """Equal for ops that do the same to values of the same types."""
    return op.kind, op.attributes, tuple(value.type for value in op.outputs)


def _matched(first: Sequence[Op], second: Sequence[Op], inputs: set[Value]) -> dict[Value, Value] | None:
    """The inputs of the function that a block reads, by those that the first block reads in their place.

    None if the blocks do not compute alike.
    """
    if list(map(key_of, first)) != list(map(key_of, second)):
        return None
    there, given = dict(zip(results(first), results(second), strict=True)), dict[Value, Value]()
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a.inputs, b.inputs, strict=True):
            if x.type != y.type or there.get(x, y) != y:
                return None
            # The first block may read data where the second one reads what the first made.
            if {x, y} <= inputs and given.setdefault(x, y) != y:
                return None
    return given
