"""Tokens in the order in which context parallelism deals them (`parallelism.kernels.token_order`).

``token_order`` gives the position of each token along a dim: in a program that is laid out, those of a zigzag over the
devices along some axes; before that the plain ones.  ``arranged`` picks the elements at these positions.  What it picks
from is whole on each device, and its result is split as the order is: so each device takes its own tokens, and nothing
is communicated.  The gradients of what was picked are sums over the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parallelism.arrays import with_extent
from parallelism.ir.core import (
    Extent,
    Operator,
    Rule,
    Shape,
    TensorType,
    checked_axis,
    first_dtype,
    product,
    register,
    rule,
    terms_along,
)
from parallelism.ir.operators.shapes import created
from parallelism.ir.tracing import apply
from parallelism.kernels.token_order import TokenOrder, positions_of

ORDER = {"order": "a string"}
"""The optional attribute of operators that depend on the positions of tokens: empty for the plain order."""


def _order_rule(shape: Shape, starts: Shape, order: str) -> Rule:
    TokenOrder.parse(order)
    if len(shape) != 1:
        raise ValueError(f"an order has one dim, got {len(shape)}")
    return created(shape, starts)


def _terms(ndim: int, axis: int) -> tuple[str, str]:
    """The terms of what is picked from, and of the result: ``az!d`` and ``akd``."""
    table, out = terms_along(ndim, checked_axis(axis, ndim), "z!", "k")
    return table, out


def _check_order(order: TensorType) -> None:
    if order.ndim != 1 or order.dtype.kind != "i":
        raise TypeError(f"the order must be a row of integers, got {order}")


def _arranged_rule(x: TensorType, order: TensorType, axis: int) -> Rule:
    _check_order(order)
    table, out = _terms(x.ndim, axis)
    return rule(f"{table},k->{out}", [x.shape, order.shape])


def _gradient_rule(grad: TensorType, order: TensorType, axis: int, extent: Extent) -> Rule:
    _check_order(order)
    table, out = _terms(grad.ndim, axis)
    return rule(f"{out},k->{table}", [grad.shape, order.shape], {"z": extent})


def _gradient(grad: Any, order: Any, axis: int, extent: int) -> Any:
    found = np.zeros(with_extent(grad.shape, axis, extent), grad.dtype)
    np.add.at(found, (slice(None),) * axis + (order,), grad)
    return found


def _taken_bytes(types: Sequence[TensorType], outputs: Sequence[TensorType]) -> Extent:
    """Only the elements that are taken are read."""
    return types[1].nbytes + 2 * outputs[0].nbytes


register(
    Operator(
        "token_order",
        _order_rule,
        lambda shape, starts, order: np.dtype(np.int64),
        lambda shape, starts, order: positions_of(order, 0, starts[0], shape[0]).astype(np.int64),
        attributes={"shape": "a shape", "starts": "a shape", **ORDER},
    )
)
register(
    Operator(
        "arranged",
        _arranged_rule,
        first_dtype,
        lambda x, order, axis: np.take(x, order, axis=axis),
        lambda g, y, x, order, axis: [
            apply("arranged_gradient", g, order, axis=axis, extent=x.shape[axis]),
            None,
        ],
        attributes={"axis": "an integer"},
        linear=(0,),
        grows=True,
        nbytes=_taken_bytes,
    )
)
register(
    Operator(
        "arranged_gradient",
        _gradient_rule,
        first_dtype,
        _gradient,
        lambda g, y, x, order, axis, extent: [apply("arranged", g, order, axis=axis), None],
        lambda of, **_: product(extent for letter, extent in of.extents.items() if letter != "z"),
        {"axis": "an integer", "extent": "an extent"},
        linear=(0,),
        grows=True,
    )
)
