"""Saying how values lie: by name in a program that is there, or in the NumPy that a program is recorded from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from parallelism.ir.core import Function, Op, Value
from parallelism.ir.operators.reshard_op import written
from parallelism.ir.tracing.tracing import apply
from parallelism.sharding import TensorSharding


def annotate(function: Function, layouts: Mapping[str | Value, TensorSharding | str | None]) -> Function:
    """The function with these layouts, by the names of values; None takes one away.

    ``ValueError`` for a value that is not there and a layout of another number of dims.
    """
    given: dict[str, TensorSharding | None] = {}
    known = {value.name for value in function.values}
    for key, layout in layouts.items():
        name = key.name if isinstance(key, Value) else key
        if name not in known:
            raise ValueError(f"@{function.name} has no value %{name}; its inputs are "
                             f"{', '.join(f'%{value.name}' for value in function.inputs) or 'none'}")
        given[name] = TensorSharding.parse(layout) if isinstance(layout, str) else layout
    return laid_out(function, given)


def laid_out(function: Function, layouts: Mapping[str, TensorSharding | None]) -> Function:
    """The function with these layouts, by name; other values keep theirs."""
    values = {
        value.name: Value(value.name, value.type, layouts[value.name]) if value.name in layouts else value
        for value in function.values
    }

    def laid(side: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(values[value.name] for value in side)

    ops = tuple(Op(op.kind, laid(op.inputs), op.attributes, laid(op.outputs), op.region) for op in function.ops)
    return replace(function, inputs=laid(function.inputs), ops=ops, outputs=laid(function.outputs))


def constrain(x: Any, layout: TensorSharding | str) -> Any:
    """``x``, which lies so from here on, and its gradient too: an annotation inside of what `parallelism.ir.record`
    records.  Arrays are returned as they are."""
    given = TensorSharding.parse(layout) if isinstance(layout, str) else layout
    return apply("reshard", x, layout=written(given.over(x.ndim)))
