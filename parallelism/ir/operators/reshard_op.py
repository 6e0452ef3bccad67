"""Operators that change the layout of a value.

``reshard`` belongs to the program of whole tensors: its output has the given layout.  In one process it does nothing.
`parallelism.layouts.redistribute` writes it in code that is recorded.
``all_slice`` and ``relayout`` belong to the program of one device (`parallelism.layouts.localize`): the first keeps a
slice of a local shard, the second runs one step of a resharding plan that is no collective along one dim.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from parallelism.ir.core import (
    Extent,
    Operator,
    Rule,
    TensorType,
    elementwise,
    first_dtype,
    register,
    shape_text,
)
from parallelism.ir.operators.collectives import alone, changed, check_group, with_shape
from parallelism.sharding import TensorSharding


@lru_cache(maxsize=4096)
def layout_text(layout: TensorSharding) -> str:
    """The layout as attributes of these ops write it: short, or as a repr if `TensorSharding.parse` needs that."""
    short = layout.short()
    try:
        parsed = TensorSharding.parse(short)
    except ValueError:
        return repr(layout)
    return short if parsed == layout else repr(layout)


STEPS = ("slice", "all_gather", "permute", "reduce_scatter", "exchange")


def _reshard_rule(x: TensorType, layout: str) -> Rule:
    TensorSharding.parse(layout).over(x.ndim)
    return elementwise([x.shape])


def _relayout_rule(
    x: TensorType,
    step: str,
    axes: Any,
    group: Extent,
    before: str,
    after: str,
    whole: Sequence[Extent],
    shape: Sequence[Extent],
    received: Extent,
) -> Rule:
    """A dim whose split does not change keeps its letter."""
    check_group(group)
    if step not in STEPS:
        raise ValueError(f"a step must be one of {', '.join(STEPS)}, got {step!r}")
    if not len(whole) == len(shape) == x.ndim:
        raise ValueError(
            f"whole, shape and the input must have equally many dims, got {shape_text(whole)}, "
            f"{shape_text(shape)} and {x}"
        )
    old, new = (TensorSharding.parse(text).over(x.ndim).dims for text in (before, after))
    moves = [a != b or n != m for a, b, n, m in zip(old, new, x.shape, shape, strict=True)]
    return with_shape(x, shape, moves)


register(
    Operator(
        "reshard",
        _reshard_rule,
        first_dtype,
        lambda x, layout: x,
        lambda g, y, x, layout: [g],
        attributes={"layout": "a string"},
        view=True,
        linear="moves",
        lays=lambda layout: TensorSharding.parse(layout),
    )
)
register(
    Operator(
        "all_slice",
        lambda x, axes, group, dim, extent: changed(x, dim, extent, group),
        first_dtype,
        alone("all_slice"),
        attributes={
            "axes": "a list of strings",
            "group": "an extent",
            "dim": "an integer",
            "extent": "an extent",
        },
    )
)
register(
    Operator(
        "relayout",
        _relayout_rule,
        first_dtype,
        alone("relayout"),
        attributes={
            "step": "a string",
            "axes": "a list of strings",
            "group": "an extent",
            "before": "a string",
            "after": "a string",
            "whole": "a shape",
            "shape": "a shape",
            "received": "an extent",
        },
        received=lambda x, received, **_: received,
    )
)
