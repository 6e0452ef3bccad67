"""Operators that pick elements by index, and that sort.  Gradients of one element that was picked twice are summed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from parallelism.arrays import with_extent
from parallelism.ir.core import (
    Extent,
    Operator,
    Rule,
    TensorType,
    along_whole,
    checked_axis,
    first_dtype,
    letters,
    product,
    register,
    rule,
    terms_along,
)
from parallelism.ir.tracing import apply
from parallelism.kernels import lookup_backward


def _check_indices(indices: TensorType) -> None:
    if indices.dtype.kind not in "iu":
        raise TypeError(f"indices must be integers, got {indices.dtype}")


def _take_terms(ndim: int, axis: int, indices: int) -> list[str]:
    """The terms of indices, table and result, for example ``ij``, ``azd`` and ``aijd``."""
    own = letters(ndim - 1 + indices, "z")[ndim - 1 :]
    return [own, *terms_along(ndim, axis, "z", own)]


def _take_rule(x: TensorType, indices: TensorType, axis: int, **_: Any) -> Rule:
    """A part of the dim ``axis`` gives zeros for elements of other parts, so the result is a sum over the parts."""
    _check_indices(indices)
    own, table, out = _take_terms(x.ndim, checked_axis(axis, x.ndim), indices.ndim)
    return rule(f"{table},{own}->{out}", [x.shape, indices.shape])


def _take_gradient_rule(grad: TensorType, indices: TensorType, axis: int, extent: Extent, **_: Any) -> Rule:
    _check_indices(indices)
    ndim = grad.ndim - indices.ndim + 1
    own, table, out = _take_terms(ndim, checked_axis(axis, ndim), indices.ndim)
    return rule(f"{out},{own}->{table}", [grad.shape, indices.shape], {"z": extent})


def places(indices: Any, whole: int) -> Any:
    """Indices from 0 on: a negative one counts from the end.  ``IndexError`` for one that is out of range."""
    if indices.size and not (indices.max() < whole and indices.min() >= -whole):
        wrong = indices[(indices >= whole) | (indices < -whole)].flat[0]
        raise IndexError(f"index {wrong} is out of bounds for a dim of {whole}")
    return np.where(indices < 0, indices + whole, indices)


def _take_part(x: Any, indices: Any, axis: int, first: int, whole: int) -> Any:
    place = places(indices, whole) - first
    here = (place >= 0) & (place < x.shape[axis])
    if not x.shape[axis]:
        return np.zeros((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    taken = np.take(x, np.where(here, place, 0), axis=axis)
    dims_behind = (1,) * (x.ndim - axis - 1)
    here = here.reshape(here.shape + dims_behind)
    return np.where(here, taken, np.zeros((), x.dtype))


def _take_gradient(
    grad: Any, indices: Any, axis: int, extent: int, first: int = 0, whole: int | None = None
) -> Any:
    place = places(indices, extent if whole is None else whole)
    rest = grad.shape[:axis] + grad.shape[axis + indices.ndim :]
    moved = (
        np.moveaxis(grad.reshape(*grad.shape[:axis], -1, *grad.shape[axis + indices.ndim :]), axis, 0)
        if grad.size
        else np.zeros((place.size, *rest), grad.dtype)
    )
    if grad.ndim == indices.ndim:
        return lookup_backward(moved.reshape(-1, 1), place.reshape(-1), extent, first).reshape(-1)
    rows = lookup_backward(moved.reshape(place.size, int(np.prod(rest))), place.reshape(-1), extent, first)
    return np.moveaxis(rows.reshape(extent, *rest), 0, axis)


def _additions(rule: Rule, **_: Any) -> Extent:
    """One for each element that is added to the table."""
    return product(extent for letter, extent in rule.extents.items() if letter != "z")


def _taken_bytes(types: Sequence[TensorType], outputs: Sequence[TensorType]) -> Extent:
    """Only the elements that are taken are read."""
    return types[1].nbytes + 2 * outputs[0].nbytes


def _take_along_rule(x: TensorType, indices: TensorType, axis: int, **_: Any) -> Rule:
    """As of ``take``, a part of the dim ``axis`` gives zeros for elements of other parts."""
    _check_indices(indices)
    table, picked = terms_along(x.ndim, checked_axis(axis, x.ndim), "z", "k")
    return rule(f"{table},{picked}->{picked}", [x.shape, indices.shape])


def _take_along_gradient_rule(
    grad: TensorType, indices: TensorType, axis: int, extent: Extent, **_: Any
) -> Rule:
    _check_indices(indices)
    table, picked = terms_along(grad.ndim, checked_axis(axis, grad.ndim), "z", "k")
    return rule(f"{picked},{picked}->{table}", [grad.shape, indices.shape], {"z": extent})


def _take_along_part(x: Any, indices: Any, axis: int, first: int, whole: int) -> Any:
    place = places(indices, whole) - first
    here = (place >= 0) & (place < x.shape[axis])
    if not x.shape[axis]:
        return np.zeros(with_extent(x.shape, axis, indices.shape[axis]), x.dtype)
    return np.where(here, np.take_along_axis(x, np.where(here, place, 0), axis), np.zeros((), x.dtype))


def _take_along_gradient(
    grad: Any, indices: Any, axis: int, extent: int, first: int = 0, whole: int | None = None
) -> Any:
    place = places(indices, extent if whole is None else whole) - first
    table = np.zeros(with_extent(grad.shape, axis, extent), grad.dtype)
    if whole is not None:
        here = (place >= 0) & (place < extent)
        if not extent:
            return table
        grad, place = np.where(here, grad, np.zeros((), grad.dtype)), np.where(here, place, 0)
    where = list(np.indices(place.shape, sparse=True))
    where[axis] = place
    np.add.at(table, tuple(where), grad)
    return table


def _one_hot_rule(indices: TensorType, extent: Extent, dtype: np.dtype[Any]) -> Rule:
    _check_indices(indices)
    names = letters(indices.ndim, "z")
    return rule(f"{names}->{names}z!", [indices.shape], {"z": extent})


_AXIS = {"axis": "an integer"}
_AXIS_OF = {"axis": "an integer", "extent": "an extent"}

_PART = {"first": "an extent", "whole": "an extent"}


def _register_picking(
    kind: str,
    rules: tuple[Callable[..., Rule], Callable[..., Rule]],
    kernel: Callable[..., Any],
    of_part: Callable[..., Any],
    gradient: Callable[..., Any],
    nbytes: Callable[[Sequence[TensorType], Sequence[TensorType]], Extent] | None = None,
) -> None:
    """Registers an operator that picks elements along a dim, and its gradient; and both for a part of that dim.

    ``rules`` and kernels are those of the operator and of its ``gradient``, which adds to a table of zeros.  Those of a
    ``kind_part`` have the place of the part, ``first``, in a dim of ``whole`` elements.
    """
    for part in ("", "_part"):
        picks, adds = f"{kind}{part}", f"{kind}_gradient{part}"
        more = _PART if part else {}
        register(
            Operator(
                picks,
                rules[0],
                first_dtype,
                of_part if part else kernel,
                partial(_picked_derivative, adds),
                attributes={**_AXIS, **more},
                linear=(0,),
                grows=True,
                nbytes=nbytes,
                indexed="z",
                part=None if part else f"{picks}_part",
            )
        )
        register(
            Operator(
                adds,
                rules[1],
                first_dtype,
                gradient,
                partial(_added_derivative, picks),
                _additions,
                {**_AXIS_OF, **more},
                linear=(0,),
                grows=True,
                indexed="z",
                part=None if part else f"{adds}_part",
            )
        )


def _picked_derivative(adds: str, g: Any, y: Any, x: Any, indices: Any, axis: int, **part: Any) -> list[Any]:
    return [apply(adds, g, indices, axis=axis, extent=x.shape[axis], **part), None]


def _added_derivative(
    picks: str, g: Any, y: Any, x: Any, indices: Any, axis: int, extent: Any, **part: Any
) -> list[Any]:
    return [apply(picks, g, indices, axis=axis, **part), None]


_register_picking(
    "take",
    (_take_rule, _take_gradient_rule),
    lambda x, indices, axis: np.take(x, indices, axis=axis),
    _take_part,
    _take_gradient,
    _taken_bytes,
)
_register_picking(
    "take_along",
    (_take_along_rule, _take_along_gradient_rule),
    lambda x, indices, axis: np.take_along_axis(x, indices, axis),
    _take_along_part,
    _take_along_gradient,
)
register(
    Operator(
        "one_hot",
        _one_hot_rule,
        lambda indices, extent, dtype: dtype,
        lambda indices, extent, dtype: (indices[..., None] == np.arange(extent)).astype(dtype),
        attributes={"extent": "an extent", "dtype": "a dtype"},
    )
)


# -- sorting -----------------------------------------------------------------------------------------------------------


register(
    Operator(
        "sort",
        along_whole,
        first_dtype,
        lambda x, axis: np.sort(x, axis=axis),
        lambda g, y, x, axis: [
            apply("take_along_gradient", g, apply("argsort", x, axis=axis), axis=axis, extent=x.shape[axis])
        ],
        1,
        _AXIS,
    )
)
register(
    Operator(
        "argsort",
        along_whole,
        lambda x, axis: np.dtype(np.int64),
        lambda x, axis: np.argsort(x, axis=axis, kind="stable"),
        None,
        1,
        _AXIS,
    )
)
