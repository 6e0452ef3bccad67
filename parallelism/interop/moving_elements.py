"""Ways to move elements that several formats have, in terms of operators of the IR.

They take and return arrays of a program that is being read (`parallelism.interop.folding`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from parallelism.arrays import vector_shape, with_extent
from parallelism.dtypes import integer_limits, is_floating
from parallelism.interop.folding import (
    MOST_FOLDED,
    Spread,
    convert,
    elementwise as ew,
    emit,
    filled,
    known,
    of_extents,
    same_everywhere,
    spread,
    unspread,
    whole,
)
from parallelism.ir.core import Expression, Extent, from_start
from parallelism.ir.operators.shapes import count
from parallelism.ir.tracing import lift

INDEX = np.dtype(np.int64)
Meaning = TypeVar("Meaning", bound=Callable[..., Any])


def number(value: Any, like: Any) -> Any:
    """A number in the dtype of an array, without dims; it may have symbols."""
    return lift(value, dtype=like.dtype) if isinstance(value, Expression) else np.asarray(value, like.dtype)


def rounded_once(means: Meaning) -> Meaning:
    """The meaning of an op that takes several steps: numbers of 16 bits or fewer are rounded once, at the end.

    The steps are computed in float32.  All operands that are floats have the dtype of the result.
    """

    def computed(reader: Any, node: Any, x: list[Any]) -> Any:
        dtype = x[0].dtype
        if not is_floating(dtype) or dtype.itemsize > 2:
            return means(reader, node, x)
        wide = list(x)
        for i, each in enumerate(x):
            if each is not None and each.dtype == dtype:
                wide[i] = convert(each, np.dtype(np.float32))
        return convert(means(reader, node, wide), dtype)

    return computed  # type: ignore[return-value]


def divided(a: Any, b: Any, apply: Callable[..., Any] = ew) -> Any:
    """The quotient; of integers it is rounded toward 0, as in C, StableHLO and ONNX.

    ``apply`` calls an elementwise operator by name: that of ONNX also broadcasts operands of other shapes.
    """
    if is_floating(a.dtype):
        return apply("divide", a, b)
    if (found := of_extents("floor_divide", [a, b])) is not None:
        return found  # extents are not negative
    down = apply("floor_divide", a, b)
    if a.dtype.kind == "u":
        return down
    rest = apply("subtract", a, apply("multiply", down, b))
    rounded = apply("not_equal", rest, number(0, a))
    negative = apply("less", apply("bitwise_xor", a, b), number(0, a))
    return apply("add", down, convert(apply("logical_and", rounded, negative), a.dtype))


def integer_power(base: Any, exponent: Any, apply: Callable[..., Any] = ew) -> Any:
    """The power of integers of one dtype; NumPy has none for negative exponents.

    Those give 1 or -1 for 1 and -1, and 0 for any other number, as in StableHLO and in C, which round toward 0.
    """
    numbers = known(exponent)
    if integer_limits(exponent.dtype)[0] == 0 or (numbers is not None and (numbers >= 0).all()):
        return convert(apply("power", base, exponent), base.dtype)
    zero, one, minus = (number(value, base) for value in (0, 1, -1))
    raised = convert(apply("power", base, apply("maximum", exponent, zero)), base.dtype)
    odd = apply("not_equal", apply("bitwise_and", exponent, one), zero)
    of_minus = apply("where", odd, minus, one)
    inverse = apply("where", apply("equal", base, minus), of_minus, zero)
    inverse = apply("where", apply("equal", base, one), one, inverse)
    return apply("where", apply("less", exponent, zero), inverse, raised)


def reshaped(x: Any, shape: Sequence[Extent]) -> Any:
    """The same elements in another shape."""
    if tuple(x.shape) == tuple(shape):
        return x
    if isinstance(x, np.ndarray) and x.dtype == object:
        return x.reshape([int(n) for n in shape])
    if (value := same_everywhere(x)) is not None:
        return filled(value, shape, x.dtype)
    if isinstance(x, Spread) and (kept := _unit_dims_changed(x, shape)) is not None:
        return kept
    return emit("reshape", whole(x), shape=tuple(shape))


def _unit_dims_changed(x: Spread, shape: Sequence[Extent]) -> Any:
    """The array if a reshape only adds or removes dims of extent 1; None if it does more."""
    old = [n for n in x.shape if n != 1]
    new = [n for n in shape if n != 1]
    if old != new:
        return None
    kept = iter([own for own, n in zip(x.array.shape, x.shape, strict=True) if n != 1])
    own_shape = tuple(1 if n == 1 else next(kept) for n in shape)
    return spread(emit("reshape", x.array, shape=own_shape), shape)


def transposed(x: Any, permutation: Sequence[int]) -> Any:
    """The dims in another order."""
    if list(permutation) == list(range(x.ndim)):
        return x
    shape = tuple(x.shape[d] for d in permutation)
    array = unspread(x)
    return spread(emit("transpose", array, permutation=tuple(permutation)), shape)


def broadcast_dims(x: Any, shape: Sequence[Extent], dims: Sequence[int]) -> Any:
    """The array with its dims at ``dims`` of a larger shape, broadcast along the others."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    x = transposed(x, order)
    array = unspread(x)
    own = [1] * len(shape)
    for d, extent in zip(sorted(dims), array.shape, strict=True):
        own[d] = extent
    return spread(emit("reshape", array, shape=tuple(own)) if list(array.shape) != own else array, shape)


