"""Arrays of a program that is being read: known numbers, or values of the program.

An operator on known numbers is computed at once, so that trip counts, shapes and indices are numbers where the program
fixes them.  Results of more than `MOST_FOLDED` elements are left to the program.

A `Spread` is an array that is broadcast later: many programs broadcast each scalar and each bias before they use it,
and elementwise operators of the IR broadcast anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.interop.errors import UnsupportedError
from parallelism.ir.core import Expression, Extent, TensorType, frozen_attributes, meaning, operator
from parallelism.ir.core.extents import largest
from parallelism.ir.tracing import Traced
from parallelism.ir.tracing.current import current

MOST_FOLDED = 64
MOST_CONSTANT = 2**18
"""The largest number of different elements that a constant of a program may have."""

Known = np.ndarray[Any, Any]
Plain = Known | Traced
"""An array as it is: with numbers, or recorded."""


@dataclass(frozen=True, eq=False)
class Spread:
    """``array``, broadcast to ``shape``; it has as many dims."""

    array: Plain
    shape: tuple[Extent, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


Some = Known | Traced | Spread


def unspread(x: Some) -> Plain:
    """The array that a `Spread` broadcasts; any other ``x`` as it is."""
    return x.array if isinstance(x, Spread) else x


def emit(kind: str, *operands: Plain, **attributes: Any) -> Any:
    """The result of an operator: numbers where all operands are known and the result is small, else recorded.

    ``ValueError`` or ``TypeError`` for operands that do not fit.
    """
    builder = current()
    assert builder is not None
    given = frozen_attributes(attributes)
    operands = tuple(recorded(x) if x.dtype == object else x for x in operands)
    if not any(isinstance(x, Traced) for x in operands):
        types = tuple(TensorType(x.dtype, x.shape) for x in operands)
        outputs = meaning(kind, types, given).outputs
        if all(map(_is_small, outputs)) and kind not in ("all_reduce",):
            with np.errstate(all="ignore"):
                found = operator(kind).run([np.asarray(x) for x in operands], given)
            return tuple(map(np.asarray, found)) if isinstance(found, tuple) else np.asarray(found)
    values = [recorded(x).value for x in operands]
    results = tuple(Traced(builder, value) for value in builder.emit(kind, values, dict(given)))
    return results[0] if len(results) == 1 else results


def _is_small(x: TensorType) -> bool:
    """Whether an array has few numbers, and no extent with a symbol; beside an extent of zero even such a size is known."""
    known = [n for n in x.shape if isinstance(n, int)]
    return len(known) == x.ndim and prod(known) <= MOST_FOLDED


def recorded(x: Plain) -> Traced:
    """``x`` as a value of the program; numbers become a constant, and objects (extents with symbols) int64."""
    if isinstance(x, Traced):
        return x
    builder = current()
    assert builder is not None
    array = np.asarray(x)
    if array.dtype == object and array.size == 1:
        number = array.flat[0]
        return recorded_op("constant", value=number, shape=array.shape, dtype=np.dtype(np.int64))
    if array.dtype == object:
        each = [recorded_op("constant", value=n, shape=(1,), dtype=np.dtype(np.int64)) for n in array.flat]
        return recorded_op("reshape", recorded_op("concatenate", *each, axis=0), shape=array.shape)
    if is_floating(array.dtype) and np.isnan(array).any():  # no attribute may be nan
        words = np.dtype(f"uint{8 * array.dtype.itemsize}")
        return recorded_op(
            "bitcast",
            recorded(np.array(array, order="C").reshape(-1).view(words).reshape(array.shape)),
            dtype=array.dtype,
        )
    same = (
        array.size > 0
        and bool((array == array.flat[0]).all())
        and not (
            is_floating(array.dtype)
            and bool(np.signbit(array.astype(np.float64)).any() and not array.flat[0])
        )
    )
    if not same and array.size > MOST_CONSTANT:
        raise UnsupportedError(
            f"a constant of shape {list(array.shape)} is too large: at most {MOST_CONSTANT} "
            "different numbers are supported; pass it as an argument"
        )
    value: Any = array.flat[0].item() if same else tuple(array.ravel().tolist())
    return recorded_op("constant", value=value, shape=array.shape, dtype=array.dtype)


def traced(x: Any) -> Traced:
    """``x``, broadcast as far as it is to be, as a value of the program."""
    return recorded(whole(x))


def recorded_op(kind: str, *operands: Traced, **attributes: Any) -> Traced:
    """The result of an operator as a value of the program, even if all operands are known."""
    builder = current()
    assert builder is not None
    return Traced(builder, builder.emit(kind, [x.value for x in operands], attributes)[0])


def filled(value: Any, shape: Sequence[Extent], dtype: np.dtype[Any]) -> Spread | Known:
    """An array in which every element is ``value``."""
    number = np.asarray(value, dtype)
    return spread(number.reshape((1,) * len(shape)), shape) if shape else number


def spread(array: Plain, shape: Sequence[Extent]) -> Any:
    """``array``, which has as many dims, broadcast to ``shape`` when that is needed."""
    return array if tuple(array.shape) == tuple(shape) else Spread(array, tuple(shape))


def whole(x: Any) -> Plain:
    """The array, broadcast as far as it is to be."""
    if not isinstance(x, Spread):
        plain: Plain = x
        return plain
    size = prod(x.shape)
    if (
        isinstance(x.array, np.ndarray)
        and x.array.size == 1
        and not (isinstance(size, int) and size <= MOST_FOLDED)
    ):
        number = x.array.reshape(())
        if not (is_floating(number.dtype) and np.isnan(number)):
            return recorded_op("constant", value=number.item(), shape=x.shape, dtype=x.dtype)
    result: Plain = emit("broadcast_to", x.array, shape=x.shape)
    return result


def elementwise(kind: str, *operands: Any, **attributes: Any) -> Any:
    """An elementwise operator on arrays of one shape, or of no dims.  What is broadcast stays so."""
    if (found := of_extents(kind, operands)) is not None:
        return found
    shapes = [x.shape for x in operands]
    shape = max(shapes, key=len)
    result = emit(kind, *map(unspread, operands), **attributes)
    return spread(result, shape) if len(result.shape) == len(shape) else result


def of_extents(kind: str, operands: Sequence[Any]) -> Any:
    """What an operator makes of known extents, some with symbols; None where that is not known, or is no extent."""
    if kind not in ON_EXTENTS or not any(x.dtype == object for x in operands):
        return None
    given = [known(x) for x in operands]
    return None if any(x is None for x in given) else ON_EXTENTS[kind](*given)


def plainest(extents: Any) -> Known:
    """Extents as an array of objects, or of integers where no symbols are left."""
    array = np.asarray(extents, object)
    return array if any(isinstance(n, Expression) for n in array.flat) else array.astype(np.int64)


def _same(a: Any, b: Any) -> Known:
    found = np.array([x == y for x, y in np.broadcast(a, b)], bool)
    return found.reshape(np.broadcast_shapes(np.shape(a), np.shape(b)))


ON_EXTENTS: dict[str, Any] = {
    "add": lambda a, b: plainest(a + b),
    "subtract": lambda a, b: plainest(a - b),
    "multiply": lambda a, b: plainest(a * b),
    "floor_divide": lambda a, b: plainest(a // b),
    "negative": lambda a: plainest(-a),
    "where": lambda *given: plainest(np.where(*given)),
    "equal": _same,
    "maximum": lambda a, b: plainest(np.frompyfunc(largest, 2, 1)(a, b)),
}
"""Arithmetic of extents with symbols, whose result is known, too.  That of other operators is left to the program."""


def known(x: Any) -> Known | None:
    """The numbers of an array, if they are known, and how many they are."""
    if not isinstance(x, Spread):
        return x if isinstance(x, np.ndarray) else None
    if not isinstance(x.array, np.ndarray) or any(isinstance(n, Expression) for n in x.shape):
        return None
    return np.broadcast_to(x.array, tuple(map(int, x.shape)))


def as_extents(values: Sequence[Any]) -> tuple[Extent, ...]:
    """The values of a list that gives a shape, as extents: plain numbers, and expressions as they are."""
    return tuple(int(value) if isinstance(value, int | np.integer) else value for value in values)


def same_everywhere(x: Any) -> Any:
    """The number that every element of an array is known to be; None if that is not known."""
    array = unspread(x)
    if isinstance(array, np.ndarray) and array.size and (array == array.flat[0]).all():
        return array.flat[0]
    return None


def convert(x: Any, dtype: np.dtype[Any]) -> Any:
    """The array in another dtype; itself if it has it already."""
    if x.dtype == object and dtype.kind in "iu" and known(x) is not None:
        return x  # extents stay what they are
    if x.dtype == object and x.size == 1 and is_floating(dtype) and (found := known(x)) is not None:
        return recorded_op("constant", value=found.flat[0], shape=x.shape, dtype=dtype)
    own = np.dtype(np.int64) if x.dtype == object else x.dtype
    return x if own == dtype else elementwise("convert", x, dtype=dtype)
