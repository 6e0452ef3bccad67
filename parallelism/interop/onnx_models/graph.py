"""A graph of ONNX as plain values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from parallelism.interop.errors import InteropError, UnsupportedError
from parallelism.ir.core import TensorType
from parallelism.ir.core.lines import Line


@dataclass(frozen=True)
class Reference:
    """An attribute of the body of a function: that attribute of the node which calls it."""

    name: str


@dataclass(frozen=True, eq=False)
class GraphNode:
    """One use of an operator.  An input without a name is left out."""

    kind: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    """Numbers, texts, arrays and graphs, and lists of them."""
    proto: Any = field(default=None, repr=False)
    region: str | None = None
    """The path of the module of PyTorch that it comes from."""
    line: Line | None = None
    is_detached: bool = False
    """Whether no gradient goes through it."""

    @property
    def label(self) -> str:
        """The operator and the name of the node, for messages."""
        kind = f"{self.domain}.{self.kind}" if self.domain else self.kind
        return f"{kind} {self.name!r}" if self.name else kind

    @property
    def place(self) -> str:
        node = f"the node of {', '.join(filter(None, self.outputs)) or 'nothing'}"
        return f"{node}, {self.line.place}" if self.line else node

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or a default."""
        return self.attributes.get(name, default)

    def unsupported(self, message: str) -> UnsupportedError:
        """The error for something that is not supported here."""
        return UnsupportedError(message, self.label, self.place)

    def wrong(self, message: str) -> InteropError:
        """The error for something that is not right here."""
        return InteropError(message, self.label, self.place)


@dataclass(frozen=True)
class GraphInput:
    """An input: its type, or the text of a type that programs do not have."""

    name: str
    type: TensorType | str


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in order, inputs, outputs, and known tensors by name."""

    name: str
    inputs: tuple[GraphInput, ...]
    outputs: tuple[str, ...]
    nodes: tuple[GraphNode, ...]
    tensors: Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, eq=False)
class FunctionBody:
    """The body of a composed operator: nodes in terms of its inputs and attributes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[GraphNode, ...]
    defaults: Mapping[str, Any]
    opsets: Mapping[str, int]


def with_nodes_in_order(model: Any) -> Any:
    """The model of the library with each node behind those whose outputs it takes; as it is if they lie so, or in a ring.

    Converters to 16 bits put some of their nodes at the end, which ONNX Runtime reads.
    """
    nodes = model.graph.node
    makers = {name: number for number, node in enumerate(nodes) for name in node.output if name}
    waits = []
    for node in nodes:
        waits.append({makers[name] for name in _read_by(node) if name in makers})
    if all(max(before, default=-1) < number for number, before in enumerate(waits)):
        return model
    try:
        order = [*TopologicalSorter(dict(enumerate(waits))).static_order()]
    except CycleError:
        return model
    ordered = type(model)()
    ordered.CopyFrom(model)
    del ordered.graph.node[:]
    ordered.graph.node.extend(nodes[number] for number in order)
    return ordered


def _read_by(node: Any, depth: int = 0) -> Iterator[str]:
    """The names that a node reads, also in graphs inside of it."""
    yield from node.input
    for attribute in node.attribute if depth < MOST_NESTED else ():
        for inner in attribute.g.node:
            yield from _read_by(inner, depth + 1)


def with_norms_of_groups(onnx: Any, model: Any, opset: int) -> Any:
    """The model with each GroupNormalization of opset 18 to 20 in other operators; as it is if it has none.

    ONNX has withdrawn it, because scale and bias are those of groups; then the groups are the channels of an
    InstanceNormalization.
    """
    withdrawn = [node for node in model.graph.node if _is_norm_of_groups(node)]
    if not withdrawn or not 18 <= opset < 21:
        return model
    found = type(model)()
    found.CopyFrom(model)
    del found.graph.node[:]
    for node in model.graph.node:
        found.graph.node.extend(_norm_of_groups(onnx, node) if _is_norm_of_groups(node) else [node])
    return found


def _is_norm_of_groups(node: Any) -> bool:
    return node.op_type == "GroupNormalization" and node.domain in ("", "ai.onnx") and len(node.input) == 3


def _norm_of_groups(onnx: Any, node: Any) -> Iterator[Any]:
    """The nodes that a GroupNormalization is."""
    make = onnx.helper.make_node
    given = {each.name: each for each in node.attribute}
    x, scale, bias = node.input
    own = f"{node.output[0]}.groups"
    shape = make("Shape", [x], [f"{own}.whole"])
    groups = [0, given["num_groups"].i if "num_groups" in given else 1, -1]
    constant = make("Constant", [], [f"{own}.shape"], value_ints=groups)
    rows = make("Reshape", [x, f"{own}.shape"], [own])
    norm = make("InstanceNormalization", [own, scale, bias], [f"{own}.norm"], name=node.name)
    if "epsilon" in given:
        norm.attribute.append(given["epsilon"])
    last = make("Reshape", [f"{own}.norm", f"{own}.whole"], [node.output[0]])
    for each in (shape, constant, rows, norm, last):
        each.metadata_props.extend(node.metadata_props)
        yield each


MOST_NESTED = 32
"""Graphs inside of nodes that are looked into; the checker refuses what is nested deeper."""


def check_by_library(onnx: Any, model: Any) -> None:
    """`InteropError` if the library of ONNX refuses a model.  Changes the model.

    A result may have no type or no shape: it is found from the nodes, as ONNX Runtime does.  The checker wants both.
    What a file says of values between nodes is not read, and may be wrong: the builder of ONNX Runtime's language models
    declares constants of one dim as single numbers.
    """
    for value in model.graph.input:
        tensor = value.type.tensor_type
        if value.type.HasField("tensor_type") and not tensor.HasField("shape"):
            raise InteropError("it has no shape: the number of its dims must be known", "input", value.name)
    untyped = [value for value in model.graph.output if not value.HasField("type")]
    unshaped = [value for value in model.graph.output if _lacks_shape(value)]
    for value in unshaped:
        value.type.tensor_type.shape.SetInParent()
    for value in untyped:
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    try:
        onnx.checker.check_model(model)
        for value in unshaped:
            value.type.tensor_type.ClearField("shape")
        for value in untyped:
            value.ClearField("type")
        del model.graph.value_info[:]
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:
        raise _refused(error) from None


def _lacks_shape(value: Any) -> bool:
    is_tensor = value.type.HasField("tensor_type") or not value.HasField("type")
    return is_tensor and not value.type.tensor_type.HasField("shape")


def _refused(error: Exception) -> InteropError:
    """The error of the checker: its first lines, and the node that it names."""
    text = " ".join(str(error).split())
    node = re.search(r"op_type:\s*(\w+)[, ]*(?:node )?name:\s*([\w./:-]*)", text) or re.search(
        r"OpType: (\w+)(?:, Name: ([\w./:-]*))?", text
    )
    name = f"{node[1]} {(node[2] or '')!r}" if node else ""
    return InteropError(f"onnx refuses the model: {text[:600]}", name)
