"""The only module that imports ``onnx``: files and models as plain values, checked by ``onnx``.

A file is read without its external data.  These are mapped into memory, and only where they lie in the folder of the
model: nothing outside of it is opened.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from parallelism.dtypes import as_dtype
from parallelism.interop.errors import InteropError, UnsupportedError
from parallelism.interop.onnx_models.graph import (
    FunctionBody,
    Graph,
    GraphInput,
    GraphNode,
    Reference,
    check_by_library,
    with_nodes_in_order,
    with_norms_of_groups,
)
from parallelism.interop.onnx_models.origins import origin_of
from parallelism.ir.core import Extent, TensorType, symbol

OLDEST = 7
MOST_BYTES = 2**31 - 1
MOST_NODES = 1_000_000
MOST_ELEMENTS = 2**36
IN_DEFAULT_DOMAIN = ("SimplifiedLayerNormalization",)
"""Operators of com.microsoft that ONNX Runtime writes without their domain."""
SMALL = 4096
"""Tensors of at most so many bytes stay in the model that is checked, because shapes may depend on them."""


@cache
def _onnx() -> Any:
    """The package.  ``ImportError`` says what to install."""
    try:
        import onnx
        import onnx.checker
        import onnx.helper
        import onnx.numpy_helper
        import onnx.shape_inference
    except ImportError as error:
        raise ImportError('ONNX models are read by the package onnx: pip install "vcluster[onnx]"') from error
    return onnx


class Model:
    """A model that was read and checked."""

    def __init__(
        self,
        path_or_model: Any,
        sizes: Mapping[str, int] | None = None,
        held: Mapping[str, np.ndarray[Any, Any]] | None = None,
    ) -> None:
        onnx = _onnx()
        self.is_exported = held is not None
        """Whether it was made of a module just now: then its caller knows no names of results."""
        self.held = held or {}
        """Tensors that are not in the model, by the names of its inputs."""
        self.sizes = dict(sizes or {})
        self.symbols: dict[str, None] = {}
        """The names of dims without a number, also of those that ``sizes`` gives one, in order."""
        self.equal: dict[str, Extent] = {}
        """Symbols that are equal to another one, or to a number."""
        self.folder: Path | None = None
        if isinstance(path_or_model, onnx.ModelProto):
            self.proto = path_or_model
        else:
            content = (
                path_or_model if isinstance(path_or_model, bytes) else self._content(Path(path_or_model))
            )
            self.proto = onnx.ModelProto()
            try:
                self.proto.ParseFromString(content)
            except Exception as error:  # the protobuf library has no common type for these
                raise InteropError(f"it is no ONNX model: {error}") from None
        self.opsets = _opsets(self.proto)
        self.proto = with_norms_of_groups(onnx, with_nodes_in_order(self.proto), self.opsets.get("", 0))
        self._check()
        self.functions = {(f.domain, f.name): f for f in self.proto.functions}

    def _content(self, path: Path) -> bytes:
        if path.stat().st_size > MOST_BYTES:
            raise InteropError(
                f"{path} is larger than {MOST_BYTES} bytes; its weights belong into external data"
            )
        self.folder = path.parent
        return path.read_bytes()

    def _check(self) -> None:
        onnx, graph = _onnx(), self.proto.graph
        count = _nodes(graph)
        if not self.proto.ir_version or not (count or graph.output):
            raise InteropError("it is no ONNX model: it has no version or no graph")
        if count > MOST_NODES:
            raise InteropError(f"the model has more than {MOST_NODES} nodes")
        latest = onnx.defs.onnx_opset_version()
        version = self.opsets.get("", latest)
        if not OLDEST <= version <= latest:
            raise UnsupportedError(f"opset {version} is not supported: {OLDEST} to {latest} are")
        for tensor in graph.initializer:
            if (
                any(n < 0 for n in tensor.dims)
                or int(np.prod([*tensor.dims, 1], dtype=object)) > MOST_ELEMENTS
            ):
                raise InteropError(
                    f"shape {list(tensor.dims)} is no shape of a tensor", "tensor", tensor.name
                )
        check_by_library(onnx, self._stripped())

    def _stripped(self) -> Any:
        """A copy in which large tensors are inputs, so that checks are quick and open no file."""
        onnx = _onnx()
        light = _without_weights(self.proto)
        named = {value.name for value in light.graph.input}
        for tensor in self.proto.graph.initializer:
            if _is_small(tensor):
                light.graph.initializer.append(tensor)
            elif tensor.name not in named:
                light.graph.input.append(_value_info(onnx, tensor.name, tensor))
        _without_large_constants(onnx, light.graph)
        for value in (*light.graph.input, *light.graph.output, *light.graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0:  # some exporters write -1 for a dim without a number
                    dim.Clear()
        for node in light.graph.node:
            if node.domain in ("", "ai.onnx") and node.op_type in IN_DEFAULT_DOMAIN:
                node.domain = "com.microsoft"
        return light

    # -- plain values --------------------------------------------------------------------------------------------------

    @cached_property
    def main(self) -> Graph:
        """The main graph.  Tensors in its Constant nodes are tensors of the graph, like initializers."""
        proto = self.proto.graph
        held = {node.output[0]: tensor for node in proto.node if (tensor := _held_by(node)) is not None}
        tensors = {name: self.array(tensor) for name, tensor in held.items()}
        found = self._graph(proto, leave_out=held)
        found = replace(found, inputs=tuple(value for value in found.inputs if value.name not in self.held))
        twice = sorted(held.keys() & {*found.tensors, *(value.name for value in found.inputs)})
        if twice:
            raise InteropError("two tensors have this name", "tensor", twice[0])
        return replace(found, tensors={**found.tensors, **tensors, **self.held})

    def _graph(self, graph: Any, leave_out: Collection[str] = ()) -> Graph:
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise UnsupportedError("sparse tensors are not supported", "tensor", name)
        tensors = {tensor.name: self.array(tensor) for tensor in graph.initializer}
        inputs = tuple(
            GraphInput(value.name, self._type(value)) for value in graph.input if value.name not in tensors
        )
        return Graph(
            graph.name,
            inputs,
            tuple(value.name for value in graph.output),
            tuple(
                self.node(node) for node in graph.node if not (node.output and node.output[0] in leave_out)
            ),
            tensors,
        )

    def node(self, node: Any) -> GraphNode:
        """A node as plain values."""
        for text in (node.name, node.op_type, node.domain, *node.input, *node.output):
            if not isinstance(text, str):  # so protobuf gives what is not UTF-8
                raise InteropError(f"a string of the model is not UTF-8: {text[:80]!r}", "node")
        attributes: dict[str, Any] = {}
        for each in node.attribute:
            own = Reference(each.ref_attr_name) if each.ref_attr_name else self._attribute(each, node)
            attributes[each.name] = own
        domain = _domain(node)
        domain = "com.microsoft" if domain == "" and node.op_type in IN_DEFAULT_DOMAIN else domain
        return GraphNode(
            node.op_type,
            domain,
            node.name,
            tuple(node.input),
            tuple(node.output),
            attributes,
            node,
            *origin_of(node),
        )

    def _attribute(self, attribute: Any, node: Any) -> Any:
        onnx = _onnx()
        kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
        match kind:
            case "INT" | "FLOAT":
                return attribute.i if kind == "INT" else attribute.f
            case "STRING":
                return attribute.s.decode("utf-8", "replace")
            case "INTS" | "FLOATS":
                return tuple(attribute.ints if kind == "INTS" else attribute.floats)
            case "STRINGS":
                return tuple(each.decode("utf-8", "replace") for each in attribute.strings)
            case "TENSOR":
                return self.array(attribute.t)
            case "GRAPH":
                return self._graph(attribute.g)
        return UnsupportedError(
            f"an attribute of kind {kind} is not supported", f"{node.op_type} {node.name!r}"
        )

    def array(self, tensor: Any) -> np.ndarray[Any, Any]:
        """The numbers of a tensor.  Those outside of the file are mapped into memory."""
        onnx, name = _onnx(), tensor.name
        dtype = _dtype(tensor.data_type)
        if isinstance(dtype, str):
            raise UnsupportedError(f"a tensor of {dtype} is not supported", "tensor", name)
        shape = tuple(tensor.dims)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return self._external(tensor, dtype, shape)
        try:
            array: np.ndarray[Any, Any] = onnx.numpy_helper.to_array(tensor)
            return array.astype(dtype, copy=False).reshape(shape)
        except Exception as error:
            raise InteropError(
                f"the numbers of the tensor do not fit its shape {list(shape)}: {error}", "tensor", name
            ) from None

    def _external(self, tensor: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        given = {entry.key: entry.value for entry in tensor.external_data}
        where = given.get("location", "")
        if not isinstance(where, str):  # so protobuf gives what is not UTF-8
            raise InteropError(
                f"external data must lie in the folder of the model, got {where!r}", "tensor", tensor.name
            )

        def wrong(message: str) -> InteropError:
            return InteropError(message, "tensor", tensor.name)

        if self.folder is None:
            raise wrong(f"its data lie in the file {where!r}, but the model was not read from a file")
        if (
            not where
            or Path(where).is_absolute()
            or ".." in Path(where).parts
            or "\\" in where
            or "\0" in where
        ):
            raise wrong(f"external data must lie in the folder of the model, got {where!r}")
        folder = self.folder.resolve()
        path = folder / where
        if path.resolve() != path or not path.resolve().is_relative_to(folder):
            raise wrong(f"external data must lie in the folder of the model and be no link, got {where!r}")
        if not path.is_file():
            raise wrong(f"the file {where!r} with its data does not exist beside the model")
        try:
            offset = int(given.get("offset", 0))
        except ValueError:
            raise wrong(f"offset must be a number, got {given['offset']!r}") from None
        count = int(np.prod(shape, dtype=np.int64))
        if offset < 0 or offset + count * dtype.itemsize > path.stat().st_size:
            raise wrong(f"the file {where!r} has {path.stat().st_size} bytes, fewer than its data need")
        if not count:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", offset, shape)

    # -- types of inputs ------------------------------------------------------------------------------------------------

    def _type(self, value: Any) -> TensorType | str:
        """The type of an input.  A dim without a number is a symbol, or its size where that is given; ``?`` is no name."""
        if value.type.WhichOneof("value") != "tensor_type":
            return str(value.type.WhichOneof("value"))
        tensor = value.type.tensor_type
        dtype = _dtype(tensor.elem_type)
        if isinstance(dtype, str):
            return f"a tensor of {dtype}"
        if not tensor.HasField("shape"):
            return "a tensor of unknown shape"
        return TensorType(dtype, [self._extent(value, n, dim) for n, dim in enumerate(tensor.shape.dim)])

    def _extent(self, value: Any, number: int, dim: Any) -> Any:
        if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:
            return dim.dim_value
        if isinstance(dim.dim_param, bytes):  # of the library, where it is not UTF-8
            raise InteropError(f"the name of dim {number} of {value.name} is not UTF-8: {dim.dim_param!r}")
        plain = re.sub(r"\W", "_", dim.dim_param.strip("?") or f"{value.name}_{number}", flags=re.ASCII)
        plain = plain if re.match(r"[A-Za-z_]", plain) else f"n{plain}"
        given = next((name for name in (dim.dim_param, plain) if name in self.sizes), None)
        self.symbols[plain] = None
        return self.equal.get(plain, symbol(plain)) if given is None else self.sizes[given]

    # -- bodies of composed operators ----------------------------------------------------------------------------------

    def body(
        self, node: GraphNode, types: Sequence[TensorType | None], opsets: Mapping[str, int]
    ) -> FunctionBody | None:
        """The body of a function of the model, or of an operator that ``onnx`` composes of others; None if none."""
        onnx = _onnx()
        found = self.functions.get((node.domain, node.kind))
        if found is None:
            found = _schema_body(onnx, node, types, opsets)
        if found is None:
            return None
        defaults = {each.name: self._attribute(each, node.proto) for each in found.attribute_proto}
        return FunctionBody(
            tuple(found.input),
            tuple(found.output),
            tuple(map(self.node, found.node)),
            defaults,
            {**opsets, **_opsets(found)},
        )

    def resolved(self, node: Any, caller: Any) -> Any:
        """A node of a body, as ``onnx`` has it, with the attributes that refer to those of the node which calls it."""
        if node is None or caller is None or not any(each.ref_attr_name for each in node.attribute):
            return node
        given = {each.name: each for each in caller.attribute}
        found = type(node)()
        found.CopyFrom(node)
        del found.attribute[:]
        for each in node.attribute:
            if not each.ref_attr_name:
                found.attribute.append(each)
            elif each.ref_attr_name in given:
                found.attribute.append(given[each.ref_attr_name])
                found.attribute[-1].name = each.name
        return found

    def defaults(self, node: GraphNode, opsets: Mapping[str, int]) -> dict[str, Any]:
        """The default attributes of an operator."""
        try:
            schema = _onnx().defs.get_schema(node.kind, opsets.get(node.domain, 1), node.domain)
        except Exception:
            return {}
        return {
            name: self._attribute(attribute.default_value, node.proto)
            for name, attribute in schema.attributes.items()
            if attribute.default_value.name
        }


def _domain(named: Any) -> str:
    """The domain of a node, or of an entry about a version; that of ONNX itself has two names."""
    return "" if named.domain == "ai.onnx" else str(named.domain)


def _opsets(of: Any) -> dict[str, int]:
    """The versions of the domains that a model, or a function, uses."""
    return {_domain(entry): entry.version for entry in of.opset_import}


def _schema_body(
    onnx: Any, node: GraphNode, types: Sequence[TensorType | None], opsets: Mapping[str, int]
) -> Any:
    version = opsets.get(node.domain, 1)
    try:
        schema = onnx.defs.get_schema(node.kind, version, node.domain)
    except Exception:
        return None
    if schema.has_function:
        return schema.function_body
    if not schema.has_context_dependent_function:
        return None
    described = [b"" if type is None else _type_proto(onnx, type).SerializeToString() for type in types]
    for opset in [n for n in schema.context_dependent_function_opset_versions if n <= version][::-1]:
        content = schema.get_context_dependent_function_with_opset_version(
            opset, node.proto.SerializeToString(), described
        )
        if content:
            body = onnx.FunctionProto()
            body.ParseFromString(content)
            return body
    return None


def _type_proto(onnx: Any, type: TensorType) -> Any:
    shape = [n if isinstance(n, int) else str(n) for n in type.shape]
    return onnx.helper.make_tensor_type_proto(_code(onnx, type.dtype), shape)


def _code(onnx: Any, dtype: np.dtype[Any]) -> int:
    code: int = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return code


_NARROW = {
    "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E5M2": "float8_e5m2",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
    "BFLOAT16": "bfloat16",
    "INT4": "int4",
    "UINT4": "uint4",
    "INT2": "int2",
    "UINT2": "uint2",
}
_PLAIN = (
    "FLOAT",
    "UINT8",
    "INT8",
    "UINT16",
    "INT16",
    "INT32",
    "INT64",
    "BOOL",
    "FLOAT16",
    "DOUBLE",
    "UINT32",
    "UINT64",
)


def dtype_of(code: int) -> np.dtype[Any] | str:
    """The dtype of a code of ONNX; its name if programs do not have it."""
    return _dtype(code)


def _dtype(code: int) -> np.dtype[Any] | str:
    onnx = _onnx()
    try:
        name: str = onnx.TensorProto.DataType.Name(code)
    except ValueError:
        raise InteropError(f"there is no type of number {code}") from None
    if name in _NARROW:
        return as_dtype(_NARROW[name])
    if name not in _PLAIN:
        return name.lower()
    dtype: np.dtype[Any] = onnx.helper.tensor_dtype_to_np_dtype(code)
    return dtype


def _held_by(node: Any) -> Any:
    """The tensor that a Constant node of the operators of ONNX holds, or None."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.output) != 1:
        return None
    values = [each.t for each in node.attribute if each.name == "value" and each.HasField("t")]
    return values[0] if len(values) == len(node.attribute) == 1 else None


