"""Types of NumPy arrays as annotations write them; plain arrays, which have values and no mask; and plain numbers."""

import sys
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def plain_array(what: str, x: Any) -> Array:
    """``np.asarray(x)``. ``TypeError`` for a masked array, whose mask that would drop; ``what`` names it."""
    refuse_masked(what, x)
    return np.asarray(x)


def plain_number(value: Any) -> Any:
    """The number of Python that a number of NumPy is, as from ``for batch in 2 ** np.arange(4)``; all else as it is."""
    return value.item() if isinstance(value, np.number) else value


def with_plain_numbers(record: Any) -> None:
    """The fields of a frozen record that is being made: their numbers are those of Python."""
    for name, value in vars(record).items():
        if isinstance(value, np.number):
            object.__setattr__(record, name, value.item())


def vector_shape(ndim: int, axis: int, extent: Any = -1) -> tuple[Any, ...]:
    """The shape of a vector that lies along dim ``axis`` of ``ndim`` dims: ``extent`` there, and 1 elsewhere."""
    return (*(1,) * axis, extent, *(1,) * (ndim - axis - 1))


def with_extent(shape: Sequence[Any], axis: int, extent: Any) -> tuple[Any, ...]:
    """The shape with another extent of dim ``axis``."""
    return (*shape[:axis], extent, *shape[axis + 1 :])


def reduced_shape(shape: Sequence[Any], axes: Container[int], *, keepdims: bool) -> list[Any]:
    """The shape after a reduction along some dims: with ``keepdims`` these are left with extent 1, else they are gone."""
    extents = []
    for dim, extent in enumerate(shape):
        if dim not in axes:
            extents.append(extent)
        elif keepdims:
            extents.append(1)
    return extents


def distinct(values: Array, axis: int | None = None) -> Array:
    """The different values, ascending; `np.unique` without options would import numpy.ma first, which takes 20 ms."""
    return np.unique(values, return_counts=True, axis=axis)[0]


def refuse_masked(what: str, x: Any) -> None:
    """``TypeError`` for a masked array."""
    # A process that has not imported numpy.ma has no masked arrays, and importing it here would take 10 ms of a kernel.
    if isinstance(x, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise TypeError(
            f"{what} takes an array without a mask, got a masked array; pass x.filled(value), or x.data and x.mask "
            f"as two arrays"
        )
