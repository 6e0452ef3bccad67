"""`TypedArray`: the shape and the dtype of an array, without its numbers; and what makes the arrays of a program.

A program runs on any device.  Where the device has numbers, its arrays are NumPy's and an op is run by its kernel.  A
device that only records (`parallelism.simulation.typed_device`) makes the arrays itself: then an op has results that
are types.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from parallelism.dtypes import as_dtype, common_dtype
from parallelism.ir.core import Op, TensorType, resolved


@runtime_checkable
class ArrayMaker(Protocol):
    """Makes the arrays of a program on one device."""

    def full(self, shape: Sequence[int], value: float, dtype: npt.DTypeLike) -> Any:
        """An array of this shape in which every element is ``value``."""

    def run_op(self, op: Op, inputs: Sequence[Any], into: Sequence[Any] = ()) -> Sequence[Any]:
        """The outputs of an op on this device.  **Communication**: that of the op.

        ``into`` has, for each output, the array in whose memory it is to lie, or None; empty: all are None.
        """

    def start(self, call: Op, ops: Sequence[Op], inputs: Sequence[Any], *, at_once: bool = False) -> Any:
        """Starts collectives, each with one input, as one call; ``at_once``: returns when they are over."""

    def wait(self, work: Any, into: Sequence[Any] = ()) -> Sequence[Any]:
        """The outputs of collectives that were started; ``into`` as in `run_op`."""


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name


class TypedArray(NDArrayOperatorsMixin):
    """An array of this shape and dtype that has no numbers and takes no memory.

    It may be added, joined, cut and reshaped as NumPy's arrays are.  ``TypeError`` where its numbers are asked for.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Sequence[Any], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = tuple(shape), as_dtype(dtype)

    @classmethod
    def of(cls, type: TensorType) -> TypedArray:
        """An array of this type, which has no symbols."""
        array = cls.__new__(cls)
        array.shape, array.dtype = type.shape, type.dtype
        return array

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that its elements would take."""
        return self.size * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The name of the dtype, which NumPy does not store."""
        return _name(self.dtype)

    def reshape(self, *shape: Any) -> TypedArray:
        """An array of as many elements.  ``ValueError`` if there are not as many."""
        extents = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if prod(extents) != self.size:
            raise ValueError(f"cannot reshape {self!r} into shape {list(extents)}")
        return TypedArray(extents, self.dtype)

    def ravel(self) -> TypedArray:
        """The type of the elements in one dim."""
        return TypedArray((self.size,), self.dtype)

    def copy(self) -> TypedArray:
        """Itself: it has nothing that could be written."""
        return self

    def view(self, dtype: npt.DTypeLike) -> TypedArray:
        """The bytes of a flat array as elements of another dtype."""
        return TypedArray((self.nbytes // as_dtype(dtype).itemsize,), dtype)

    def __getitem__(self, part: slice | tuple[slice, ...]) -> TypedArray:
        parts = part if isinstance(part, tuple) else (part,)
        cut = [len(range(*each.indices(n))) for each, n in zip(parts, self.shape, strict=False)]
        return TypedArray((*cut, *self.shape[len(cut) :]), self.dtype)

    def __setitem__(self, part: Any, value: Any) -> None:
        """Nothing: it has no numbers that could be written."""

    def __repr__(self) -> str:
        return f"TypedArray({list(self.shape)}, {self.dtype})"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self!r} has no numbers")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or ufunc.nout != 1:
            return NotImplemented
        if options.get("out"):
            return options["out"][0]
        given: list[Any] = [getattr(x, "dtype", type(x)) for x in inputs]
        dtype = resolved(ufunc, *given)[-1]
        return TypedArray(np.broadcast_shapes(*(getattr(x, "shape", ()) for x in inputs)), dtype)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        match function.__name__:
            case "concatenate":
                parts = args[0]
                length = sum(part.shape[0] for part in parts)
                return TypedArray(
                    (length, *parts[0].shape[1:]), common_dtype(*(part.dtype for part in parts))
                )
            case "ravel" | "reshape" if not options:
                return getattr(self, function.__name__)(*args[1:])
        return NotImplemented
