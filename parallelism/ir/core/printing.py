"""The text of a program, in the manner of MLIR's generic form: one line for each op, every type written out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.ir.core.extents import Expression
from parallelism.ir.core.types import dtype_text

if TYPE_CHECKING:
    from parallelism.ir.core.function import Function, Op, Value
    from parallelism.sharding import TensorSharding

PLAIN = re.compile(r"(?!None\b)[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
"""Axis names that a layout writes without quotes."""


def print_function(function: Function) -> str:
    """The text of a function; `parallelism.ir.parse` reads it back."""
    inputs = ", ".join(map(print_value, function.inputs))
    outputs = ", ".join(map(print_type, function.outputs))
    attributes = f" attributes {print_attributes(function.attributes)}" if function.attributes else ""
    return "\n".join(
        [
            f"func @{function.name}({inputs}) -> ({outputs}){attributes} {{",
            *(f"  {print_op(op)}" for op in function.ops),
            f"  return {names(function.outputs)}".rstrip(),
            "}\n",
        ]
    )


def names(values: Iterable[Value]) -> str:
    """The names of values, each with its %."""
    return ", ".join(f"%{value.name}" for value in values)


def print_op(op: Op) -> str:
    """The line of one op."""
    types = ", ".join(str(value.type) for value in op.inputs)
    results = ", ".join(map(print_type, op.outputs))
    braces = f" {print_attributes(op.attributes)}" if op.attributes else ""
    equals = f"{names(op.outputs)} = " if op.outputs else ""
    returned = results if len(op.outputs) == 1 else f"({results})"
    region = "" if op.region is None else f' region="{op.region}"'
    return f"{equals}{json.dumps(op.kind)}({names(op.inputs)}){braces} : ({types}) -> {returned}{region}"


def print_value(value: Value) -> str:
    """The text of an input: its name, its type, and its layout if it has one."""
    return f"%{value.name}: {print_type(value)}"


def print_type(value: Value) -> str:
    """The type of a value, and its layout if it has one."""
    return str(value.type) if value.layout is None else f"{value.type} {print_layout(value.layout)}"


def print_layout(layout: TensorSharding) -> str:
    """The layout as `TensorSharding.short` writes it.  Axis names that are not plain words are quoted."""
    op = f", op={layout.op}" if layout.op != "sum" else ""
    partial = f" partial={_axes(layout.partial)}{op}" if layout.partial else ""
    return f"[{', '.join(_axes(dim.axes) for dim in layout.dims)}]{partial}"


def _axes(axes: tuple[str, ...]) -> str:
    text = ", ".join(map(_axis, axes))
    return f"({text})" if len(axes) > 1 else text or "None"


def _axis(name: str) -> str:
    return name if PLAIN.fullmatch(name) else json.dumps(name)


def print_attributes(attributes: Iterable[tuple[str, Any]]) -> str:
    """The text of attributes, in braces."""
    return f"{{{', '.join(f'{name} = {print_attribute(value)}' for name, value in attributes)}}}"


def print_attribute(value: Any) -> str:
    """The text of an attribute's value."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | Expression):
        return str(value)
    if isinstance(value, np.dtype):
        return str(dtype_text(value))
    if isinstance(value, str):
        return json.dumps(value)
    return f"[{', '.join(map(print_attribute, value))}]"
