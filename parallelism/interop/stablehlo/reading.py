"""The nodes of a module, gone through once: each becomes ops of a program.

Functions and calls are inlined, loops with a fixed number of turns are unrolled.  What a node means is said by the
modules of this room, in one table by the names of nodes: ``meaning(reader, node, operands)`` returns the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from parallelism.interop.complex_numbers import (
    ARITHMETIC,
    COMPARISONS,
    MOVING,
    Pair,
    fourier,
    is_sum,
    pair,
    product,
    type_of_parts,
)
from parallelism.interop.errors import InteropError
from parallelism.interop.folding import traced
from parallelism.interop.meanings import Meanings
from parallelism.interop.stablehlo.module import Block, Module, Node, OtherType, Type
from parallelism.ir.core import Builder, Function, IRError, TensorType
from parallelism.ir.tracing import Traced, recording
from parallelism.mesh import Mesh

Meaning = Callable[["Reader", Node, list[Any]], Any]

MEANINGS: Meanings[Meaning] = Meanings()
"""What nodes mean, by their kinds.  A result is an array, or a list of them if there is not exactly one."""
meaning = MEANINGS.of

MOST_OPS = 200_000
"""The largest number of ops that a program may have, loops unrolled."""
MOST_DEPTH = 64


class Devices(NamedTuple):
    """The devices of a module: a mesh of its replicas, and within each of its partitions."""

    mesh: Mesh
    replicas: int
    partitions: int


@dataclass
class Cut:
    """A program of one device inside a program of whole tensors."""

    node: Node
    ops: int
    """The number of ops before it."""
    operands: list[Traced]
    """What it takes: whole tensors, in the layouts of its shards."""
    results: list[Traced]
    """What it returns, whole; in the program of whole tensors they are inputs."""
    body: Function


class Reader:
    """Reads a module into the builder of a program."""

    def __init__(
        self, module: Module, builder: Builder, most_ops: int = MOST_OPS, placed: Devices | None = None
    ) -> None:
        self.module, self.builder, self.most_ops, self.placed = module, builder, most_ops, placed
        self.cuts: list[Cut] = []
        self.callees: list[str] = []
        """The names of the functions whose calls are being read, from the outermost on."""
        self.in_cut = False
        self.around: dict[int, Any] = {}
        self.defined: dict[int, Node] = {}
        """The nodes so far, by the numbers of their results."""
        self.is_differentiated = any(_comes_from(node, "transpose(") for node in module.functions.values())

    def function(self, node: Node, arguments: Sequence[Any]) -> list[Any]:
        """What a function returns for these arguments."""
        return self.block(node.body, arguments, {})

    def called(self, name: str, caller: Node, arguments: Sequence[Any]) -> list[Any]:
        """What the function of this name returns."""
        if name not in self.module.functions:
            raise caller.wrong(f"the module has no function @{name}")
        self.callees.append(name)
        if len(self.callees) > MOST_DEPTH:
            raise caller.wrong(f"calls are nested more than {MOST_DEPTH} deep: @{name} calls itself")
        try:
            return self.function(self.module.functions[name], arguments)
        finally:
            self.callees.pop()

    def block(self, block: Block, arguments: Sequence[Any], values: dict[int, Any]) -> list[Any]:
        """What a block returns; ``values`` are those defined around it, by number."""
        inner = {**values, **dict(zip(block.arguments, arguments, strict=True))}
        for node in block.nodes:
            operands = [inner[number] for number in node.operands]
            if node.kind in RETURNS:
                return operands
            with self._phase(node):
                results = self.results(node, operands, inner)
            inner.update(zip(node.results, results, strict=True))
        return []

    def _phase(self, node: Node) -> AbstractContextManager[None]:
        """The region of a phase of a program that JAX has differentiated: its names say what a node was made of."""
        if not self.is_differentiated or self.builder.in_region:
            return nullcontext()
        found = next((phase for word, phase in _PHASES.items() if word in node.place), None)
        return nullcontext() if found is None else self.builder.region(found)

    def results(self, node: Node, operands: list[Any], values: dict[int, Any]) -> list[Any]:
        """The results of one node."""
        means = _of_pairs if _is_complex(node, operands) else MEANINGS.get(node.kind)
        if means is None:
            raise node.unsupported("this op is not supported")
        if len(self.builder.ops) > self.most_ops:
            raise node.unsupported(
                f"the program would have more than {self.most_ops} ops, its loops unrolled; "
                "most_ops= sets another limit"
            )
        self.defined.update(dict.fromkeys(node.results, node))
        outer, self.around = self.around, values
        try:
            results = means(self, node, operands)
        except InteropError:
            raise
        except (
            IRError,
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            OverflowError,
            ZeroDivisionError,
        ) as error:
            raise node.unsupported(str(error) or repr(error)) from error
        finally:
            self.around = outer
        return list(results) if isinstance(results, list | tuple) else [results]

    def applied(self, block: Block, arguments: Sequence[Any] = ()) -> list[Any]:
        """The results of a block inside of a node: of a branch or a loop, or of a reducer or comparator.

        The latter have arrays in place of their single numbers.
        """
        return self.block(block, arguments, self.around)

    def devices(self, node: Node) -> Devices:
        """The devices, for a node that needs them."""
        if self.placed is None:
            raise node.unsupported("the module says for no devices that it is for")
        return self.placed

    def cut(self, node: Node, operands: list[Traced], layouts: list[Any]) -> list[Any]:
        """The results of a node whose body is the program of one device.  They are new inputs of this program."""
        if self.in_cut:
            raise node.unsupported("a shard_map inside another is only supported in the words of Shardy")
        inner = Builder()
        before = self.builder, self.around
        self.builder, self.in_cut = inner, True
        try:
            with recording(inner):
                arguments = []
                for i, type in enumerate(node.body.types):
                    if not isinstance(type, TensorType):
                        raise node.unsupported(f"the type {type.text} is not supported")
                    arguments.append(Traced(inner, inner.input(f"x{i}", type)))
                outputs = [traced(x).value for x in self.block(node.body, arguments, {})]
        finally:
            (self.builder, self.around), self.in_cut = before, False
        body = inner.function("body", outputs, prune=True)
        number = len(self.cuts)
        results = [
            Traced(self.builder, self.builder.input(f"cut.{number}.{i}", node.type(i), layout))
            for i, layout in enumerate(layouts)
        ]
        self.cuts.append(Cut(node, len(self.builder.ops), operands, results, body))
        return results

    def producer(self, node: Node, number: int) -> Node | None:
        """The node that made an operand, if it is not an argument."""
        return self.defined.get(node.operands[number])


def _is_complex(node: Node, operands: Sequence[Any]) -> bool:
    """Whether a node takes or gives complex numbers, and is no call."""
    if node.kind in CALLING:
        return False
    given = any(isinstance(x, Pair) for x in operands)
    return given or any(isinstance(type, OtherType) and type_of_parts(type.text) for type in node.types)


def _of_part(type: Type) -> Type:
    """The type of each part of complex numbers; any other type as it is."""
    return type_of_parts(type.text) or type if isinstance(type, OtherType) else type


def _of_pairs(reader: Reader, node: Node, x: list[Any]) -> Any:
    """What a node makes of complex numbers."""
    kind, of_parts = node.kind, replace(node, types=tuple(map(_of_part, node.types)))
    if kind in ARITHMETIC:
        return ARITHMETIC[kind](*x)
    if kind == "stablehlo.complex":
        return Pair(*x)
    if kind == "stablehlo.compare" and (direction := node.word("comparison_direction")) in COMPARISONS:
        return COMPARISONS[direction](*x)
    if kind == "stablehlo.fft":
        lengths = [int(n) for n in np.reshape(node.attributes["fft_length"], -1)]
        return fourier(x[0], node.word("fft_type"), lengths)
    if kind == "stablehlo.constant" and isinstance(array := node.attributes["value"], np.ndarray):
        dtype = of_parts.type().dtype
        return Pair(*(np.array(each, dtype) for each in (array.real, array.imag)))
    means = MEANINGS.get(kind)
    if means is not None and kind in ("stablehlo.convert", "stablehlo.dot_general"):
        if kind == "stablehlo.convert":
            given = [pair(x[0]).real, pair(x[0]).imag]
            parts = [means(reader, of_parts, [each]) for each in given]
            return Pair(*parts) if isinstance(node.types[0], OtherType) else parts[0]
        return product(x[0], x[1], lambda a, b: means(reader, of_parts, [a, b]))
    sums = kind == "stablehlo.reduce" and is_sum([each.kind for each in node.body.nodes])
    if means is None or not (sums or kind in MOVING):
        raise node.unsupported("it is not supported for complex numbers")
    pairs = [each if isinstance(each, Pair) else Pair(each, each) for each in x]
    real = means(reader, of_parts, [each.real for each in pairs])
    imag = means(reader, of_parts, [each.imag for each in pairs])
    if not isinstance(real, list | tuple):
        return Pair(real, imag)
    return [Pair(*parts) for parts in zip(real, imag, strict=True)]


CALLING = frozenset(("func.call", "func.return", "stablehlo.return"))
_PHASES = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward"}


def _comes_from(node: Node, word: str) -> bool:
    """Whether a node, or one in it, has a place with this word."""
    return word in node.place or any(
        _comes_from(inner, word) for region in node.regions for block in region for inner in block.nodes
    )


RETURNS = ("stablehlo.return", "func.return", "sdy.return", "mhlo.return")
