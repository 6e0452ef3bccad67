"""``scatter(x, indices, updates)``: ``x`` with updates put in, added, or combined in another way, at indices of a dim.

    y = x.copy();  y[indices[j]] = y[indices[j]] combined with updates[j],  for each j in order

``indices`` has one dim.  An index that is out of range is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.arrays import vector_shape
from parallelism.ir.core import (
    Operator,
    Rule,
    TensorType,
    checked_axis,
    first_dtype,
    register,
    rule,
    terms_along,
)
from parallelism.ir.core.extents import Extent
from parallelism.ir.tracing.tracing import apply

_COMBINE: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "set": None,
}


def _rule(x: TensorType, indices: TensorType, updates: TensorType, axis: int, op: str) -> Rule:
    if op not in _COMBINE:
        raise ValueError(f"op must be one of {', '.join(_COMBINE)}, got {op!r}")
    if indices.dtype.kind not in "iu" or indices.ndim != 1:
        raise TypeError(f"indices must be integers of one dim, got {indices}")
    if updates.dtype != x.dtype:
        raise TypeError(f"updates must have the dtype of the array, {x.dtype}, got {updates.dtype}")
    table, new = terms_along(x.ndim, checked_axis(axis, x.ndim), "z!", "k!")
    return rule(f"{table},k!,{new}->{table}", [x.shape, indices.shape, updates.shape])


def _scatter(x: Any, indices: Any, updates: Any, axis: int, op: str) -> Any:
    y = np.array(x, order="C")
    here = (indices >= 0) & (indices < x.shape[axis])
    key = (slice(None),) * axis
    places, values = indices[here], updates[(*key, here)]
    if _COMBINE[op] is None:
        y[(*key, places)] = values
    else:
        _COMBINE[op].at(y, (*key, places), values)
    return y


def _taken(g: Any, indices: Any, axis: int) -> Any:
    """The gradient at the indices; 0 for one that is out of range."""
    return apply("take_part", g, np.maximum(indices, 0), axis=axis, first=0, whole=2**62) * (
        indices >= 0
    ).astype(g.dtype).reshape(vector_shape(g.ndim, axis))


def _is_last(indices: Any, extent: Extent) -> Any:
    """Whether no later index is the same: of several updates that are set at one place, the last one stays."""
    places = apply("iota", dim=0, shape=indices.shape, starts=(0,), dtype=np.dtype(np.int64))
    none = apply("constant", value=-1, shape=(extent,), dtype=np.dtype(np.int64))
    stays = apply("scatter", none, indices, places, axis=0, op="set")
    return apply("take_part", stays, np.maximum(indices, 0), axis=0, first=0, whole=2**62) == places


def _derivative(g: Any, y: Any, x: Any, indices: Any, updates: Any, axis: int, op: str) -> list[Any]:
    if op == "sum":
        return [g, None, _taken(g, indices, axis)]
    if op in ("max", "min"):
        return _extreme_derivative(g, y, x, indices, updates, axis)
    if op == "prod":
        return _product_derivative(g, x, indices, updates, axis)
    if op == "set":
        none = apply("constant", value=0, shape=updates.shape, dtype=updates.dtype)
        last = _is_last(indices, x.shape[axis]).astype(g.dtype).reshape(vector_shape(g.ndim, axis))
        return [
            apply("scatter", g, indices, none, axis=axis, op="set"),
            None,
            _taken(g, indices, axis) * last,
        ]
    raise ValueError(f"scatter by {op} has no derivative")


def _extreme_derivative(g: Any, y: Any, x: Any, indices: Any, updates: Any, axis: int) -> list[Any]:
    """All that are as large as the extreme of a place have equal shares of its gradient."""
    stays = (x == y).astype(g.dtype)
    wins = (updates == _taken(y, indices, axis)).astype(g.dtype)
    share = g / apply("scatter", stays, indices, wins, axis=axis, op="sum")
    return [share * stays, None, _taken(share, indices, axis) * wins]


def _product_derivative(g: Any, x: Any, indices: Any, updates: Any, axis: int) -> list[Any]:
    """The gradient of a factor is the product of the others of its place; no factor is divided by that is 0."""
    others = apply("scatter", g, indices, updates, axis=axis, op="prod")
    zero = updates == 0
    product = apply("scatter", g * x, indices, np.where(zero, 1, updates), axis=axis, op="prod")
    none = apply("constant", value=0, shape=x.shape, dtype=g.dtype)
    zeros = apply("scatter", none, indices, zero.astype(g.dtype), axis=axis, op="sum")
    alone = np.where(zero, _taken(zeros, indices, axis) == 1, _taken(zeros, indices, axis) == 0)
    own = np.where(zero, 1, updates)
    return [others, None, _taken(product, indices, axis) / own * alone.astype(g.dtype)]


def _nbytes(types: Sequence[TensorType], outputs: Sequence[TensorType]) -> Extent:
    """The array is read and written once, the updates are read and their places read and written."""
    x, indices, updates = types
    return 2 * x.nbytes + indices.nbytes + 3 * updates.nbytes


register(
    Operator(
        "scatter",
        _rule,
        first_dtype,
        _scatter,
        _derivative,
        attributes={"axis": "an integer", "op": "a string"},
        nbytes=_nbytes,
    )
)
