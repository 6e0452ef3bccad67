"""A module of MLIR as plain values: nodes in blocks, in regions of other nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from parallelism.interop.errors import InteropError, UnsupportedError
from parallelism.ir.core import TensorType, symbol

OPEN = symbol("open_extent")
"""Stands in types for an extent that the module leaves open."""
STOPS_GRADIENT = "vcluster.stops_gradient"
"""An attribute of the barriers that stand for ``jax.lax.stop_gradient``, of which JAX writes nothing."""


@dataclass(frozen=True)
class OtherType:
    """A type that is no tensor of numbers that programs have: its text."""

    text: str


Type = TensorType | OtherType


@dataclass(frozen=True, eq=False)
class Node:
    """One op.  Operands and results are the numbers of values."""

    kind: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    types: tuple[Type, ...]
    """The types of the results."""
    attributes: dict[str, Any]
    """Numbers, bools and texts; tuples and arrays of them; the text of any other attribute."""
    regions: tuple[tuple[Block, ...], ...]
    place: str
    """The location in the text, or in the source that the text was made from."""

    @property
    def body(self) -> Block:
        """The block of its first region."""
        return self.regions[0][0]

    def type(self, number: int = 0) -> TensorType:
        """The type of a result, which must be a tensor."""
        type = self.types[number]
        if isinstance(type, OtherType):
            raise self.unsupported(f"the type {type.text} is not supported")
        return type

    def word(self, attribute: str) -> str:
        """The last word of an attribute: LT of ``#stablehlo<comparison_direction LT>``; empty without the attribute."""
        return re.split("[ <]", str(self.attributes.get(attribute, "")).rstrip(">"))[-1]

    def unsupported(self, message: str) -> UnsupportedError:
        """The error for something that is not supported here."""
        return UnsupportedError(message, self.kind, self.place)

    def wrong(self, message: str) -> InteropError:
        """The error for something that is not right here."""
        return InteropError(message, self.kind, self.place)


@dataclass(frozen=True, eq=False)
class Block:
    """Nodes in order.  The last one returns."""

    arguments: tuple[int, ...]
    types: tuple[Type, ...]
    nodes: tuple[Node, ...]
    names: tuple[str, ...] = ()
    """The names of the arguments, from their locations; empty for one without a name."""


@dataclass(frozen=True, eq=False)
class Module:
    """A module: its functions by name, and its other attributes and nodes."""

    name: str
    functions: dict[str, Node]
    attributes: dict[str, Any]
    others: tuple[Node, ...] = field(default=())

    @property
    def main(self) -> Node:
        """The function ``main``, or the only public function."""
        if "main" in self.functions:
            return self.functions["main"]
        public = [
            f for f in self.functions.values() if f.attributes.get("sym_visibility", "public") == "public"
        ]
        if len(public) != 1:
            names = ", ".join(f"@{name}" for name in self.functions) or "none"
            raise InteropError(
                f"the module must have a function @main, or one public function; it has {names}"
            )
        return public[0]

    def nodes(self) -> Iterator[Node]:
        """All nodes of all functions, nested ones too."""
        waiting = list(self.functions.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(inner for region in node.regions for block in region for inner in block.nodes)
