"""Annotation of values with layouts, by name in an existing program, or in NumPy code that is recorded."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parallelism.display.quantities import cut
from parallelism.ir.core import Function, Op, Value
from parallelism.ir.core.derived import laid_value, with_values
from parallelism.ir.core.printing import names
from parallelism.ir.operators import layout_text
from parallelism.ir.tracing.tracing import apply
from parallelism.sharding import TensorSharding
from parallelism.spelling import did_you_mean

Layout = TensorSharding | str | None
Layouts = Mapping[str, Layout] | Mapping[Value, Layout] | Mapping[str | Value, Layout]
"""Layouts by the names of values, by the values, or by both."""


def annotate(function: Function, layouts: Layouts) -> Function:
    """The function with these layouts, given by the names of values.  None removes a layout.

    ``ValueError`` for a value that does not exist, and for a layout with a wrong number of dims.
    """
    given: dict[str, TensorSharding | None] = {}
    known = {value.name for value in function.values}
    for key, layout in layouts.items():
        name = key.name if isinstance(key, Value) else key
        if name not in known:
            near = did_you_mean(name, (value.name for value in function.inputs))
            listed = cut(names(function.inputs), 300) or "none"
            raise ValueError(f"@{function.name} has no value %{name}; its inputs are {listed}{near}")
        given[name] = None if layout is None else TensorSharding.of(layout, name=f"the layout of %{name}")
    return laid_out(function, given)


def laid_out(function: Function, layouts: Mapping[str, TensorSharding | None]) -> Function:
    """The function with these layouts, by names of values.  Other values keep theirs.

    A `redistribute` whose result gets another layout is one to that layout.
    """
    if not layouts:
        return function
    values = {value.name: value for value in function.values}
    for name, value in values.items():
        if name in layouts:
            values[name] = laid_value(value, layouts[name])
    laid = with_values(function, values)
    moved: dict[int, Op] = {}
    for number, op in enumerate(laid.ops):
        if op.kind == "reshard" and op.outputs[0].name in layouts:
            layout = op.outputs[0].layout
            if layout is not None and layout_text(layout) != op["layout"]:
                moved[number] = replace(op, attributes=(("layout", layout_text(layout)),))
    if not moved:
        return laid
    return replace(laid, ops=tuple(moved.get(number, op) for number, op in enumerate(laid.ops)))


def redistribute(x: Any, layout: TensorSharding | str) -> Any:
    """``x`` in this layout, in code that `parallelism.ir.record` records; on arrays ``x`` as it is.

    It is the op ``reshard``: what computes ``x`` may lie otherwise, and the plan from there to ``layout`` is what it
    communicates.  The gradient is brought into the layout, too, without a pending reduction.  A dim that stands as None
    is whole; ``...`` stands for dims that are.  A transform that splits the batch splits the dim here, too.

    ``ValueError`` for a layout with a wrong number of dims.
    """
    given = TensorSharding.of(layout)
    return apply("reshard", x, layout=layout_text(given.over(x.ndim)))