def _without_large_constants(onnx: Any, graph: Any) -> None:
    """Makes large tensors of Constant nodes inputs of a graph, as large initializers."""
    kept = []
    for node in graph.node:
        tensor = _held_by(node)
        if tensor is None or _is_small(tensor):
            kept.append(node)
        else:
            graph.input.append(_value_info(onnx, node.output[0], tensor))
    if len(kept) < len(graph.node):
        kept = [each.__class__.FromString(each.SerializeToString()) for each in kept]
        del graph.node[:]
        graph.node.extend(kept)


def _value_info(onnx: Any, name: str, tensor: Any) -> Any:
    return onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))


def _is_small(tensor: Any) -> bool:
    count = int(np.prod([*tensor.dims, 1], dtype=object))
    return tensor.data_location != _onnx().TensorProto.EXTERNAL and count * 8 <= SMALL


def _without_weights(proto: Any) -> Any:
    """A copy of a model without initializers: they are moved out for the time of the copy."""
    onnx = _onnx()
    light = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name == "graph":
            for inner, part in value.ListFields():
                if inner.name == "initializer":
                    continue
                _set(light.graph, inner, part)
        else:
            _set(light, field, value)
    return light


def _set(target: Any, field: Any, value: Any) -> None:
    own = getattr(target, field.name)
    if hasattr(own, "extend"):
        own.extend(value)
    elif hasattr(own, "CopyFrom"):
        own.CopyFrom(value)
    else:
        setattr(target, field.name, value)