def sliced(x: Any, begins: Sequence[Any], ends: Sequence[Any], steps: Sequence[int]) -> Any:
    """``x[begin:end:step, ...]`` with steps of at least 1."""
    for axis, (begin, end, step) in enumerate(zip(begins, ends, steps, strict=True)):
        x = part(x, axis, begin, end, step)
    return x


def part(x: Any, axis: int, begin: Any, end: Any, step: int = 1) -> Any:
    """``x[begin:end:step]`` along a dim."""
    if (begin, step) == (0, 1) and end == x.shape[axis]:
        return x
    if not isinstance(x, Spread):
        return emit("slice", x, axis=axis, begin=begin, end=end, step=step)
    if x.array.shape[axis] == 1:
        return spread(x.array, with_extent(x.shape, axis, count(begin, end, step)))
    own = emit("slice", x.array, axis=axis, begin=begin, end=end, step=step)
    return spread(own, with_extent(x.shape, axis, own.shape[axis]))


def concatenated(parts: Sequence[Any], axis: int) -> Any:
    """The arrays joined along a dim."""
    if any(each.dtype == object for each in parts):
        numbers = [known(each) for each in parts]
        if all(each is not None for each in numbers):
            return np.concatenate([np.asarray(each, object) for each in numbers], axis)
    parts = [each for each in parts if each.shape[axis] != 0] or list(parts[:1])
    same = _same_along(parts, axis) if len(parts) > 1 else {}
    if same:
        narrow = [spread(each.array, _with(each.shape, same)) for each in parts]
        found = whole(concatenated(narrow, axis))
        extents = {d: parts[0].shape[d] for d in same}
        return spread(found, _with(found.shape, extents))
    while len(parts) > 1:
        group, rest = parts[:24], parts[24:]
        parts = [emit("concatenate", *map(whole, group), axis=axis), *rest]
    return parts[0]


def _same_along(parts: Sequence[Any], axis: int) -> dict[int, int]:
    """The other dims along which each part is broadcast later, with extent 1: the same copies may be joined before."""
    if not all(isinstance(each, Spread) for each in parts):
        return {}
    found = {}
    for d in range(parts[0].ndim):
        extents = {each.array.shape[d] for each in parts}
        if d != axis and parts[0].shape[d] != 1 and extents == {1}:
            found[d] = 1
    return found


def _with(shape: Sequence[Extent], extents: Mapping[int, Extent]) -> list[Extent]:
    """The shape with other extents of some dims."""
    return [extents.get(d, n) for d, n in enumerate(shape)]


def flipped(x: Any, axis: int) -> Any:
    """The elements along a dim in the opposite order."""
    array = unspread(x)
    return x if array.shape[axis] == 1 else spread(emit("flip", array, axis=axis), x.shape)


def iota(extent: Extent, dtype: np.dtype[Any] = INDEX, ndim: int = 1, axis: int = 0) -> Any:
    """0, 1, ... along dim ``axis`` of an array whose other dims have extent 1."""
    shape = vector_shape(ndim, axis, extent)
    if isinstance(extent, int) and extent <= MOST_FOLDED:
        return np.arange(extent).astype(dtype).reshape(shape)
    return emit("iota", dim=axis, shape=shape, starts=(0,) * ndim, dtype=dtype)


