"""Operators that pick elements by index, and that sort.  Gradients of one element that was picked twice are summed."""

from typing import Any

import numpy as np

from parallelism.ir.core import (
    Extent,
    Operator,
    Rule,
    TensorType,
    along_whole,
    checked_axis,
    first_dtype,
    letters,
    register,
    rule,
    terms_along,
)
from parallelism.ir.tracing import apply
from parallelism.kernels import lookup_backward


def _check_indices(indices: TensorType) -> None:
    if indices.dtype.kind not in "iu":
        raise TypeError(f"indices must be integers, got {indices.dtype}")


def _take_terms(indices: TensorType, ndim: int, axis: int) -> list[str]:
    """The terms of indices, table and result, for example ``ij``, ``az!d`` and ``aijd``."""
    _check_indices(indices)
    own = letters(ndim - 1 + indices.ndim, "z")[ndim - 1:]
    return [own, *terms_along(ndim, checked_axis(axis, ndim), "z!", own)]


def _take_rule(x: TensorType, indices: TensorType, axis: int) -> Rule:
    own, table, out = _take_terms(indices, x.ndim, axis)
    return rule(f"{table},{own}->{out}", [x.shape, indices.shape])


def _take_gradient_rule(grad: TensorType, indices: TensorType, axis: int, extent: Extent) -> Rule:
    own, table, out = _take_terms(indices, grad.ndim - indices.ndim + 1, axis)
    return rule(f"{out},{own}->{table}", [grad.shape, indices.shape], {"z": extent})


def _take_gradient(grad: Any, indices: Any, axis: int, extent: int) -> Any:
    places = np.where(indices < 0, indices + extent, indices)
    rest = grad.shape[:axis] + grad.shape[axis + indices.ndim:]
    moved = np.moveaxis(grad.reshape(*rest[:axis], places.size, *rest[axis:]), axis, 0)
    rows = lookup_backward(moved.reshape(places.size, int(np.prod(rest))), places.reshape(-1), extent)
    return np.moveaxis(rows.reshape(extent, *rest), 0, axis)


def _take_along_rule(x: TensorType, indices: TensorType, axis: int) -> Rule:
    _check_indices(indices)
    table, picked = terms_along(x.ndim, checked_axis(axis, x.ndim), "z!", "k")
    return rule(f"{table},{picked}->{picked}", [x.shape, indices.shape])


def _take_along_gradient_rule(grad: TensorType, indices: TensorType, axis: int, extent: Extent) -> Rule:
    _check_indices(indices)
    table, picked = terms_along(grad.ndim, checked_axis(axis, grad.ndim), "z!", "k")
    return rule(f"{picked},{picked}->{table}", [grad.shape, indices.shape], {"z": extent})


def _take_along_gradient(grad: Any, indices: Any, axis: int, extent: int) -> Any:
    table = np.zeros((*grad.shape[:axis], extent, *grad.shape[axis + 1:]), grad.dtype)
    places = list(np.indices(indices.shape, sparse=True))
    places[axis] = indices
    np.add.at(table, tuple(places), grad)
    return table


def _one_hot_rule(indices: TensorType, extent: Extent, dtype: np.dtype[Any]) -> Rule:
    _check_indices(indices)
    names = letters(indices.ndim, "z")
    return rule(f"{names}->{names}z!", [indices.shape], {"z": extent})


_AXIS = {"axis": "an integer"}
_AXIS_OF = {"axis": "an integer", "extent": "an extent"}

register(Operator("take", _take_rule, first_dtype, lambda x, indices, axis: np.take(x, indices, axis=axis),
                  lambda g, y, x, indices, axis: [
                      apply("take_gradient", g, indices, axis=axis, extent=x.shape[axis]), None
                  ], attributes=_AXIS, linear=(0,), grows=True))
register(Operator("take_gradient", _take_gradient_rule, first_dtype, _take_gradient,
                  lambda g, y, x, indices, axis, extent: [apply("take", g, indices, axis=axis), None], 1, _AXIS_OF,
                  linear=(0,), grows=True))
register(Operator("take_along", _take_along_rule, first_dtype,
                  lambda x, indices, axis: np.take_along_axis(x, indices, axis),
                  lambda g, y, x, indices, axis: [
                      apply("take_along_gradient", g, indices, axis=axis, extent=x.shape[axis]), None
                  ], attributes=_AXIS, linear=(0,), grows=True))
register(Operator("take_along_gradient", _take_along_gradient_rule, first_dtype, _take_along_gradient,
                  lambda g, y, x, indices, axis, extent: [apply("take_along", g, indices, axis=axis), None], 1,
                  _AXIS_OF, linear=(0,), grows=True))
register(Operator("one_hot", _one_hot_rule, lambda indices, extent, dtype: dtype,
                  lambda indices, extent, dtype: (indices[..., None] == np.arange(extent)).astype(dtype),
                  attributes={"extent": "an extent", "dtype": "a dtype"}))


# -- sorting -----------------------------------------------------------------------------------------------------------


register(Operator(
    "sort", along_whole, first_dtype, lambda x, axis: np.sort(x, axis=axis),
    lambda g, y, x, axis: [
        apply("take_along_gradient", g, apply("argsort", x, axis=axis), axis=axis, extent=x.shape[axis])
    ], 1, _AXIS,
))
register(Operator(
    "argsort", along_whole, lambda x, axis: np.dtype(np.int64), lambda x, axis: np.argsort(x, axis=axis, kind="stable"),
    None, 1, _AXIS,
))