def _nodes(graph: Any) -> int:
    return len(graph.node) + sum(
        _nodes(attribute.g) for node in graph.node for attribute in node.attribute if attribute.HasField("g")
    )


# -- writing -----------------------------------------------------------------------------------------------------------


def code_of(dtype: np.dtype[Any]) -> int:
    """The code that ONNX has for a dtype."""
    return _code(_onnx(), dtype)


def tensor_proto(array: np.ndarray[Any, Any], name: str) -> Any:
    """A tensor of a model."""
    return _onnx().numpy_helper.from_array(array, name)


def node_proto(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], name: str, attributes: dict[str, Any]
) -> Any:
    """A node of a model."""
    return _onnx().helper.make_node(kind, list(inputs), list(outputs), name=name, **attributes)


def written(
    name: str, nodes: list[Any], tensors: list[Any], inputs: Sequence[Any], outputs: Sequence[Any], opset: int
) -> Any:
    """The model of these nodes, checked."""
    onnx = _onnx()

    def declared(value: Any) -> Any:
        code = _code(onnx, value.type.dtype)
        return onnx.helper.make_tensor_value_info(value.name, code, list(value.type.shape))

    declarations = [*map(declared, inputs)], [*map(declared, outputs)]
    graph = onnx.helper.make_graph(nodes, name, *declarations, tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(model)
    return model