def padded(x: Any, value: Any, low: Sequence[int], high: Sequence[int], interior: Sequence[int]) -> Any:
    """``x`` with a ``value``, an array of no dims, before, after and between the elements of each dim.

    A negative number in ``low`` or ``high`` cuts elements off.  Zeros around ``x`` are one op, `place`; for another value
    a constant mask says which elements are those of ``x``.
    """
    if not (any(low) or any(high) or any(interior)):
        return x
    for axis in range(x.ndim):
        n, gap = x.shape[axis], interior[axis]
        if gap and n not in (0, 1):
            x = _placed(x, value, axis, 0, gap + 1, (n - 1) * (gap + 1) + 1)
    for axis in range(x.ndim):
        n = x.shape[axis]
        begin, end = max(0, -low[axis]), n - max(0, -high[axis])
        x = part(x, axis, begin, end)
        before, after = max(0, low[axis]), max(0, high[axis])
        if before or after:
            x = _placed(x, value, axis, before, 1, before + x.shape[axis] + after)
    return x


def _placed(x: Any, value: Any, axis: int, begin: int, step: int, extent: int) -> Any:
    zero = same_everywhere(value)
    if zero is not None and zero == 0:
        return emit("place", whole(x), axis=axis, begin=begin, step=step, extent=extent)
    if step == 1:
        parts = [_like(x, value, axis, begin), x, _like(x, value, axis, extent - begin - x.shape[axis])]
        return concatenated([part for part in parts if part.shape[axis]], axis)
    inside = np.zeros(extent, bool)
    inside[begin : begin + x.shape[axis] * step : step] = True
    mask = inside.reshape(vector_shape(x.ndim, axis))
    placed = emit("place", whole(x), axis=axis, begin=begin, step=step, extent=extent)
    return ew("where", spread(mask, placed.shape), placed, value)


def _like(x: Any, value: Any, axis: int, extent: int) -> Any:
    return broadcast_dims(value, with_extent(x.shape, axis, extent), ())


def sorted_places(x: Any, axis: int, *, descending: bool = False) -> Any:
    """The places of sorted numbers along a dim; equal ones keep their order."""
    if not descending:
        return emit("argsort", x, axis=axis)
    last = np.asarray(x.shape[axis] - 1)
    return flipped(ew("subtract", last, emit("argsort", whole(flipped(x, axis)), axis=axis)), axis)


def taken(x: Any, indices: Any, axis: int) -> Any:
    """The elements at indices, which lie inside, along a dim; by a slice where the indices are known to be in a row.

    An index below 0 counts from the end.
    """
    numbers = known(indices)
    if numbers is not None and numbers.ndim <= 1 and numbers.size:
        flat = [from_start(n, x.shape[axis]) for n in numbers.reshape(-1).tolist()]
        step, *others = {b - a for a, b in pairwise(flat)} or {1}
        if not others and isinstance(step, int) and step > 0:
            cut = part(x, axis, flat[0], flat[-1] + 1, step)
            return cut if numbers.ndim else reshaped(cut, (*x.shape[:axis], *x.shape[axis + 1 :]))
    return emit("take", whole(x), whole(indices), axis=axis)


def clipped(x: Any, least: int, most: Extent) -> Any:
    """Integers brought into a range, whose end may have symbols."""
    if x.dtype.kind == "i":
        x = ew("maximum", x, np.asarray(least, x.dtype))
    if isinstance(most, Expression):
        return ew("minimum", x, number(most, x))
    if most <= np.iinfo(x.dtype).max:
        x = ew("minimum", x, np.asarray(most, x.dtype))
    return x


def window_at(x: Any, starts: Mapping[int, Any], sizes: Sequence[Extent]) -> Any:
    """The elements of one window; ``starts`` has, by dim, the first index, brought into the range where it fits."""
    for axis, start in starts.items():
        extent, size = x.shape[axis], sizes[axis]
        if size == extent:
            continue
        first = clipped(start, 0, extent - size)
        if size == 1:
            x = taken(x, reshaped(to_index(first), (1,)), axis)
        elif (found := known(first)) is not None:
            begin = int(found.reshape(()))
            x = part(x, axis, begin, begin + size)
        else:
            x = taken(x, ew("add", iota(size), to_index(first)), axis)
    return x


def to_index(x: Any) -> Any:
    """Integers as int64."""
    return convert(x, INDEX)
