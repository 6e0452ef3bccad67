"""The nodes of a graph, gone through once: each becomes ops of a program.

What a node means is in one table, by the names of operators: ``meaning(reader, node, inputs)`` returns the outputs.  An
operator that is not in the table, but that ONNX composes of others, is read as its body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from parallelism.interop.errors import InteropError
from parallelism.interop.expert_rows.chosen_rows import ChosenRows
from parallelism.interop.folding import known
from parallelism.interop.meanings import Meanings
from parallelism.interop.onnx_models.files import Model
from parallelism.interop.onnx_models.graph import Graph, GraphNode, Reference
from parallelism.ir.core import Builder, Extent, IRError, TensorType

Meaning = Callable[["Reader", GraphNode, list[Any]], Any]

MEANINGS: Meanings[Meaning] = Meanings()
meaning = MEANINGS.of
OLD_MEANINGS: dict[str, tuple[int, Meaning]] = {}
"""What operators mean in opsets before one (`old_forms`)."""
_RANDOM = {"Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
_OF_CHANCE = (
    "it draws random numbers, and a program has none of its own: draw them outside, and give them as an input"
)
MOST_OPS, MOST_DEPTH = 200_000, 32


def _with_sizes(text: str) -> str:
    """What an error says to write, for who has no program yet: the symbols get their numbers when a model is read."""

    def said(found: re.Match[str]) -> str:
        names = re.findall(r"(\w+)=", found[1])
        return f", as sizes={dict.fromkeys(names, 8)}"

    return re.sub(r" with specialize\(([^)]*)\)", said, text)


class Reader:
    """Reads graphs into the builder of a program."""

    def __init__(self, model: Model, builder: Builder, prefix: str = "") -> None:
        self.prefix, self.model, self.builder, self.opsets = prefix, model, builder, dict(model.opsets)
        self.chosen_rows = ChosenRows(builder)
        self.depth = 0
        self.around: dict[str, Any] = {}

    def graph(
        self, graph: Graph, inputs: Mapping[str, Any], tensors: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """What a graph returns.  ``inputs`` has those of the graph, and what is defined around it."""
        values = {**inputs, **(graph.tensors if tensors is None else tensors)}
        return self.nodes(graph.nodes, graph.outputs, values)

    def nodes(self, nodes: Sequence[GraphNode], outputs: Sequence[str], values: dict[str, Any]) -> list[Any]:
        """Values of ``outputs`` after these nodes."""
        for node in nodes:
            for name in node.inputs:
                if name and name not in values:
                    raise node.wrong(f"its input {name!r} is not defined")
            given = [values[name] if name else None for name in node.inputs]
            while given and given[-1] is None:
                given.pop()
            with self._from(node):
                results = self.results(node, given, values)
            values.update((name, result) for name, result in zip(node.outputs, results, strict=False) if name)
        for name in outputs:
            if name not in values:
                raise InteropError(f"the output {name!r} is not defined")
        return [values[name] for name in outputs]

    def _from(self, node: GraphNode) -> AbstractContextManager[None]:
        """Ops of a node of the main graph are of its module and its line."""
        if self.depth or not (node.region or node.line):
            return nullcontext()
        region = f"{node.region or ''}."
        region = region.removeprefix(self.prefix).strip(".")
        return self.builder.region(region or None, node.line)

    def results(self, node: GraphNode, inputs: list[Any], values: dict[str, Any]) -> list[Any]:
        """The outputs of one node."""
        if len(self.builder.ops) > MOST_OPS:
            raise node.unsupported(f"the program would have more than {MOST_OPS} ops")
        outer, self.around = self.around, values
        try:
            means = self._meaning(node)
            results = self._composed(node, inputs) if means is None else means(self, node, inputs)
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
            AttributeError,
        ) as error:
            raise node.unsupported(_with_sizes(str(error)) or repr(error)) from error
        finally:
            self.around = outer
        return list(results) if isinstance(results, list | tuple) else [results]

    def _meaning(self, node: GraphNode) -> Meaning | None:
        """What a node means; None if it is composed of others, or not known.  Those of a domain have its name."""
        if (node.domain, node.kind) in self.model.functions:
            return None
        if node.domain:
            return MEANINGS.get(f"{node.domain}.{node.kind}")
        before, means = OLD_MEANINGS.get(node.kind, (0, None))
        return means if means and self.opsets.get("", before) < before else MEANINGS.get(node.kind)

    def _composed(self, node: GraphNode, inputs: list[Any]) -> list[Any]:
        body = self.model.body(node, [*map(_type_of, inputs)], self.opsets)
        if body is None:
            raise node.unsupported(_OF_CHANCE if node.kind in _RANDOM else "this operator is not supported")
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise node.wrong(f"functions are nested more than {MOST_DEPTH} deep: it calls itself")
        attributes = {**self.model.defaults(node, self.opsets), **body.defaults, **node.attributes}
        before, self.opsets = self.opsets, dict(body.opsets)
        try:
            given = [*inputs, *[None] * (len(body.inputs) - len(inputs))]
            values = dict(zip(body.inputs, given, strict=True))
            nodes = [self._resolved(each, attributes, node.proto) for each in body.nodes]
            # A body need not define an output that the node leaves out.
            wanted = [own for own, name in zip(body.outputs, node.outputs, strict=False) if name]
            found = dict(zip(wanted, self.nodes(nodes, wanted, values), strict=True))
        finally:
            self.depth -= 1
            self.opsets = before
        return [found.get(own) for own in body.outputs[: len(node.outputs)]]

    def _resolved(self, node: GraphNode, attributes: Mapping[str, Any], caller: Any) -> GraphNode:
        """A node of a body, with the attributes that it has from the node which calls the body."""
        if not any(isinstance(value, Reference | Graph) for value in node.attributes.values()):
            return node
        found = {}
        for name, value in node.attributes.items():
            if isinstance(value, Reference):
                if value.name in attributes:
                    found[name] = attributes[value.name]
            elif isinstance(value, Graph):
                inner = tuple(self._resolved(each, attributes, caller) for each in value.nodes)
                found[name] = Graph(value.name, value.inputs, value.outputs, inner, value.tensors)
            else:
                found[name] = value
        return replace(node, attributes=found, proto=self.model.resolved(node.proto, caller))

    # -- numbers that must be known ------------------------------------------------------------------------------------

    def count(self, node: GraphNode, at: int, what: str) -> int:
        """How many elements an output has that depend on numbers: what the caller gave for its name."""
        name = node.outputs[at]
        if name not in self.model.sizes:
            raise self.uncounted(node, at, what)
        return self.model.sizes[name]

    def uncounted(self, node: GraphNode, at: int, what: str) -> InteropError:
        """The error for an output with so many elements as the numbers say."""
        name = node.outputs[at]
        if self.model.is_exported:
            return node.unsupported(
                f"{what} depends on the numbers, as of x[mask]: write torch.where(mask, x, 0), or a loss with "
                "ignore_index, whose shapes do not; chosen rows may only be changed one by one, and put back"
            )
        return node.unsupported(f"{what} depends on the numbers: give it, as sizes={{{name!r}: 10}}")

    def numbers(self, node: GraphNode, x: Any, what: str) -> np.ndarray[Any, Any]:
        """The numbers of an input that fixes a shape.  Extents with symbols are among them, as objects."""
        found = known(x)
        if found is None:
            raise node.unsupported(f"{what} must be known, because it fixes the shape of the result")
        return found

    def ints(self, node: GraphNode, x: Any, what: str) -> list[Any]:
        """The numbers of an input that fixes a shape, as a list; ``what`` names them in errors."""
        return [
            n if not isinstance(n, np.generic) else int(n)
            for n in self.numbers(node, x, what).reshape(-1).tolist()
        ]


def with_optional(inputs: Sequence[Any], count: int) -> list[Any]:
    """So many inputs of a node: None stands for optional ones that are left out, those at the end among them."""
    return [*inputs, *[None] * (count - len(inputs))]


def vector(extents: Sequence[Extent]) -> np.ndarray[Any, Any]:
    """Extents as an array: of integers, or of objects if there are symbols."""
    if all(isinstance(n, int) for n in extents):
        return np.array(extents, np.int64)
    array = np.empty(len(extents), object)
    array[:] = extents
    return array


def _type_of(x: Any) -> TensorType | None:
    """The type of an array; None for what is left out, and for a sequence of arrays."""
    if x is None or isinstance(x, list):
        return None
    return TensorType(np.int64 if x.dtype == object else x.dtype, x.shape)
