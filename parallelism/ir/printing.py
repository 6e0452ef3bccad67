"""A program as text, in the manner of MLIR's generic form: a line an op, every type written out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelism.ir.extents import Expression
from parallelism.ir.types import DTYPE_NAMES

if TYPE_CHECKING:
    from parallelism.ir.function import Function, Op


def print_function(function: Function) -> str:
    """The text that `parallelism.ir.parse` reads back."""
    inputs = ", ".join(f"%{value.name}: {value.type}" for value in function.inputs)
    outputs = ", ".join(str(value.type) for value in function.outputs)
    returned = ", ".join(f"%{value.name}" for value in function.outputs)
    lines = [f"func @{function.name}({inputs}) -> ({outputs}) {{", *(f"  {print_op(op)}" for op in function.ops)]
    return "\n".join([*lines, f"  return {returned}".rstrip(), "}"]) + "\n"


def print_op(op: Op) -> str:
    """One line of it."""
    outputs = ", ".join(f"%{value.name}" for value in op.outputs)
    inputs = ", ".join(f"%{value.name}" for value in op.inputs)
    types = ", ".join(str(value.type) for value in op.inputs)
    results = ", ".join(str(value.type) for value in op.outputs)
    if len(op.outputs) != 1:
        results = f"({results})"
    attributes = ", ".join(f"{name} = {print_attribute(value)}" for name, value in op.attributes)
    braces = f" {{{attributes}}}" if attributes else ""
    equals = f"{outputs} = " if outputs else ""
    return f"{equals}{json.dumps(op.kind)}({inputs}){braces} : ({types}) -> {results}"


def print_attribute(value: Any) -> str:
    """The value of an attribute."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | Expression):
        return str(value)
    if isinstance(value, np.dtype):
        return DTYPE_NAMES[value]
    if isinstance(value, str):
        return json.dumps(value)
    return f"[{', '.join(map(print_attribute, value))}]"
